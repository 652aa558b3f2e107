"""Pool projected rows into compressed latents: one row at a time, float64 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.kernels.index_contract import CompressCall, host_rows


def compress(call: CompressCall) -> Tensor:
    """Latents before rotation, bf16 [T, dim]; see `CompressCall`. Rows that close no group are zero."""
    if call.ratio == 1:
        rows = [norm_row(row.double(), call.norm_weight, call.eps) for row in call.projected]
        return torch.stack(rows) if rows else call.projected.clone()
    ring = call.ring
    assert ring is not None
    dim = call.projected.shape[1] // 2
    latents = torch.zeros(len(call.projected), dim, dtype=torch.bfloat16)
    for first, last in host_rows(ring.query_start_loc.cpu()):
        for row in range(first, last):
            slot, position = int(ring.slots[row]), int(call.positions[row])
            if slot < 0 or position % 2 == 0:
                continue
            if row > first:
                partner = call.projected[row - 1]
            else:
                partner = ring.rows[slot // ring.capacity, (position - 1) % ring.capacity]
            pooled = _pool(partner.double(), call.projected[row].double(), dim)
            rounded = pooled.to(torch.bfloat16).double()
            latents[row] = norm_row(rounded, call.norm_weight, call.eps)
        for row in range(max(first, last - ring.capacity), last):
            slot = int(ring.slots[row])
            if slot >= 0:
                ring.rows[slot // ring.capacity, slot % ring.capacity] = call.projected[row]
    return latents


def norm_row(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 [dim]: the norm of one float64 row."""
    inverse = 1.0 / torch.sqrt((row * row).sum() / row.numel() + eps)
    return (row * inverse * weight.double()).to(torch.bfloat16)


def _pool(first: Tensor, second: Tensor, dim: int) -> Tensor:
    pooled = torch.empty(dim, dtype=torch.float64)
    for channel in range(dim):
        scores = torch.stack([first[dim + channel], second[dim + channel]])
        share = torch.softmax(scores, dim=0)
        pooled[channel] = share[0] * first[channel] + share[1] * second[channel]
    return pooled
