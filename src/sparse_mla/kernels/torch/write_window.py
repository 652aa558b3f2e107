"""Window writer in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.config.rope import apply_rope
from sparse_mla.kernels.write_contract import WriteWindowCall

BLOCK_ROWS = 4096
"""Rows encoded at a time; scratch is about 40 bytes a value, 84 MB."""


def write_window(call: WriteWindowCall) -> None:
    """Store the rows with a slot, then rotate the queries."""
    rows = call.slots.shape[0]
    store_rotated(call.cache, call.slots, call.latents[:rows], call.positions[:rows], call.rope)
    if call.q is not None and call.q_out is not None:
        for first in range(0, call.q.shape[0], BLOCK_ROWS // 16):
            some = slice(first, first + BLOCK_ROWS // 16)
            call.q_out[some] = apply_rope(call.q[some], call.positions[some], call.rope)


def store_rotated(
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n], negative = skip
    latents: Tensor,  # bf16 [n, 512]
    positions: Tensor,  # int32 or int64 [n]
    rope: Tensor,  # float32 [max_positions, 64]
) -> None:
    """Rotate, round to bf16, encode and store; works without a host sync on a GPU."""
    if not slots.is_cuda:
        kept = (slots >= 0).nonzero().view(-1)
        slots, latents, positions = slots[kept], latents[kept], positions[kept]
    for first in range(0, slots.shape[0], BLOCK_ROWS):
        some = slice(first, first + BLOCK_ROWS)
        turned = apply_rope(latents[some], positions[some], rope)
        data, scales = encode_rows(cache.record, turned)
        if slots.is_cuda:
            _store_masked(cache, slots[some], data, scales)
        else:
            cache.write_rows(slots[some], data, scales)


def _store_masked(cache: PagedCache, slots: Tensor, data: Tensor, scales: Tensor) -> None:
    """Store rows with slot >= 0 without counting them on the host.

    The other rows repeat the first such row; without any, slot 0 is rewritten with its own bytes.
    """
    valid = slots >= 0
    first = valid.int().argmax().view(1)
    old_data, old_scales = cache.read_rows(torch.zeros_like(first))
    chosen = valid[first]
    fill_slot = torch.where(chosen, slots[first], 0)
    fill_data = torch.where(chosen[:, None], data[first], old_data)
    fill_scales = torch.where(chosen[:, None], scales[first], old_scales)
    keep = valid[:, None]
    cache.write_rows(
        torch.where(valid, slots, fill_slot),
        torch.where(keep, data, fill_data),
        torch.where(keep, scales, fill_scales),
    )
