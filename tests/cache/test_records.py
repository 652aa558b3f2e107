"""Every byte layout as data: widths, offsets, pages, and the worked numbers of the format notes."""

import math

import pytest

from sparse_mla.cache.records import (
    INDEX_FP8,
    INDEX_MXFP4,
    INDEX_RECORDS,
    KV_RECORDS,
    MXFP8,
    MXFP8_PLANAR,
    NVFP4,
    NVFP4_PLANAR,
    RECORDS,
    V4,
    Placement,
    ScaleFormat,
    record_named,
    round_up,
)
from sparse_mla.errors import CacheFormatError

ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


@pytest.mark.parametrize(
    ("record", "row", "data", "scales", "block", "meaningful"),
    [
        (V4, 584, 576, 8, 64, 7),
        (MXFP8, 528, 512, 16, 32, 16),
        (MXFP8_PLANAR, 528, 512, 16, 32, 16),
        (NVFP4, 288, 256, 32, 16, 32),
        (NVFP4_PLANAR, 288, 256, 32, 16, 32),
        (INDEX_FP8, 132, 128, 4, 128, 1),
        (INDEX_MXFP4, 68, 64, 4, 32, 4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_widths(record, row, data, scales, block, meaningful):
    assert record.row_bytes == row
    assert record.data_bytes == data
    assert record.scale_bytes == scales
    assert record.scale_block == block
    assert record.scales_per_row == meaningful


def test_the_v4_row_keeps_64_rotary_dims_as_bf16():
    assert (V4.quantised_dims, V4.tail_dims, V4.quantised_bytes) == (448, 64, 448)
    assert all(record.tail_dims == 0 for record in RECORDS.values() if record is not V4)


def test_placements():
    interleaved = {r.name for r in RECORDS.values() if r.placement is Placement.INTERLEAVED}
    assert interleaved == {"mxfp8", "nvfp4"}


@ALL
@pytest.mark.parametrize("page_rows", [1, 3, 16])
def test_every_byte_of_a_page_has_one_meaning(record, page_rows):
    seen: dict[int, str] = {}

    def claim(offset, what):
        assert 0 <= offset < page_rows * record.row_bytes
        assert seen.setdefault(offset, what) == what

    width = 4 if record.scale_format is ScaleFormat.F32 else 1
    for row in range(page_rows):
        for dim in range(record.dim):
            offset = record.value_offset(row, dim, page_rows)
            if dim < record.quantised_dims:
                claim(offset, f"row {row} codes {dim * record.value_bits // 8}")
                first = record.scale_offset(row, dim, page_rows)
                for byte in range(width):
                    claim(first + byte, f"row {row} scale {dim // record.scale_block}.{byte}")
            else:
                claim(offset, f"row {row} dim {dim} low")
                claim(offset + 1, f"row {row} dim {dim} high")
    padding = record.scale_bytes - record.scales_per_row * width
    assert len(seen) == page_rows * (record.row_bytes - padding)


@ALL
def test_offsets_are_the_three_numbers_that_kernels_use(record):
    rows = 5
    for row in range(rows):
        for dim in (0, 1, 31, 32, 127, record.quantised_dims - 1):
            data = row * record.data_stride + dim * record.value_bits // 8
            assert record.value_offset(row, dim, rows) == data
        scale = record.scale_base(rows) + row * record.scale_stride
        assert record.scale_offset(row, 0, rows) == scale


def at(record, slot, page_rows, stride, dim):
    page, row = divmod(slot, page_rows)
    return (
        page * stride + record.value_offset(row, dim, page_rows),
        page * stride + record.scale_offset(row, dim, page_rows),
    )


@pytest.mark.parametrize(
    ("record", "slot", "page_rows", "stride", "dim", "value", "scale"),
    [
        (V4, 35, 32, 19008, 447, 21183, 37470),
        (MXFP8, 35, 32, 19008, 450, 21042, 21118),
        (MXFP8_PLANAR, 35, 32, 16896, 450, 18882, 33342),
        (NVFP4, 130, 128, 38016, 33, 38608, 38850),
        (INDEX_MXFP4, 70, 64, 4608, 100, 5042, 8731),
        (INDEX_FP8, 70, 64, 8704, 100, 9572, 16920),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_worked_addresses(record, slot, page_rows, stride, dim, value, scale):
    assert at(record, slot, page_rows, stride, dim) == (value, scale)


def test_worked_address_of_a_rotary_value():
    assert at(V4, 35, 32, 19008, 448)[0] == 21184
    assert V4.value_offset(3, 511, 32) == 3 * 576 + 574


def test_planar_nvfp4_offsets():
    assert NVFP4_PLANAR.value_offset(2, 33, 64) == 2 * 256 + 16
    assert NVFP4_PLANAR.scale_offset(2, 33, 64) == 64 * 256 + 2 * 32 + 2


@pytest.mark.parametrize(
    ("record", "alignment", "pages"),
    [  # bytes for (ratio 1, ratio 2) at block sizes 64, 128 and 256
        (NVFP4, None, (18432, 9216, 36864, 18432, 73728, 36864)),
        (MXFP8, None, (33792, 16896, 67584, 33792, 135168, 67584)),
        (V4, None, (37440, 19008, 74880, 37440, 149760, 74880)),
        (INDEX_MXFP4, None, (4608, 2560, 8704, 4608, 17408, 8704)),
        (INDEX_FP8, None, (8704, 4608, 16896, 8704, 33792, 16896)),
        (INDEX_FP8, 576, (8640, 4608, 17280, 8640, 33984, 17280)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_page_bytes(record, alignment, pages):
    rows = [block // ratio for block in (64, 128, 256) for ratio in (1, 2)]
    assert tuple(record.page_bytes(n, alignment) for n in rows) == pages


def test_window_pages_of_32_tokens():
    assert MXFP8.page_bytes(32) == 16896 == 32 * 528
    assert V4.page_bytes(32) == 19008
    assert 32 * V4.row_bytes == 18688


def test_stride_rules():
    assert math.lcm(MXFP8.stride_multiple_bytes, NVFP4.stride_multiple_bytes) == 3168
    assert math.lcm(MXFP8.stride_multiple_bytes, MXFP8.stride_multiple_bytes) == 528
    assert math.lcm(256, V4.stride_multiple_bytes) == 2304
    assert MXFP8_PLANAR.stride_multiple_bytes == NVFP4_PLANAR.stride_multiple_bytes == 512
    assert round_up(40000, 3168) == 41184  # a real engine's five layers, NVFP4
    assert round_up(64000, 528) == 64416  # the same with MXFP8


@ALL
def test_the_row_alignment_divides_all_that_a_kernel_adds_up(record):
    """Rows of data begin aligned whenever the page does."""
    assert record.stride_multiple_bytes % record.row_alignment_bytes == 0
    assert record.page_alignment_bytes % record.row_alignment_bytes == 0
    assert record.data_stride % record.row_alignment_bytes == 0


def test_names():
    assert list(RECORDS) == [record.name for record in (*KV_RECORDS, *INDEX_RECORDS)]
    assert record_named("nvfp4_planar") is NVFP4_PLANAR
    with pytest.raises(
        CacheFormatError,
        match=r"record: got 'mxfp9'; allowed: v4 \(584 B\), mxfp8 \(528 B\), .*68 B",
    ):
        record_named("mxfp9")


@pytest.mark.parametrize(
    ("size", "multiple", "wanted"), [(0, 512, 0), (1, 512, 512), (512, 512, 512)]
)
def test_round_up(size, multiple, wanted):
    assert round_up(size, multiple) == wanted
