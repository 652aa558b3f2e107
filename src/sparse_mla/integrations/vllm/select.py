"""The one function of vLLM that is wrapped: which attention layer a DeepSeek-V4.1 model gets."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.models.deepseek_v41 import attention
from vllm.platforms import current_platform

from sparse_mla.errors import UnsupportedError
from sparse_mla.integrations.vllm.names import BACKENDS
from sparse_mla.integrations.vllm.refusals import Wanted, refusals

SELECTOR = "_select_dsv4_attn_cls"
_MARK = "_sparse_mla_original"
_maker = "amd" if current_platform.is_rocm() else "nvidia"
model: Any = importlib.import_module(f"vllm.models.deepseek_v41.{_maker}.model")
"""Where vLLM's models of this platform look the selector up."""


def wrap_selector() -> None:
    """Let vLLM's selector ask us first. Idempotent; every backend that is not ours goes to vLLM's own."""
    original = getattr(model, SELECTOR, None)
    if original is None:
        init_logger(f"vllm.{__name__}").error(
            "sparse_mla: this vLLM has no %s, so its own attention layers are used whatever the "
            "attention backend; install vLLM as released.",
            SELECTOR,
        )
        return
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def select(vllm_config: Any) -> Any:
        name = getattr(vllm_config.attention_config.backend, "name", None)
        if name not in BACKENDS:
            return original(vllm_config)
        return select_layer(vllm_config, name)

    setattr(select, _MARK, original)
    setattr(model, SELECTOR, select)


def select_layer(vllm_config: Any, name: str) -> Any:
    """Our layer class for a backend of ours.

    Raises:
        UnsupportedError: with every reason, ours and those of vLLM's own `validate_configuration`.
    """
    reasons = [*contract_drift(), *refusals(wanted_of(vllm_config, name))]
    if current_platform.is_cuda():
        from sparse_mla.integrations.vllm.layer import LAYERS

        layer = LAYERS[name]
        reasons += validation_reasons(layer.backend_cls, vllm_config)
        if not reasons:
            return layer
    raise UnsupportedError(f"attention backend {name}", list(dict.fromkeys(reasons)))


def wanted_of(vllm_config: Any, name: str) -> Wanted:
    """What a vLLM configuration asks of our layer."""
    config = _text_config(vllm_config)
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return Wanted(
        backend=name,
        vllm_version=vllm.__version__,
        capability=None if capability is None else (capability.major, capability.minor),
        kv_cache_dtype=cache.cache_dtype,
        num_heads=config.num_attention_heads,
        num_groups=config.o_groups,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        tensor_parallel=parallel.tensor_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        block_tokens=cache.block_size if cache.user_specified_block_size else None,
    )


def validation_reasons(backend: Any, vllm_config: Any) -> list[str]:
    """What vLLM's own check of a backend says; it never asks for DeepSeek-V4.1 layers by itself."""
    from vllm import envs

    capability = current_platform.get_device_capability()
    if capability is None:
        return []
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    reasons: list[str] = backend.validate_configuration(
        head_size=_text_config(vllm_config).head_dim,
        dtype=vllm_config.model_config.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        use_mla=True,
        has_sink=True,
        use_sparse=True,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=capability,
        attn_type="decoder",
        use_non_causal=speculative is not None and speculative.use_dspark(),
        use_batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        use_kv_connector=vllm_config.kv_transfer_config is not None,
        use_pcp=parallel.prefill_context_parallel_size > 1,
        use_dcp=parallel.decode_context_parallel_size > 1,
    )
    return [f"vLLM's validate_configuration: {reason}" for reason in reasons]


def contract_drift() -> list[str]:
    """Private names of vLLM that are not as this plug-in knows them, one sentence each."""
    selector = getattr(getattr(model, SELECTOR, None), _MARK, getattr(model, SELECTOR, None))
    layer = attention.DeepseekV4Attention
    expected: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        (f"{_maker}.model.{SELECTOR}", selector, ("vllm_config",)),
        (
            "attention._use_v41_mxfp8_kv_record",
            getattr(attention, "_use_v41_mxfp8_kv_record", None),
            (),
        ),
        (
            "DeepseekV4Attention.forward_mqa",
            getattr(layer, "forward_mqa", None),
            ("self", "q", "kv", "positions", "output"),
        ),
        (
            "DeepseekV4Attention._fused_qnorm_rope_kv_insert",
            getattr(layer, "_fused_qnorm_rope_kv_insert", None),
            ("self", "q", "kv", "positions", "attn_metadata"),
        ),
        (
            "DeepseekV4Attention._o_proj",
            getattr(layer, "_o_proj", None),
            ("self", "attn_out", "positions"),
        ),
        (
            "DeepseekV4Attention.forward_kv",
            getattr(layer, "forward_kv", None),
            ("self", "positions", "hidden_states"),
        ),
    )
    reasons = []
    for name, function, parameters in expected:
        got = None if function is None else tuple(inspect.signature(function).parameters)
        if got != parameters:
            reasons.append(f"vLLM's {name}: got parameters {got}; known: {parameters}")
    return reasons


def _text_config(vllm_config: Any) -> Any:
    config = vllm_config.model_config.hf_config
    return getattr(config, "text_config", config)
