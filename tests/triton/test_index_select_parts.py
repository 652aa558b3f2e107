"""Rows shared out to several programs, in Triton's interpreter: the same lists as a sort gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparse_mla.kernels.torch.index_topk import take_best

triton = pytest.importorskip("triton")

from sparse_mla.kernels.triton import index_topk as body  # noqa: E402
from sparse_mla.kernels.triton.index_scores import ABSENT  # noqa: E402
from sparse_mla.kernels.triton.index_select_parts import (  # noqa: E402
    HEADER,
    MAX_PARTS,
    select_parts_kernel,
)

GROUP, TILE, KEYS = 16, 64, 64
SIZES = {"LANES": 32, "FOLD": 2, "KEYS": KEYS, "FEW": 32, "MANY": 64, "GROUP": GROUP}
"""Small, so that short rows have many parts and every way through the kernel is taken."""


def ordered(values: Tensor) -> Tensor:
    """float32 -> int32 in the order of the score kernels."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(values.isnan(), 0x7FFFFFFF, bits)


def choose(
    rows: list[Tensor],
    topk: int,
    parts: int,
    candidates: Tensor | None = None,
    block_size: int = 1,
    visible: list[int] | None = None,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    """(lists, columns that each part listed) of rows of any lengths.

    What a score kernel would not have written holds the best score, and scratch holds garbage.
    """
    lengths = [len(row) for row in rows]
    columns = -(-max([*lengths, 1]) // TILE) * TILE
    scores = torch.full((len(rows), columns), 0x7FFFFFFF, dtype=torch.int32)
    for row, values in enumerate(rows):
        scores[row, : -(-len(values) // TILE) * TILE] = ABSENT.value
        scores[row, : len(values)] = ordered(values)
    maxima = scores.view(len(rows), -1, GROUP).amax(2)
    lists = torch.full((len(rows), body.lists_width(topk, parts)), 77, dtype=torch.int32)
    lists[:, 0] = 0
    out = torch.full((len(rows), topk), 77, dtype=torch.int32)
    sees = torch.tensor(lengths if visible is None else visible, dtype=torch.int32)
    blocks = sees[:, None] if candidates is None else candidates
    select_parts_kernel[(len(rows) * parts,)](
        out, lists, scores, maxima, sees, blocks, 0, topk, columns, blocks.shape[1], block_size,
        parts, scores.stride(0), maxima.stride(0), lists.stride(0), out.stride(0),
        blocks.stride(0), FILTER=candidates is not None, **{**SIZES, **sizes},
    )  # fmt: skip
    return out, lists[:, MAX_PARTS.value : MAX_PARTS.value + parts]


def wanted_of(rows: list[Tensor], topk: int) -> Tensor:
    """The same by a sort."""
    lists = torch.full((len(rows), topk), -1, dtype=torch.int32)
    for row, values in enumerate(rows):
        count = min(topk, len(values))
        if len(values) <= topk:
            lists[row, :count] = torch.arange(count)
        else:
            lists[row] = take_best(values[None], topk)[0]
    return lists


@pytest.mark.parametrize("parts", [1, 5, 16])
def test_ragged_rows_equal_a_sort(parts: int) -> None:
    """Lengths at the borders of groups, tiles and parts, rows of no key and rows shorter than the list."""
    generator = torch.Generator().manual_seed(parts)
    lengths = [0, 1, 12, 13, 63, 64, 65, 127, 128, 129, 320, 321, 700]
    rows = [torch.randn(length, generator=generator) for length in lengths]
    assert torch.equal(choose(rows, 12, parts)[0], wanted_of(rows, 12))


@pytest.mark.parametrize("topk", [1, 12, 100])
def test_ties_go_to_the_lower_column_across_parts(topk: int) -> None:
    """A few values, infinities and both zeros among them: most columns at the cut are tied."""
    generator = torch.Generator().manual_seed(topk)
    pool = torch.tensor([-math.inf, -2.0, 0.0, -0.0, 1e-40, 0.5, 0.5, 3.0, math.inf])
    rows = [
        pool[torch.randint(0, len(pool), (length,), generator=generator)]
        for length in (130, 257, 600)
    ]
    rows.append(torch.zeros(500))
    assert torch.equal(choose(rows, topk, 4)[0], wanted_of(rows, topk))


def test_the_best_of_a_row_may_lie_in_one_part_or_at_its_borders() -> None:
    """A part where more than `topk` columns reach the floor, and winners beside each border of parts."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(640, generator=generator) for _ in range(5)]
    rows[0][128:256] += 50  # one part of five holds every winner
    rows[1][600:] += 50  # the last one, which is cut short
    rows[2][::128] = 60 + torch.arange(5)
    rows[2][127::128] = 50
    rows[3][:130] = 7.0  # more equal ones than a list holds, across a border
    rows[4] = torch.arange(640).float()  # ascending: the floor is low
    for topk in (10, 24):
        lists, listed = choose(rows, topk, 5)
        assert torch.equal(lists, wanted_of(rows, topk))
        assert int(listed[0, 1]) == topk


def test_long_lists_are_closed_up_and_read_again() -> None:
    """All keys of a group are about equal: the best of groups are a poor floor, and much is listed.

    More than the kernel holds in registers at a time, then all of it.
    """
    steps = torch.linspace(1, 2, 64).repeat_interleave(16) + torch.linspace(0, 1e-3, 1024)
    short = steps.clone()
    short[:800] -= 10
    rows = [steps, short, steps.flip(0)]
    few = SIZES["FEW"]
    for many in (few, 64):
        lists, listed = choose(rows, 15, 8, MANY=many)
        assert torch.equal(lists, wanted_of(rows, 15))
        total = listed.sum(1)
        assert few < int(total.min()) <= int(total.max()) <= 64


def test_fewer_columns_that_may_be_chosen_than_the_list_holds() -> None:
    """-inf and absent keys are never chosen; -1 behind the rest."""
    row = torch.full((300,), -math.inf)
    row[[3, 70, 299]] = torch.tensor([1.0, -4.0, 0.0])
    lists, _ = choose([row, torch.full((300,), -math.inf)], 6, 3)
    assert lists.tolist() == [[3, 70, 299, -1, -1, -1], [-1] * 6]


def test_not_a_number_is_chosen_first() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(0))
    row[[5, 250]] = torch.nan
    row[77] = math.inf
    assert {5, 77, 250} <= set(choose([row], 4, 3)[0][0].tolist())


def test_columns_are_called_by_their_candidate_blocks() -> None:
    """A row's columns are those of its blocks in list order; none, and blocks that are not there."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.tensor([[2 * block + 1 for block in range(40)], [-1] * 40], dtype=torch.int32)
    values = torch.randn(200, generator=generator)
    nothing = torch.full((200,), -math.inf)
    lists, _ = choose([values, nothing], 9, 3, blocks, 5, visible=[400, 400])
    columns = take_best(values[None], 9)[0]
    wanted = blocks[0][(columns // 5).long()] * 5 + columns % 5
    assert torch.equal(lists[0], wanted.int())
    assert lists[1].tolist() == [-1] * 9
    none, _ = choose([nothing], 9, 1, blocks[:1, :0], 5, visible=[400])
    assert none.tolist() == [[-1] * 9]


def test_parts_do_not_matter_and_little_is_listed() -> None:
    """Of scores in no order, about as many columns reach the floor as are wanted."""
    row = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    for parts in (1, 3, 47, MAX_PARTS.value):
        lists, listed = choose([row], 10, parts, LANES=128)
        assert torch.equal(lists, wanted_of([row], 10))
        active = -(-47 // -(-47 // parts))
        assert 10 <= int(listed[0, :active].sum()) <= 20


def test_programs_and_scratch_are_bounded() -> None:
    for rows in range(1, body.FEW_ROWS + 1):
        for columns in (128, 65536, 131072, 1 << 20):
            parts = body.parts_of(rows, columns)
            assert 1 <= parts <= MAX_PARTS.value // rows
            assert (parts - 1) * body.PART_KEYS < columns
            width = body.lists_width(512, parts)
            assert rows * width <= rows * HEADER.value + 2 * MAX_PARTS.value * 512
    assert body.parts_of(body.FEW_ROWS + 1, 1 << 20) == 0
    assert body.lists_width(512, 0) == 512
    assert body.row_bytes(1 << 20, body.lists_width(512, 128), 1 << 17) < 6 << 20
