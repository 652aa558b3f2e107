"""Index keys and queries: bytes, scales, rotation, folded weights, skipped rows, bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_rows, gather_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, INDEX_RECORDS, MXFP8, RecordFormat
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.rope import rope_table
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import CacheFormatError, DTypeError, IndexRangeError, ShapeError
from sparse_mla.kernels.index_contract import PrepareIndexQueriesCall, WriteIndexKeysCall
from sparse_mla.ops.index import prepare_index_queries, write_index_keys

ROPE = rope_table(ModelConfig.deepseek_v41_flash(), LayerKind.RATIO_2, 300)
STEP = {INDEX_FP8: 2.0**-3, INDEX_MXFP4: 2.0**-1}
"""Largest relative distance of neighbouring codes."""


def strided_cache(record: RecordFormat, pages: int = 5, page_rows: int = 8) -> PagedCache:
    """Pages apart from each other, filled with 0xFF."""
    size = page_rows * record.row_bytes
    base = torch.full((pages, size + 64), 0xFF, dtype=torch.uint8)
    return PagedCache(base[:, 16 : 16 + size], record, page_rows)


def keys_call(record: RecordFormat, ratio: int = 2) -> WriteIndexKeysCall:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(6, 128, generator=generator).to(torch.bfloat16)
    keys[2] = torch.nan  # closes no group
    return WriteIndexKeysCall(
        keys=keys,
        norm_weight=torch.linspace(0.5, 1.5, 128),
        eps=1e-20,
        positions=torch.tensor([201, 203, 204, 205, 1, -7]),
        ratio=ratio,
        rope=ROPE,
        cache=strided_cache(record),
        slots=torch.tensor([17, 0, -1, 39, 8, -3]),
    )


@pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda r: r.name)
def test_keys_equal_the_loops(record: RecordFormat) -> None:
    fast, slow = keys_call(record), keys_call(record)
    write_index_keys(fast)
    write_index_keys(slow, backend="reference")
    # float32 and float64 norms may round a value to neighbouring bf16 values; that moves a code seldom.
    differs = (fast.cache.pages != slow.cache.pages).float().mean()
    assert float(differs) < 0.01
    slots = torch.tensor([17, 0, 39, 8])
    got, wanted = gather_rows(fast.cache, slots), gather_rows(slow.cache, slots)
    assert bool(((got - wanted).abs() <= STEP[record] * wanted.abs() + 1e-3).all())


@pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda r: r.name)
def test_keys_against_plain_maths(record: RecordFormat) -> None:
    """Loose bound: norm, rotation at the group's first token, and one quantisation step."""
    call = keys_call(record)
    write_index_keys(call)
    wide = call.keys.double()
    normed = wide / wide.square().mean(-1, keepdim=True).sqrt() * call.norm_weight.double()
    got = gather_rows(call.cache, torch.tensor([17, 0, 39, 8]))
    for row, (source, first) in enumerate([(0, 200), (1, 202), (3, 204), (4, 0)]):
        wanted = normed[source].clone()
        pairs = torch.view_as_complex(wanted[64:].reshape(32, 2))
        angle = torch.complex(ROPE[first, :32].double(), ROPE[first, 32:].double())
        wanted[64:] = torch.view_as_real(pairs * angle).flatten()
        bound = STEP[record] * wanted.abs() + 0.05 * wanted.abs().max()
        assert bool(((got[row] - wanted).abs() <= bound).all())


@pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda r: r.name)
def test_skipped_rows_and_page_tails_keep_their_bytes(record: RecordFormat) -> None:
    call = keys_call(record)
    untouched = torch.ones(call.cache.num_slots, dtype=torch.bool)
    untouched[torch.tensor([17, 0, 39, 8])] = False
    write_index_keys(call)
    data, scales = call.cache.read_rows(untouched.nonzero().flatten())
    assert bool((data == 0xFF).all())
    assert bool((scales == 0xFF).all())
    storage = call.cache.pages.untyped_storage()
    base = torch.tensor([], dtype=torch.uint8).set_(storage).view(5, -1)  # type: ignore[call-overload]
    assert bool((base[:, :16] == 0xFF).all())
    assert bool((base[:, 16 + call.cache.pages.shape[1] :] == 0xFF).all())


def queries_call(record: RecordFormat, tokens: int = 3, heads: int = 4) -> PrepareIndexQueriesCall:
    generator = torch.Generator().manual_seed(6)
    return PrepareIndexQueriesCall(
        queries=torch.randn(tokens, heads, 128, generator=generator).to(torch.bfloat16),
        weights=torch.randn(tokens, heads, generator=generator).to(torch.bfloat16),
        positions=torch.tensor([0, 131, 299]),
        rope=ROPE,
        record=record,
    )


@pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda r: r.name)
def test_queries_equal_the_loops(record: RecordFormat) -> None:
    fast = prepare_index_queries(queries_call(record))
    slow = prepare_index_queries(queries_call(record), backend="reference")
    assert float((fast.codes != slow.codes).float().mean()) < 0.002
    assert torch.equal(fast.weights, slow.weights)
    assert (fast.scales is None) == (record is INDEX_FP8)
    if fast.scales is not None and slow.scales is not None:
        assert torch.equal(fast.scales, slow.scales)


def test_fp8_scale_is_folded_into_the_weight() -> None:
    """relu(q . k) with q = scale * codes: the scale moves into the weight exactly."""
    call = queries_call(INDEX_FP8)
    call = dataclasses.replace(call, positions=torch.zeros(3, dtype=torch.int32))
    call.queries.fill_(1.75).neg_()  # amax 1.75 = 448 / 256: scale 2**-8, codes -448
    got = prepare_index_queries(call)
    assert bool((got.codes == 0xFE).all())
    assert torch.equal(got.weights, call.weights.float() * 2.0**-8 * (128 * 4) ** -0.5)


def test_mxfp4_scales_are_per_32_values() -> None:
    call = queries_call(INDEX_MXFP4)
    call = dataclasses.replace(call, positions=torch.zeros(3, dtype=torch.int64))
    for block, amax in enumerate((0.0, 1.0, 6.0, 3.0)):
        call.queries[:, :, 32 * block : 32 * block + 32] = amax
    got = prepare_index_queries(call)
    assert got.scales is not None
    assert got.scales[0, 0].tolist() == [1, 125, 127, 126]
    values = decode_rows(INDEX_MXFP4, got.codes[0], got.scales[0])
    assert torch.equal(values, call.queries[0].float())
    assert torch.equal(got.weights, call.weights.float() * (128 * 4) ** -0.5)


def test_positions_of_both_integer_types_agree() -> None:
    call = queries_call(INDEX_FP8)
    other = dataclasses.replace(call, positions=call.positions.int())
    assert torch.equal(prepare_index_queries(call).codes, prepare_index_queries(other).codes)


def broken(name: str, value: object) -> WriteIndexKeysCall:
    return dataclasses.replace(keys_call(INDEX_FP8), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("keys", torch.zeros(6, 64, dtype=torch.bfloat16), ShapeError, "keys: got shape"),
        ("keys", torch.zeros(6, 128), DTypeError, "keys: got dtype float32"),
        ("norm_weight", torch.zeros(64), ShapeError, "norm_weight"),
        ("positions", torch.zeros(5, dtype=torch.int64), ShapeError, "positions"),
        ("rope", torch.zeros(9, 32), ShapeError, "rope"),
        (
            "slots",
            torch.tensor([0, 1, 2, 3, 4, 40]),
            IndexRangeError,
            "slots: got 40; allowed: bel",
        ),
        ("slots", torch.zeros(6), DTypeError, "slots"),
        ("ratio", 3, ValueError, "ratio: got 3"),
        (
            "cache",
            PagedCache.allocate(MXFP8, num_pages=1, page_rows=8),
            CacheFormatError,
            "index_fp8",
        ),
    ],
)
def test_bad_key_calls_write_nothing(
    name: str, value: Tensor, error: type[Exception], match: str
) -> None:
    call = broken(name, value)
    before = call.cache.pages.clone()
    with pytest.raises(error, match=match):
        write_index_keys(call)
    assert torch.equal(call.cache.pages, before)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("queries", torch.zeros(3, 4, 64, dtype=torch.bfloat16), ShapeError, "queries"),
        ("weights", torch.zeros(3, 5, dtype=torch.bfloat16), ShapeError, "weights"),
        ("weights", torch.zeros(3, 4), DTypeError, "weights"),
        ("positions", torch.zeros(3), DTypeError, "positions"),
        (
            "record",
            MXFP8,
            CacheFormatError,
            "record: got 'mxfp8'; allowed: index_fp8 or index_mxfp4",
        ),
    ],
)
def test_bad_query_calls(name: str, value: object, error: type[Exception], match: str) -> None:
    call = dataclasses.replace(queries_call(INDEX_FP8), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(error, match=match):
        prepare_index_queries(call)
