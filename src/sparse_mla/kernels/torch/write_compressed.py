"""Compressed writer in plain PyTorch."""

from __future__ import annotations

import torch

from sparse_mla.kernels.torch.write_window import store_rotated
from sparse_mla.kernels.write_contract import WriteCompressedCall


def write_compressed(call: WriteCompressedCall) -> None:
    """Store the rows that close a group, rotated at the group's first position."""
    rows = call.slots.shape[0]
    positions = call.positions[:rows].long()
    closes = torch.remainder(positions + 1, call.ratio) == 0
    slots = torch.where(closes, call.slots, -1)
    first = torch.div(positions, call.ratio, rounding_mode="floor") * call.ratio
    store_rotated(call.cache, slots, call.latents[:rows], first, call.rope)
