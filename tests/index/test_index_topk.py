"""Selection: against plain loops bit for bit, ties, candidates, batching, poison, scratch, bad input."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_mla.cache.codec import scatter_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, INDEX_RECORDS, RecordFormat
from sparse_mla.errors import ArgumentError, CacheFormatError, IndexRangeError, ShapeError
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    IndexTopkCall,
    IndexTopkOut,
    PrepareIndexQueriesCall,
)
from sparse_mla.kernels.reference.index_topk import best
from sparse_mla.kernels.torch import index_topk as torch_body
from sparse_mla.kernels.torch.index_topk import scratch_bytes, take_best
from sparse_mla.ops.index import index_topk, prepare_index_queries

PAGE_ROWS = 8


def make_call(
    contexts: list[int],
    query_lens: list[int],
    *,
    record: RecordFormat = INDEX_FP8,
    topk: int = 12,
    heads: int = 4,
    seed: int = 0,
    padding: int = 0,
) -> IndexTopkCall:
    """Requests whose last row sees `contexts[i]` keys; every byte that no key names is 0xFF."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-context // PAGE_ROWS) for context in contexts]
    total = sum(pages_of) + 3
    order = torch.randperm(total, generator=generator).tolist()
    size = PAGE_ROWS * record.row_bytes
    cache = PagedCache(
        torch.full((total, size + 4), 0xFF, dtype=torch.uint8)[:, :size], record, PAGE_ROWS
    )
    table = torch.full((len(contexts), max([*pages_of, 1]) + 1), -1, dtype=torch.int32)
    visible, offsets = [], [0]
    for request, (context, count) in enumerate(zip(contexts, query_lens, strict=True)):
        mine = [order.pop() for _ in range(pages_of[request])]
        table[request, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        slots = [mine[j // PAGE_ROWS] * PAGE_ROWS + j % PAGE_ROWS for j in range(context)]
        keys = torch.randn(context, 128, generator=generator)
        if context:
            scatter_rows(cache, torch.tensor(slots), keys)
        visible += [max(context - count + 1 + i, 0) for i in range(count)]
        offsets.append(offsets[-1] + count)
    tokens = offsets[-1] + padding
    visible += [0] * padding
    queries = prepare_index_queries(
        PrepareIndexQueriesCall(
            queries=torch.randn(tokens, heads, 128, generator=generator).to(torch.bfloat16),
            weights=torch.randn(tokens, heads, generator=generator).to(torch.bfloat16),
            positions=torch.zeros(tokens, dtype=torch.int64),
            rope=torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1),
            record=record,
        )
    )
    return IndexTopkCall(
        queries=queries,
        keys=cache,
        block_table=table,
        visible=torch.tensor(visible, dtype=torch.int32),
        query_start_loc=torch.tensor(offsets, dtype=torch.int32),
        max_visible=max([*contexts, 0]),
        topk=topk,
        candidate_block_size=4,
    )


def run(call: IndexTopkCall, candidates: int | None = None, backend: str = "auto") -> IndexTopkOut:
    """Lists of a call, from buffers that hold garbage before."""
    tokens = call.queries.num_tokens
    out = IndexTopkOut(
        torch.full((tokens, call.topk), 77, dtype=torch.int32),
        None if candidates is None else torch.full((tokens, candidates), 77, dtype=torch.int32),
    )
    index_topk(call, out, backend=backend)
    return out


def rows_of(call: IndexTopkCall, rows: slice, request: int) -> IndexTopkCall:
    """The same call with some rows of one request alone."""
    queries = call.queries
    scales = None if queries.scales is None else queries.scales[rows]
    part = IndexQueries(queries.record, queries.codes[rows], scales, queries.weights[rows])
    visible = call.visible[rows]
    return dataclasses.replace(
        call,
        queries=part,
        block_table=call.block_table[request : request + 1],
        visible=visible,
        query_start_loc=torch.tensor([0, len(visible)], dtype=torch.int32),
        candidates=None if call.candidates is None else call.candidates[rows],
    )


@pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda r: r.name)
def test_lists_equal_the_loops(record: RecordFormat) -> None:
    """A mixed batch with an empty request, short and long ones, padding; then its consumers."""
    call = make_call([50, 9, 0, 12, 33], [5, 2, 0, 1, 3], record=record, padding=2)
    fast, slow = run(call, 5), run(call, 5, "reference")
    assert torch.equal(fast.positions, slow.positions)
    assert fast.candidates is not None
    assert slow.candidates is not None
    assert torch.equal(fast.candidates, slow.candidates)
    again = make_call([50, 9, 0, 12, 33], [5, 2, 0, 1, 3], record=record, padding=2, seed=9)
    consumer = dataclasses.replace(again, candidates=fast.candidates)
    assert torch.equal(run(consumer).positions, run(consumer, None, "reference").positions)
    inside = run(consumer).positions[:5]
    blocks = fast.candidates[:5]
    assert bool(((inside[:, :, None] // 4 == blocks[:, None]).any(-1) | (inside < 0)).all())


def test_lists_are_sets_of_the_best_scores() -> None:
    """Independent check in float64: everything chosen scores at least what is left out."""
    call = make_call([90], [4], topk=20, heads=8)
    got = run(call).positions
    values = torch_body._decode_queries(call.queries, slice(None))
    for row in range(4):
        seen = int(call.visible[row])
        slots = [int(call.block_table[0, j // 8]) * 8 + j % 8 for j in range(seen)]
        keys = torch_body.gather_rows(call.keys, torch.tensor(slots)).double()
        scores = call.queries.weights[row].double() @ (values[row] @ keys.T).relu()
        chosen = got[row].long()
        assert torch.equal(chosen, chosen.unique())
        left = torch.ones(seen, dtype=torch.bool)
        left[chosen] = False
        assert float(scores[chosen].min()) >= float(scores[left].max()) - 1e-6


def test_short_rows_take_everything_and_publish_nothing() -> None:
    call = make_call([12, 3], [12, 1], topk=12)
    out = run(call, 4)
    for row in range(12):
        assert out.positions[row].tolist() == [*range(row + 1), *[-1] * (11 - row)]
    assert out.positions[12].tolist() == [0, 1, 2, *[-1] * 9]
    assert out.candidates is not None
    assert bool((out.candidates == -1).all())


def test_a_row_does_not_depend_on_its_batch() -> None:
    call = make_call([200, 14, 70], [9, 14, 30], topk=10, heads=8)
    whole = run(call, 7)
    assert whole.candidates is not None
    for request, (first, last) in enumerate([(0, 9), (9, 23), (23, 53)]):
        for start in range(first, last, 4):
            rows = slice(start, min(start + 4, last))
            part = run(rows_of(call, rows, request), 7)
            assert torch.equal(part.positions, whole.positions[rows])
            assert part.candidates is not None
            assert torch.equal(part.candidates, whole.candidates[rows])


def test_chunks_of_rows_and_tiles_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([300, 40], [40, 5], topk=10)
    whole = run(call, 9)
    monkeypatch.setattr(torch_body, "SCORE_SCRATCH_BYTES", 7 * 300 * torch_body.BYTES_PER_SCORE)
    monkeypatch.setattr(torch_body, "DOT_SCRATCH_BYTES", 1)
    monkeypatch.setattr(torch_body, "MIN_TILE_KEYS", 13)
    small = run(call, 9)
    assert torch.equal(small.positions, whole.positions)
    assert small.candidates is not None
    assert whole.candidates is not None
    assert torch.equal(small.candidates, whole.candidates)


def test_ties_go_to_the_lower_position_and_minus_infinity_is_never_taken() -> None:
    inf = math.inf
    scores = torch.tensor(
        [
            [0.0, -0.0, 1.0, 0.0, -inf, -0.0],
            [-1.0, -inf, -1.0, -2.0, -inf, -inf],
            [-inf] * 6,
            [3.0, inf, inf, 3.0, -3e38, 1e-45],
        ]
    )
    assert take_best(scores, 3).tolist() == [[0, 1, 2], [0, 2, 3], [-1, -1, -1], [0, 1, 2]]
    assert take_best(scores, 8)[1].tolist() == [0, 2, 3, *[-1] * 5]
    assert take_best(scores[:, :0], 2).tolist() == [[-1, -1]] * 4
    nan = torch.tensor([[math.nan, 5.0, -math.nan]])
    assert take_best(nan, 2).tolist() == [[0, 2]]


@given(
    st.lists(
        st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0, math.inf]),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 45),
)
@settings(max_examples=60, deadline=None)
def test_take_best_equals_a_sort(scores: list[float], count: int) -> None:
    got = take_best(torch.tensor([scores]), count)[0]
    wanted = best([float(torch.tensor(score)) for score in scores], count)
    assert got.tolist() == wanted + [-1] * (count - len(wanted))


def test_all_scores_tied_at_zero_take_the_oldest_keys() -> None:
    """No head is positive: every score is 0, so the first positions win (and the newest block)."""
    call = make_call([40], [2], topk=6)
    call.queries.weights.zero_()
    out = run(call, 3)
    assert out.positions.tolist() == [list(range(6))] * 2
    assert out.candidates is not None
    assert out.candidates.tolist() == [[0, 1, 9]] * 2


def test_candidate_blocks_of_21_keys() -> None:
    """21 visible keys in blocks of 8: three blocks, block 2 pinned although its scores are worst."""
    call = dataclasses.replace(make_call([21], [1], topk=4), candidate_block_size=8)
    call.queries.weights.copy_(call.queries.weights.abs())
    data = call.keys.data_view()
    data[call.block_table[0, 2].long()] = 0  # keys 16..23 score 0
    for count, wanted in ((1, [2]), (3, [0, 1, 2]), (5, [0, 1, 2, -1, -1])):
        out = run(call, count)
        assert out.candidates is not None
        assert out.candidates[0].tolist() == wanted


def test_candidates_starve_a_consumer_without_leaking() -> None:
    """Fewer candidate positions than topk: the list ends early, masked positions never leak in."""
    call = make_call([40], [1], topk=12)
    blocks = torch.tensor([[9, 2, -1, 4096]], dtype=torch.int32)
    out = run(dataclasses.replace(call, candidates=blocks))
    assert out.positions[0].tolist() == [8, 9, 10, 11, 36, 37, 38, 39, -1, -1, -1, -1]
    none = torch.full((1, 4), -1, dtype=torch.int32)
    assert run(dataclasses.replace(call, candidates=none)).positions[0].tolist() == [-1] * 12


def test_keys_past_the_count_never_matter() -> None:
    """The cache outside of visible keys is NaN already; lists stay in range and finite."""
    call = make_call([30], [3], topk=29, record=INDEX_MXFP4)
    got = run(call).positions
    assert bool((got < call.visible[:, None]).all())
    early = dataclasses.replace(call, visible=call.visible - 3, max_visible=27)
    assert bool((run(early).positions.max(dim=1).values == early.visible - 1).all())


def test_scratch_is_bounded_for_many_rows_and_long_contexts() -> None:
    assert scratch_bytes(1 << 20, 32) <= 96 << 20
    assert scratch_bytes(4096, 32) <= 96 << 20


def test_one_row_over_many_keys() -> None:
    """4,000 keys in one row: positions past one tile are found (the best key is planted last)."""
    call = make_call([4000], [1], topk=3, heads=2)
    call.queries.weights.fill_(1.0)
    last = call.block_table[0, 3999 // 8].long() * 8 + 3999 % 8
    loud = call.queries.codes[0, :1]
    call.keys.data_view()[last // 8, last % 8] = loud[0]
    assert run(call).positions[0, -1] == 3999


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("topk", 0, ArgumentError, "topk: got 0"),
        ("candidate_block_size", 0, ArgumentError, "candidate_block_size"),
        ("visible", torch.zeros(3, dtype=torch.int32), ShapeError, "visible"),
        ("visible", torch.tensor([9, 57], dtype=torch.int32), IndexRangeError, "visible: got 57"),
        ("query_start_loc", torch.tensor([0, 1, 2], dtype=torch.int32), ArgumentError, "2 requests"),
        ("query_start_loc", torch.tensor([0, 3], dtype=torch.int32), ArgumentError, "3 rows"),
        ("candidates", torch.zeros(1, 4, dtype=torch.int32), ShapeError, r"call\.candidates"),
        ("block_table", torch.zeros(4, dtype=torch.int32), ShapeError, "block_table"),
    ],
)  # fmt: skip
def test_bad_calls_write_nothing(
    name: str, value: Tensor, error: type[Exception], match: str
) -> None:
    call = dataclasses.replace(make_call([40], [2]), **{name: value})  # type: ignore[arg-type]
    out = IndexTopkOut(torch.full((2, call.topk), 77, dtype=torch.int32))
    with pytest.raises(error, match=match):
        index_topk(call, out)
    assert bool((out.positions == 77).all())


def test_queries_and_keys_must_be_of_one_record() -> None:
    call = make_call([40], [2])
    other = make_call([40], [2], record=INDEX_MXFP4)
    with pytest.raises(CacheFormatError, match="the keys' record 'index_fp8'"):
        run(dataclasses.replace(call, queries=other.queries))
