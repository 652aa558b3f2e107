"""Compressed writer in Triton."""

from __future__ import annotations

from sparse_mla.kernels.triton.write_window import store_rotated
from sparse_mla.kernels.write_contract import WriteCompressedCall


def write_compressed(call: WriteCompressedCall) -> None:
    """Store the rows that close a group, rotated at the group's first position: one launch."""
    store_rotated(call.cache, call.slots, call.latents, call.positions, call.rope, call.ratio)
