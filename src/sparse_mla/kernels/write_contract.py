"""What the cache writers are given: the same in every kernel folder.

A written row is the latent with its last 64 dims rotated in float32, rounded to bf16, then encoded with
the cache's record. Rows with a negative slot write nothing, whatever their latent and position hold; no
byte outside the written rows changes. Two rows with one slot: one of them wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparse_mla.cache.paged import PagedCache


@dataclass(frozen=True, slots=True)
class WriteWindowCall:
    """Store window latents, and rotate queries on the way if asked."""

    latents: Tensor  # bf16 [T, 512], not yet rotated, any row stride; not modified
    cache: PagedCache
    slots: Tensor  # int32 or int64 [n], n <= T: rows n.. are not stored
    positions: Tensor  # int32 or int64 [T]; clamped to the table
    rope: Tensor  # float32 [max_positions, 64], cos 32 then sin 32
    q: Tensor | None = None  # bf16 [T, H, 512], any token and head stride
    q_out: Tensor | None = None  # bf16 [T, H, 512] for the rotated query; may be q itself


@dataclass(frozen=True, slots=True)
class WriteCompressedCall:
    """Store compressed latents: rows with slot >= 0 whose position p closes a group, (p + 1) % ratio == 0.

    The rotation is that of the group's first token, position (p // ratio) * ratio.
    """

    latents: Tensor  # bf16 [T, 512], not yet rotated; rows that close no group may hold anything
    cache: PagedCache
    slots: Tensor  # int32 or int64 [n], n <= T
    positions: Tensor  # int32 or int64 [T]
    rope: Tensor  # float32 [max_positions, 64]
    ratio: int  # tokens of a group, >= 1
