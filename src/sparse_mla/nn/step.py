"""What the layers of a step share: caches, metadata, rotary tables, and lists of sources.

A step is one forward over the packed rows of several requests. The engine builds one `StepState`
per step (a handful of references, no allocation) and hands it to every layer in ascending layer
order, because an index source overwrites the shared lists that its consumers read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.rope import rope_table
from sparse_mla.config.topology import LayerKind, kinds_present
from sparse_mla.errors import ShapeError
from sparse_mla.metadata.builder import StepMetadata


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Lists that index sources publish and later layers read; every step reuses them."""

    topk: Tensor  # int32 [max_tokens, index_topk] compressed positions, ascending, -1 suffix
    slots: Tensor  # int32 [max_tokens, index_topk] the same as cache slots
    lengths: Tensor  # int32 [max_tokens] valid lanes of a row of `slots`
    candidates: Tensor  # int32 [max_tokens, candidate_topk_blocks] block ids, ascending, -1 suffix

    @classmethod
    def allocate(
        cls, cfg: ModelConfig, max_tokens: int, device: torch.device | str = "cpu"
    ) -> StepBuffers:
        """Buffers for steps of up to `max_tokens` rows, padding rows included.

        Without a candidate source the candidate buffer has no columns.
        """
        check_at_least("max_tokens", max_tokens, 1)
        blocks = cfg.candidate_topk_blocks if cfg.candidate_source_layer_id >= 0 else 0

        def empty(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        return cls(
            topk=empty(max_tokens, cfg.index_topk),
            slots=empty(max_tokens, cfg.index_topk),
            lengths=torch.zeros(max_tokens, dtype=torch.int32, device=device),
            candidates=empty(max_tokens, blocks),
        )

    @property
    def max_tokens(self) -> int:
        """Rows of every buffer."""
        return self.topk.shape[0]


def rope_tables(
    cfg: ModelConfig,
    *,
    num_positions: int | None = None,
    layer_ids: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
) -> dict[LayerKind, Tensor]:
    """The rotary table of every layer kind present, float32 [num_positions, 64] (cos 32, sin 32).

    The two compressed kinds share one table. `num_positions` None means all positions of the model.
    """
    tables: dict[LayerKind, Tensor] = {}
    shared: Tensor | None = None
    for kind in kinds_present(cfg, layer_ids):
        if kind is LayerKind.WINDOW_ONLY:
            tables[kind] = rope_table(cfg, kind, num_positions, device)
        else:
            shared = rope_table(cfg, kind, num_positions, device) if shared is None else shared
            tables[kind] = shared
    return tables


@dataclass(frozen=True, slots=True)
class StepState:
    """Everything but the hidden states that a layer needs for one step of `num_tokens` rows."""

    caches: CachePool
    metadata: StepMetadata
    buffers: StepBuffers
    rope: Mapping[LayerKind, Tensor]  # from `rope_tables`

    def __post_init__(self) -> None:
        if self.num_tokens > self.buffers.max_tokens:
            raise ShapeError(
                "buffers",
                f"room for {self.buffers.max_tokens} rows",
                f"at least the step's {self.num_tokens} rows",
                "allocate StepBuffers with a larger max_tokens",
            )

    @property
    def num_tokens(self) -> int:
        """Rows of the step, padding rows included."""
        return self.positions.shape[0]

    @property
    def positions(self) -> Tensor:
        """int64 [num_tokens]; those of padding rows are garbage."""
        return self.metadata.batch.positions
