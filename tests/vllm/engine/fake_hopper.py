"""A CPU that vLLM takes for a Hopper GPU, and the engine objects that tests need.

Importing this module makes the process such a machine; the environment must be set before (see
`ENVIRONMENT`). vLLM's modules are imported while the platform is still "unspecified", because a CUDA
platform loads extensions that need a driver; then the platform's class is changed under them.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # with it empty vLLM lets Triton's interpreter count as Triton
    "TRITON_INTERPRET": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""What a process needs before it imports this module."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402
import vllm.models.deepseek_v41.nvidia.model  # noqa: E402, F401
from vllm.platforms import current_platform  # noqa: E402
from vllm.platforms.interface import DeviceCapability, PlatformEnum  # noqa: E402

MEGA, SPARSE = "SPARSE_MLA_MEGA_DSV41", "SPARSE_MLA_DSV41"
_QUESTIONS = (  # asked by vLLM's linear layers; the answers come from an extension that needs a driver
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_fp4",
)
_library = torch.library.Library("_C", "FRAGMENT")
for _name in _QUESTIONS:
    _library.define(f"{_name}(int cuda_device_capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
for _name in (
    "silu_and_mul",
    "silu_and_mul_with_clamp",
):  # looked up when a layer is built, never called
    _library.define(f"{_name}(Tensor! result, Tensor input) -> ()")

_products = torch.library.Library("aten", "IMPL")
_products.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")

_interpreter_cast = interpreter._convert_float


def _exact_cast(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Casts from float32 rounded as a GPU rounds them; the interpreter's own lose carries and ties."""
    exact = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}.get(target.name)
    if source.name != "fp32" or exact is None:
        return _interpreter_cast(values, source, target, rounding)
    bits = torch.uint16 if exact is torch.bfloat16 else torch.uint8
    return torch.from_numpy(values.copy()).float().to(exact).view(bits).numpy()


interpreter._convert_float = _exact_cast

_platform = type(current_platform)


def become(major: int, minor: int = 0) -> None:
    """Change the compute capability of the pretended GPU."""
    _platform.get_device_capability = classmethod(
        lambda cls, device_id=0: DeviceCapability(major, minor)
    )


for _name, _value in {
    "_enum": PlatformEnum.CUDA,
    "device_type": "cpu",
    "device_name": "cpu",
    "dist_backend": "gloo",
    "get_device_name": classmethod(lambda cls, device_id=0: "a pretended Hopper"),
    "get_device_total_memory": classmethod(lambda cls, device_id=0: 141 << 30),
    "is_pin_memory_available": classmethod(lambda cls: False),
    "support_hybrid_kv_cache": classmethod(lambda cls: True),
    "num_compute_units": classmethod(lambda cls, device_id=0: 132),
    "get_cuda_runtime_major": classmethod(lambda cls: 13),
}.items():
    setattr(_platform, _name, _value)
become(9)

TEXT_CONFIG = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "o_lora_rank": 128,
    "o_groups": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 2, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 8,
    "index_topk": 512,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hash_layers": 0,
    "swiglu_limit": 10.0,
}
"""A DeepSeek-V4.1 with one layer of each kind and role, small."""


def model_dir(**changes: Any) -> str:
    """A directory with nothing but the config of a small model."""
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "text_config": {**TEXT_CONFIG, **changes},
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        },
    }
    path = Path(tempfile.mkdtemp(prefix="sparse-mla-vllm-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def engine_config(
    kv_cache_dtype: str = "auto",
    backend: str | None = MEGA,
    model: str | None = None,
    **fields: Any,
) -> Any:
    """vLLM's configuration as its engine builds it, plug-ins loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    arguments = {
        "model": model or model_dir(),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_dtype": kv_cache_dtype,
        "attention_config": {} if backend is None else {"backend": backend},
        "enforce_eager": True,
        **fields,
    }
    return EngineArgs(**arguments).create_engine_config()


def start_distributed(config: Any) -> None:
    """One rank on gloo; vLLM's layers ask for their group. Idempotent."""
    import vllm.distributed as distributed
    from vllm.config import set_current_vllm_config

    if distributed.parallel_state.model_parallel_is_initialized():
        return
    port = 20000 + os.getpid() % 20000
    with set_current_vllm_config(config):
        distributed.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What vLLM's loader does around the construction of a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_layers(config: Any, layer_ids: range = range(5)) -> list[Any]:
    """Attention layers by vLLM's own selector, with seeded weights."""
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v41.nvidia import model

    start_distributed(config)
    topk = torch.full((512, 512), -1, dtype=torch.int32)
    cls = model._select_dsv4_attn_cls(config)
    with set_current_vllm_config(config), default_dtype(torch.bfloat16):
        layers = [
            cls(
                config,
                prefix=f"model.layers.{n}.attn",
                topk_indices_buffer=topk,
                aux_stream_list=None,
            )
            for n in layer_ids
        ]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.copy_(values.to(parameter.dtype))
    return layers


def make_empty_layers(config: Any, count: int) -> None:
    """Attention layers by vLLM's own selector, without memory for their weights."""
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v41.nvidia import model

    start_distributed(config)
    cls = model._select_dsv4_attn_cls(config)
    meta = torch.device("meta")
    with set_current_vllm_config(config), default_dtype(torch.bfloat16), meta:
        buffers = {
            "topk_indices_buffer": torch.empty(8192, 512, dtype=torch.int32),
            "candidate_block_buffer": torch.empty(8192, 2048, dtype=torch.int32),
        }
        for n in range(count):
            cls(config, prefix=f"model.layers.{n}.attn", aux_stream_list=None, **buffers)


def plan(config: Any, num_bytes: int) -> tuple[Any, Any, Any]:
    """(cache specs, layout, plan) of vLLM's own planner for the layers made so far."""
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    current_platform.update_block_size_for_backend(config)
    specs = get_kv_cache_spec(config)
    backends = current_platform._find_non_ssm_backends(config)
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    layout = resolve_kv_cache_layout(config, [names], specs.values())
    config.cache_config.kv_cache_layout = layout.name
    groups = get_global_kv_cache_groups(config, [specs])
    planned = get_kv_cache_configs(config, [specs], [num_bytes], groups)[0]
    planned.kv_cache_layout = layout.name
    return specs, layout, planned


def plan_caches(config: Any, num_bytes: int = 16 << 20) -> SimpleNamespace:
    """vLLM's caches of the layers made so far: planned, allocated, bound."""
    from vllm.v1.worker.utils import allocate_kv_cache

    specs, layout, planned = plan(config, num_bytes)
    caches = allocate_kv_cache(planned, torch.device("cpu"), layout)
    layers = config.compilation_config.static_forward_context
    for name, cache in caches.items():
        layers[name].bind_kv_cache(cache)
    return SimpleNamespace(specs=specs, layout=layout, plan=planned, caches=caches, layers=layers)
