"""Rows of the indexer in Triton, 128 wide: rotate the last 64 values, quantise as the codec does.

Both writers of such rows (index keys into their cache, queries into a buffer) are made of these parts.
Rounding order: what comes in has bf16 precision; the rotation is float32, rounded to bf16 once; then the
block quantisation of `cache/codec.py`, byte for byte, rules for NaN and infinity included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.numbers import (
    INVERSE_E2M1_MAX,
    encode_e2m1,
    encode_e4m3,
    from_bf16,
    inverse_ue8m0,
    to_bf16,
    ue8m0_byte,
)

INDEX_DIM = tl.constexpr(128)
HALF = tl.constexpr(64)  # pairs of a row, and values that rotate
ROTATED_PAIRS = tl.constexpr(32)
F32_MAX = tl.constexpr(3.4028234663852886e38)
MXFP4_FLOOR = tl.constexpr(6.0 * 2.0**-126)


@triton.jit
def rotate_rows(values, rope_rows, N: tl.constexpr, MODE: tl.constexpr):
    """float32 [N, 128] of bf16 precision, rotated by the table rows at `rope_rows` (pointers [N, 1])."""
    pair = tl.arange(0, HALF)[None, :]
    turns = pair >= HALF - ROTATED_PAIRS
    at = pair - (HALF - ROTATED_PAIRS)
    cos = tl.load(rope_rows + at, mask=turns, other=1.0)
    sin = tl.load(rope_rows + (at + ROTATED_PAIRS), mask=turns, other=0.0)
    even, odd = tl.split(tl.reshape(values, [N, HALF, 2]))
    new_even = from_bf16(to_bf16(even * cos - odd * sin, MODE))
    new_odd = from_bf16(to_bf16(odd * cos + even * sin, MODE))
    even, odd = tl.where(turns, new_even, even), tl.where(turns, new_odd, odd)
    return tl.reshape(tl.join(even, odd), [N, INDEX_DIM])


@triton.jit
def quantise_rows(values, N: tl.constexpr, RECORD: tl.constexpr):
    """(codes, scales) of float32 [N, 128].

    FP8:   uint8 [N, 128], uint32 [N, 1] exponent byte of the row's float32 scale
    MXFP4: uint8 [N, 64] pairs, uint32 [N, 4] exponent bytes
    """
    BLOCKS: tl.constexpr = INDEX_DIM // RECORD.scale_block
    blocks = tl.reshape(values, [N, BLOCKS, RECORD.scale_block])
    number = blocks == blocks
    amax = tl.max(tl.where(number, tl.abs(blocks), 0.0), 2)
    amax = tl.minimum(amax, F32_MAX)
    if RECORD.value_bits == 8:
        byte = ue8m0_byte(amax)
        codes = tl.reshape(encode_e4m3(blocks * inverse_ue8m0(byte)[:, :, None]), [N, INDEX_DIM])
    else:
        ratio = tl.maximum(amax, MXFP4_FLOOR) * INVERSE_E2M1_MAX
        bits = ratio.to(tl.uint32, bitcast=True)
        byte = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0).to(tl.uint32)
        spoilt = tl.max(tl.where(number, 0, 1), 2)
        nibbles = encode_e2m1(blocks * inverse_ue8m0(byte)[:, :, None])
        nibbles = tl.where(spoilt[:, :, None] != 0, 0, nibbles.to(tl.int32)).to(tl.uint8)
        low, high = tl.split(tl.reshape(nibbles, [N, HALF, 2]))
        codes = low | (high << 4)
        byte = tl.where(spoilt != 0, 255, byte.to(tl.int32)).to(tl.uint32)
    return codes, byte


@triton.jit
def norm_rows(values, weight, eps, dim, MODE: tl.constexpr):
    """float32 [N, BLOCK] with zeros past `dim`, normed and multiplied by the gain, of bf16 precision."""
    mean = tl.sum(values * values, 1) / dim
    root = tl.sqrt_rn(mean + eps)
    inverse = tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)
    return from_bf16(to_bf16(values * inverse[:, None] * weight[None, :], MODE))


@triton.jit
def table_rows(rope, position, num_positions):
    """Pointers [N, 1] to the table rows of int64 positions [N], clamped to the table."""
    safe = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    return rope + safe[:, None] * HALF
