"""Pool projected rows into compressed latents, with the open group's first row carried in a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.kernels.index_contract import CompressCall, Ring
from sparse_mla.kernels.torch.rms_norm import rms_norm


def compress(call: CompressCall) -> Tensor:
    """Latents before rotation, bf16 [T, dim]; rows that close no group are zero.

    Ratio 1: the norm of each row. Ratio 2: a row at an odd position pools with the row before it,
    taken from this step if that row belongs to the same request and from the ring otherwise; the
    pooled vector is rounded to bf16 before the norm. All ring reads precede the writes; the last
    `min(rows of the request, capacity)` rows of each request are then stored.
    """
    if call.ratio == 1:
        return rms_norm(call.projected, call.norm_weight, call.eps)
    ring = call.ring
    assert ring is not None
    partner = _partners(call, ring)
    dim = call.projected.shape[1] // 2
    pooled = _pool(partner, call.projected, dim).to(torch.bfloat16)
    latent = rms_norm(pooled, call.norm_weight, call.eps)
    closes = (call.positions % 2 == 1) & (ring.slots >= 0)
    latent = torch.where(closes[:, None], latent, latent.new_zeros(()))
    _store(call, ring)
    return latent


def _row_in_request(ring: Ring, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [T] each: index of a row among its request's rows of this step, and how many those are."""
    requests = ring.request_ids.long()
    starts = ring.query_start_loc.long()
    first = starts[requests]
    rows = torch.arange(num_rows, device=first.device)
    return rows - first, starts[requests + 1] - first


def _partners(call: CompressCall, ring: Ring) -> Tensor:
    """float32 [T, 2 * dim]: the projected row at position p - 1 of the same request."""
    projected = call.projected
    previous = torch.cat([projected[:1], projected[:-1]])
    row, _ = _row_in_request(ring, projected.shape[0])
    slots = ring.slots.clamp_min(0)
    block = torch.div(slots, ring.capacity, rounding_mode="floor")
    offset = (call.positions.long() - 1) % ring.capacity
    return torch.where((row > 0)[:, None], previous, ring.rows[block, offset])


def _pool(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """float32 [T, dim]: per channel, the average of u under the softmax of the two scores s."""
    score_a, score_b = first[:, dim:], second[:, dim:]
    top = torch.maximum(score_a, score_b)
    weight_a = torch.exp(score_a - top)
    weight_b = torch.exp(score_b - top)
    total = weight_a + weight_b
    return weight_a / total * first[:, :dim] + weight_b / total * second[:, :dim]


def _store(call: CompressCall, ring: Ring) -> None:
    row, rows = _row_in_request(ring, call.projected.shape[0])
    stored = (ring.slots >= 0) & (row >= rows - ring.capacity)
    # A row that is not stored rewrites the null block's first row with what it holds.
    slots = torch.where(stored, ring.slots, ring.slots.new_zeros(()))
    block = torch.div(slots, ring.capacity, rounding_mode="floor")
    rows = torch.where(stored[:, None], call.projected, ring.rows[0, 0])
    ring.rows[block, slots - block * ring.capacity] = rows
