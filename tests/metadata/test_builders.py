"""The builders against a plain model, over random steps, and what a step must never do."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, IndexRangeError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadata, StepMetadataBuilder
from sparse_mla.metadata.compressed import topk_to_slots

_spec = importlib.util.spec_from_file_location(
    "metadata_model", Path(__file__).with_name("model.py")
)
assert _spec is not None
assert _spec.loader is not None
model = importlib.util.module_from_spec(_spec)
sys.modules["metadata_model"] = model
_spec.loader.exec_module(model)

CFG = ModelConfig.deepseek_v41_flash().replace(sliding_window=12)
SPEC = 3
WIDTH = 64  # of a draft block's row
POOL = CachePool.allocate(
    CFG, pages=64, layer_ids=[0, 2, 20], block_size=8, window_page_rows=4, num_spec_tokens=SPEC
)
PAGE_TOKENS = {name: group.tokens_per_page for name, group in POOL.groups.items()}


def make_builder(max_tokens: int = 96, max_requests: int = 8) -> StepMetadataBuilder:
    return StepMetadataBuilder(
        CFG, POOL, max_tokens=max_tokens, max_requests=max_requests, max_seq_len=200,
        num_spec_tokens=SPEC,
    )  # fmt: skip


def make_batch(requests: list[Any], *, pad: int = 0, causal: bool = True) -> StepBatch:
    return StepBatch.from_requests(
        [request.query for request in requests],
        [request.seq for request in requests],
        {name: [request.tables[name] for request in requests] for name in POOL.groups},
        PAGE_TOKENS,
        pad_to=sum(request.query for request in requests) + pad,
        replay_start=[request.replay for request in requests],
        replay_tokens=5,
        causal=causal,
    )


def make_request(query: int, seq: int, replay: int = 0, seed: int = 0) -> Any:
    rng = random.Random(f"{query}/{seq}/{seed}")
    tables = {
        name: [rng.randrange(64) for _ in range(-(-seq // rows))]
        for name, rows in PAGE_TOKENS.items()
        if name != "ring"
    }
    first_needed = max(seq - query - 12, 0) // PAGE_TOKENS["window"]
    tables["window"][:first_needed] = [-1] * first_needed  # pages that slid out of the window
    tables["ring"] = [rng.randrange(1, 64)]
    return model.Request(query, seq, tables, replay)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Any], int, bool]:
    requests = []
    causal = draw(st.booleans())
    for seed in range(draw(st.integers(0, 5))):
        query = draw(st.integers(0, 9 if causal else SPEC))
        seq = query + draw(st.integers(0, 60))
        replay = draw(st.integers(0, max(seq - query, 0))) if causal else 0
        requests.append(make_request(query, seq, replay, seed))
    return requests, draw(st.integers(0, 4)), causal


def check_against_model(got: StepMetadata, requests: list[Any], pad: int, causal: bool) -> None:
    rows = model.tokens(requests, sum(request.query for request in requests) + pad)
    width = got.window.width
    for t, token in enumerate(rows):
        if token is None:
            assert got.window.indices[t].tolist() == [-1] * width
            numbers = [got.window.lengths[t], got.compressed[1].visible[t]]
            assert [int(n) for n in numbers] == [0, 0]
            assert [int(got.compressed[r].slot_mapping[t]) for r in (1, 2)] == [-1, -1]
            assert int(got.window.token_to_req_indices[t]) == 0
            continue
        request, position = token
        wanted = model.window_row(request, position, 12, width, 4, causal)
        assert got.window.indices[t].tolist() == wanted
        assert int(got.batch.positions[t]) == position == int(got.window.token_positions[t])
        for ratio in (1, 2):
            here = got.compressed[ratio]
            assert int(here.visible[t]) == (position + 1) // ratio
            assert int(here.slot_mapping[t]) == model.compressed_slot(
                request, position, ratio, 8 // ratio, 5
            )
        assert got.ring is not None
        assert int(got.ring.slots[t]) == request.tables["ring"][0] * 8 + position % 8
        assert requests[int(got.window.token_to_req_indices[t])] is request


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_builders_equal_the_model(step: tuple[list[Any], int, bool]) -> None:
    requests, pad, causal = step
    check_against_model(
        make_builder().build(make_batch(requests, pad=pad, causal=causal)), requests, pad, causal
    )


def test_zero_length_requests_in_the_middle() -> None:
    requests = [make_request(q, q + 7, seed=n) for n, q in enumerate([3, 0, 5, 0, 0, 1])]
    got = make_builder().build(make_batch(requests, pad=2))
    assert got.window.token_to_req_indices.tolist() == [0] * 3 + [2] * 5 + [5] + [0] * 2
    check_against_model(got, requests, 2, True)


@pytest.mark.parametrize("pad", [0, 3])
def test_an_empty_step(pad: int) -> None:
    got = make_builder().build(make_batch([], pad=pad))
    assert got.window.indices.tolist() == [[-1] * 12] * pad
    assert got.window.lengths.tolist() == [0] * pad
    assert got.compressed[2].visible.tolist() == [0] * pad
    assert got.batch.num_requests == 0


def test_speculative_rows_equal_single_rows() -> None:
    builder = make_builder()
    request = make_request(4, 40)
    block = builder.build(make_batch([request]))
    together = [block.window.indices.clone(), block.compressed[2].visible.clone()]
    for t in range(4):
        alone = model.Request(1, 37 + t, request.tables, 0)
        one = builder.build(make_batch([alone]))
        assert torch.equal(one.window.indices[0], together[0][t])
        assert int(one.compressed[2].visible[0]) == int(together[1][t])


def test_warm_up_rows_before_position_zero_see_nothing() -> None:
    batch = make_batch([make_request(4, 4)])
    short = StepBatch(**{
        **{name: getattr(batch, name) for name in StepBatch.__slots__},
        "seq_lens": torch.tensor([2], dtype=torch.int32),
    })  # fmt: skip
    got = make_builder().build(short)
    assert got.window.token_positions.tolist() == [-2, -1, 0, 1]
    assert got.window.lengths.tolist() == [0, 0, 1, 2]
    assert got.compressed[1].visible.tolist() == [0, 0, 1, 2]


def _tensors(got: StepMetadata) -> dict[str, torch.Tensor]:
    window, c2 = got.window, got.compressed[2]
    assert got.ring is not None
    return {
        "indices": window.indices, "lengths": window.lengths, "valid": window.is_valid_token,
        "requests": window.token_to_req_indices, "slots": window.slot_mapping,
        "table": window.block_table, "c2 slots": c2.slot_mapping, "visible": c2.visible,
        "c2 table": c2.block_table, "ring": got.ring.slots, "positions": got.batch.positions,
        "seq_lens": got.batch.seq_lens, "starts": got.batch.query_start_loc,
    }  # fmt: skip


def test_addresses_and_strides_never_change() -> None:
    builder = make_builder()
    seen = set()
    for requests in ([make_request(1, 5)], [make_request(9, 60), make_request(2, 3)]):
        tensors = _tensors(builder.build(make_batch(requests, pad=1)))
        seen.add(tuple((name, t.data_ptr(), t.stride()) for name, t in tensors.items()))
    assert len(seen) == 1


def test_stale_rows_of_an_earlier_step_do_not_show() -> None:
    builder = make_builder()
    builder.build(make_batch([make_request(9, 150, seed=n) for n in range(5)]))
    requests = [make_request(2, 9)]
    check_against_model(builder.build(make_batch(requests, pad=3)), requests, 3, True)


class NoSync(TorchDispatchMode):
    """Raises on operations that wait for a device or whose result has a data-dependent shape."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(word in name for word in self.forbidden), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_host_sync() -> None:
    builder = make_builder()
    batch = make_batch([make_request(3, 30), make_request(1, 90)], pad=2)
    batch.query_start_loc_cpu.tolist()
    with NoSync():
        got = builder.build(batch)
        topk_to_slots(
            torch.zeros(6, 4, dtype=torch.int32), got.compressed[2].block_table,
            got.compressed[2].req_id_per_token, 4, got.compressed[2].is_valid_token,
            got.compressed[2].visible,
        )  # fmt: skip


