"""Norm, rotate, quantise and store index keys."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import scatter_rows
from sparse_mla.config.rope import apply_rope
from sparse_mla.kernels.index_contract import WriteIndexKeysCall
from sparse_mla.kernels.torch.rms_norm import rms_norm


def write_index_keys(call: WriteIndexKeysCall) -> None:
    """Store the rows whose slot is not negative; bf16 after the norm and again after the rotation."""
    normed = rms_norm(call.keys, call.norm_weight, call.eps)
    rotated = apply_rope(normed, group_positions(call.positions, call.ratio), call.rope)
    scatter_rows(call.cache, call.slots, rotated.to(torch.bfloat16))


def group_positions(positions: Tensor, ratio: int) -> Tensor:
    """Position of the first token of each row's group, `(p // ratio) * ratio`."""
    if ratio == 1:
        return positions
    return torch.div(positions, ratio, rounding_mode="floor") * ratio
