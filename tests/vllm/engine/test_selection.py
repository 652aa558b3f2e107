"""Which layer vLLM's selector gives, with and without us, and every refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper
import vllm
from vllm.models.deepseek_v41 import attention
from vllm.models.deepseek_v41.nvidia import model
from vllm.platforms.interface import PlatformEnum
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sparse_mla.errors import UnsupportedError
from sparse_mla.integrations.vllm import hook, select
from sparse_mla.integrations.vllm.layer import MegaAttention, SparseAttention, v41_records

ORIGINAL = getattr(model._select_dsv4_attn_cls, select._MARK)


@pytest.fixture(scope="module")
def config() -> Any:
    return fake_hopper.engine_config()


@pytest.fixture(autouse=True)
def _hopper() -> Any:
    load_general_plugins()
    fake_hopper.become(9)
    yield
    fake_hopper.become(9)


def small(backend: Any, pcp: int = 1) -> SimpleNamespace:
    """As much of a configuration as vLLM's selector reads."""
    hf = SimpleNamespace(num_attention_heads=64, o_groups=8)
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=pcp, tensor_parallel_size=1),
        model_config=SimpleNamespace(hf_config=hf),
    )


def outcome(selector: Any, config: Any) -> Any:
    try:
        return selector(config)
    except (ValueError, NotImplementedError, AttributeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("pcp", [1, 2])
@pytest.mark.parametrize("major", [9, 10, 12])
def test_no_other_choice_changes(major: int, pcp: int) -> None:
    fake_hopper.become(major)
    others = [None, *AttentionBackendEnum]
    others = [b for b in others if getattr(b, "name", "") not in select.BACKENDS]
    assert len(others) > 40
    for backend in others:
        config = small(backend, pcp)
        assert outcome(model._select_dsv4_attn_cls, config) == outcome(ORIGINAL, config), backend


def test_the_names_are_where_the_selector_looks() -> None:
    assert model._select_dsv4_attn_cls is not ORIGINAL
    assert model._select_dsv4_attn_cls.__wrapped__ is ORIGINAL
    select.wrap_selector()  # once more changes nothing
    assert model._select_dsv4_attn_cls.__wrapped__ is ORIGINAL
    assert select.contract_drift() == []


def test_models_are_vllms_own() -> None:
    assert hook.DeepseekV41ForCausalLM.__module__ == "vllm.models.deepseek_v41.nvidia.vl_model"
    assert hook.DSparkDeepseekV4ForCausalLM.__module__ == "vllm.models.deepseek_v41.nvidia.dspark"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("SPARSE_MLA_MEGA_DSV41", MegaAttention),
        ("SPARSE_MLA_DSV41", SparseAttention),
        ("sparse_mla_mega_dsv41", MegaAttention),
    ],
)
def test_our_names_give_our_layers(name: str, layer: type) -> None:
    config = fake_hopper.engine_config(backend=name)
    assert model._select_dsv4_attn_cls(config) is layer
    assert layer.backend_cls.get_name() == name.upper()
    assert AttentionBackendEnum[name.upper()].get_class() is layer.backend_cls


def test_a_draft_layer_is_ours_and_window_only(config: Any) -> None:
    """Drafts lie past the list of ratios; vLLM stores their context keys itself, by these attributes."""
    (layer,) = fake_hopper.make_layers(fake_hopper.engine_config(), range(5, 6))
    assert type(layer) is MegaAttention
    assert (layer.compress_ratio, layer.compressor, layer.indexer) == (0, None, None)
    assert layer.kv_mxfp8 is True
    assert layer.swa_cache_layer.block_size == 32


def refused(config: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match="attention backend SPARSE_MLA_MEGA_DSV41") as error:
        model._select_dsv4_attn_cls(config)
    assert words in str(error.value)


@pytest.mark.parametrize("major", [8, 10, 12])
def test_other_devices_are_refused(config: Any, major: int) -> None:
    fake_hopper.become(major)
    refused(config, f"got compute capability {major}.0; allowed: Hopper")
    refused(config, "vLLM's validate_configuration: compute capability not supported")


def test_another_makers_gpu_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AMD GPU has a capability too, and it may begin with 9."""
    monkeypatch.setattr(type(select.current_platform), "_enum", PlatformEnum.ROCM)
    refused(config, "device: got no NVIDIA GPU; allowed: Hopper")


@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_other_kv_dtypes_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(config.cache_config, "cache_dtype", name)
    refused(config, f"kv_cache_dtype: got '{name}'")
    refused(config, "vLLM's validate_configuration: kv_cache_dtype not supported")


def test_context_parallelism_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("prefill", "PCP"), ("decode", "DCP")):
        with monkeypatch.context() as patch:
            patch.setattr(config.parallel_config, f"{name}_context_parallel_size", 2)
            refused(config, f"{name} context parallelism: got 2 ranks")
            refused(config, f"vLLM's validate_configuration: {words} not supported")


def test_head_counts_that_split_a_group_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 4)
    refused(config, "output groups: got 2 on 4 tensor-parallel ranks")


def test_another_vllm_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    refused(config, "vLLM version: got 0.34.0; tested: 0.33.0")


@pytest.mark.parametrize("tokens", [96, 128])
def test_another_block_size_is_refused(tokens: int) -> None:
    config = fake_hopper.engine_config(block_size=tokens)
    refused(config, f"block size: got {tokens} tokens; allowed: 64; leave --block-size out")
    refused(config, "vLLM's validate_configuration: block_size not supported")


def test_batch_invariance_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    refused(config, "vLLM's validate_configuration: batch invariance not supported")


def test_private_names_that_moved_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_mqa(self: Any, q: Any, output: Any) -> None: ...

    monkeypatch.setattr(attention.DeepseekV4Attention, "forward_mqa", forward_mqa)
    refused(
        config, "vLLM's DeepseekV4Attention.forward_mqa: got parameters ('self', 'q', 'output')"
    )


def test_the_record_switch_is_put_back() -> None:
    before = attention._use_v41_mxfp8_kv_record
    seen = []

    def fails() -> None:
        with v41_records():
            seen.append(attention._use_v41_mxfp8_kv_record())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == [True]
    assert attention._use_v41_mxfp8_kv_record is before
    assert before() is False
