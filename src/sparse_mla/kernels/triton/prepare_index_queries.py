"""Rotate and quantise indexer queries, and fold what can be folded into the head weights: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_mla.cache.records import ScaleFormat
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    PrepareIndexQueriesCall,
    index_weight_scale,
)
from sparse_mla.kernels.triton.index_records import (
    INDEX_DIM,
    quantise_rows,
    rotate_rows,
    table_rows,
)
from sparse_mla.kernels.triton.launch import compile_mode
from sparse_mla.kernels.triton.numbers import decode_ue8m0, from_bf16

ROWS = 8
"""(token, head) pairs of a program."""


@triton.jit(
    do_not_specialize=[
        "num_pairs", "num_heads", "num_positions", "token_stride", "head_stride", "weight_stride",
        "scale",
    ],
    do_not_specialize_on_alignment=["positions", "rope", "weights", "scales", "folded"],
)  # fmt: skip
def prepare_kernel(
    codes,  # uint8 [T * heads, data_bytes]
    scales,  # uint8 [T * heads, 4], MXFP4 only
    folded,  # float32 [T * heads]
    queries,  # bf16 [T, heads, 128]
    weights,  # bf16 [T, heads]
    positions,  # int32 or int64 [T]
    rope,  # float32 [num_positions, 64]
    token_stride: tl.int64,
    head_stride: tl.int64,
    weight_stride: tl.int64,
    num_pairs: tl.int64,
    num_heads: tl.int32,
    num_positions: tl.int32,
    scale: tl.float32,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = pair < num_pairs
    token = pair // num_heads
    head = pair - token * num_heads
    here = valid[:, None]
    source = queries + (token * token_stride + head * head_stride)[:, None]
    values = from_bf16(tl.load(source + tl.arange(0, INDEX_DIM)[None, :], mask=here, other=0.0))
    position = tl.load(positions + token, mask=valid, other=0).to(tl.int64)
    turned = rotate_rows(values, table_rows(rope, position, num_positions), ROWS, MODE)
    data, byte = quantise_rows(turned, ROWS, RECORD)
    lane = tl.arange(0, RECORD.data_bytes)[None, :]
    tl.store(codes + (pair[:, None] * RECORD.data_bytes + lane), data, mask=here)
    weight = from_bf16(tl.load(weights + token * weight_stride + head, mask=valid, other=0.0))
    if RECORD.value_bits == 8:
        weight = weight * tl.reshape(decode_ue8m0(byte), [ROWS])
    else:
        block = tl.arange(0, 4)[None, :]
        tl.store(scales + (pair[:, None] * 4 + block), byte.to(tl.uint8), mask=here)
    tl.store(folded + pair, weight * scale, mask=valid)


def prepare_index_queries(call: PrepareIndexQueriesCall) -> IndexQueries:
    """Queries rotated in float32, rounded to bf16, quantised like the keys of `call.record`.

    The weights are those of `kernels.torch.prepare_index_queries`, bit for bit.
    """
    tokens, heads, dim = call.queries.shape
    record, device = call.record, call.queries.device
    folds = record.scale_format is ScaleFormat.F32
    codes = torch.empty(tokens, heads, record.data_bytes, dtype=torch.uint8, device=device)
    folded = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    scales = None if folds else torch.empty(tokens, heads, 4, dtype=torch.uint8, device=device)
    pairs = tokens * heads
    if pairs:
        prepare_kernel[(-(-pairs // ROWS),)](
            codes,
            codes if scales is None else scales,
            folded,
            call.queries,
            call.weights,
            call.positions,
            call.rope,
            call.queries.stride(0),
            call.queries.stride(1),
            call.weights.stride(0),
            pairs,
            heads,
            call.rope.shape[0],
            index_weight_scale(heads, dim),
            RECORD=record,
            ROWS=ROWS,
            MODE=compile_mode(prepare_kernel),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return IndexQueries(record, codes, scales, folded)
