"""Compressor: pooling against plain loops, ring state over chunks, drafts and rejection, bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sparse_mla.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from sparse_mla.kernels.index_contract import CompressCall, Ring
from sparse_mla.ops.compress import compress
from sparse_mla.testing.index_inputs import ring_of

DIM = 64
CAPACITY = 8


def call_of(
    projected: Tensor, positions: list[int], ring: Ring | None, ratio: int = 2
) -> CompressCall:
    gain = torch.linspace(0.5, 1.5, DIM)
    where = torch.tensor(positions, dtype=torch.int64)
    return CompressCall(projected, ratio, where, gain, 1e-20, ring)


def new_rows(blocks: int = 4) -> Tensor:
    """Ring rows full of NaN, inside a wider tensor so that blocks lie apart."""
    return torch.full((blocks, CAPACITY * 2, 2 * DIM), torch.nan)[:, :CAPACITY]


def assert_bf16_close(got: Tensor, wanted: Tensor, ulps: int) -> None:
    error = (got.float() - wanted.float()).abs()
    assert bool((error <= ulps * 2.0**-8 * wanted.float().abs() + 1e-30).all())


def test_toy_pool_of_the_specification() -> None:
    """u = [1, 4], [3, -2] with scores [0, 2], [ln 3, 2] pools to [2.5, 1]."""
    first = torch.tensor([1.0, 4.0, 0.0, 2.0])
    second = torch.tensor([3.0, -2.0, torch.tensor(3.0).log(), 2.0])
    ring = ring_of([1], [2], [0], torch.zeros(2, CAPACITY, 4))
    gain = torch.ones(2)
    call = CompressCall(torch.stack([first, second]), 2, torch.arange(2), gain, 1e-20, ring)
    pooled = torch.tensor([2.5, 1.0])
    wanted = (pooled / pooled.square().mean().sqrt()).to(torch.bfloat16)
    assert torch.equal(compress(call)[1], wanted)
    assert torch.equal(compress(call)[0], torch.zeros(2, dtype=torch.bfloat16))


def test_ratio_1_is_the_norm_of_each_row() -> None:
    rows = torch.randn(5, DIM).to(torch.bfloat16)
    got = compress(call_of(rows, [3, 4, 5, 6, 7], None, ratio=1))
    wide = rows.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    assert_bf16_close(got, normed * torch.linspace(0.5, 1.5, DIM), 1)
    slow = compress(call_of(rows, [3, 4, 5, 6, 7], None, ratio=1), backend="reference")
    assert_bf16_close(got, slow, 1)


def test_zero_rows_stay_zero_and_empty_steps_work() -> None:
    zeros = torch.zeros(2, DIM, dtype=torch.bfloat16)
    assert torch.equal(compress(call_of(zeros, [0, 1], None, ratio=1)), zeros)
    ring = ring_of([], [], [], new_rows())
    assert compress(call_of(torch.empty(0, 2 * DIM), [], ring)).shape == (0, DIM)


def test_mixed_step_equals_the_loops() -> None:
    """Requests with zero rows, odd and even starts, padding and a request without a ring block."""
    lens, starts, blocks = [3, 0, 5, 1, 12, 2], [7, 4, 2, 9, 1, 3], [3, 1, 2, 4, 5, 0]
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(6, CAPACITY, 2 * DIM, generator=generator)
    projected = torch.randn(sum(lens) + 2, 2 * DIM, generator=generator)
    projected[-2:] = torch.nan  # padding rows
    positions = [s + i for n, s in zip(lens, starts, strict=True) for i in range(n)]
    positions += [2**31 - 1, -5]
    outs, rings = [], []
    for backend in ("torch", "reference"):
        ring = ring_of(blocks, lens, starts, state.clone())
        pad = torch.tensor([-1, -1])
        ring = dataclasses.replace(
            ring,
            slots=torch.cat([ring.slots, pad]),
            request_ids=torch.cat([ring.request_ids, pad.int() + 1]),
        )
        outs.append(compress(call_of(projected, positions, ring), backend=backend))
        rings.append(ring.rows[1:])
    assert torch.equal(rings[0], rings[1])
    # A pooled channel may round to the other bf16 neighbour, and so may the norm's result.
    assert_bf16_close(outs[0], outs[1], 2)
    assert float((outs[0] != outs[1]).float().mean()) < 0.01
    closing = torch.tensor([p % 2 == 1 for p in positions[:-4]] + [False] * 4)
    assert torch.equal(outs[0].float().abs().sum(-1) > 0, closing)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 64])
def test_chunks_equal_one_shot_bit_for_bit(chunk: int) -> None:
    length = 41
    projected = torch.randn(length, 2 * DIM, generator=torch.Generator().manual_seed(2))
    rows = new_rows()
    whole = compress(call_of(projected, list(range(length)), ring_of([1], [length], [0], rows)))
    rows, pieces = new_rows(), []
    for start in range(0, length, chunk):
        part = projected[start : start + chunk]
        ring = ring_of([2], [len(part)], [start], rows)
        pieces.append(compress(call_of(part, list(range(start, start + len(part))), ring)))
    assert torch.equal(torch.cat(pieces), whole)


def test_rejected_drafts_do_not_change_latents() -> None:
    """Six drafts stored, any number of them rejected: the next step finds its predecessor."""
    generator = torch.Generator().manual_seed(3)
    length = 40
    accepted = torch.randn(length, 2 * DIM, generator=generator)
    whole = compress(
        call_of(accepted, list(range(length)), ring_of([1], [length], [0], new_rows()))
    )
    rows = new_rows()
    got = torch.zeros_like(whole)
    position, step = 0, 0
    while position < length:
        keep = 1 + step % 7  # accepted rows of this step: the token and keep - 1 drafts
        step += 1
        wrong = torch.randn(7, 2 * DIM, generator=generator)
        right = accepted[position : position + keep]
        wrong[: len(right)] = right
        ring = ring_of([3], [7], [position], rows)
        out = compress(call_of(wrong, list(range(position, position + 7)), ring))
        got[position : position + len(right)] = out[: len(right)]
        position += keep
    assert torch.equal(got, whole)


def test_ring_keeps_the_last_rows_only_and_writes_nothing_else() -> None:
    rows = new_rows()
    projected = torch.randn(13, 2 * DIM)
    compress(call_of(projected, list(range(4, 17)), ring_of([2], [13], [4], rows)))
    for position in range(9, 17):
        assert torch.equal(rows[2, position % CAPACITY], projected[position - 4])
    assert bool(rows[1].isnan().all())
    assert bool(rows[3].isnan().all())


def test_garbage_in_unread_rows_does_not_matter() -> None:
    """A first row at an even position reads no ring row, though its slot holds NaN."""
    projected = torch.randn(2, 2 * DIM)
    out = compress(call_of(projected, [6, 7], ring_of([1], [2], [6], new_rows())))
    assert bool(out.isfinite().all())


def good_call() -> CompressCall:
    return call_of(
        torch.randn(3, 2 * DIM), [0, 1, 2], ring_of([1], [3], [0], torch.zeros(3, 8, 128))
    )


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"ratio": 4}, ArgumentError, "ratio: got 4; allowed: 1, 2"),
        ({"ratio": 1}, ArgumentError, "projected"),
        ({"projected": torch.zeros(3, 130)}, ShapeError, "projected"),
        ({"projected": torch.zeros(3, 128, dtype=torch.float64)}, DTypeError, "projected"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, ShapeError, "positions"),
        ({"positions": torch.zeros(3)}, DTypeError, "positions"),
        ({"norm_weight": torch.zeros(32)}, ShapeError, "projected"),
        ({"ring": None}, ArgumentError, "ratio 2 carries"),
    ],
)  # fmt: skip
def test_bad_calls(changes: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        compress(dataclasses.replace(good_call(), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"rows": torch.zeros(3, 8, 64)}, ShapeError, r"ring\.rows"),
        ({"rows": torch.zeros(3, 7, 128)}, ArgumentError, "even capacity"),
        ({"slots": torch.tensor([8, 9, 24])}, IndexRangeError, r"ring\.slots: got 24"),
        ({"slots": torch.tensor([8, 9])}, ShapeError, r"ring\.slots"),
        ({"request_ids": torch.zeros(3, dtype=torch.int64)}, DTypeError, r"ring\.request_ids"),
    ],
)
def test_bad_rings_change_nothing(
    changes: dict[str, object], error: type[Exception], match: str
) -> None:
    call = good_call()
    assert call.ring is not None
    ring = dataclasses.replace(call.ring, **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=match):
        compress(dataclasses.replace(call, ring=ring))
    assert float(ring.rows.abs().sum()) == 0


def test_ratio_1_takes_no_ring() -> None:
    call = good_call()
    rows = torch.zeros(3, DIM, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="carries no state"):
        compress(dataclasses.replace(call, projected=rows, ratio=1))
