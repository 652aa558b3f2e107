"""Reading cache rows in Triton: one place that knows how a record is read, for every kernel here.

All that it needs of a record is in `RecordFormat` (cache/records.py), passed as a compile-time
constant: offsets and sizes have no second home. Reading is in two steps, so that a loop can have the
bytes of its next tile in flight while it works on the present one: `load_raw` (32-bit words: narrower
values would each hold a register) and `widen`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.numbers import (
    decode_e4m3,
    decode_ue8m0,
    materialise,
    quotient,
    widen_e2m1,
    widen_e4m3,
)


@triton.jit
def row_offsets(
    slots,  # int32 [N], every one a valid slot
    page_rows,  # int32
    page_magic,  # int64, with page_shift: division by page_rows, see `kernels.division`
    page_shift,  # int32
    page_stride,  # int64, units of 16 bytes between pages (so that alignment is visible)
    RECORD: tl.constexpr,  # RecordFormat
):
    """int64 [N] byte offsets of the rows' data and of their scales."""
    page = quotient(slots, page_magic, page_shift)
    row = slots - page * page_rows
    base = page.to(tl.int64) * (page_stride * 16)
    data = base + row * RECORD.data_stride
    if RECORD.data_stride == RECORD.row_bytes:
        return data, data + RECORD.data_bytes
    return data, base + page_rows * RECORD.data_bytes + row * RECORD.scale_stride


@triton.jit
def load_raw(
    pages,  # uint8 pointer to the first page
    slots,  # int32 [N], negative = none
    page_rows,  # int32
    page_magic,  # int64
    page_shift,  # int32
    page_stride,  # int64, units of 16 bytes between pages
    RECORD: tl.constexpr,  # RecordFormat with dim 512
):
    """(words, scales, tail) of the rows, zero where there is none; nothing of such a row is read.

    words  int32 [N, 128 or 64], the quantised values (V4: words from 112 on are zero)
    scales uint8 [N, 512 / scale block]
    tail   int32 [N, 32], the bf16 values (V4), else the scales once more
    """
    valid = slots >= 0
    data, scale_at = row_offsets(
        tl.where(valid, slots, 0), page_rows, page_magic, page_shift, page_stride, RECORD
    )
    WORDS: tl.constexpr = RECORD.dim * RECORD.value_bits // 32
    QUANTISED: tl.constexpr = RECORD.quantised_bytes // 4
    word = tl.arange(0, WORDS)
    here = valid[:, None]
    if QUANTISED < WORDS:
        here = here & (word < QUANTISED)[None, :]
    as_words = tl.pointer_type(tl.int32)
    words = tl.load((pages + data[:, None]).to(as_words) + word[None, :], mask=here, other=0)
    block = tl.arange(0, RECORD.dim // RECORD.scale_block)
    scales = tl.load(pages + (scale_at[:, None] + block[None, :]), mask=valid[:, None], other=0)
    if RECORD.tail_dims > 0:
        pair = tl.arange(0, RECORD.tail_dims // 2) + QUANTISED
        at = (pages + data[:, None]).to(as_words) + pair[None, :]
        tail = tl.load(at, mask=valid[:, None], other=0)
    else:
        tail = scales
    return words, scales, tail


@triton.jit
def widen(words, scales, tail, RECORD: tl.constexpr, MODE: tl.constexpr):
    """bf16 [N, 512] of what `load_raw` returned."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = RECORD.dim // RECORD.scale_block
    WORDS: tl.constexpr = RECORD.scale_block * RECORD.value_bits // 32
    words = tl.reshape(words, [ROWS, BLOCKS, WORDS])
    if RECORD.value_bits == 8:
        scale = decode_ue8m0(scales)
        scale, words = tl.broadcast(scale[:, :, None], words)
        values = widen_e4m3(words, scale, MODE)
    else:
        scale = decode_e4m3(scales)
        scale, words = tl.broadcast(scale[:, :, None], words)
        values = widen_e2m1(words, scale, MODE)
    if RECORD.tail_dims > 0:
        TAIL: tl.constexpr = RECORD.tail_dims
        bits = tail.to(tl.uint32, bitcast=True)
        low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        kept = tl.reshape(tl.join(low, high), [ROWS, 1, TAIL])
        kept = tl.broadcast_to(kept, [ROWS, RECORD.dim // TAIL, TAIL])
        values = tl.reshape(values, [ROWS, RECORD.dim // TAIL, TAIL])
        last = tl.arange(0, RECORD.dim // TAIL) == RECORD.dim // TAIL - 1
        values = tl.where(last[None, :, None], kept, values)
    return materialise(tl.reshape(values, [ROWS, RECORD.dim]), MODE)
