"""Selection in Triton's interpreter: exact where scores are, ties, candidates, chunks, scratch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, INDEX_RECORDS, RecordFormat
from sparse_mla.kernels.index_contract import IndexTopkCall, IndexTopkOut
from sparse_mla.kernels.torch.index_topk import index_topk as wanted_topk
from sparse_mla.kernels.torch.index_topk import take_best
from sparse_mla.testing.index_inputs import IndexSizes, make_index_call, selection_faults

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from sparse_mla.kernels.triton import index_topk as body  # noqa: E402
from sparse_mla.kernels.triton.index_select import collect  # noqa: E402

RECORDS = pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda record: record.name)
MIXED = ([300, 9, 0, 12, 133], [2, 2, 0, 1, 3])
FEW_ROWS = pytest.mark.parametrize("few_rows", [0, body.FEW_ROWS], ids=["one program", "parts"])
"""Whether one program selects for a row, or one for each part of it."""


@pytest.fixture(autouse=True)
def _small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SELECT_LANES": 256, "PART_LANES": 64, "PART_KEYS": 64, "FEW_LISTED": 32, "MANY_LISTED": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(body, name, value)


def make(
    contexts: list[int],
    query_lens: list[int],
    *,
    padding: int = 0,
    exact: bool = False,
    seed: int = 0,
    **sizes,
) -> IndexTopkCall:
    return make_index_call(
        contexts, query_lens, IndexSizes(**sizes), padding=padding, exact=exact, seed=seed
    )


def run(call: IndexTopkCall, candidates: int | None = None, topk=body.index_topk) -> IndexTopkOut:
    """Lists of a call, from buffers that hold garbage before."""
    tokens = call.queries.num_tokens
    out = IndexTopkOut(
        torch.full((tokens, call.topk), 77, dtype=torch.int32),
        None if candidates is None else torch.full((tokens, candidates), 77, dtype=torch.int32),
    )
    topk(call, out)
    return out


def assert_equal(got: IndexTopkOut, wanted: IndexTopkOut) -> None:
    assert torch.equal(got.positions, wanted.positions)
    if wanted.candidates is not None:
        assert got.candidates is not None
        assert torch.equal(got.candidates, wanted.candidates)


@FEW_ROWS
@pytest.mark.parametrize(("record", "share"), [(INDEX_FP8, 1), (INDEX_FP8, 100), (INDEX_MXFP4, 2)])
def test_mixed_batch_equals_pytorch_and_so_do_its_consumers(
    record: RecordFormat, share: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers: scores are exact in any order, and most are tied."""
    monkeypatch.setattr(body, "FEW_ROWS", few_rows)
    monkeypatch.setattr(body, "ROWS_TO_SHARE", share)
    call = make(*MIXED, record=record, exact=True, padding=2)
    got = run(call, 20)
    assert_equal(got, run(call, 20, wanted_topk))
    again = make(*MIXED, record=record, exact=True, padding=2, seed=9)
    consumer = dataclasses.replace(again, candidates=got.candidates)
    assert_equal(run(consumer), run(consumer, None, wanted_topk))


@RECORDS
@pytest.mark.parametrize("heads", [3, 32])
def test_random_scores_give_the_best_within_a_rounding(record: RecordFormat, heads: int) -> None:
    call = make([400], [5], record=record, topk=20, heads=heads)
    got = run(call).positions
    for row in range(5):
        assert selection_faults(call, row, got[row]) == []


def test_rows_are_shared_in_products_whatever_their_requests() -> None:
    """Requests of 1 to 9 rows in one block of rows, short ones between them."""
    lens = [7, 1, 2, 5, 1, 9]
    call = make([150, 20, 140, 5, 131, 20], lens, record=INDEX_FP8, exact=True)
    assert call.queries.num_tokens >= body.ROWS_TO_SHARE * 6
    assert_equal(run(call, 6), run(call, 6, wanted_topk))


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make([300, 40], [4, 2], record=INDEX_FP8, exact=True)
    whole = run(call, 9)
    for few_rows in (0, body.FEW_ROWS):
        monkeypatch.setattr(body, "FEW_ROWS", few_rows)
        lists = body.lists_width(call.topk, body.parts_of(2, 384))
        monkeypatch.setattr(body, "SCORE_SCRATCH_BYTES", 2 * body.row_bytes(384, lists, 75))
        assert_equal(run(call, 9), whole)


def test_a_captured_call_may_see_less_than_it_was_sized_for() -> None:
    """Sized for 400 keys; the rows see fewer, or more than the limit, or none."""
    call = make([300], [3], record=INDEX_FP8, exact=True)
    wide = dataclasses.replace(call, max_visible=10**6)
    assert_equal(run(wide, 5), run(call, 5))
    for visible in ([0, 12, 13], [299, 0, 1]):
        changed = dataclasses.replace(wide, visible=torch.tensor(visible, dtype=torch.int32))
        assert_equal(run(changed, 5), run(changed, 5, wanted_topk))
    beyond = dataclasses.replace(wide, visible=torch.full((3,), 2**31 - 1, dtype=torch.int32))
    assert bool((run(beyond).positions < 304).all())  # the pages end there


