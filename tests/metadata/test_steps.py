"""What one builder does over many steps: stale rows, fixed addresses, refusals, and no look at a value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, DeviceError, DTypeError, IndexRangeError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadata, StepMetadataBuilder
from sparse_mla.metadata.compressed import SparseMLAMetadataBuilder, topk_to_slots
from sparse_mla.metadata.extent import Extent, clear
from sparse_mla.metadata.window import SparseSWAMetadataBuilder

CFG = ModelConfig.deepseek_v41_flash().replace(sliding_window=12)
POOL = CachePool.allocate(
    CFG, pages=64, layer_ids=[0, 2, 20], block_size=8, window_page_rows=4, num_spec_tokens=3
)
PAGE_TOKENS = {name: group.tokens_per_page for name, group in POOL.groups.items()}
INT32 = torch.int32


def make_builder(**changes: Any) -> StepMetadataBuilder:
    sizes: dict[str, Any] = {
        "max_tokens": 32, "max_requests": 6, "max_seq_len": 200, "num_spec_tokens": 3,
    }  # fmt: skip
    return StepMetadataBuilder(CFG, POOL, **{**sizes, **changes})


def make_batch(lens: list[tuple[int, int]], *, first_page: int = 1, **options: Any) -> StepBatch:
    """Requests of (query, seq) tokens whose pages count up from `first_page`."""
    tables = {
        name: [
            [first_page + i]
            if name == "ring"
            else [first_page + i + n for n in range(-(-seq // tokens))]
            for i, (_, seq) in enumerate(lens)
        ]
        for name, tokens in PAGE_TOKENS.items()
    }
    return StepBatch.from_requests(
        [query for query, _ in lens], [seq for _, seq in lens], tables, PAGE_TOKENS, **options
    )


def results(got: StepMetadata) -> dict[str, Tensor]:
    """Every tensor that a step returns."""
    window, batch = got.window, got.batch
    assert got.ring is not None
    assert batch.replay_start is not None
    found = {
        "indices": window.indices, "lengths": window.lengths, "valid": window.is_valid_token,
        "requests": window.token_to_req_indices, "own positions": window.token_positions,
        "replay": window.replay_start, "ring": got.ring.slots, "positions": batch.positions,
        "seq_lens": batch.seq_lens, "starts": batch.query_start_loc,
    }  # fmt: skip
    for ratio, part in got.compressed.items():
        found |= {f"c{ratio} slots": part.slot_mapping, f"c{ratio} visible": part.visible}
    found |= {f"{name} table": table for name, table in batch.block_tables.items()}
    return found | {f"{name} slots in": slots for name, slots in batch.slot_mappings.items()}


def buffers(builder: StepMetadataBuilder) -> dict[str, Tensor]:
    """Every buffer of a builder, whole."""
    owners = {"in": builder._inputs, "window": builder._window}
    owners |= {f"c{ratio}": part for ratio, part in builder._compressed.items()}
    found: dict[str, Tensor] = {}
    for owner, thing in owners.items():
        for field, value in vars(thing).items():
            if isinstance(value, Tensor):
                found[f"{owner}.{field}"] = value
            elif isinstance(value, dict):
                found |= {
                    f"{owner}.{field}.{name}": some
                    for name, some in value.items()
                    if isinstance(some, Tensor)
                }
    return found


FULL = [(27, 200), *[(1, 200)] * 5]  # every row, request and page of `make_builder()`
LONG = [(9, 150), (3, 60), (0, 40), (5, 33), (1, 17)]
STEPS: list[tuple[list[tuple[int, int]], dict[str, Any]]] = [
    ([(2, 9)], {"pad_to": 5}),
    ([(1, 5), (0, 8), (4, 44)], {"replay_start": [3, 0, 40]}),
    ([(3, 21), (3, 7)], {"causal": False}),
    ([], {"pad_to": 3}),
    ([], {}),
    ([(0, 5), (0, 0)], {"pad_to": 2}),
    ([(20, 20)], {}),
]


@pytest.mark.parametrize(("lens", "options"), STEPS)
def test_a_step_does_not_depend_on_the_steps_before_it(
    lens: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    used = make_builder()
    used.build(make_batch(FULL))
    for name, buffer in buffers(used).items():
        if name != "window._no_replay":
            buffer.fill_(0x7F7F7F7F if buffer.dtype != torch.bool else 1)
    batch = make_batch(lens, **options)
    wanted, got = results(make_builder().build(batch)), results(used.build(batch))
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(("lens", "options"), STEPS)
def test_past_a_step_stands_padding(lens: list[tuple[int, int]], options: dict[str, Any]) -> None:
    """What a graph captured for all rows and requests finds when a shorter step was built."""
    builder = make_builder()
    builder.build(make_batch(LONG, first_page=30))
    batch = make_batch(lens, **options)
    builder.build(batch)
    tokens, requests = batch.num_tokens, batch.num_requests
    whole = buffers(builder)
    for name in ("window._lengths", "window._requests", "window._positions", "in.positions",
                 "c1._visible", "c2._visible", "window._is_valid"):  # fmt: skip
        assert not whole[name][tokens:].any(), name
    for name in ("c1._slots", "c2._slots", *(f"in.slots.{group}" for group in PAGE_TOKENS)):
        assert bool((whole[name][tokens:] == -1).all()), name
    for name in ("in.seq_lens", "in.replay_start"):
        assert not whole[name][requests:].any(), name
    ends = whole["in.query_start_loc"][requests:].tolist()
    assert set(ends) == {batch.num_actual_tokens}, "requests without tokens"
    for group in PAGE_TOKENS:
        table, given = whole[f"in.tables.{group}"], batch.block_tables[group]
        assert bool((table[requests:] == -1).all())
        assert bool((table[:requests, given.shape[1] :] == -1).all())


def test_a_longer_replay_over_a_shorter_step_sees_padding_only() -> None:
    """Eight rows read from the buffers of a step of six equal the same step padded to eight."""
    builder = make_builder()
    eight = results(builder.build(make_batch([(4, 40), (4, 9)])))
    builder.build(make_batch([(5, 30), (1, 9)], first_page=20))  # refills what `eight` looks at
    padded = results(make_builder().build(make_batch([(5, 30), (1, 9)], first_page=20, pad_to=8)))
    for name in ("lengths", "valid", "requests", "c1 slots", "c1 visible", "c2 slots", "ring",
                 "c2 visible", "starts", "seq_lens", "window slots in", "c2 slots in"):  # fmt: skip
        assert torch.equal(eight[name], padded[name]), name
    lanes = torch.arange(12) < eight["lengths"][:, None]
    assert torch.equal(torch.where(lanes, eight["indices"], -1), padded["indices"])


def test_every_address_stays() -> None:
    builder = make_builder()
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for lens, options in [(LONG, {}), *STEPS]:
        got = builder.build(make_batch(lens, **options))
        for name, tensor in results(got).items():
            if tensor.numel():
                seen.setdefault(name, set()).add((tensor.data_ptr(), tensor.stride()[1:]))
    assert {name for name, places in seen.items() if len(places) > 1} == set()


def test_nothing_is_read_from_the_device() -> None:
    """A meta tensor has no values, so a builder that looked at one would raise."""
    builder = make_builder(device="meta")
    for lens, options in [(LONG, {}), *STEPS]:
        batch = make_batch(lens, device="meta", **options)
        got = builder.build(batch)
        assert all(tensor.device.type == "meta" for tensor in results(got).values())
        assert got.window.indices.shape == (batch.num_tokens, got.window.width)
        part = got.compressed[2]
        slots, lengths = topk_to_slots(
            torch.zeros(batch.num_tokens, 7, dtype=INT32, device="meta"), part.block_table,
            part.req_id_per_token, part.page_rows, part.is_valid_token, part.visible,
        )  # fmt: skip
        assert (slots.shape, lengths.shape) == ((batch.num_tokens, 7), (batch.num_tokens,))


@pytest.mark.parametrize("garbage", [-(2**31), -1, 0, 2**31 - 1])
def test_values_of_padding_rows_do_not_matter(garbage: int) -> None:
    """Positions of padding rows, and lengths and starts of requests without tokens."""
    batch = make_batch([(3, 30), (0, 0)], pad_to=6)
    positions, seq_lens = batch.positions.clone(), batch.seq_lens.clone()
    positions[3:], seq_lens[1] = garbage, garbage
    replay = torch.tensor([0, garbage], dtype=INT32)
    stale = dataclasses.replace(batch, positions=positions, seq_lens=seq_lens, replay_start=replay)
    wanted = results(make_builder().build(batch))
    got = results(make_builder().build(stale))
    for name in ("indices", "lengths", "valid", "requests", "ring", "c1 slots", "c2 slots",
                 "c1 visible", "c2 visible"):  # fmt: skip
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("length", [-(2**31), -5, 2**31 - 1])
def test_garbage_lengths_of_the_padding_request_do_not_matter(length: int) -> None:
    """Padding rows belong to request 0, which may itself be padding."""
    batch = make_batch([(0, 0), (3, 30)], pad_to=6)
    seq_lens = batch.seq_lens.clone()
    seq_lens[0] = length
    got = make_builder().build(dataclasses.replace(batch, seq_lens=seq_lens))
    assert got.window.lengths.tolist() == [12, 12, 12, 0, 0, 0]
    assert got.window.indices[3:].tolist() == [[-1] * 12] * 3
    assert got.compressed[2].visible.tolist() == [14, 14, 15, 0, 0, 0]
    assert got.compressed[2].slot_mapping[3:].tolist() == [-1] * 3


def test_a_step_may_be_built_from_what_the_builder_returned() -> None:
    builder = make_builder()
    first = builder.build(make_batch(LONG))
    wanted = {name: tensor.clone() for name, tensor in results(first).items()}
    for name, tensor in results(builder.build(first.batch)).items():
        assert torch.equal(tensor, wanted[name]), name


def replaced(**changes: Any) -> StepBatch:
    return dataclasses.replace(make_batch([(3, 30), (1, 9)], pad_to=5), **changes)


def without(group: str) -> dict[str, dict[str, Tensor]]:
    batch = replaced()
    return {
        field: {name: one for name, one in getattr(batch, field).items() if name != group}
        for field in ("block_tables", "slot_mappings")
    }


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"positions": torch.zeros(5, dtype=INT32)}, DTypeError, "positions: got dtype int32"),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, ShapeError, r"slot_mappings\['window'\]"),
    ({"seq_lens": torch.zeros(3, dtype=INT32)}, ShapeError, r"query_start_loc: got shape \[3\]"),
    ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, DTypeError, "seq_lens: got dtype int64"),
    ({"query_start_loc": torch.zeros(2, dtype=INT32)}, ShapeError, "query_start_loc: got shape"),
    ({"query_start_loc_cpu": torch.zeros(3, dtype=INT32, device="meta")}, DeviceError, "device cpu"),
    ({"query_start_loc_cpu": torch.tensor([0, 3, 2], dtype=INT32)}, ArgumentError, "never fall"),
    ({"query_start_loc_cpu": torch.tensor([1, 3, 4], dtype=INT32)}, ArgumentError, r"got \[1, 3, 4\]"),
    ({"query_start_loc_cpu": torch.tensor([0, 3, 6], dtype=INT32)}, ArgumentError, "at least the 6"),
    ({"num_actual_tokens": 6}, ArgumentError, "num_actual_tokens: got 6; .* at most the 5 rows"),
    ({"max_query_len": 2}, ArgumentError, "max_query_len: got 2; allowed: an integer >= 3"),
    ({"max_seq_len": -1}, ArgumentError, "max_seq_len: got -1"),
    ({"replay_start": torch.zeros(1, dtype=INT32)}, ShapeError, r"replay_start: got shape \[1\]"),
    ({"replay_start": torch.zeros(2, dtype=INT32, device="meta")}, DeviceError, "replay_start"),
    (
        {"slot_mappings": {"window": torch.zeros(1, dtype=torch.int64)}},
        ShapeError, r"slot_mappings\['window'\]: got shape \[1\]; allowed: shape \[5\]",
    ),
    ({"slot_mappings": {"c1": torch.zeros(5)}}, DTypeError, r"slot_mappings\['c1'\]: got dtype float32"),
    ({"block_tables": {"c2": torch.zeros(1, 4, dtype=INT32)}}, ShapeError, r"block_tables\['c2'\]"),
    ({"block_tables": {"c2": torch.zeros(2, dtype=INT32)}}, ShapeError, r"shape \[2, max_pages\]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_tensors_of_an_engine_must_fit_each_other(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        replaced(**change)


UNBUILDABLE: list[tuple[dict[str, Any], StepBatch, type[Exception], str]] = [
    ({"max_tokens": 4}, make_batch([(2, 2)], pad_to=5), ShapeError, "batch tokens: got 5"),
    ({"max_requests": 1}, make_batch([(1, 2), (1, 2)]), ShapeError, "batch requests: got 2"),
    ({"max_seq_len": 16}, make_batch([(1, 20)]), ShapeError, "raise max_seq_len of the builder"),
    ({}, replaced(**without("c2")), ArgumentError, r"batch.block_tables: got \['c1', 'ring', 'window'\]"),
    (
        {"num_spec_tokens": 0}, make_batch([(2, 20)], causal=False),
        ArgumentError, "pass its num_spec_tokens to the builder",
    ),
    (
        {"max_tokens": 64}, make_batch([(53, 60)], causal=False),
        ShapeError, "batch.max_query_len: got 53; allowed: at most 52 for a non-causal step",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "batch", "error", "match"), UNBUILDABLE)
def test_a_refused_step_changes_no_buffer(
    sizes: dict[str, Any], batch: StepBatch, error: type[Exception], match: str
) -> None:
    builder = make_builder(**sizes)
    builder.build(make_batch([(3, 11)], first_page=7))
    before = {name: buffer.clone() for name, buffer in buffers(builder).items()}
    with pytest.raises(error, match=match):
        builder.build(batch)
    for name, buffer in buffers(builder).items():
        assert torch.equal(buffer, before[name]), name


def test_the_longest_block_that_fits_is_listed_whole() -> None:
    batch = make_batch([(52, 90)], causal=False)
    got = make_builder(max_tokens=64).build(batch).window
    assert (got.width, got.lengths.tolist()) == (64, [64] * 52)
    assert got.indices[0, [0, -1]].tolist() == [1 * 4 + 26, 1 * 4 + 89], "positions 26 to 89"


def test_window_and_compressed_builders_refuse_what_they_cannot_build() -> None:
    window = SparseSWAMetadataBuilder(CFG, max_tokens=8, max_requests=2, page_rows=4)
    compressed = SparseMLAMetadataBuilder(CFG, 2, max_tokens=8, page_rows=4)
    batch = replaced()
    rows = window.build(batch)
    assert compressed.build(batch, rows).num_reqs == 2
    with pytest.raises(ArgumentError, match=r"one of group 'window' among them"):
        window.build(replaced(**without("window")))
    with pytest.raises(DeviceError, match="batch: got device meta; allowed: device cpu"):
        window.build(make_batch([(1, 1)], device="meta"))
    with pytest.raises(ArgumentError, match=r"one of group 'c2' among them"):
        compressed.build(replaced(**without("c2")), rows)
    with pytest.raises(ShapeError, match="window: got 5 rows; allowed: the 4 rows of the batch"):
        compressed.build(make_batch([(4, 4)]), rows)


I32 = torch.zeros(2, 3, dtype=INT32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"topk": torch.zeros(2, 3)}, DTypeError, "topk: got dtype float32"),
        ({"topk": I32.long()}, DTypeError, "topk: got dtype int64; allowed: dtype int32"),
        ({"topk": I32[0]}, ShapeError, r"topk: got shape \[3\]; allowed: shape \[T, K\]"),
        ({"block_table": I32[0]}, ShapeError, r"block_table: .* \[R, max_pages\]"),
        ({"block_table": I32.to("meta")}, DeviceError, "block_table: got device meta"),
        ({"req_ids": I32[0]}, ShapeError, r"req_ids: got shape \[3\]; allowed: shape \[2\]"),
        ({"page_rows": 0}, ArgumentError, "page_rows: got 0; allowed: an integer >= 1"),
        ({"is_valid": torch.ones(2, dtype=INT32)}, DTypeError, "is_valid: .* dtype bool"),
        ({"visible": torch.ones(3, dtype=INT32)}, ShapeError, "visible: got shape"),
    ],
)
def test_list_conversion_refuses(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments: dict[str, Any] = {
        "topk": I32, "block_table": I32, "req_ids": I32[:, 0].contiguous(), "page_rows": 4,
        "is_valid": torch.ones(2, dtype=torch.bool), "visible": None,
    }  # fmt: skip
    topk_to_slots(**arguments)
    with pytest.raises(error, match=match):
        topk_to_slots(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query_lens": [1.5]}, ArgumentError, r"query_lens\[0\]: got 1.5; allowed: an integer"),
        ({"seq_lens": ["9"]}, ArgumentError, r"seq_lens\[0\]: got '9'; allowed: an integer"),
        ({"seq_lens": [2**31]}, ArgumentError, r"seq_lens\[0\]: got 2147483648; .* 0..2147483647"),
        ({"seq_lens": [-1]}, ArgumentError, r"seq_lens\[0\]: got -1"),
        ({"query_lens": []}, ShapeError, "seq_lens: got 1 entries; allowed: one for each of 0"),
        ({"replay_start": [5]}, ArgumentError, r"replay_start\[0\]: got 5; allowed: at most 4"),
        ({"replay_tokens": -1}, ArgumentError, "replay_tokens: got -1"),
        ({"page_tokens": {"window": 0}}, ArgumentError, r"page_tokens\['window'\]: got 0"),
        ({"pad_to": 0}, ShapeError, "pad_to: got 0; allowed: at least the 1 query tokens"),
        ({"block_tables": {"window": [[0, 2**31]]}}, IndexRangeError, r"\['window'\]\[0\]: .* int32"),
        ({"block_tables": {"window": [["a", 1]]}}, ArgumentError, "a sequence of integer page ids"),
        ({"block_tables": {"window": [None]}}, ArgumentError, "a sequence of integer page ids"),
        ({"block_tables": {"window": [[]]}}, ShapeError, "0 pages of 4 tokens; .* at least 2 for 5"),
        (
            {"block_tables": {"ring": [[]]}, "page_tokens": {"ring": 8}},
            ShapeError, r"\['ring'\]\[0\]: got 0 blocks; allowed: one block",
        ),
    ],
)  # fmt: skip
def test_lists_of_a_step_are_refused(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments: dict[str, Any] = {
        "query_lens": [1], "seq_lens": [5], "block_tables": {"window": [[0, 1]]},
        "page_tokens": {"window": 4},
    }  # fmt: skip
    StepBatch.from_requests(**arguments)
    with pytest.raises(error, match=match):
        StepBatch.from_requests(**{**arguments, **change})


def test_an_extent_names_what_the_last_step_left() -> None:
    extent = Extent("cpu")
    assert [extent.stale(end) for end in (5, 9, 2, 2, 4)] == [
        slice(5, 5), slice(9, 9), slice(2, 9), slice(2, 2), slice(4, 4),
    ]  # fmt: skip
    buffer = torch.arange(6)
    clear(slice(2, 4), (buffer, -1))
    clear(slice(5, 5), (buffer, -1))
    assert buffer.tolist() == [0, 1, -1, -1, 4, 5]


def test_rows_of_a_captured_step_stay_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay may write the captured rows again at any time."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    extent = Extent("cuda")
    assert extent.stale(3) == slice(3, 3)
    capturing = True
    assert extent.stale(8) == slice(8, 8)
    capturing = False
    assert [extent.stale(2), extent.stale(2), extent.stale(9)] == [
        slice(2, 8), slice(2, 8), slice(9, 9),
    ]  # fmt: skip
    assert extent.stale(4) == slice(4, 9)
