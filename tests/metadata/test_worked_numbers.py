"""Every worked number of the metadata rules."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.metadata.batch import StepBatch, replayed_positions
from sparse_mla.metadata.builder import StepMetadata, StepMetadataBuilder, build_metadata
from sparse_mla.metadata.compressed import SparseMLAMetadataBuilder, topk_to_slots
from sparse_mla.metadata.prefill import (
    PrefillChunk,
    gather_length,
    plan_prefill_chunks,
    replay_start,
    trimmed_window_bound,
    workspace_row,
)
from sparse_mla.metadata.window import (
    DecodeSplit,
    SparseSWAMetadata,
    SparseSWAMetadataBuilder,
    dspark_width,
    split_decodes,
)

REAL = ModelConfig.deepseek_v41_flash()
MINI = REAL.replace(sliding_window=4)


def window_rows(
    cfg: ModelConfig,
    query: int,
    seq: int,
    table: list[int],
    page_rows: int,
    *,
    replay: int = 0,
    causal: bool = True,
    spec: int = 0,
) -> SparseSWAMetadata:
    batch = StepBatch.from_requests(
        [query], [seq], {"window": [table]}, {"window": page_rows},
        replay_start=[replay], causal=causal,
    )  # fmt: skip
    builder = SparseSWAMetadataBuilder(
        cfg, max_tokens=8, max_requests=2, page_rows=page_rows, num_spec_tokens=spec
    )
    return builder.build(batch)


def test_window_at_real_size() -> None:
    got = window_rows(REAL, 1, 131, [7, 3, 9, 12, 5], 32)
    row = got.indices[0].tolist()
    assert (got.lengths.tolist(), row[:2], row[-2:]) == ([128], [227, 228], [161, 162])


def test_window_of_three_query_tokens() -> None:
    got = window_rows(MINI, 3, 9, [6, 2, 9], 4)
    assert got.indices.tolist() == [[27, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 36]]
    assert got.token_positions.tolist() == [6, 7, 8]


def test_window_does_not_look_below_a_replay() -> None:
    got = window_rows(MINI, 3, 9, [6, 2, 9], 4, replay=6)
    assert (got.indices[1].tolist(), int(got.lengths[1])) == ([10, 11, -1, -1], 2)


@pytest.mark.parametrize(
    ("query", "seq", "table", "start_slot", "last_slot", "length"),
    [(5, 205, list(range(10, 20)), 392, 524, 133), (5, 8, [4], 128, 135, 8)],
)
def test_dspark_block_shares_one_window(
    query: int, seq: int, table: list[int], start_slot: int, last_slot: int, length: int
) -> None:
    got = window_rows(REAL, query, seq, table, 32, causal=False, spec=5)
    assert got.indices.shape == (query, 192)
    for row in got.indices.tolist():
        assert (row[0], row[length - 1]) == (start_slot, last_slot)
        assert row[length:] == [-1] * (192 - length)
    assert got.lengths.tolist() == [length] * query


def test_dspark_mini() -> None:
    batch = StepBatch.from_requests([2], [9], {"window": [[6, 2, 9]]}, {"window": 4}, causal=False)
    builder = SparseSWAMetadataBuilder(
        MINI, max_tokens=2, max_requests=1, page_rows=4, num_spec_tokens=2
    )
    got = builder.build(batch)
    assert got.indices[:, :8].tolist() == [[27, 8, 9, 10, 11, 36, -1, -1]] * 2
    assert (got.lengths.tolist(), dspark_width(128, 5)) == ([6, 6], 192)


@pytest.mark.parametrize(
    ("replayed", "wanted"),
    [(False, [22, -1, 23, -1, 8, -1]), (True, [-1, -1, -1, -1, 8, -1])],
)
def test_compressed_slots(replayed: bool, wanted: list[int]) -> None:
    batch = StepBatch.from_requests(
        [6], [11], {"window": [[0, 1]], "c2": [[5, 2]]}, {"window": 8, "c2": 8},
        replay_start=[5 if replayed else 0], replay_tokens=3,
    )  # fmt: skip
    window = SparseSWAMetadataBuilder(MINI, max_tokens=6, max_requests=1, page_rows=8).build(batch)
    got = SparseMLAMetadataBuilder(MINI, 2, max_tokens=6, page_rows=4).build(batch, window)
    assert got.slot_mapping.tolist() == wanted
    assert got.visible.tolist() == [3, 3, 4, 4, 5, 5]
    assert (got.block_size, got.max_visible) == (8, 5)


def test_topk_to_slots() -> None:
    slots, lengths = topk_to_slots(
        torch.tensor([[0, 5, 9, -1]], dtype=torch.int32),
        torch.tensor([[5, 2, 8]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        4,
        torch.ones(1, dtype=torch.bool),
    )
    assert (slots.tolist(), lengths.tolist()) == ([[20, 9, 33, -1]], [3])


def test_ring_slots() -> None:
    def ring(block: int) -> list[int]:
        batch = StepBatch.from_requests(
            [4], [10], {"window": [[0]], "ring": [[block]]}, {"window": 16, "ring": 8}
        )
        return batch.slot_mappings["ring"].tolist()

    assert ring(3) == [30, 31, 24, 25]
    assert ring(0) == [-1] * 4, "block 0 is the null block"


@pytest.mark.parametrize(
    ("position", "window", "r1", "r2"),
    [(0, 1, 1, 0), (1, 2, 2, 1), (2, 3, 3, 1), (126, 127, 127, 63), (127, 128, 128, 64),
     (128, 128, 129, 64), (1023, 128, 1024, 512), (1024, 128, 1025, 512)],
)  # fmt: skip
def test_visibility(position: int, window: int, r1: int, r2: int) -> None:
    pool = CachePool.allocate(REAL, pages=40, layer_ids=[0, 2, 20])
    pages = {name: -(-(position + 1) // g.tokens_per_page) for name, g in pool.groups.items()}
    tables = {name: [list(range(1, 1 + count))] for name, count in pages.items()}
    tables["ring"] = [[1]]
    tokens = {name: group.tokens_per_page for name, group in pool.groups.items()}
    got: StepMetadata = build_metadata(
        REAL, StepBatch.from_requests([1], [position + 1], tables, tokens), pool
    )
    assert int(got.window.lengths[0]) == window
    assert [int(got.compressed[ratio].visible[0]) for ratio in (1, 2)] == [r1, r2]


def test_gather_lengths() -> None:
    cases = [(300, 300, 0), (1000, 200, 0), (1000, 200, 700), (150, 22, 100)]
    assert [gather_length(seq, query, 128, start) for seq, query, start in cases] == [
        300, 327, 300, 50,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [
        (2, [(0, 4, 2000, 2627), (4, 5, 4096, 5223)]),
        (1, [(0, 4, 4000, 4627), (4, 5, 8192, 9319)]),
        (0, [(0, 5, 0, 1127)]),
    ],
)
def test_prefill_chunks(ratio: int, wanted: list[tuple[int, int, int, int]]) -> None:
    chunks = plan_prefill_chunks(
        REAL, ratio, [1000, 300, 4000, 50, 8192], [200, 300, 500, 50, 1000],
        max_model_len=8192, max_batched_tokens=2048,
    )  # fmt: skip
    assert [(c.first, c.end, c.compressed_rows, c.rows) for c in chunks] == wanted


@pytest.mark.parametrize(
    ("topk", "replay", "indices", "positions"),
    [
        ([3, 0, 1], 0, [13, 10, 11, 15, 16, 17, 18], [4, 5, 6, 7]),
        ([3, -1, 9], 0, [13, -1, -1, 15, 16, 17, 18], [4, 5, 6, 7]),  # holes keep their lanes
        ([3, 0, 1], 6, [13, 10, 11, 14, 15], [6, 7]),  # three rows gathered: positions 6, 7, 8
    ],
)
def test_workspace_rows(
    topk: list[int], replay: int, indices: list[int], positions: list[int]
) -> None:
    row = workspace_row(
        PrefillChunk(first=0, end=2, compressed_rows=4, rows=10), topk,
        request=1, position=7, seq_len=9, query_len=3, ratio=2, window=4, replay_start=replay,
    )  # fmt: skip
    assert (row.indices, row.positions) == (indices, positions)


def test_a_workspace_row_names_the_keys_of_the_flattened_row() -> None:
    """The mini example again: its window positions are those of our own list."""
    got = window_rows(MINI, 3, 9, [0, 1, 2], 4)
    chunk = PrefillChunk(first=0, end=1, compressed_rows=4, rows=10)
    for t, position in enumerate((6, 7, 8)):
        row = workspace_row(
            chunk, [], request=0, position=position, seq_len=9, query_len=3, ratio=0, window=4
        )
        assert row.positions == got.indices[t].tolist(), "pages 0, 1, 2: slot = position"
        assert len(row.indices) == int(got.lengths[t])


def compressed_rows(queries: list[int], seqs: list[int], ratio: int, pad: int) -> list[int]:
    tables = {"window": [[0] * 3 for _ in seqs], f"c{ratio}": [[0] * 3 for _ in seqs]}
    batch = StepBatch.from_requests(
        queries, seqs, tables, dict.fromkeys(tables, 8), pad_to=sum(queries) + pad
    )
    window = SparseSWAMetadataBuilder(MINI, max_tokens=16, max_requests=4, page_rows=8).build(batch)
    builder = SparseMLAMetadataBuilder(MINI, ratio, max_tokens=16, page_rows=8 // ratio)
    return builder.build(batch, window).visible.tolist()


def test_one_length_for_every_row_of_unequal_decodes() -> None:
    lengths = [8, 9, 10, 7, 9, 10, 11, 12]
    assert compressed_rows([3, 1, 4, 0], [10, 7, 12, 0], 1, 2) == [*lengths, 0, 0]
    assert compressed_rows([3, 1, 4, 0], [10, 7, 12, 0], 2, 0) == [n // 2 for n in lengths]


def test_entries_of_rows_in_a_packed_prefill() -> None:
    """ke - ks of requests (seq 5, q 3) and (seq 4, q 2) at ratio 2."""
    ks, ke = [0, 0, 0, 2, 2], [1, 2, 2, 3, 4]
    wanted = [end - begin for begin, end in zip(ks, ke, strict=True)]
    assert compressed_rows([3, 2], [5, 4], 2, 0) == wanted


def test_decode_split() -> None:
    assert split_decodes([1, 6, 6, 7, 300], 320, 5) == DecodeSplit(3, 2, 13, 307)
    assert split_decodes([1, 1], 4) == DecodeSplit(2, 0, 4, 0), "padding goes to the decodes"
    assert split_decodes([5, 1], 8) == DecodeSplit(0, 2, 0, 8), "a long first request: all prefill"
    assert split_decodes([], 0) == DecodeSplit(0, 0, 0, 0)


def test_replay() -> None:
    assert [replay_start(hit) for hit in (0, 64, 127, 128, 129, 1000)] == [0, 0, 0, 0, 1, 872]
    assert replayed_positions(872) == range(872, 1000)
    assert len(replayed_positions(0)) == 0, "nothing replays: all is computed afresh"
    assert trimmed_window_bound(1000, 0, 128) == 872
    assert trimmed_window_bound(1000, 900, 128) == 900


def test_a_plan_for_every_kind_present() -> None:
    pool = CachePool.allocate(REAL, pages=4, layer_ids=[0, 2])
    builder = StepMetadataBuilder(REAL, pool, max_tokens=4, max_requests=1, max_seq_len=64)
    tables = {"window": [[0]], "c2": [[0]], "ring": [[1]]}
    tokens = {name: group.tokens_per_page for name, group in pool.groups.items()}
    plans = builder.build(StepBatch.from_requests([1], [1], tables, tokens)).plan
    assert {kind.value: plan.compressed_keys for kind, plan in plans.items()} == {
        "swaonly": 0,
        "c2a": 512,
    }
