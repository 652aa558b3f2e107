"""Norm, rotate, quantise and store index keys in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.index_contract import WriteIndexKeysCall
from sparse_mla.kernels.triton.index_records import (
    INDEX_DIM,
    norm_rows,
    quantise_rows,
    rotate_rows,
    table_rows,
)
from sparse_mla.kernels.triton.launch import compile_mode
from sparse_mla.kernels.triton.numbers import from_bf16

ROWS = 8
"""Rows of a program."""


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_positions", "num_slots", "page_rows", "ratio", "key_stride", "page_stride",
        "eps",
    ],
    do_not_specialize_on_alignment=["slots", "positions", "rope", "weight", "pages"],
)  # fmt: skip
def write_index_keys_kernel(
    keys,  # bf16 [T, 128]
    weight,  # float32 [128]
    positions,  # int32 or int64 [T]
    rope,  # float32 [num_positions, 64]
    slots,  # int32 or int64 [T]
    pages,  # uint8, first page
    key_stride: tl.int64,
    page_stride: tl.int64,  # bytes
    num_rows: tl.int32,
    num_positions: tl.int32,
    num_slots: tl.int32,
    page_rows: tl.int32,
    ratio: tl.int32,
    eps: tl.float32,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    dims = tl.arange(0, INDEX_DIM)
    here = valid[:, None]
    source = keys + row.to(tl.int64)[:, None] * key_stride + dims[None, :]
    values = from_bf16(tl.load(source, mask=here, other=0.0))
    normed = norm_rows(values, tl.load(weight + dims), eps, INDEX_DIM, MODE)
    position = tl.load(positions + row, mask=valid, other=0).to(tl.int64)
    first = position // ratio * ratio
    turned = rotate_rows(normed, table_rows(rope, first, num_positions), ROWS, MODE)
    codes, byte = quantise_rows(turned, ROWS, RECORD)
    slot = tl.where(valid, slot, 0)
    page = slot // page_rows
    inside = slot - page * page_rows
    base = page * page_stride
    data = base + inside * RECORD.data_bytes
    scale_at = base + page_rows * RECORD.data_bytes + inside * RECORD.scale_bytes
    lane = tl.arange(0, RECORD.data_bytes)[None, :]
    tl.store(pages + (data[:, None] + lane), codes, mask=here)
    if RECORD.value_bits == 8:
        at = (pages + scale_at[:, None]).to(tl.pointer_type(tl.uint32))
        tl.store(at, byte << 23, mask=here)
    else:
        block = tl.arange(0, 4)[None, :]
        tl.store(pages + (scale_at[:, None] + block), byte.to(tl.uint8), mask=here)


def write_index_keys(call: WriteIndexKeysCall) -> None:
    """Store the rows whose slot lies in the cache; bf16 after the norm and again after the rotation."""
    cache, tokens = call.cache, call.slots.shape[0]
    if not tokens or not cache.num_slots:
        return
    write_index_keys_kernel[(-(-tokens // ROWS),)](
        call.keys,
        call.norm_weight,
        call.positions,
        call.rope,
        call.slots,
        cache.pages,
        call.keys.stride(0),
        cache.page_stride_bytes,
        tokens,
        call.rope.shape[0],
        cache.num_slots,
        cache.page_rows,
        call.ratio,
        call.eps,
        RECORD=cache.record,
        ROWS=ROWS,
        MODE=compile_mode(write_index_keys_kernel),
        num_warps=4,
        enable_fp_fusion=False,
    )
