"""PagedCache over strided, offset views: right rows, no copy, no byte outside them, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.cache.codec import encode_rows, gather_rows, scatter_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, MXFP8, MXFP8_PLANAR, NVFP4, RECORDS, V4
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DTypeError,
    IndexRangeError,
    ShapeError,
    StrideError,
)

ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
GUARD = 0xEE


def guarded_view(record, num_pages, page_rows, gap_bytes=96, front_bytes=64):
    """(buffer, view uint8 [num_pages, page_rows, row_bytes]) with guard bytes around every page."""
    stride = page_rows * record.row_bytes + gap_bytes
    stride += -stride % record.row_alignment_bytes
    buffer = torch.full((front_bytes + num_pages * stride,), GUARD, dtype=torch.uint8)
    shape = (num_pages, page_rows, record.row_bytes)
    view = buffer.as_strided(shape, (stride, record.row_bytes, 1), front_bytes)
    return buffer, view


def filled(record, slots, seed=0):
    return torch.randn(len(slots), record.dim, generator=torch.Generator().manual_seed(seed))


@ALL
@pytest.mark.parametrize("page_rows", [1, 2, 16, 33])
def test_an_offset_strided_view_equals_a_contiguous_copy_and_keeps_its_guards(record, page_rows):
    num_pages = 4
    buffer, view = guarded_view(record, num_pages, page_rows)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    cache = PagedCache.from_view(view, record)
    copy = PagedCache(
        view.clone(memory_format=torch.contiguous_format).flatten(1), record, page_rows
    )
    slots = torch.randperm(num_pages * page_rows)[: num_pages * page_rows // 2 + 1]
    rows = filled(record, slots)
    scatter_rows(cache, slots, rows)
    scatter_rows(copy, slots, rows)
    assert torch.equal(view, copy.pages.view(view.shape))
    assert buffer[outside].eq(GUARD).all()
    for got, wanted in zip(cache.read_rows(slots), encode_rows(record, rows), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(gather_rows(cache, slots), gather_rows(copy, slots))


@ALL
@pytest.mark.parametrize("page_rows", [1, 33])
def test_rows_lie_where_the_record_says(record, page_rows):
    cache = PagedCache.allocate(record, num_pages=3, page_rows=page_rows)
    slot = 3 * page_rows - 1
    data = torch.randint(1, 256, (1, record.data_bytes), dtype=torch.uint8)
    scales = torch.randint(1, 256, (1, record.scale_bytes), dtype=torch.uint8)
    cache.write_rows(torch.tensor([slot]), data, scales)
    page, row = divmod(slot, page_rows)
    for dim in (0, 33, record.quantised_dims - 1):
        offset = record.value_offset(row, dim, page_rows)
        assert cache.pages[page, offset] == data[0, dim * record.value_bits // 8]
        assert cache.pages[page, record.scale_offset(row, dim, page_rows)] in scales[0]
    assert cache.pages.ne(0).sum() == record.row_bytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dims", [3, 4])
def test_byte_dtypes_and_ranks_wrap_the_same_memory(dtype, dims):
    storage = torch.zeros(5, 8, MXFP8.row_bytes, dtype=torch.uint8)
    view = storage.view(dtype)
    cache = PagedCache.from_view(view.unsqueeze(2) if dims == 4 else view, MXFP8)
    assert cache.pages.data_ptr() == storage.data_ptr()
    assert cache.pages.dtype is torch.uint8
    assert (cache.num_pages, cache.page_rows, cache.num_slots) == (5, 8, 40)
    scatter_rows(cache, torch.tensor([39]), filled(MXFP8, [0]))
    assert storage[4, 7].any()
    assert not storage[:4].any()


def test_a_view_of_one_page_may_have_any_page_stride():
    buffer = torch.zeros(4096, dtype=torch.uint8)
    view = buffer.as_strided((1, 2, MXFP8.row_bytes), (7, MXFP8.row_bytes, 1), 32)
    cache = PagedCache.from_view(view, MXFP8)
    assert cache.page_stride_bytes == 2 * MXFP8.row_bytes
    scatter_rows(cache, torch.tensor([1]), filled(MXFP8, [0]))
    assert buffer[32 + MXFP8.row_bytes : 32 + 2 * MXFP8.row_bytes].any()
    assert not buffer[: 32 + MXFP8.row_bytes].any()


def test_one_row_pages_may_have_any_row_stride():
    storage = torch.zeros(6, 544, dtype=torch.uint8)
    view = storage.as_strided((6, 1, MXFP8.row_bytes), (544, 5, 1))
    cache = PagedCache.from_view(view, MXFP8)
    scatter_rows(cache, torch.tensor([5]), filled(MXFP8, [0]))
    assert storage[5, : MXFP8.row_bytes].any()
    assert not storage[:, MXFP8.row_bytes :].any()


@ALL
def test_views_of_data_and_scales_share_the_memory(record):
    cache = PagedCache.allocate(record, num_pages=2, page_rows=3)
    cache.data_view().fill_(1)
    cache.scale_view().fill_(2)
    assert cache.pages.eq(1).sum() == 6 * record.data_bytes
    assert cache.pages.eq(2).sum() == 6 * record.scale_bytes


@ALL
@pytest.mark.parametrize("page_rows", [1, 2, 16, 32, 33])
def test_allocated_pages_follow_the_alignment_and_the_stride_rule(record, page_rows):
    cache = PagedCache.allocate(record, num_pages=3, page_rows=page_rows)
    assert cache.page_stride_bytes >= record.page_bytes(page_rows)
    assert cache.page_stride_bytes % record.stride_multiple_bytes == 0
    assert cache.pages.eq(0).all()
    cache.check_strides()


def lazy_cache(record, page_rows, num_bytes):
    """A cache over memory that nothing has touched yet, so that only written pages become real."""
    stride = page_rows * record.row_bytes
    num_pages = num_bytes // stride
    pages = torch.empty(num_pages * stride, dtype=torch.uint8)
    return PagedCache.from_view(pages.view(num_pages, page_rows, record.row_bytes), record)


@pytest.mark.parametrize("record", [MXFP8, NVFP4, V4, INDEX_MXFP4], ids=lambda r: r.name)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_rows_past_two_gib_are_reached(record, slot_dtype):
    cache = lazy_cache(record, 64, 2**31 + 4 * 64 * record.row_bytes)
    border = 2**31 // (64 * record.row_bytes)  # the page that holds byte 2**31
    slots = [0, 1, border * 64 - 1, border * 64, border * 64 + 63, cache.num_slots - 1]
    assert (border + 1) * cache.page_stride_bytes > 2**31
    slots = torch.tensor(slots, dtype=slot_dtype)
    rows = filled(record, slots)
    scatter_rows(cache, slots, rows)
    for got, wanted in zip(cache.read_rows(slots), encode_rows(record, rows), strict=True):
        assert torch.equal(got, wanted)
    flat = cache.pages.view(-1)
    first = flat[: record.data_bytes]
    assert torch.equal(first, encode_rows(record, rows)[0][0])


@given(
    name=st.sampled_from(list(RECORDS)),
    page_rows=st.integers(1, 9),
    num_pages=st.integers(1, 5),
    gap=st.integers(0, 6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_writes_behave_like_a_dictionary_of_rows(name, page_rows, num_pages, gap, data):
    record = RECORDS[name]
    _, view = guarded_view(record, num_pages, page_rows, gap_bytes=16 * gap)
    cache = PagedCache.from_view(view, record)
    model = dict.fromkeys(range(cache.num_slots), (GUARD,) * record.row_bytes)
    for _ in range(2):
        chosen = st.lists(st.integers(-2, cache.num_slots - 1), max_size=8)
        slots = data.draw(
            chosen.filter(lambda s: len({x for x in s if x >= 0}) == len([x for x in s if x >= 0]))
        )
        seed = data.draw(st.integers(0, 2**31))
        generator = torch.Generator().manual_seed(seed)
        shape = (len(slots), record.row_bytes)
        raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        cache.write_rows(
            torch.tensor(slots, dtype=torch.int64),
            raw[:, : record.data_bytes],
            raw[:, record.data_bytes :],
        )
        model |= {s: tuple(r) for s, r in zip(slots, raw.tolist(), strict=True) if s >= 0}
    both = torch.cat(cache.read_rows(torch.arange(cache.num_slots)), dim=1).tolist()
    assert {slot: tuple(row) for slot, row in enumerate(both)} == model


def test_caches_are_compared_by_identity():
    cache = PagedCache.allocate(MXFP8, num_pages=1, page_rows=1)
    other = PagedCache(cache.pages, MXFP8, 1)
    assert len({cache, other, cache}) == 2


# ---------------------------------------------------------------------------------------------- refusals


def pages_of(record, num_pages=3, page_rows=4, dtype=torch.uint8):
    return torch.zeros(num_pages, page_rows, record.row_bytes, dtype=dtype)


def test_other_dtypes_are_refused():
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.int32):
        with pytest.raises(DTypeError, match=r"kv: got dtype torch\..*; allowed: uint8, int8 or"):
            PagedCache.from_view(pages_of(MXFP8, dtype=dtype), MXFP8, "kv")


@pytest.mark.parametrize("shape", [(3, 528), (3, 4, 2, 528), (3, 0, 528), (1, 3, 4, 1, 528)])
def test_other_ranks_are_refused(shape):
    with pytest.raises(ShapeError, match=r"kv: got shape .*allowed: \[num_pages, page_rows, row_b"):
        PagedCache.from_view(torch.zeros(shape, dtype=torch.uint8), MXFP8, "kv")


def test_another_width_is_refused_and_the_known_ones_are_named():
    with pytest.raises(
        CacheFormatError,
        match=r"window: got a last dimension of 528 bytes; allowed: 288 bytes for record 'nvfp4'; "
        r"records and their bytes: v4 584, mxfp8 528, .*index_mxfp4 68",
    ):
        PagedCache.from_view(pages_of(MXFP8), NVFP4, "window")


def test_rows_that_lie_apart_are_refused():
    wide = torch.zeros(3, 4, 544, dtype=torch.uint8)
    with pytest.raises(
        StrideError, match=r"cache: got row strides \(544, 1\); allowed: \(528, 1\)"
    ):
        PagedCache.from_view(wide[..., : MXFP8.row_bytes], MXFP8)
    with pytest.raises(StrideError, match=r"row strides \(1056, 2\)"):
        PagedCache.from_view(torch.zeros(3, 4, 1056, dtype=torch.uint8)[..., ::2], MXFP8)
    strange = torch.zeros(9000, dtype=torch.uint8).as_strided((3, 1, 528), (2048, 528, 2))
    with pytest.raises(StrideError, match=r"row strides \(528, 2\)"):
        PagedCache.from_view(strange, MXFP8)


def test_overlapping_pages_are_refused():
    one = pages_of(MXFP8, num_pages=1)
    with pytest.raises(StrideError, match="got 0 bytes between pages; allowed: a multiple of 16"):
        PagedCache.from_view(one.expand(3, -1, -1), MXFP8)
    flat = torch.zeros(8192, dtype=torch.uint8)
    with pytest.raises(StrideError, match=r"got 1056 bytes between pages.* at least 2112"):
        PagedCache.from_view(flat.as_strided((3, 4, 528), (1056, 528, 1)), MXFP8)


@pytest.mark.parametrize(
    ("record", "alignment"), [(MXFP8, 16), (NVFP4, 32), (V4, 16), (INDEX_FP8, 4)]
)
def test_misaligned_pages_are_refused(record, alignment):
    flat = torch.zeros(64 * 1024, dtype=torch.uint8)
    shape, row = (3, 2, record.row_bytes), record.row_bytes
    stride = 4096 + alignment // 2
    with pytest.raises(
        StrideError, match=rf"{stride} bytes between pages; allowed: a multiple of {alignment}"
    ):
        PagedCache.from_view(flat.as_strided(shape, (stride, row, 1)), record)
    with pytest.raises(StrideError, match=rf"a first byte at address 0x.*that {alignment} divides"):
        PagedCache.from_view(flat.as_strided(shape, (4096, row, 1), alignment // 2), record)


def test_allocate_refuses_empty_pages():
    with pytest.raises(ArgumentError, match="page_rows: got 0; allowed: an integer >= 1"):
        PagedCache.allocate(MXFP8, num_pages=1, page_rows=0)
    with pytest.raises(ArgumentError, match="num_pages: got -1; allowed: an integer >= 0"):
        PagedCache.allocate(MXFP8, num_pages=-1, page_rows=1)


def test_bad_writes_store_nothing():
    cache = PagedCache.allocate(MXFP8_PLANAR, num_pages=2, page_rows=2)
    data, scales = encode_rows(MXFP8_PLANAR, torch.ones(2, 512))
    slots = torch.tensor([0, 1])
    with pytest.raises(
        IndexRangeError, match=r"slots: got slot 4; allowed: below 4 \(2 pages of 2"
    ):
        cache.write_rows(torch.tensor([0, 4]), data, scales)
    with pytest.raises(ShapeError, match=r"data: got shape \[2, 511\]; allowed: shape \[2, 512\]"):
        cache.write_rows(slots, data[:, :-1], scales)
    with pytest.raises(ShapeError, match=r"scales: got shape \[1, 16\]; allowed: shape \[2, 16\]"):
        cache.write_rows(slots, data, scales[:1])
    with pytest.raises(DTypeError, match="scales: got dtype int16; allowed: dtype uint8"):
        cache.write_rows(slots, data, scales.short())
    with pytest.raises(DTypeError, match="slots: got dtype int16"):
        cache.write_rows(slots.short(), data, scales)
    with pytest.raises(ArgumentError, match=r"slots: got list; allowed: a torch.Tensor"):
        cache.write_rows([0, 1], data, scales)
    assert cache.pages.eq(0).all()


def test_reads_refuse_slots_out_of_range():
    cache = PagedCache.allocate(MXFP8, num_pages=2, page_rows=2)
    with pytest.raises(IndexRangeError, match="slots: got slot 4; allowed: below 4"):
        cache.read_rows(torch.tensor([3, 4]))
    with pytest.raises(IndexRangeError, match=r"slots: got slot -1; allowed: 0..3"):
        cache.read_rows(torch.tensor([3, -1]))


def test_the_sync_free_write_skips_like_the_other(monkeypatch):
    """Devices where looking at slots would stall give skipped rows a stored row's slot and bytes."""
    kept = filled(NVFP4, range(4))
    for slots in ([3, -1, 9, 0], [-1, -1, 99, -7], [-5, 2, 5, 1]):
        wanted = PagedCache.allocate(NVFP4, num_pages=3, page_rows=2)
        wanted.pages.fill_(GUARD)
        got = PagedCache(wanted.pages.clone(), NVFP4, 2)
        data, scales = encode_rows(NVFP4, kept)
        inside = [slot if slot < 6 else -1 for slot in slots]
        wanted.write_rows(torch.tensor(inside), data, scales)
        moved = got._redirect_skipped(torch.tensor(slots), data, scales)
        assert moved[0].ge(0).all()
        assert moved[0].lt(6).all()
        got.write_rows(*moved)
        assert torch.equal(got.pages, wanted.pages)
