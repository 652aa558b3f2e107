"""Index keys and queries in Triton's interpreter: byte for byte as the codec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.records import INDEX_FP8, INDEX_RECORDS, RecordFormat
from sparse_mla.kernels.index_contract import PrepareIndexQueriesCall, WriteIndexKeysCall
from sparse_mla.kernels.torch.prepare_index_queries import (
    prepare_index_queries as wanted_queries,
)
from sparse_mla.kernels.torch.write_index_keys import write_index_keys as wanted_keys
from sparse_mla.testing.index_inputs import wild_rows
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache

pytest.importorskip("triton")

from sparse_mla.kernels.triton.prepare_index_queries import prepare_index_queries
from sparse_mla.kernels.triton.write_index_keys import write_index_keys

RECORDS = pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda record: record.name)
ROPE = plain_rope_table(4096)


@RECORDS
def test_queries_are_byte_exact(record: RecordFormat) -> None:
    wide = torch.zeros(3, 7, 160, dtype=torch.bfloat16)
    wide[:, :, :128] = wild_rows(21).view(3, 7, 128)
    call = PrepareIndexQueriesCall(
        queries=wide[:, :, :128],
        weights=torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)[
            :, :7
        ],
        positions=torch.tensor([0, 131, 10**12]),
        rope=ROPE,
        record=record,
    )
    got, wanted = prepare_index_queries(call), wanted_queries(call)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.weights, wanted.weights)
    assert (got.scales is None) == (record is INDEX_FP8)
    if got.scales is not None and wanted.scales is not None:
        assert torch.equal(got.scales, wanted.scales)


def exact_norm_keys(rows: int) -> Tensor:
    """Rows of +-2**e: their norm is exact whatever the order of its sum."""
    generator = torch.Generator().manual_seed(4)
    signs = torch.randint(0, 2, (rows, 128), generator=generator) * 2 - 1
    return (signs * torch.exp2(torch.arange(rows).float() % 5 - 2)[:, None]).to(torch.bfloat16)


@RECORDS
@pytest.mark.parametrize("ratio", [1, 2])
def test_keys_are_byte_exact_and_nothing_else_is_touched(record: RecordFormat, ratio: int) -> None:
    keys = exact_norm_keys(9)
    keys[2] = torch.nan  # no slot
    storages = []
    for write in (write_index_keys, wanted_keys):
        cache = poisoned_cache(
            record, num_pages=3, page_rows=7, page_padding_bytes=12, offset_rows=1
        )
        write(
            WriteIndexKeysCall(
                keys=keys,
                norm_weight=torch.linspace(0.5, 1.5, 128),
                eps=1e-20,
                positions=torch.tensor([201, 203, 204, 205, 1, -7, 4095, 2**40, 9]),
                ratio=ratio,
                rope=ROPE,
                cache=cache,
                slots=torch.tensor([17, 0, -1, 20, 8, -3, 6, 7, 13]),
            )
        )
        storages.append(
            torch.empty(0, dtype=torch.uint8).set_(cache.pages.untyped_storage())  # type: ignore[call-overload]
        )
    assert torch.equal(*storages)


@RECORDS
def test_random_keys_differ_by_a_rounding_of_the_norm_at_most(record: RecordFormat) -> None:
    caches = []
    for write in (write_index_keys, wanted_keys):
        cache = poisoned_cache(record, num_pages=4, page_rows=8)
        generator = torch.Generator().manual_seed(6)
        write(
            WriteIndexKeysCall(
                keys=torch.randn(32, 128, generator=generator).to(torch.bfloat16),
                norm_weight=torch.linspace(0.5, 1.5, 128),
                eps=1e-20,
                positions=torch.arange(100, 132, dtype=torch.int32),
                ratio=1,
                rope=ROPE,
                cache=cache,
                slots=torch.arange(32),
            )
        )
        caches.append(cache.pages)
    assert float((caches[0] != caches[1]).float().mean()) < 0.01


def test_slots_past_the_cache_and_empty_calls_write_nothing() -> None:
    cache = poisoned_cache(INDEX_FP8, num_pages=2, page_rows=4)
    before = cache.pages.clone()
    for slots in (torch.tensor([8, 2**31]), torch.empty(0, dtype=torch.int64)):
        rows = len(slots)
        write_index_keys(
            WriteIndexKeysCall(
                exact_norm_keys(rows), torch.ones(128), 1e-20, torch.zeros(rows, dtype=torch.int64),
                1, ROPE, cache, slots,
            )
        )  # fmt: skip
    assert torch.equal(cache.pages, before)
