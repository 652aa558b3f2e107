"""What an attention kernel is given and what it fills: the same in every kernel folder.

    z_k = scale * <rot(q_h), key_k>          over the valid keys of both sets, one softmax
    o_h = sum_k exp(z_k - m) key_k / (sum_k exp(z_k - m) + exp(sink_h - m))
    lse_h = m + ln sum_k exp(z_k - m)        natural log, without the sink

A key counts if its lane is below the row's length, its index is not negative and its index is below
the cache's number of slots. A row without a key gives output 0, lse +inf and max -inf.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.metadata.plan import TileSchedulerPlan

HEAD_DIM = 512
ROPE_DIM = 64
MAX_HEADS = 128
"""Most query heads of one call."""
OUTPUT_BLOCK = 32
"""Consecutive dims of one head that share one scale of the FP8 output."""


@dataclass(frozen=True, slots=True)
class KeySet:
    """One paged cache and the rows of it that each query attends. Duplicates count twice."""

    cache: PagedCache
    indices: Tensor  # int32 [T, K] slots, negative = none; any row stride, last stride 1
    lengths: Tensor | None = None  # int32 [T], lanes at or past it are ignored; None = K

    @property
    def width(self) -> int:
        """Lanes of a row, K."""
        return self.indices.shape[1]


class Layout(enum.Enum):
    """Order of a token's query or output values.

    standard             query h*512 + d; output group: h*512 + d
    chunk_interleaved    query (d//16)*(16*H) + h*16 + d%16; output group of `hpg` heads:
                         ((d//32)*hpg + h)*32 + d%32 (the fused kernels' order, spec of FlashMLA)
    """

    STANDARD = "standard"
    CHUNK_INTERLEAVED = "chunk_interleaved"


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Everything that attention reads."""

    q: Tensor  # bf16 [T, H, 512], any token and head stride, last stride 1
    window: KeySet
    compressed: KeySet | None
    scale: float
    sink: Tensor | None  # float32 [H]; -inf = no sink, +inf = output 0
    positions: Tensor | None  # int32 or int64 [T]; needed by the two rotations
    rope: Tensor | None  # float32 [max_positions, 64], cos 32 then sin 32
    rotate_query: bool  # rotate the last 64 dims of q in float32, round to bf16
    unrotate_output: bool  # rotate the last 64 output dims back, in float32, before any rounding
    query_layout: Layout = Layout.STANDARD
    plan: TileSchedulerPlan | None = None
    batch_invariant: bool = False  # a row's bits must not depend on the other rows of the call
    query_scale: Tensor | None = None  # float32 [T, H] contiguous, multiplies a row's logits

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.q.shape[1]


@dataclass(frozen=True, slots=True)
class AttendOut:
    """Everything that attention fills; allocated by the op, written whole by the kernel.

    With `scales` the output is FP8: one ue8m0 byte b for 32 dims of a head, value = code * 2**(b-127),
    b = clamp(ceil(log2(max(amax, 1e-4) / 448)) + 127, 0, 255). Bytes are numbered in a group of heads:
    standard order `h*16 + d//32`, chunk-interleaved order `(d//32)*heads_per_group + h`; byte 4w+i of a
    group is byte i (little endian) of its word w.
    """

    data: Tensor  # bf16 [T, H, 512] contiguous, or uint8 [T, G, heads_per_group*512] contiguous
    scales: Tensor | None  # int32 [T, G, 4*heads_per_group], strides (1, 4*hpg*A, A), A >= T
    lse: Tensor | None  # float32 [T, H]
    max_logits: Tensor | None  # float32 [T, H]
    heads_per_group: int = 8
    layout: Layout = Layout.STANDARD

    @property
    def is_fp8(self) -> bool:
        """Whether the output is quantised."""
        return self.scales is not None


def allocate_scales(num_tokens: int, num_groups: int, words: int, device: torch.device) -> Tensor:
    """int32 [num_tokens, num_groups, words], token-major innermost and padded to 16 bytes.

    Strides (1, words * A, A) with A = num_tokens rounded up to a multiple of 4, so that a TMA can read
    a word of consecutive tokens. The padding is zero.
    """
    aligned = -(-num_tokens // 4) * 4
    storage = torch.zeros(num_groups, words, aligned, dtype=torch.int32, device=device)
    return storage.permute(2, 0, 1)[:num_tokens]
