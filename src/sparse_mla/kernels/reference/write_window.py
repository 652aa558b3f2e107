"""Window writer, one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.kernels.contract import ROPE_DIM
from sparse_mla.kernels.write_contract import WriteWindowCall


def write_window(call: WriteWindowCall) -> None:
    """Store rows in list order (of two with one slot the later stays), then rotate the queries."""
    for row in range(call.slots.shape[0]):
        slot = int(call.slots[row])
        if slot >= 0:
            store_row(
                call.cache, slot, rotate_row(call.latents[row], call.positions[row], call.rope)
            )
    if call.q is not None and call.q_out is not None:
        for row in range(call.q.shape[0]):
            for head in range(call.q.shape[1]):
                turned = rotate_row(call.q[row, head], call.positions[row], call.rope)
                call.q_out[row, head] = turned


def rotate_row(values: Tensor, position: Tensor, rope: Tensor) -> Tensor:
    """bf16 [512] rotated in float32, pair by pair; the position is clamped to the table."""
    angles = rope[min(max(int(position), 0), rope.shape[0] - 1)]
    turned = values.float().clone()
    first = turned.shape[0] - ROPE_DIM
    for pair in range(ROPE_DIM // 2):
        a, b = values[first + 2 * pair].float(), values[first + 2 * pair + 1].float()
        cos, sin = angles[pair], angles[ROPE_DIM // 2 + pair]
        turned[first + 2 * pair] = a * cos - b * sin
        turned[first + 2 * pair + 1] = b * cos + a * sin
    return turned.to(torch.bfloat16)


def store_row(cache: PagedCache, slot: int, values: Tensor) -> None:
    """Encode bf16 [512] and store it byte by byte at the offsets that the record gives."""
    data, scales = encode_rows(cache.record, values[None])
    page, row = divmod(slot, cache.page_rows)
    target = cache.pages[page]
    start = row * cache.record.data_stride
    target[start : start + cache.record.data_bytes] = data[0]
    start = cache.record.scale_base(cache.page_rows) + row * cache.record.scale_stride
    target[start : start + cache.record.scale_bytes] = scales[0]
