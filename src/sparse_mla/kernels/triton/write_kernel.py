"""The cache writer in Triton: rotate, round to bf16, quantise and store, and rotate queries beside it."""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.numbers import (
    E4M3_MAX,
    INVERSE_E2M1_MAX,
    SMALLEST_E4M3,
    decode_e4m3,
    e2m1_of_quotient,
    from_bf16,
    inverse_ue8m0,
    quantise_e4m3,
    round_bf16,
    to_bf16,
    ue8m0_byte,
)
from sparse_mla.kernels.triton.rows import row_offsets

DIM = tl.constexpr(512)
ROPE_FIRST = tl.constexpr(448)
ROPE_DIM = tl.constexpr(64)
ROPE_PAIRS = tl.constexpr(32)


@triton.jit
def _rotate_tail(values, row, N: tl.constexpr, MODE: tl.constexpr):
    """bf16 [N, 64] rotated in float32 by the table rows that `row` (pointers [N, 1]) names."""
    pair = tl.arange(0, ROPE_PAIRS)[None, :]
    cos, sin = tl.load(row + pair), tl.load(row + (pair + ROPE_PAIRS))
    even, odd = tl.split(tl.reshape(values, [N, ROPE_PAIRS, 2]))
    even32, odd32 = from_bf16(even), from_bf16(odd)
    new_even = to_bf16(even32 * cos - odd32 * sin, MODE)
    new_odd = to_bf16(odd32 * cos + even32 * sin, MODE)
    return tl.reshape(tl.join(new_even, new_odd), [N, ROPE_DIM])


