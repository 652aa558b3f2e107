"""Compressed writer, one row after the other."""

from __future__ import annotations

from sparse_mla.kernels.reference.write_window import rotate_row, store_row
from sparse_mla.kernels.write_contract import WriteCompressedCall


def write_compressed(call: WriteCompressedCall) -> None:
    """Store the rows that close a group, rotated at the group's first position."""
    for row in range(call.slots.shape[0]):
        slot, position = int(call.slots[row]), int(call.positions[row])
        if slot < 0 or (position + 1) % call.ratio:
            continue
        first = call.positions[row] // call.ratio * call.ratio
        store_row(call.cache, slot, rotate_row(call.latents[row], first, call.rope))
