"""What compressor and indexer kernels are given and what they fill, in every kernel folder."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat


@dataclass(frozen=True, slots=True)
class Ring:
    """Carried compressor state of ratio 2 and where this step's rows lie in it.

    Row `p % capacity` of a request's block holds `u ++ s` of position p. Block 0 is the null block:
    no slot lies in it.
    """

    rows: Tensor  # float32 [blocks, capacity, 2 * dim], any block stride
    slots: Tensor  # int64 [T] block * capacity + p % capacity; negative: neither pool nor store
    request_ids: Tensor  # int32 [T] request of each row; anything valid for padding rows
    query_start_loc: Tensor  # int32 [R + 1] first row of each request

    @property
    def capacity(self) -> int:
        """Positions that a block holds."""
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class CompressCall:
    """Projected rows to pool into latents.

    A latent exists for row t iff its position closes a group, `(p + 1) % ratio == 0`, and (ratio 2)
    its ring slot is not negative. Other rows of the output are zero; consumers skip them.
    """

    projected: Tensor  # ratio 1: bf16 [T, dim] = u; ratio 2: float32 [T, 2 * dim] = u ++ s
    ratio: int  # 1 or 2
    positions: Tensor  # int32 or int64 [T], consecutive within a request; garbage in padding rows
    norm_weight: Tensor  # float32 [dim]
    eps: float
    ring: Ring | None = None  # ratio 2 only


@dataclass(frozen=True, slots=True)
class WriteIndexKeysCall:
    """Projected index keys to norm, rotate, quantise and store.

    Row t is written iff its slot is not negative; it then closes a group and rotates at
    `(p // ratio) * ratio`.
    """

    keys: Tensor  # bf16 [T, 128] = latent @ wk^T
    norm_weight: Tensor  # float32 [128]
    eps: float
    positions: Tensor  # int32 or int64 [T]
    ratio: int
    rope: Tensor  # float32 [max_positions, 64]
    cache: PagedCache  # record index_fp8 or index_mxfp4
    slots: Tensor  # int64 [T] compressed slots, negative: not written; no duplicates


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Quantised indexer queries and the weights that sum their heads.

    score_j = sum_h weights_h * relu(<q_h, k_j>), where an FP8 query counts with its codes only (its
    scale, a power of two, sits in the weight) and an MXFP4 query with its block scales.
    """

    record: RecordFormat  # the keys' record; the codes have its value format
    codes: Tensor  # uint8 [T, heads, data_bytes] e4m3, or e2m1 pairs (even value in the low nibble)
    scales: Tensor | None  # MXFP4: uint8 [T, heads, 4] ue8m0 of 32 values; FP8: None
    weights: Tensor  # float32 [T, heads]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.codes.shape[0]

    @property
    def num_heads(self) -> int:
        """Indexer heads."""
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class PrepareIndexQueriesCall:
    """Projected indexer queries to rotate and quantise."""

    queries: Tensor  # bf16 [T, heads, 128]
    weights: Tensor  # bf16 [T, heads] = x @ weights_proj^T
    positions: Tensor  # int32 or int64 [T]
    rope: Tensor  # float32 [max_positions, 64]
    record: RecordFormat  # index_fp8 or index_mxfp4


@dataclass(frozen=True, slots=True)
class IndexTopkCall:
    """Queries to score against their own request's index keys, and how many to keep.

    Row t sees the keys `0 .. visible[t] - 1` of its request; key j lies in slot
    `block_table[request, j // page_rows] * page_rows + j % page_rows`.
    """

    queries: IndexQueries
    keys: PagedCache
    block_table: Tensor  # int32 [R, max_pages]
    visible: Tensor  # int32 [T]; 0 for padding rows
    query_start_loc: Tensor  # int32 [R + 1] on the host
    max_visible: int  # no row sees more
    topk: int
    candidate_block_size: int = 8
    candidates: Tensor | None = None
    """int32 [T, C] block ids that row t may choose from, ascending, each once; negative = none."""
    request_ids: Tensor | None = None
    """int32 [T] request of each row, on the device; None = from `query_start_loc`, which a captured
    graph cannot follow. Anything valid for padding rows."""


@dataclass(frozen=True, slots=True)
class IndexTopkOut:
    """Lists to fill whole, padding rows included."""

    positions: Tensor  # int32 [T, topk] chosen compressed positions, ascending, -1 suffix
    candidates: Tensor | None = None  # int32 [T, C] best blocks, ascending, -1 suffix


def index_weight_scale(num_heads: int, head_dim: int = 128) -> float:
    """`head_dim**-0.5 * num_heads**-0.5`, a factor of the head weights (2**-6 for 32 heads)."""
    return float((head_dim * num_heads) ** -0.5)


def host_rows(query_start_loc: Tensor) -> list[tuple[int, int]]:
    """First and last + 1 row of every request, from the host copy of the offsets."""
    assert query_start_loc.device == torch.device("cpu")
    offsets = query_start_loc.tolist()
    return list(itertools.pairwise(offsets))