@triton.jit
def _rotate_end(values, row, N: tl.constexpr, MODE: tl.constexpr):
    """bf16 [N, 512] with the last 64 dims rotated; every pair stays where it is, so nothing is moved."""
    pair = tl.arange(0, DIM // 2)[None, :] - (DIM // 2 - ROPE_PAIRS)
    turns = tl.broadcast_to(pair >= 0, [N, DIM // 2])
    cos = tl.load(row + pair, mask=turns, other=1.0)
    sin = tl.load(row + (pair + ROPE_PAIRS), mask=turns, other=0.0)
    even, odd = tl.split(tl.reshape(values, [N, DIM // 2, 2]))
    even32, odd32 = from_bf16(even), from_bf16(odd)
    new_even = to_bf16(even32 * cos - odd32 * sin, MODE)
    new_odd = to_bf16(odd32 * cos + even32 * sin, MODE)
    even, odd = tl.where(pair >= 0, new_even, even), tl.where(pair >= 0, new_odd, odd)
    return tl.reshape(tl.join(even, odd), [N, DIM])


@triton.jit
def _store_row(
    pages,
    data,  # int64 [N] offsets of the data
    scale_at,  # int64 [N] offsets of the scales
    values,  # float32 [N, 512], already rotated and rounded to bf16
    valid,  # int1 [N]
    N: tl.constexpr,
    RECORD: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    MODE: tl.constexpr,
):
    """Quantise and store rows as the codec does, NaN and infinity included; other bytes stay."""
    BLOCKS: tl.constexpr = RECORD.dim // RECORD.scale_block
    SIZE: tl.constexpr = RECORD.scale_block
    blocks = tl.reshape(values, [N, BLOCKS, SIZE])
    bits = blocks.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    block = tl.arange(0, BLOCKS)[None, :]
    here = valid[:, None]
    if RECORD.value_bits == 8:
        numbers = tl.where(magnitude > 0x7F800000, 0, magnitude)
        amax = tl.max(numbers, 2).to(tl.float32, bitcast=True)
        byte = ue8m0_byte(amax)
        codes = quantise_e4m3(blocks * inverse_ue8m0(byte)[:, :, None], HARDWARE_E4M3)
        codes = tl.reshape(codes, [N, DIM])
        scale = tl.where(block < RECORD.scales_per_row, byte, 0).to(tl.uint8)
        byte_index = tl.arange(0, DIM)[None, :]
        kept = here & (byte_index < RECORD.quantised_dims)
    else:
        largest = tl.max(magnitude, 2)
        spoilt = largest > 0x7F800000  # e2m1 has no NaN: the scale takes it
        amax = tl.where(spoilt, 0, largest).to(tl.float32, bitcast=True)
        ratio = tl.minimum(tl.maximum(amax * INVERSE_E2M1_MAX, SMALLEST_E4M3), E4M3_MAX)
        scale = quantise_e4m3(ratio, HARDWARE_E4M3)
        codes = e2m1_of_quotient(magnitude, decode_e4m3(scale)[:, :, None], MODE)
        codes |= (bits >> 28) & 8
        low, high = tl.split(tl.reshape(codes, [N, DIM // 2, 2]))
        codes = tl.reshape(low | (high << 4), [N, BLOCKS, SIZE // 2])
        codes = tl.reshape(tl.where(spoilt[:, :, None], 0, codes), [N, DIM // 2]).to(tl.uint8)
        scale = tl.where(spoilt, 0x7F, scale).to(tl.uint8)
        byte_index = tl.arange(0, DIM // 2)[None, :]
        kept = here & (byte_index >= 0)
    tl.store(pages + (data[:, None] + byte_index), codes, mask=kept)
    tl.store(pages + (scale_at[:, None] + block), scale, mask=here)
    if RECORD.tail_dims > 0:
        dims = tl.arange(0, DIM)[None, :]
        at = data[:, None] + (2 * dims - RECORD.quantised_dims)
        tail = here & (dims >= RECORD.quantised_dims)
        tl.store((pages + at).to(tl.pointer_type(tl.bfloat16)), round_bf16(values), mask=tail)


@triton.jit(
    do_not_specialize=[
        "latent_stride", "num_rows", "num_positions", "num_slots", "page_rows", "page_magic",
        "page_shift", "page_stride", "row_programs", "num_tokens", "num_heads", "q_token_stride", "q_head_stride",
        "out_token_stride", "out_head_stride",
    ],
    do_not_specialize_on_alignment=["slots", "positions", "rope"],
)  # fmt: skip
def write_kernel(
    latents,  # bf16 [T, 512]
    slots,  # int32 or int64 [num_rows]
    positions,  # int32 or int64 [T]
    rope,  # float32 [num_positions, 64]
    pages,  # uint8, first page
    q,  # bf16 [T, H, 512]
    q_out,  # bf16 [T, H, 512]
    latent_stride: tl.int64,
    num_rows: tl.int32,
    num_positions: tl.int32,
    num_slots: tl.int32,
    page_rows: tl.int32,
    page_magic: tl.int64,
    page_shift: tl.int32,
    page_stride: tl.int64,  # in units of 16 bytes
    row_programs: tl.int32,  # programs that store rows; the others rotate queries
    num_tokens: tl.int32,
    num_heads: tl.int32,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    RECORD: tl.constexpr,
    RATIO: tl.constexpr,  # only rows that close a group of so many positions are stored
    ALIGNED: tl.constexpr,  # every latent begins at a multiple of 16 bytes
    ROWS: tl.constexpr,  # rows of a program, also (token, head) pairs of a query program
    QUERY: tl.constexpr,  # "none", "copy", or "in place": only the rotated dims move
    HARDWARE_E4M3: tl.constexpr,
    MODE: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    if program < row_programs:
        row = program * ROWS + lane
        inside = row < num_rows
        slot = tl.load(slots + row, mask=inside, other=-1)
        position = tl.load(positions + row, mask=inside, other=0).to(tl.int64)
        valid = (slot >= 0) & (slot < num_slots)
        if RATIO > 1:
            valid = valid & ((position + 1) % RATIO == 0)
            position = position // RATIO * RATIO
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        if ALIGNED:  # the compiler sees that the stride is a multiple of 8
            latent_stride = latent_stride // 8 * 8
        source = latents + row.to(tl.int64)[:, None] * latent_stride
        dims = tl.arange(0, DIM)[None, :]
        values = tl.load(source + dims, mask=(inside if RATIO == 1 else valid)[:, None], other=0.0)
        values = _rotate_end(values, rope + position[:, None] * ROPE_DIM, ROWS, MODE)
        safe = tl.where(valid, slot, 0).to(tl.int32)
        data, scale_at = row_offsets(safe, page_rows, page_magic, page_shift, page_stride, RECORD)
        _store_row(
            pages, data, scale_at, from_bf16(values), valid, ROWS, RECORD, HARDWARE_E4M3, MODE
        )
    elif QUERY != "none":
        pair = (program - row_programs).to(tl.int64) * ROWS + lane
        token = pair // num_heads
        head = pair - token * num_heads
        here = (token < num_tokens)[:, None]
        position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        source = q + (token * q_token_stride + head * q_head_stride)[:, None]
        target = q_out + (token * out_token_stride + head * out_head_stride)[:, None]
        last = tl.arange(0, ROPE_DIM)[None, :] + ROPE_FIRST
        tail = tl.load(source + last, mask=here, other=0.0)
        turned = _rotate_tail(tail, rope + position[:, None] * ROPE_DIM, ROWS, MODE)
        tl.store(target + last, turned, mask=here)
        if QUERY == "copy":
            dims = tl.arange(0, DIM)[None, :]
            kept = here & (dims < ROPE_FIRST)
            tl.store(target + dims, tl.load(source + dims, mask=kept, other=0.0), mask=kept)