@pytest.mark.parametrize("garbage", [-(2**31), -1, 11, 12, 2**31 - 1])
def test_local_positions_out_of_range_give_none(garbage: int) -> None:
    """11 entries are visible, the table has room for 12: 11 is allocated but not yet written."""
    table = torch.tensor([[3, 7, 1]], dtype=torch.int32)
    slots, lengths = topk_to_slots(
        torch.tensor([[10, garbage, 2]], dtype=torch.int32),
        table, torch.zeros(1, dtype=torch.int32), 4, torch.ones(1, dtype=torch.bool),
        torch.tensor([11], dtype=torch.int32),
    )  # fmt: skip
    assert slots.tolist() == [[6, -1, 14]]
    assert lengths.tolist() == [3], "a hole does not hide the lanes after it"


def test_unallocated_pages_give_none_and_the_table_is_untouched() -> None:
    table = torch.tensor([[3, -1, 1]], dtype=torch.int32)
    slots, lengths = topk_to_slots(
        torch.tensor([[0, 5, -1], [1, -1, -1]], dtype=torch.int32),
        table, torch.zeros(2, dtype=torch.int32), 4, torch.tensor([True, False]),
    )  # fmt: skip
    assert (slots.tolist(), lengths.tolist()) == ([[12, -1, -1], [13, -1, -1]], [1, 0])
    assert table.tolist() == [[3, -1, 1]]


