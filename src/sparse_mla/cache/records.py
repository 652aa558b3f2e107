"""Every byte layout of the caches, as data. No other file knows an offset or a row size.

A page holds `page_rows` rows of one record. A row has two parts, its *data* (quantised values, then
bf16 values if the record keeps some) and its *scales*. Two placements exist:

    interleaved   row o:   [data | scales]                at o * row_bytes
    planar        page:    [data of row 0 | data of row 1 | ... | scales of row 0 | scales of row 1 | ...]

Both reduce to three numbers, which is all that a codec or a kernel needs:

    data byte i of row o   at  o * data_stride + i
    scale byte i of row o  at  scale_base(page_rows) + o * scale_stride + i

relative to the page, whose own address is `page * page_stride` (int64). Rows of equal width exist in
both placements, so the width never identifies a record; the name does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sparse_mla.errors import CacheFormatError


class Placement(enum.Enum):
    """Where a row's scales lie."""

    INTERLEAVED = "interleaved"
    PLANAR = "planar"


class ValueFormat(enum.Enum):
    """How a quantised value is stored."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"


class ScaleFormat(enum.Enum):
    """How a block scale is stored."""

    UE8M0 = "ue8m0"
    E4M3 = "e4m3"
    F32 = "f32"


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One record: `dim` values of a row, how they are quantised, and where the bytes lie."""

    name: str
    dim: int  # values of a row
    quantised_dims: int  # leading values that are quantised; the rest is bf16
    value_format: ValueFormat
    scale_format: ScaleFormat
    scale_block: int  # consecutive values that share one scale
    scale_bytes: int  # bytes of a row's scales, padding included
    placement: Placement
    page_alignment_bytes: int  # page bytes are rounded up to this
    stride_multiple_bytes: int  # our pools place pages a multiple of this apart (FlashMLA's rule)
    row_alignment_bytes: int  # every page begins at a multiple of this; kernels rely on it

    @property
    def value_bits(self) -> int:
        """Bits of one quantised value."""
        return 8 if self.value_format is ValueFormat.E4M3 else 4

    @property
    def quantised_bytes(self) -> int:
        """Bytes of a row's quantised values."""
        return self.quantised_dims * self.value_bits // 8

    @property
    def tail_dims(self) -> int:
        """Trailing values that are stored as bf16."""
        return self.dim - self.quantised_dims

    @property
    def data_bytes(self) -> int:
        """Bytes of a row's data: quantised values, then bf16 values."""
        return self.quantised_bytes + 2 * self.tail_dims

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, data and scales."""
        return self.data_bytes + self.scale_bytes

    @property
    def scales_per_row(self) -> int:
        """Scales that mean something (padding bytes not counted)."""
        return self.quantised_dims // self.scale_block

    @property
    def data_stride(self) -> int:
        """Bytes between the data of consecutive rows of a page."""
        return self.row_bytes if self.placement is Placement.INTERLEAVED else self.data_bytes

    @property
    def scale_stride(self) -> int:
        """Bytes between the scales of consecutive rows of a page."""
        return self.row_bytes if self.placement is Placement.INTERLEAVED else self.scale_bytes

    def scale_base(self, page_rows: int) -> int:
        """Offset in the page of the scales of row 0."""
        if self.placement is Placement.INTERLEAVED:
            return self.data_bytes
        return page_rows * self.data_bytes

    def page_bytes(self, page_rows: int, alignment_bytes: int | None = None) -> int:
        """Bytes of a page, rounded up to the record's alignment (or a stricter one)."""
        alignment = alignment_bytes or self.page_alignment_bytes
        return round_up(page_rows * self.row_bytes, alignment)

    def value_offset(self, row: int, dim: int, page_rows: int) -> int:
        """Offset in the page of the byte that holds value `dim` of `row` (its first byte if bf16)."""
        del page_rows  # the data region begins the page in both placements
        if dim < self.quantised_dims:
            return row * self.data_stride + dim * self.value_bits // 8
        return row * self.data_stride + self.quantised_bytes + 2 * (dim - self.quantised_dims)

    def scale_offset(self, row: int, dim: int, page_rows: int) -> int:
        """Offset in the page of the first byte of the scale of value `dim` of `row`."""
        width = 4 if self.scale_format is ScaleFormat.F32 else 1
        return (
            self.scale_base(page_rows) + row * self.scale_stride + dim // self.scale_block * width
        )


