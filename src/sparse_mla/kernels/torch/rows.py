"""Rows of a paged cache as float32, quickly: the decode function of this folder.

Two tricks carry it. Rows are read with `index_select` over a view whose rows overlap (one row each few
bytes), so any page stride is a plain row gather. Codes are widened two at a time by a table of 65,536
pairs of float32 (one 8-byte word each), then multiplied by the block scale; both are exact.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_e2m1, decode_e4m3, decode_ue8m0
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat, ScaleFormat, ValueFormat

BLOCK_ROWS = 1024
"""Rows decoded at a time: 2 MB of float32, which stays in a second-level cache."""
BLOCK_BYTES = BLOCK_ROWS * (1024 + 2048 + 1024 + 64)
"""Most scratch of `decode_into`: raw bytes, indices of pairs, values of a record with a bf16 tail, scales."""


def decode_into(cache: PagedCache, slots: Tensor, out: Tensor) -> None:
    """Decode rows into `out`, exactly.

    Args:
        cache: a cache of 512-wide rows with at least one page.
        slots: int64 [n], each a valid slot.
        out: float32 [n, 512] contiguous, overwritten.
    """
    record = cache.record
    pairs = _pair_table(record.value_format, slots.device)
    scales = _scale_table(record.scale_format, slots.device)
    for first in range(0, slots.shape[0], BLOCK_ROWS):
        some = slots[first : first + BLOCK_ROWS]
        data, scale_bytes = _raw_rows(cache, some)
        _decode_block(record, data, scale_bytes, pairs, scales, out[first : first + BLOCK_ROWS])


def _decode_block(
    record: RecordFormat,
    data: Tensor,  # uint8 [n, data_bytes]
    scale_bytes: Tensor,  # uint8 [n, scale_bytes]
    pairs: Tensor,  # float64 words, each two float32
    scales: Tensor,  # float32 [256]
    out: Tensor,  # float32 [n, 512]
) -> None:
    rows = data.shape[0]
    codes = data[:, : record.quantised_bytes]
    if record.value_format is ValueFormat.E4M3:
        codes = codes.view(torch.uint16)
    index = codes.to(torch.int32).view(-1)
    quantised = out[:, : record.quantised_dims]
    if record.tail_dims:
        words = torch.index_select(pairs, 0, index)
        quantised.copy_(words.view(torch.float32).view(rows, -1))
        out[:, record.quantised_dims :] = data[:, record.quantised_bytes :].view(torch.bfloat16)
    else:
        torch.index_select(pairs, 0, index, out=out.view(torch.float64).view(-1))
    scale_index = scale_bytes[:, : record.scales_per_row].to(torch.int32).reshape(-1)
    factors = torch.index_select(scales, 0, scale_index).view(rows, -1, 1)
    quantised.view(rows, record.scales_per_row, record.scale_block).mul_(factors)


def _raw_rows(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of rows: data [n, data_bytes] and scales [n, scale_bytes], one gather if they are adjacent."""
    record = cache.record
    page = torch.div(slots, cache.page_rows, rounding_mode="floor")
    row = slots - page * cache.page_rows
    base = record.scale_base(cache.page_rows)
    if base == record.data_bytes and record.data_stride == record.scale_stride:
        both = _gather_bytes(cache, page, row, 0, record.data_stride, record.row_bytes)
        return both[:, : record.data_bytes], both[:, record.data_bytes :]
    data = _gather_bytes(cache, page, row, 0, record.data_stride, record.data_bytes)
    return data, _gather_bytes(cache, page, row, base, record.scale_stride, record.scale_bytes)


def _gather_bytes(
    cache: PagedCache, page: Tensor, row: Tensor, base: int, row_stride: int, width: int
) -> Tensor:
    """uint8 [n, width]: the bytes at `base + row * row_stride` of each page."""
    page_stride = cache.page_stride_bytes if cache.num_pages > 1 else 0
    unit = math.gcd(page_stride, row_stride)
    offset = cache.pages.storage_offset() + base
    storage = cache.pages.untyped_storage()
    word = math.gcd(8, unit, width, offset, storage.data_ptr(), storage.nbytes())
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    last = (cache.num_pages - 1) * page_stride + (cache.page_rows - 1) * row_stride
    windows = torch.empty(0, dtype=dtype, device=cache.device)
    size = (last // unit + 1, width // word)
    windows = windows.set_(storage, offset // word, size, (unit // word, 1))
    index = page * (page_stride // unit) + row * (row_stride // unit)
    return torch.index_select(windows, 0, index).view(torch.uint8)


@functools.cache
def _pair_table(values: ValueFormat, device: torch.device) -> Tensor:
    """float64 words that hold two float32: [65536] by two e4m3 codes, [256] by a byte of two e2m1."""
    if values is ValueFormat.E4M3:
        single, bits = decode_e4m3(torch.arange(256, dtype=torch.uint8)), 8
    else:
        single, bits = decode_e2m1(torch.arange(16, dtype=torch.uint8)), 4
    code = torch.arange(1 << (2 * bits))
    low, high = single[code & ((1 << bits) - 1)], single[code >> bits]
    return torch.stack((low, high), dim=1).contiguous().view(torch.float64).view(-1).to(device)


@functools.cache
def _scale_table(scales: ScaleFormat, device: torch.device) -> Tensor:
    """float32 [256]: the factor of a scale byte."""
    code = torch.arange(256, dtype=torch.uint8)
    table = decode_e4m3(code) if scales is ScaleFormat.E4M3 else decode_ue8m0(code)
    return table.float().to(device)
