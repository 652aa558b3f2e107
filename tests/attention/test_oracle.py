"""The oracle against a second one that shares nothing with it, and against worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import KV_RECORDS, MXFP8, V4
from sparse_mla.kernels.contract import KeySet, Layout
from sparse_mla.kernels.reference.attend import attend, attend_exact
from sparse_mla.kernels.reference.attend_alternative import attend_alternative
from sparse_mla.testing.compare import (
    FLOAT32_BODY,
    assert_matches_oracle,
    compare_with_oracle,
    same_bits,
)
from sparse_mla.testing.inputs import make_problem


@pytest.mark.parametrize("window", KV_RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("compressed", KV_RECORDS, ids=lambda record: record.name)
def test_two_oracles_agree(window, compressed):
    problem = make_problem(
        tokens=2,
        heads=2,
        window_keys=11,
        compressed_keys=9,
        window_record=window,
        compressed_record=compressed,
        window_page_rows=4,
        compressed_page_rows=16,
        hole_probability=0.2,
        beyond_probability=0.1,
        lengths="random",
        page_padding_bytes=300,
        offset_rows=1,
        strided=True,
        pool_rows=40,
    )
    _agree(problem.call(query_layout=Layout.CHUNK_INTERLEAVED))


@pytest.mark.parametrize(
    "fields",
    [
        {"window_keys": 0},
        {"lengths": "zero"},
        {"hole_probability": 1.0},
        {"sink": None},
        {"sink": math.inf},
        {"sink": -math.inf},
        {"sink": 20.0},
        {"sink": math.inf, "lengths": "zero"},
        {"key_scale": 30.0},
        {"positions_dtype": torch.int32},
    ],
    ids=str,
)
def test_two_oracles_agree_in_corners(fields):
    problem = make_problem(**{"tokens": 2, "heads": 3, "window_keys": 12, **fields})
    _agree(problem.call())
    _agree(problem.call(rotate_query=False, unrotate_output=False))


def _agree(call):
    first = attend_exact(call)
    output, lse, largest = attend_alternative(call)
    np.testing.assert_allclose(first.output.numpy(), output, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(first.lse.numpy(), lse, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(first.max_logits.numpy(), largest, rtol=1e-12, atol=1e-12)


def test_worked_softmax_with_sink():
    """Logits 1 and 2 and a sink of 0.5: lse 2.3132616875, weights 0.2312239 and 0.6285317."""
    cache = PagedCache.allocate(V4, num_pages=1, page_rows=2)
    latents = torch.zeros(2, 512)
    latents[0, 0], latents[1, 0] = 1.0, 2.0
    latents[0, 1] = latents[1, 2] = 1.0  # marks each key's share in the output
    from sparse_mla.cache.codec import encode_rows

    cache.write_rows(torch.arange(2), *encode_rows(V4, latents))
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    base = make_problem(tokens=1, heads=1, window_keys=1)
    problem = replace(
        base,
        q=q,
        window=KeySet(cache, torch.tensor([[0, 1]], dtype=torch.int32)),
        sink=torch.tensor([0.5]),
        scale=1.0,
    )
    result = attend_exact(problem.call(rotate_query=False, unrotate_output=False))
    assert result.lse.item() == pytest.approx(2.3132616875, abs=1e-9)
    assert result.max_logits.item() == 2.0
    assert result.output[0, 0, 1:3].tolist() == pytest.approx([0.2312239, 0.6285317], abs=1e-7)


def test_reference_body_fills_every_output():
    problem = make_problem(tokens=4, heads=8, window_keys=20, compressed_keys=12, lengths="random")
    for fp8 in (False, True):
        out = problem.allocate_out(fp8=fp8)
        attend(problem.call(), out)
        result = assert_matches_oracle(problem.call(), out, FLOAT32_BODY)
        assert result.differing_codes == 0.0
        assert result.lse <= 1.0


def test_quantised_attention_is_near_the_unquantised_maths():
    """The loose bound: with MXFP8 rows the output differs from plain bf16 keys by under 4 percent."""
    from sparse_mla.testing.inputs import SCALE

    problem = make_problem(tokens=2, heads=4, window_keys=64, sink=None, window_record=MXFP8)
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(64, 512, generator=generator).bfloat16()
    cache = PagedCache.allocate(MXFP8, num_pages=2, page_rows=32)
    from sparse_mla.cache.codec import encode_rows

    cache.write_rows(torch.arange(64), *encode_rows(MXFP8, plain))
    lanes = torch.arange(64, dtype=torch.int32).expand(2, 64).contiguous()
    call = replace(problem, window=KeySet(cache, lanes)).call(
        rotate_query=False, unrotate_output=False
    )
    keys = plain.double()
    wanted = torch.softmax(SCALE * problem.q.double() @ keys.T, dim=-1) @ keys
    error = (attend_exact(call).output - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.04


def test_comparison_notices_faults():
    """The judge itself: small errors of each kind are found."""
    problem = make_problem(tokens=3, heads=4, window_keys=40, lengths="random")
    call = problem.call()
    exact = attend_exact(call)

    def judged(spoil) -> bool:
        out = problem.allocate_out()
        attend(call, out)
        spoil(out)
        return compare_with_oracle(call, out, FLOAT32_BODY, exact).passed

    assert judged(lambda out: None)
    assert not judged(lambda out: out.data[1, 2, 300:301].mul_(1.02))
    assert not judged(lambda out: out.data[2, 0, 0].fill_(torch.nan))
    assert not judged(lambda out: out.lse.add_(2e-4))
    assert not judged(lambda out: out.lse.mul_(1 / math.log(2)))
    assert not judged(lambda out: out.max_logits[0].fill_(torch.inf))


def test_same_bits_sees_every_part_of_an_output() -> None:
    problem = make_problem(tokens=2, heads=8)
    one = problem.allocate_out(fp8=True)
    two = problem.allocate_out(fp8=True)
    attend(problem.call(), one)
    attend(problem.call(), two)
    assert same_bits(one, two)
    for part in (two.data.view(torch.uint8), two.lse, two.max_logits, two.scales):
        assert part is not None
        kept = part.clone()
        part[(0,) * part.ndim] += 1
        assert not same_bits(one, two)
        part.copy_(kept)