def test_without_request_ids_the_host_offsets_count() -> None:
    call = make(*MIXED, record=INDEX_MXFP4, exact=True, padding=1)
    assert_equal(run(dataclasses.replace(call, request_ids=None)), run(call))


def test_keys_without_a_page_are_not_chosen_and_nothing_is_read_out_of_range() -> None:
    call = make([64], [1], record=INDEX_FP8, exact=True)
    call.block_table[0, 1] = -1
    call.block_table[0, 3] = 10**6
    got = run(call).positions[0]
    assert bool((got >= 0).all())
    assert not set(got.tolist()) & {*range(8, 16), *range(24, 32)}


def test_everything_tied_at_zero_takes_the_oldest_keys_and_the_newest_block() -> None:
    call = make([200], [2], record=INDEX_FP8, topk=6)
    call.queries.weights.zero_()
    out = run(call, 3)
    assert out.positions.tolist() == [list(range(6))] * 2
    assert out.candidates is not None
    assert out.candidates.tolist() == [[0, 1, 49]] * 2


def test_candidates_starve_a_consumer_without_leaking() -> None:
    call = make([40], [1], record=INDEX_FP8)
    blocks = torch.tensor([[2, -1, 9, 4096, 2**31 - 1]], dtype=torch.int32)
    out = run(dataclasses.replace(call, candidates=blocks))
    assert out.positions[0].tolist() == [8, 9, 10, 11, 36, 37, 38, 39, -1, -1, -1, -1]
    none = torch.full((1, 4), -1, dtype=torch.int32)
    assert run(dataclasses.replace(call, candidates=none)).positions[0].tolist() == [-1] * 12


@FEW_ROWS
@pytest.mark.parametrize("block_size", [3, 8, 16])
def test_candidate_blocks_of_any_size(
    block_size: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "FEW_ROWS", few_rows)
    call = make([141], [2], record=INDEX_FP8, exact=True, block_size=block_size)
    got = run(call, 4)
    assert_equal(got, run(call, 4, wanted_topk))
    consumer = dataclasses.replace(call, candidates=got.candidates)
    assert_equal(run(consumer), run(consumer, None, wanted_topk))


def test_no_rows_and_no_keys() -> None:
    call = make([0], [0], record=INDEX_FP8)
    assert run(call, 3).positions.shape == (0, 12)
    call = make([0, 3], [2, 1], record=INDEX_FP8)
    assert run(call).positions.tolist() == [[-1] * 12] * 2 + [[0, 1, 2, *[-1] * 9]]


def test_scratch_is_bounded_for_many_rows_and_long_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert body.scratch_bytes(1 << 20, 512) == body.SCORE_SCRATCH_BYTES
    assert body.row_bytes(1 << 20, 512, 1 << 17) < 5 << 20
    taken: list[int] = []
    real = torch.empty

    def spy(*size: int, **options: object) -> Tensor:
        made = real(*size, **options)
        taken.append(made.nbytes)
        return made

    call = make([300], [4], record=INDEX_FP8)
    monkeypatch.setattr(body, "SCORE_SCRATCH_BYTES", 8000)
    monkeypatch.setattr(body.torch, "empty", spy)
    out = IndexTopkOut(torch.zeros(4, 12).int(), torch.zeros(4, 5).int())
    for few_rows in (0, body.FEW_ROWS):
        monkeypatch.setattr(body, "FEW_ROWS", few_rows)
        taken.clear()
        body.index_topk(call, out)
        assert len(taken) == 4
        assert 0 < sum(taken) <= body.scratch_bytes(300, 12, 4) <= 8000


@triton.jit
def best_kernel(out, values, count, wanted, LANES: tl.constexpr):
    collect(out, values, out, out, count, wanted, 1, LANES, 1, False)


def test_the_choice_equals_a_sort() -> None:
    """Floats in integer order, with infinities, both zeros, subnormals and many ties."""
    generator = torch.Generator().manual_seed(8)
    pool = torch.tensor([-math.inf, -2.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0, math.inf, -1e-40])
    sizes = ((1, 1), (40, 12), (64, 20), (60, 64), (64, 7), (200, 64), (200, 250), (130, 7))
    for count, wanted in sizes:
        values = pool[torch.randint(0, len(pool), (count,), generator=generator)]
        if wanted == 7:
            values = torch.randn(count, generator=generator)
        bits = values.view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        out = torch.full((wanted,), 77, dtype=torch.int32)
        best_kernel[(1,)](out, ordered, count, wanted, 64)
        assert torch.equal(out, take_best(values[None], wanted)[0])