ONE = {"window": [[0, 1]], "c1": [[0]], "c2": [[0]], "ring": [[1]]}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query_lens": [-1]}, ArgumentError, r"query_lens\[0\]: got -1"),
        ({"seq_lens": [2]}, ArgumentError, r"seq_lens\[0\]: got 2; allowed: at least its 5"),
        ({"seq_lens": [5, 6]}, ShapeError, "seq_lens: got 2 entries; allowed: one for each of 1"),
        ({"replay_start": [0, 1]}, ShapeError, "replay_start: got 2 entries"),
        ({"replay_start": [-3]}, ArgumentError, r"replay_start\[0\]: got -3"),
        ({"pad_to": 4}, ShapeError, "pad_to: got 4; allowed: at least the 5 query tokens"),
        ({"block_tables": {**ONE, "window": [[0]]}}, ShapeError, "1 pages of 4 tokens"),
        ({"block_tables": {**ONE, "window": [[0, -1]]}}, IndexRangeError, "no page for position 4"),
        ({"block_tables": {**ONE, "c1": []}}, ShapeError, "block_tables.'c1'.: got 0 tables"),
        ({"block_tables": {**ONE, "ring": [[1, 2]]}}, ShapeError, "2 blocks; allowed: one block"),
        ({"block_tables": {"window": [[0, 1]]}}, ArgumentError, "page_tokens: got"),
    ],
)
def test_bad_steps_are_refused(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {
        "query_lens": [5], "seq_lens": [5], "block_tables": ONE, "page_tokens": PAGE_TOKENS,
    }  # fmt: skip
    StepBatch.from_requests(**arguments)
    with pytest.raises(error, match=match):
        StepBatch.from_requests(**{**arguments, **change})


@pytest.mark.parametrize(
    ("requests", "pad", "match"),
    [
        ([(3, 3)] * 3, 0, "batch requests: got 3; allowed: at most 2"),
        ([(3, 3)], 20, "batch tokens: got 23; allowed: at most 16"),
        ([(1, 300)], 0, "pages a request; allowed: at most"),
    ],
)
def test_steps_without_room_touch_no_buffer(
    requests: list[tuple[int, int]], pad: int, match: str
) -> None:
    builder = make_builder(max_tokens=16, max_requests=2)
    before = {
        name: tensor.clone()
        for name, tensor in _tensors(builder.build(make_batch([make_request(2, 9)]))).items()
    }
    with pytest.raises(ShapeError, match=match):
        builder.build(make_batch([make_request(*lens) for lens in requests], pad=pad))
    after = builder._window._indices[:2]
    assert torch.equal(after[:, :12], before["indices"])


def test_groups_that_differ_from_the_pool_are_refused() -> None:
    batch = StepBatch.from_requests([1], [1], {"window": [[0]]}, {"window": 4})
    with pytest.raises(ArgumentError, match=r"batch.block_tables: got \['window'\]"):
        make_builder().build(batch)


def test_non_causal_steps_need_room_for_the_block() -> None:
    builder = StepMetadataBuilder(CFG, POOL, max_tokens=8, max_requests=1, max_seq_len=64)
    with pytest.raises(ArgumentError, match="pass its num_spec_tokens to the builder"):
        builder.build(make_batch([make_request(2, 9)], causal=False))