def _main(
    name: str, value: ValueFormat, scale: ScaleFormat, block: int, placement: Placement
) -> RecordFormat:
    interleaved = placement is Placement.INTERLEAVED
    scale_bytes = 512 // block
    row_bytes = 512 * (8 if value is ValueFormat.E4M3 else 4) // 8 + scale_bytes
    return RecordFormat(
        name=name,
        dim=512,
        quantised_dims=512,
        value_format=value,
        scale_format=scale,
        scale_block=block,
        scale_bytes=scale_bytes,
        placement=placement,
        page_alignment_bytes=512,
        stride_multiple_bytes=row_bytes if interleaved else 512,
        row_alignment_bytes=16 if value is ValueFormat.E4M3 else 32,
    )


def _index(name: str, value: ValueFormat, scale: ScaleFormat, block: int) -> RecordFormat:
    return RecordFormat(
        name=name,
        dim=128,
        quantised_dims=128,
        value_format=value,
        scale_format=scale,
        scale_block=block,
        scale_bytes=4,
        placement=Placement.PLANAR,
        page_alignment_bytes=512,
        stride_multiple_bytes=4,
        row_alignment_bytes=4,
    )


V4 = RecordFormat(
    name="v4",
    dim=512,
    quantised_dims=448,
    value_format=ValueFormat.E4M3,
    scale_format=ScaleFormat.UE8M0,
    scale_block=64,
    scale_bytes=8,  # seven scales and one zero byte
    placement=Placement.PLANAR,
    page_alignment_bytes=576,
    stride_multiple_bytes=576,
    row_alignment_bytes=16,
)
"""584 bytes: 448 e4m3 values with a ue8m0 scale each 64, then 64 bf16 rotary values."""

MXFP8 = _main("mxfp8", ValueFormat.E4M3, ScaleFormat.UE8M0, 32, Placement.INTERLEAVED)
"""528 bytes: 512 e4m3 values with a ue8m0 scale each 32."""
MXFP8_PLANAR = _main("mxfp8_planar", ValueFormat.E4M3, ScaleFormat.UE8M0, 32, Placement.PLANAR)
"""The 528 bytes of kernels built before October 2026."""

NVFP4 = _main("nvfp4", ValueFormat.E2M1, ScaleFormat.E4M3, 16, Placement.INTERLEAVED)
"""288 bytes: 512 e2m1 values (even dim in the low nibble) with an e4m3 scale each 16."""
NVFP4_PLANAR = _main("nvfp4_planar", ValueFormat.E2M1, ScaleFormat.E4M3, 16, Placement.PLANAR)
"""The 288 bytes of kernels built before October 2026."""

INDEX_FP8 = _index("index_fp8", ValueFormat.E4M3, ScaleFormat.F32, 128)
"""132 bytes: 128 e4m3 values and one float32 power of two."""
INDEX_MXFP4 = _index("index_mxfp4", ValueFormat.E2M1, ScaleFormat.UE8M0, 32)
"""68 bytes: 128 e2m1 values with a ue8m0 scale each 32."""

BF16 = RecordFormat(
    name="bf16",
    dim=512,
    quantised_dims=0,  # so value and scale format mean nothing
    value_format=ValueFormat.E4M3,
    scale_format=ScaleFormat.UE8M0,
    scale_block=512,
    scale_bytes=0,
    placement=Placement.INTERLEAVED,
    page_alignment_bytes=512,
    stride_multiple_bytes=16,
    row_alignment_bytes=16,
)
"""1024 bytes: 512 bf16 values, no scale. Gathered rows that attention reads; no pool holds them."""

KV_RECORDS = (V4, MXFP8, MXFP8_PLANAR, NVFP4, NVFP4_PLANAR)
"""Records of window and compressed caches."""
ATTEND_RECORDS = (*KV_RECORDS, BF16)
"""Records that attention reads, gathered rows included."""
INDEX_RECORDS = (INDEX_FP8, INDEX_MXFP4)
"""Records of index-key caches."""
RECORDS = {record.name: record for record in (*KV_RECORDS, *INDEX_RECORDS)}


def record_named(name: str) -> RecordFormat:
    """The record of that name.

    Raises:
        CacheFormatError: no such record; the message lists the names with their row bytes.
    """
    if name not in RECORDS:
        known = ", ".join(f"{known.name} ({known.row_bytes} B)" for known in RECORDS.values())
        raise CacheFormatError("record", repr(name), known)
    return RECORDS[name]
