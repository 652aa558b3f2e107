"""KV planning by vLLM's own planner: records, alignments, block sizes, memory."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper
from vllm.models.deepseek_v41 import attention

from sparse_mla.cache.records import INDEX_FP8, MXFP8, NVFP4

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"


def compressed_bytes(engine: SimpleNamespace) -> int:
    return NVFP4.row_bytes if engine.name == "nvfp4_ds_mla" else MXFP8.row_bytes


def test_every_cache_holds_the_record_that_its_kernels_read(engine: SimpleNamespace) -> None:
    wanted: dict[str, tuple[int, int]] = {}
    for layer in range(5):
        wanted[f"model.layers.{layer}.attn.swa_cache"] = (32, MXFP8.row_bytes)
    for layer, rows in ((1, 32), (3, 64)):
        wanted[f"model.layers.{layer}.attn"] = (rows, compressed_bytes(engine))
        wanted[f"model.layers.{layer}.attn.indexer.k_cache"] = (rows, INDEX_FP8.row_bytes)
    got = {name: tuple(cache.shape[2:]) for name, cache in engine.caches.items()}
    got.pop("model.layers.1.attn.compressor.state_cache")
    assert got == wanted


def test_specs_carry_v41s_alignments(engine: SimpleNamespace) -> None:
    for name, spec in engine.specs.items():
        if "state_cache" in name:
            continue
        assert spec.alignment == 512, name
        if "swa_cache" in name:
            rows = math.lcm(MXFP8.row_bytes, compressed_bytes(engine))
            assert spec.block_stride_alignment == rows
    assert engine.config.cache_config.block_size == 64


def test_views_are_what_kernels_may_rely_on(engine: SimpleNamespace) -> None:
    """Design facts of the host: pages are never densely packed, and 16 or 32 bytes divide every row."""
    strides = {c.stride(0) for name, c in engine.caches.items() if "state" not in name}
    assert strides == {41184 if engine.name == "nvfp4_ds_mla" else 64416}
    for name, cache in engine.caches.items():
        if "state" in name or "indexer" in name:
            continue
        multiple = 32 if cache.shape[-1] == NVFP4.row_bytes else 16
        assert cache.stride(2) == cache.shape[-1]
        assert cache.stride(0) % multiple == 0
        assert cache.data_ptr() % multiple == 0


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [(None, "auto"), (fake_hopper.MEGA, "fp8"), (fake_hopper.MEGA, "auto")],
)
def test_blocks_of_the_real_model_are_those_on_the_page(
    backend: str | None, kv_cache_dtype: str
) -> None:
    """The planner on DeepSeek-V4.1-Flash, its 40 layers without weights."""
    text = resources.files("sparse_mla.config").joinpath("deepseek_v41_flash.json").read_text()
    real = json.loads(text)
    real = {name: value for name, value in real.items() if name != "model_type"}
    config = fake_hopper.engine_config(
        kv_cache_dtype,
        backend,
        fake_hopper.model_dir(**real),
        max_model_len=131072,
        max_num_batched_tokens=8192,
    )
    fake_hopper.make_empty_layers(config, config.model_config.hf_config.num_hidden_layers)
    _, _, plan = fake_hopper.plan(config, 40 << 30)
    (block_bytes,) = {
        tensor.block_stride for tensor in plan.kv_cache_tensors if tensor.block_stride
    }
    dtype = config.cache_config.cache_dtype
    who = "vLLM's own on Hopper" if backend is None else "ours"
    row = f"| {who} | `{dtype}` | {block_bytes:,} B | {block_bytes / 64:,.0f} B | {plan.num_blocks:,} |"
    assert row in PAGE.read_text()


def test_an_explicit_fp8_stays_fp8() -> None:
    config = fake_hopper.engine_config("fp8")
    fake_hopper.make_layers(config)
    assert config.cache_config.cache_dtype == "fp8_ds_mla"


def test_auto_is_what_the_model_was_trained_with() -> None:
    config = fake_hopper.engine_config("auto")
    layers = fake_hopper.make_layers(config)
    assert config.cache_config.cache_dtype == "nvfp4_ds_mla"
    assert layers[1].kv_cache_dtype == "nvfp4_ds_mla"


def test_vllms_own_layer_keeps_its_records() -> None:
    config = fake_hopper.engine_config("auto", backend=None)
    layers = fake_hopper.make_layers(config)
    assert type(layers[0]) is attention_class()
    assert layers[0].swa_bytes_per_token == 584
    assert config.cache_config.cache_dtype == "fp8_ds_mla"
    assert layers[1].kv_page_alignment == 576
    assert "insert_cache" not in vars(layers[1].compressor)


def attention_class() -> Any:
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    assert attention._use_v41_mxfp8_kv_record() is False
    return DeepseekV4FlashMLAAttention
