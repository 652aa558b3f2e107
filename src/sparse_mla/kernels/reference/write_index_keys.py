"""Norm, rotate, quantise and store index keys: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.kernels.index_contract import WriteIndexKeysCall
from sparse_mla.kernels.reference.compress import norm_row


def write_index_keys(call: WriteIndexKeysCall) -> None:
    """Store the rows whose slot is not negative; see `WriteIndexKeysCall`."""
    for key, slot, position in zip(call.keys, call.slots, call.positions, strict=True):
        if int(slot) < 0:
            continue
        normed = norm_row(key.double(), call.norm_weight, call.eps)
        rotated = rotate_row(normed, int(position) // call.ratio * call.ratio, call.rope)
        data, scales = encode_rows(call.cache.record, rotated[None])
        page, row = divmod(int(slot), call.cache.page_rows)
        call.cache.data_view()[page, row] = data[0]
        call.cache.scale_view()[page, row] = scales[0]


def rotate_row(row: Tensor, position: int, rope: Tensor) -> Tensor:
    """bf16 [dim]: the last 64 values rotated pair by pair, rounded once."""
    rotated = row.double().clone()
    start = row.numel() - rope.shape[1]
    for pair in range(rope.shape[1] // 2):
        cos = float(rope[position, pair])
        sin = float(rope[position, rope.shape[1] // 2 + pair])
        a, b = float(rotated[start + 2 * pair]), float(rotated[start + 2 * pair + 1])
        rotated[start + 2 * pair] = a * cos - b * sin
        rotated[start + 2 * pair + 1] = b * cos + a * sin
    return rotated.to(torch.bfloat16)
