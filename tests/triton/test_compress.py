"""The compressor in Triton's interpreter: pooling, ring state over chunks, drafts, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_mla.kernels.index_contract import CompressCall, Ring
from sparse_mla.kernels.torch.compress import compress as wanted_compress
from sparse_mla.kernels.torch.rms_norm import rms_norm as wanted_norm
from sparse_mla.testing.index_inputs import ring_of

pytest.importorskip("triton")

from sparse_mla.kernels.triton.compress import compress
from sparse_mla.kernels.triton.rms_norm import rms_norm

DIM = 48
CAPACITY = 8


def new_rows(blocks: int = 6) -> Tensor:
    """Ring rows full of NaN, inside a wider tensor so that blocks lie apart."""
    return torch.full((blocks, CAPACITY * 2, 2 * DIM), torch.nan)[:, :CAPACITY]


def call_of(projected: Tensor, positions: list[int], ring: Ring | None) -> CompressCall:
    where = torch.tensor(positions, dtype=torch.int64)
    ratio = 1 if ring is None else 2
    return CompressCall(projected, ratio, where, torch.linspace(0.5, 1.5, DIM), 1e-20, ring)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """A pooled channel and then the norm may each round to the other bf16 neighbour, seldom."""
    error = (got.float() - wanted.float()).abs()
    assert bool((error <= 2 * 2.0**-8 * wanted.float().abs() + 1e-30).all())
    assert float((got != wanted).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :DIM]
    rows[1] = 0.0
    gain = torch.linspace(0.5, 1.5, DIM)
    got, wanted = rms_norm(rows, gain, 1e-20), wanted_norm(rows, gain, 1e-20)
    assert_close(got, wanted)
    assert torch.equal(got[1], torch.zeros(DIM, dtype=torch.bfloat16))
    assert rms_norm(rows[:0], gain, 1e-20).shape == (0, DIM)


def test_ratio_1_is_the_norm_of_each_row() -> None:
    rows = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    call = call_of(rows, [3, 4, 5, 6], None)
    assert_close(compress(call), wanted_compress(call))


def test_mixed_step_with_padding_and_a_request_without_a_block() -> None:
    lens, starts, blocks = [3, 0, 5, 1, 12, 2], [7, 4, 2, 9, 1, 3], [3, 1, 2, 4, 5, 0]
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(6, CAPACITY, 2 * DIM, generator=generator)
    projected = torch.randn(sum(lens) + 2, 2 * DIM, generator=generator)
    projected[-2:] = torch.nan  # padding rows
    positions = [s + i for n, s in zip(lens, starts, strict=True) for i in range(n)]
    outs, rings = [], []
    for body in (compress, wanted_compress):
        ring = ring_of(blocks, lens, starts, state.clone())
        pad = torch.tensor([-1, -1])
        ring = Ring(
            ring.rows,
            torch.cat([ring.slots, pad]),
            torch.cat([ring.request_ids, torch.zeros(2, dtype=torch.int32)]),
            ring.query_start_loc,
        )
        outs.append(body(call_of(projected, [*positions, 2**31 - 1, -5], ring)))
        rings.append(ring.rows[1:])
    assert torch.equal(*rings)
    assert_close(*outs)
    closing = torch.tensor([p % 2 == 1 for p in positions[:-2]] + [False] * 4)
    assert torch.equal(outs[0].float().abs().sum(-1) > 0, closing)


@pytest.mark.parametrize("chunk", [1, 3, 8, 9])
def test_chunks_equal_one_shot_bit_for_bit(chunk: int) -> None:
    length = 21
    projected = torch.randn(length, 2 * DIM, generator=torch.Generator().manual_seed(2))
    rows = new_rows()
    whole = compress(call_of(projected, list(range(length)), ring_of([1], [length], [0], rows)))
    rows, pieces = new_rows(), []
    for start in range(0, length, chunk):
        part = projected[start : start + chunk]
        ring = ring_of([2], [len(part)], [start], rows)
        pieces.append(compress(call_of(part, list(range(start, start + len(part))), ring)))
    assert torch.equal(torch.cat(pieces), whole)
    assert bool(rows[[0, 1, 3, 4, 5]].isnan().all())  # nothing outside the request's block


def test_rejected_drafts_do_not_change_latents() -> None:
    """Six drafts stored, any number of them rejected: the next step finds its predecessor."""
    generator = torch.Generator().manual_seed(3)
    length = 20
    accepted = torch.randn(length, 2 * DIM, generator=generator)
    whole = compress(
        call_of(accepted, list(range(length)), ring_of([1], [length], [0], new_rows()))
    )
    rows, got, position, step = new_rows(), torch.zeros_like(whole), 0, 0
    while position < length:
        keep = 1 + step % 7
        step += 1
        wrong = torch.randn(7, 2 * DIM, generator=generator)
        right = accepted[position : position + keep]
        wrong[: len(right)] = right
        ring = ring_of([3], [7], [position], rows)
        out = compress(call_of(wrong, list(range(position, position + 7)), ring))
        got[position : position + len(right)] = out[: len(right)]
        position += keep
    assert torch.equal(got, whole)
