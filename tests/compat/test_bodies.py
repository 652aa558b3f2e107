"""What FlashMLA's calls need beyond the caches: plain bf16 rows and a norm of the query, in every body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparse_mla.cache.codec import decode_rows, encode_rows, gather_rows, scatter_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import ATTEND_RECORDS, BF16, KV_RECORDS, MXFP8
from sparse_mla.errors import ArgumentError, CacheFormatError, UnsupportedError
from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.reference.attend import attend_exact
from sparse_mla.kernels.reference.attend_alternative import attend_alternative
from sparse_mla.kernels.torch.attend import attend
from sparse_mla.ops.attend import AttendOptions, mega_attention, sparse_attention
from sparse_mla.ops.write import write_window
from sparse_mla.testing.compare import FLOAT32_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem, poisoned_cache


def problem(**fields: object) -> AttendProblem:
    base = {
        "tokens": 3, "heads": 2, "window_keys": 9, "compressed_keys": 5, "window_record": BF16,
        "window_page_rows": 1, "compressed_record": MXFP8, "hole_probability": 0.2, "lengths": "random",
    }  # fmt: skip
    return make_problem(**{**base, **fields})


def test_a_bf16_row_is_its_own_bytes():
    assert (*KV_RECORDS, BF16) == ATTEND_RECORDS
    assert (BF16.row_bytes, BF16.data_bytes, BF16.scale_bytes, BF16.scales_per_row) == (
        1024,
        1024,
        0,
        0,
    )
    values = torch.randn(5, 512).to(torch.bfloat16)
    data, scales = encode_rows(BF16, values)
    assert torch.equal(data.view(torch.bfloat16), values)
    assert scales.shape == (5, 0)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(decode_rows(BF16, data, scales, dtype), values.to(dtype))


@pytest.mark.parametrize("page_rows", [1, 3])
def test_bf16_rows_in_pages(page_rows):
    cache = poisoned_cache(
        BF16, num_pages=7, page_rows=page_rows, page_padding_bytes=32, offset_rows=1
    )
    values = torch.randn(4, 512).to(torch.bfloat16)
    slots = torch.tensor([6, -1, 0, 2])
    scatter_rows(cache, slots, values)
    got = gather_rows(cache, slots, torch.bfloat16)
    assert torch.equal(got[[0, 2, 3]], values[[0, 2, 3]])
    assert not got[1].any()
    untouched = [slot for slot in range(cache.num_slots) if slot not in (0, 2, 6)]
    assert torch.equal(
        cache.read_rows(torch.tensor(untouched))[0].unique(), torch.tensor([255]).byte()
    )


def test_no_pool_and_no_writer_takes_bf16_rows():
    cache = PagedCache.allocate(BF16, num_pages=2, page_rows=4)
    rows, slots, rope = (
        torch.zeros(1, 512, dtype=torch.bfloat16),
        torch.tensor([0]),
        torch.zeros(4, 64),
    )
    with pytest.raises(CacheFormatError, match="record 'bf16'"):
        write_window(rows, cache=cache, slots=slots, positions=slots, rope=rope)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("norm", [False, True])
def test_both_oracles_and_the_cpu_body_agree(layout, norm):
    case = problem()
    call = case.call(query_layout=layout)
    if norm:
        mean = case.q.float().square().mean(-1)
        call = replace(call, query_scale=torch.rsqrt(mean * 4 + 1e-6))
    exact = attend_exact(call)
    output, lse, largest = attend_alternative(call)
    for one, two in ((exact.output, output), (exact.lse, lse), (exact.max_logits, largest)):
        np.testing.assert_allclose(one.numpy(), two, rtol=1e-9, atol=1e-12)
    for fp8 in (False, True):
        out = case.allocate_out(fp8=fp8, layout=layout)
        attend(call, out)
        assert_matches_oracle(call, out, FLOAT32_BODY, exact)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_the_norm_is_that_of_the_raw_query(backend):
    """Logits times 1 / sqrt(mean(q**2) + eps) = attention of one head alone with that much scale."""
    case = problem(heads=3)
    options = AttendOptions(
        output="bf16", return_lse=True, query_norm_eps=0.25, backend=backend, heads_per_group=1
    )
    arguments = {"window": case.window, "compressed": case.compressed, "positions": case.positions,
                 "rope": case.rope}  # fmt: skip
    whole = mega_attention(case.q, scale=case.scale, sink=case.sink, options=options, **arguments)
    plain = replace(options, query_norm_eps=None)
    for token in range(3):
        for head in range(3):
            factor = float((case.q[token, head].double().square().mean() + 0.25) ** -0.5)
            q = case.q[token, None, head, None]
            part = case.rows(torch.tensor([token]))
            alone = mega_attention(
                q, window=part.window, compressed=part.compressed, positions=part.positions,
                rope=case.rope, scale=case.scale * factor, sink=case.sink[head, None], options=plain,
            )  # fmt: skip
            torch.testing.assert_close(
                alone.lse[0, 0], whole.lse[token, head], rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(
                alone.bf16[0, 0], whole.bf16[token, head], rtol=2**-7, atol=1e-5
            )


def test_a_query_of_zeros_has_a_finite_norm():
    case = problem()
    options = AttendOptions(query_norm_eps=1e-6)
    result = sparse_attention(
        torch.zeros_like(case.q), window=case.window, scale=1.0, options=options
    )
    assert bool(torch.isfinite(result.bf16).all())


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), "1"])
def test_other_eps_are_refused(eps):
    case = problem()
    with pytest.raises(ArgumentError, match="query_norm_eps"):
        sparse_attention(
            case.q, window=case.window, scale=1.0, options=AttendOptions(query_norm_eps=eps)
        )


def test_kernels_without_them_refuse_by_name():
    case = problem()
    with pytest.raises(UnsupportedError, match="window record: got bf16"):
        sparse_attention(
            case.q, window=case.window, scale=1.0, options=AttendOptions(backend="triton")
        )
    case = problem(window_record=MXFP8)
    options = AttendOptions(backend="triton", query_norm_eps=1e-6)
    with pytest.raises(UnsupportedError, match="query norm: got one; allowed: none"):
        sparse_attention(case.q, window=case.window, scale=1.0, options=options)
