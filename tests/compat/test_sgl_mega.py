"""SGLang's mega functions against the oracle, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.compat import sgl_mega
from sparse_mla.compat.sgl_mega import (
    flash_mla_mega_decode,
    flash_mla_mega_prefill,
    permute_mega_q_weight,
)
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.kernels.contract import AttendOut, Layout
from sparse_mla.ops.layouts import interleave_query, query_permutation
from sparse_mla.testing.compare import FLOAT32_BODY, TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

INTERLEAVED = Layout.CHUNK_INTERLEAVED


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def four_dims(cache: PagedCache) -> Tensor:
    """The cache as SGLang holds it: bytes [pages, page_rows, 1, row_bytes]."""
    row = cache.record.row_bytes
    shape = (cache.num_pages, cache.page_rows, 1, row)
    return cache.pages.as_strided(shape, (cache.page_stride_bytes, row, row, 1))


def decode(problem: AttendProblem) -> tuple[Tensor, Tensor, Tensor]:
    extra = problem.compressed
    return flash_mla_mega_decode(
        interleave_query(problem.q),
        four_dims(problem.window.cache),
        problem.window.indices,
        problem.positions.int(),
        problem.rope,
        problem.scale,
        attn_sink=problem.sink,
        topk_length=problem.window.lengths,
        extra_kv=None if extra is None else four_dims(extra.cache),
        extra_indices=None if extra is None else extra.indices,
        extra_topk_length=None if extra is None else extra.lengths,
    )


@pytest.mark.parametrize("kv_format", ["v41_new", "v41"])
@pytest.mark.parametrize("extra", [None, "mxfp8", "nvfp4"])
@pytest.mark.parametrize("heads", [8, 64])
def test_decode_equals_the_oracle(
    monkeypatch: pytest.MonkeyPatch, device: str, heads: int, extra: str | None, kv_format: str
) -> None:
    monkeypatch.setattr(sgl_mega, "kv_format", kv_format)
    suffix = "" if kv_format == "v41_new" else "_planar"
    problem = make_problem(
        tokens=5,
        heads=heads,
        window_record="mxfp8" + suffix,
        compressed_record=(extra or "mxfp8") + suffix,
        compressed_keys=None if extra is None else 96,
        hole_probability=0.1,
        lengths="random",
        device=device,
    )
    codes, scales, lse = decode(problem)
    groups = heads // 8
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == (5, groups, 4096)
    assert scales.shape == (5, groups, 32)
    assert scales.stride() == (1, 256, 8)
    out = AttendOut(codes.view(torch.uint8), scales, lse, None, 8, INTERLEAVED)
    precision = FLOAT32_BODY if device == "cpu" else TENSOR_CORE_BODY
    assert_matches_oracle(problem.call(query_layout=INTERLEAVED), out, precision)


def test_prefill_over_all_rows_equals_decode(device: str) -> None:
    """The same rows, gathered: only the rounding of keys to bf16 could differ, and FP8 values have none."""
    from sparse_mla.cache.codec import gather_rows

    problem = make_problem(tokens=4, heads=16, device=device, poison=False, named_share=1.0)
    cache = problem.window.cache
    slots = torch.arange(cache.num_slots, device=device)
    rows = gather_rows(cache, slots, dtype=torch.bfloat16)
    codes, scales, largest, lse = flash_mla_mega_prefill(
        interleave_query(problem.q),
        rows[:, None],
        problem.window.indices[:, None],
        problem.positions.int(),
        problem.rope,
        problem.scale,
        attn_sink=problem.sink,
    )
    out = AttendOut(codes.view(torch.uint8), scales, lse, largest, 8, INTERLEAVED)
    precision = FLOAT32_BODY if device == "cpu" else TENSOR_CORE_BODY
    assert_matches_oracle(problem.call(query_layout=INTERLEAVED), out, precision)


def test_the_query_weight_gives_the_query_that_kernels_read() -> None:
    weight = torch.randn(8 * 512, 6, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    moved = permute_mega_q_weight(weight, 8)
    assert torch.equal(moved, weight[query_permutation(8)])
    standard = (x @ weight.T).view(3, 8, 512)
    assert torch.allclose((x @ moved.T).view(3, 8, 512), interleave_query(standard), atol=1e-5)


def test_bad_arguments_are_named() -> None:
    problem = make_problem(tokens=2, heads=4)
    with pytest.raises(ShapeError, match="q: got 4 heads; allowed: a multiple of 8 up to 128"):
        decode(problem)
    with pytest.raises(ArgumentError, match="head_dim: got 576"):
        permute_mega_q_weight(torch.zeros(576, 2), 1, 576)


def test_an_unknown_kv_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl_mega, "kv_format", "v42")
    with pytest.raises(ArgumentError, match="sgl_mega.kv_format: got 'v42'; allowed: 'v41_new'"):
        decode(make_problem(tokens=2, heads=8))
