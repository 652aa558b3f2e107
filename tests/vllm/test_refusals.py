"""What the plug-in refuses, decided without vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_mla.integrations.vllm.names import MEGA, SPARSE, is_tested
from sparse_mla.integrations.vllm.refusals import (
    Wanted,
    default_kv_dtype,
    explicit_kv_dtype,
    kv_dtypes,
    refusals,
)

GOOD = Wanted(
    backend=MEGA,
    vllm_version="0.33.0+cu130",
    capability=(9, 0),
    kv_cache_dtype="auto",
    num_heads=64,
    num_groups=8,
)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("backend", "dtype"), [(name, dtype) for name in (MEGA, SPARSE) for dtype in kv_dtypes(name)]
)
def test_what_runs_has_no_reason_against_it(backend: str, dtype: str, ranks: int) -> None:
    wanted = replace(GOOD, backend=backend, kv_cache_dtype=dtype, tensor_parallel=ranks)
    assert refusals(wanted) == []


REFUSED = [
    ({"vllm_version": "0.32.1"}, "vLLM version: got 0.32.1; tested: 0.33.0; install a tested one"),
    ({"backend": "FLASHMLA"}, "backend: got FLASHMLA; allowed: SPARSE_MLA_MEGA_DSV41, SPARSE_MLA_"),
    ({"capability": (10, 0)}, "device: got compute capability 10.0; allowed: Hopper (9.x)"),
    ({"capability": (8, 9)}, "device: got compute capability 8.9"),
    ({"capability": None}, "device: got no NVIDIA GPU"),
    ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype: got 'bfloat16'; allowed: auto"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "two mantissa bits are too few"),
    ({"kv_cache_dtype": "nvfp4"}, "is called 'nvfp4_ds_mla'"),
    ({"kv_cache_dtype": "fp8_ds_mla_v4"}, "kv_cache_dtype: got 'fp8_ds_mla_v4'"),
    ({"backend": SPARSE, "kv_cache_dtype": "nvfp4_ds_mla"}, "SPARSE_MLA_DSV41 reads auto"),
    ({"prefill_context_parallel": 2}, "prefill context parallelism: got 2 ranks; allowed: 1"),
    ({"decode_context_parallel": 4}, "decode context parallelism: got 4 ranks; allowed: 1"),
    ({"block_tokens": 256}, "block size: got 256 tokens; allowed: 64"),
    ({"head_dim": 576}, "head size: got 576 with 64 rotary; allowed: 512 with 64"),
    ({"tensor_parallel": 16}, "output groups: got 8 on 16 tensor-parallel ranks"),
    ({"tensor_parallel": 3}, "attention heads: got 64 on 3 tensor-parallel ranks"),
    ({"num_heads": 256}, "attention heads of a rank: got 256; allowed: 1 to 128; use more"),
    ({"num_heads": 60}, "attention heads: got 60; allowed: a multiple of 8 groups"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_refusal_names_field_value_and_remedy(change: dict[str, object], words: str) -> None:
    reasons = refusals(replace(GOOD, **change))
    assert any(words in reason for reason in reasons), reasons


def test_all_reasons_come_at_once() -> None:
    wanted = replace(GOOD, capability=(12, 0), kv_cache_dtype="int8", tensor_parallel=5)
    assert len(refusals(wanted)) == 4


def test_fp8_is_never_read_as_something_else() -> None:
    assert explicit_kv_dtype("fp8") == "fp8_ds_mla"
    assert explicit_kv_dtype("auto") == "auto"
    assert (default_kv_dtype(MEGA), default_kv_dtype(SPARSE)) == ("nvfp4_ds_mla", "fp8_ds_mla")


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.33.0", True), ("0.33.0+cpu", True), ("0.33.1", False), ("0.33.0rc1", False)],
)
def test_only_tested_versions_count(version: str, tested: bool) -> None:
    assert is_tested(version) is tested
