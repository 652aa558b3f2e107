"""Pool projected rows into compressed latents: a launch that reads the ring, then one that stores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla.kernels.index_contract import CompressCall, Ring
from sparse_mla.kernels.triton.index_records import norm_rows
from sparse_mla.kernels.triton.launch import compile_mode
from sparse_mla.kernels.triton.numbers import from_bf16, to_bf16
from sparse_mla.kernels.triton.rms_norm import rms_norm


@triton.jit(
    do_not_specialize=["row_stride", "block_stride", "dim", "capacity", "num_blocks", "eps"],
    do_not_specialize_on_alignment=[
        "positions", "weight", "slots", "request_ids", "query_start_loc",
    ],
)  # fmt: skip
def pool_kernel(
    out,  # bf16 [T, dim] contiguous
    projected,  # float32 [T, 2 * dim]
    positions,  # int32 or int64 [T]
    weight,  # float32 [dim]
    ring,  # float32 [blocks, capacity, 2 * dim]
    slots,  # int64 [T]
    request_ids,  # int32 [T]
    query_start_loc,  # int32 [R + 1]
    row_stride: tl.int64,
    block_stride: tl.int64,
    dim: tl.int32,
    capacity: tl.int32,
    num_blocks: tl.int32,
    eps: tl.float32,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row)
    block = tl.maximum(slot, 0) // capacity
    closes = ((position & 1) == 1) & (slot >= 0) & (block < num_blocks)
    begin = tl.load(query_start_loc + tl.load(request_ids + row))
    here = lane < tl.where(closes, dim, 0)
    mine = projected + row * row_stride + lane
    before = projected + (row - 1) * row_stride + lane
    offset = tl.maximum(position - 1, 0) % capacity
    kept = ring + block * block_stride + offset * (2 * dim) + lane
    step = lane < tl.where(closes & (row > begin), dim, 0)
    carried = lane < tl.where(closes & (row <= begin), dim, 0)
    # one of the two loads is masked out whole and gives zeros
    u_a = tl.load(before, mask=step, other=0.0) + tl.load(kept, mask=carried, other=0.0)
    s_a = tl.load(before + dim, mask=step, other=0.0) + tl.load(kept + dim, mask=carried, other=0.0)
    u_b = tl.load(mine, mask=here, other=0.0)
    s_b = tl.load(mine + dim, mask=here, other=0.0)
    top = tl.maximum(s_a, s_b)
    weight_a, weight_b = tl.exp(s_a - top), tl.exp(s_b - top)
    total = weight_a + weight_b
    pooled = tl.div_rn(weight_a, total) * u_a + tl.div_rn(weight_b, total) * u_b
    pooled = from_bf16(to_bf16(pooled, MODE))
    gain = tl.load(weight + lane, mask=lane < dim, other=0.0)
    latent = norm_rows(tl.where(here, pooled, 0.0)[None, :], gain, eps, dim, MODE)
    latent = tl.where(here[None, :], latent, 0.0)
    tl.store((out + row * dim + lane)[None, :], to_bf16(latent, MODE), mask=(lane < dim)[None, :])


@triton.jit(
    do_not_specialize=["row_stride", "block_stride", "width", "capacity", "num_blocks"],
    do_not_specialize_on_alignment=["slots", "request_ids", "query_start_loc"],
)
def store_ring_kernel(
    ring,  # float32 [blocks, capacity, width]
    projected,  # float32 [T, width]
    slots,  # int64 [T]
    request_ids,  # int32 [T]
    query_start_loc,  # int32 [R + 1]
    row_stride: tl.int64,
    block_stride: tl.int64,
    width: tl.int32,
    capacity: tl.int32,
    num_blocks: tl.int32,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    end = tl.load(query_start_loc + tl.load(request_ids + row) + 1)
    block = tl.maximum(slot, 0) // capacity
    stored = (slot >= 0) & (block < num_blocks) & (row >= end - capacity)
    lane = tl.arange(0, BLOCK)
    here = lane < tl.where(stored, width, 0)
    values = tl.load(projected + row * row_stride + lane, mask=here, other=0.0)
    target = ring + block * block_stride + (slot - block * capacity) * width + lane
    tl.store(target, values, mask=here)


def compress(call: CompressCall) -> Tensor:
    """Latents before rotation, bf16 [T, dim]; rows that close no group are zero.

    The same rules as `kernels.torch.compress`: a pooled vector is rounded to bf16 before its norm, all
    ring reads precede the ring writes, the last `capacity` rows of each request are stored.
    """
    if call.ratio == 1:
        return rms_norm(call.projected, call.norm_weight, call.eps)
    assert call.ring is not None
    tokens, dim = call.projected.shape[0], call.norm_weight.shape[0]
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=call.projected.device)
    if tokens:
        _pool(call, call.ring, out)
        _store(call, call.ring)
    return out


def _pool(call: CompressCall, ring: Ring, out: Tensor) -> None:
    dim = out.shape[1]
    pool_kernel[(out.shape[0],)](
        out,
        call.projected,
        call.positions,
        call.norm_weight,
        ring.rows,
        ring.slots,
        ring.request_ids,
        ring.query_start_loc,
        call.projected.stride(0),
        ring.rows.stride(0),
        dim,
        ring.capacity,
        ring.rows.shape[0],
        call.eps,
        BLOCK=triton.next_power_of_2(dim),
        MODE=compile_mode(pool_kernel),
        num_warps=4,
        enable_fp_fusion=False,
    )


def _store(call: CompressCall, ring: Ring) -> None:
    width = call.projected.shape[1]
    store_ring_kernel[(call.projected.shape[0],)](
        ring.rows,
        call.projected,
        ring.slots,
        ring.request_ids,
        ring.query_start_loc,
        call.projected.stride(0),
        ring.rows.stride(0),
        width,
        ring.capacity,
        ring.rows.shape[0],
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
