"""Builders and list conversion against the plain model, over random page sizes and tables with gaps."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.config.model import ModelConfig
from sparse_mla.metadata.batch import StepBatch, replayed_positions
from sparse_mla.metadata.compressed import SparseMLAMetadataBuilder, topk_to_slots
from sparse_mla.metadata.ring import ring_metadata
from sparse_mla.metadata.rules import Rows, fill_compressed_slots
from sparse_mla.metadata.window import SparseSWAMetadataBuilder, split_decodes

_spec = importlib.util.spec_from_file_location(
    "metadata_model", Path(__file__).with_name("model.py")
)
assert _spec is not None
assert _spec.loader is not None
model = importlib.util.module_from_spec(_spec)
sys.modules["metadata_model"] = model
_spec.loader.exec_module(model)

BASE = ModelConfig.deepseek_v41_flash()
INT32 = torch.int32
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Step:
    """A random step with its own page sizes."""

    requests: list[Any]
    pad: int
    window: int
    page_tokens: dict[str, int]
    replay_tokens: int

    @property
    def batch(self) -> StepBatch:
        return StepBatch.from_requests(
            [request.query for request in self.requests],
            [request.seq for request in self.requests],
            {name: [r.tables[name] for r in self.requests] for name in self.page_tokens},
            self.page_tokens,
            pad_to=sum(request.query for request in self.requests) + self.pad,
            replay_start=[request.replay for request in self.requests],
            replay_tokens=self.replay_tokens,
        )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    page_tokens = {
        "window": draw(st.sampled_from([1, 2, 3, 32])),
        "c1": draw(st.sampled_from([1, 2, 5, 64])),
        "c2": draw(st.sampled_from([2, 4, 10, 64])),
        "ring": draw(st.sampled_from([2, 8])),
    }
    replay_tokens = draw(st.integers(0, 6))
    requests = []
    for _ in range(draw(st.integers(0, 4))):
        query = draw(st.integers(0, 6))
        seq = query + draw(st.integers(0, 40))
        replay = draw(st.one_of(st.just(0), st.just(seq - query), st.integers(0, seq - query)))
        spared = replayed_positions(replay, replay_tokens)
        tables = {}
        for name, tokens in page_tokens.items():
            table = draw(st.lists(st.integers(0, 9), min_size=50, max_size=50))
            table = table[: max(-(-seq // tokens), 1)] + table[: draw(st.integers(0, 2))]
            needed = {
                p // tokens for p in range(seq - query, seq) if name == "window" or p not in spared
            }
            gaps = draw(st.sets(st.integers(0, len(table) - 1), max_size=4))
            tables[name] = [
                -1 if page in gaps - needed else block for page, block in enumerate(table)
            ]
        tables["ring"] = [draw(st.integers(0, 3))]
        requests.append(model.Request(query, seq, tables, replay))
    return Step(
        requests, draw(st.integers(0, 3)), draw(st.integers(1, 9)), page_tokens, replay_tokens
    )


@settings(max_examples=80, deadline=None)
@given(step=steps())
def test_builders_equal_the_model(step: Step) -> None:
    cfg, batch, pages = BASE.replace(sliding_window=step.window), step.batch, step.page_tokens
    window = SparseSWAMetadataBuilder(
        cfg, max_tokens=40, max_requests=4, page_rows=pages["window"], num_spec_tokens=2
    ).build(batch)
    compressed = {
        ratio: SparseMLAMetadataBuilder(
            cfg, ratio, max_tokens=40, page_rows=pages[f"c{ratio}"] // ratio
        ).build(batch, window)
        for ratio in (1, 2)
    }
    ring = ring_metadata(batch, window)
    rows = model.tokens(step.requests, batch.num_tokens)
    for t, token in enumerate(rows):
        if token is None:
            assert window.indices[t].tolist() == [-1] * step.window
            assert (int(window.lengths[t]), int(ring.slots[t])) == (0, -1)
            assert [int(c.slot_mapping[t]) for c in compressed.values()] == [-1, -1]
            assert [int(c.visible[t]) for c in compressed.values()] == [0, 0]
            continue
        request, position = token
        wanted = model.window_row(
            request, position, step.window, step.window, pages["window"], True
        )
        assert window.indices[t].tolist() == wanted
        first = max(position - step.window + 1, 0, request.replay)
        assert int(window.lengths[t]) == position - first + 1, "missing pages count"
        for ratio, got in compressed.items():
            assert int(got.slot_mapping[t]) == model.compressed_slot(
                request, position, ratio, got.page_rows, step.replay_tokens
            )
            assert int(got.visible[t]) == (position + 1) // ratio
        assert int(ring.slots[t]) == model.ring_slot(request, position, pages["ring"])


POSITIONS = st.one_of(
    st.integers(-3, 45), st.sampled_from([INT32_MIN, INT32_MIN + 1, INT32_MAX - 1, INT32_MAX])
)


@settings(max_examples=120, deadline=None)
@given(
    tables=st.lists(
        st.lists(st.integers(-2, 2**20), min_size=6, max_size=6), min_size=1, max_size=3
    ),
    rows=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 2), st.sampled_from([-1, 3, INT32_MIN, INT32_MAX])),
            st.lists(POSITIONS, min_size=5, max_size=5),
            st.booleans(),
            st.integers(0, 45),
        ),
        max_size=6,
    ),
    page_rows=st.sampled_from([1, 3, 7, 32]),
    bounded=st.booleans(),
)
def test_lists_equal_the_model(
    tables: list[list[int]],
    rows: list[tuple[int, list[int], bool, int]],
    page_rows: int,
    bounded: bool,
) -> None:
    table = torch.tensor(tables, dtype=INT32)
    before = table.clone()
    slots, lengths = topk_to_slots(
        torch.tensor([row[1] for row in rows], dtype=INT32).view(len(rows), 5),
        table,
        torch.tensor([row[0] for row in rows], dtype=INT32),
        page_rows,
        torch.tensor([row[2] for row in rows], dtype=torch.bool),
        torch.tensor([row[3] for row in rows], dtype=INT32) if bounded else None,
    )
    assert torch.equal(table, before), "the caller's table is not clamped in place"
    for t, (request, positions, valid, visible) in enumerate(rows):
        own = tables[request] if 0 <= request < len(tables) else []
        wanted, length = model.list_slots(
            own, positions, visible if bounded else INT32_MAX + 1, page_rows
        )
        assert slots[t].tolist() == wanted
        assert int(lengths[t]) == (length if valid else 0)


@pytest.mark.parametrize("width", [0, 1])
@pytest.mark.parametrize("columns", [0, 2])
@pytest.mark.parametrize("tokens", [0, 3])
def test_lists_without_rows_lanes_or_pages(tokens: int, width: int, columns: int) -> None:
    slots, lengths = topk_to_slots(
        torch.full((tokens, width), 2, dtype=INT32), torch.full((1, columns), 5, dtype=INT32),
        torch.zeros(tokens, dtype=INT32), 2, torch.ones(tokens, dtype=torch.bool),
    )  # fmt: skip
    assert slots.tolist() == [[10 if columns else -1] * width] * tokens
    assert lengths.tolist() == [int(bool(width and columns))] * tokens


def test_ratio_two_stores_nothing_without_pages() -> None:
    """A token's own slot is not the slot of an entry, not even where no table says otherwise."""
    slots = torch.full((2,), 77)
    rows = Rows(
        torch.zeros(2, dtype=INT32),
        torch.tensor([0, 1], dtype=INT32),
        torch.ones(2, dtype=torch.bool),
    )
    fill_compressed_slots(slots, rows, torch.zeros(1, 0, dtype=INT32), torch.tensor([6, 7]), 2, 4)
    assert slots.tolist() == [-1, -1]


def test_ratio_two_stores_nothing_for_rows_that_are_no_token() -> None:
    """A stale slot of the group does not make a token of a row without a window slot."""
    slots, positions = torch.full((4,), 77), torch.tensor([1, 3, 3, 2**31 - 1], dtype=INT32)
    rows = Rows(torch.zeros(4, dtype=INT32), positions, torch.tensor([True, True, False, False]))
    table = torch.tensor([[6]], dtype=INT32)
    fill_compressed_slots(slots, rows, table, torch.tensor([9, -1, 9, 9]), 2, 4)
    assert slots.tolist() == [24, -1, -1, -1]


@pytest.mark.parametrize("spec", [0, 2, 5])
def test_every_small_split_equals_the_model(spec: int) -> None:
    for lens in itertools.chain.from_iterable(
        itertools.product((0, 1, 3, 6, 7), repeat=count) for count in range(4)
    ):
        got = split_decodes(list(lens), sum(lens) + 2, spec)
        wanted = model.split(list(lens), sum(lens) + 2, 1 + spec)
        assert (
            got.num_decodes, got.num_prefills, got.num_decode_tokens, got.num_prefill_tokens,
        ) == wanted  # fmt: skip
