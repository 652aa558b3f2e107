"""The metadata kernels in Triton's interpreter against the PyTorch rules."""

import pytest
import torch

from sparse_mla.metadata.rules import TORCH_RULES, Rows, TopkRows, WindowSpans

pytest.importorskip("triton")

from sparse_mla.kernels.triton.metadata import TRITON_RULES

RULES = (TORCH_RULES, TRITON_RULES)
QUERY_LENS = [3, 0, 5, 0, 0, 1, 70]
SEQ_LENS = torch.tensor([9, 4, 140, 0, 7, 1, 205], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 3, 8, 8, 8, 9, 79], dtype=torch.int32)
ROWS = 83  # four padding rows


def table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    pages = torch.randperm(7 * 13, generator=generator).reshape(7, 13).to(torch.int32)
    pages[2, 5] = -1
    return pages


def rows_of(rules) -> Rows:
    rows = Rows(
        torch.full((ROWS,), 99, dtype=torch.int32),
        torch.full((ROWS,), 99, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.bool),
    )
    slots = torch.arange(ROWS)
    slots[79:] = -1
    slots[4] = -1
    rules.fill_rows(rows, STARTS, SEQ_LENS, slots)
    return rows


def test_rows() -> None:
    wanted, got = (rows_of(rules) for rules in RULES)
    assert torch.equal(got.requests, wanted.requests)
    assert torch.equal(got.positions, wanted.positions)
    assert torch.equal(got.is_valid, wanted.is_valid)
    assert got.requests[[0, 2, 3, 7, 8, 9, 78]].tolist() == [0, 0, 2, 2, 5, 6, 6]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [16, 300])
def test_window_lists(causal: bool, width: int) -> None:
    results = []
    for rules in RULES:
        indices = torch.full((ROWS, width), 77, dtype=torch.int32)
        lengths = torch.full((ROWS,), 77, dtype=torch.int32)
        replay = torch.tensor([0, 0, 137, 0, 0, 0, 50], dtype=torch.int32)
        spans = WindowSpans(16, 16, replay, STARTS, SEQ_LENS, causal)
        rules.fill_window(indices, lengths, rows_of(TORCH_RULES), table(), spans)
        results.append((indices, lengths))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert int(results[1][1].max()) > 1


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_slots_and_visible_counts(ratio: int) -> None:
    results = []
    for rules in RULES:
        slots = torch.full((ROWS,), 77)
        visible = torch.full((ROWS,), 77, dtype=torch.int32)
        token_slots = torch.arange(ROWS)
        token_slots[10:12] = -1
        rows = rows_of(TORCH_RULES)
        rules.fill_compressed_slots(slots, rows, table(), token_slots, ratio, 8)
        rules.fill_visible(visible, rows, ratio)
        results.append((slots, visible))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("bounded", [False, True])
def test_topk_to_slots_reads_nothing_out_of_range(bounded: bool) -> None:
    results = []
    for rules in RULES:
        rows = rows_of(TORCH_RULES)
        positions = torch.randint(-5, 200, (ROWS, 300), generator=torch.Generator().manual_seed(2))
        positions[:, :4] = torch.tensor([-(2**31), -1, 104, 2**31 - 1])
        topk = TopkRows(
            positions.to(torch.int32),
            table(),
            rows.requests,
            8,
            rows.is_valid,
            torch.arange(ROWS, dtype=torch.int32) if bounded else None,
        )
        slots = torch.full((ROWS, 300), 77, dtype=torch.int32)
        lengths = torch.full((ROWS,), 77, dtype=torch.int32)
        rules.fill_topk_slots(slots, lengths, topk)
        results.append((slots, lengths))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][0][0, :4].tolist() == [-1, -1, -1, -1]


def test_a_request_without_a_table_has_no_slots() -> None:
    """Requests -1 and past the table give -1 and do not read the tables of others."""
    results = []
    for rules in RULES:
        requests = torch.tensor([0, -1, 1, 2, 2**31 - 1], dtype=torch.int32)
        topk = TopkRows(
            torch.tensor([[0, 3, -1]] * 5, dtype=torch.int32),
            torch.tensor([[4, 5], [6, 7]], dtype=torch.int32),
            requests,
            2,
            torch.ones(5, dtype=torch.bool),
            None,
        )
        slots = torch.full((5, 3), 77, dtype=torch.int32)
        lengths = torch.full((5,), 77, dtype=torch.int32)
        rules.fill_topk_slots(slots, lengths, topk)
        results.append((slots.tolist(), lengths.tolist()))
    none = [-1, -1, -1]
    assert results[0] == ([[8, 11, -1], none, [12, 15, -1], none, none], [2, 0, 2, 0, 0])
    assert results[1] == results[0]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_an_empty_table_closes_no_entry(shape: tuple[int, int]) -> None:
    for rules in RULES:
        rows = Rows(
            torch.zeros(4, dtype=torch.int32),
            torch.arange(4, dtype=torch.int32),
            torch.ones(4, dtype=torch.bool),
        )
        slots = torch.full((4,), 77)
        empty = torch.zeros(shape, dtype=torch.int32)
        rules.fill_compressed_slots(slots, rows, empty, torch.arange(4), 2, 8)
        assert slots.tolist() == [-1] * 4
