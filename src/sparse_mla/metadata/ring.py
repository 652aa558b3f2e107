"""Metadata of the compressor's ring: where each row of a step keeps its state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparse_mla.errors import ArgumentError
from sparse_mla.metadata.batch import RING, StepBatch
from sparse_mla.metadata.window import SparseSWAMetadata


@dataclass(frozen=True, slots=True)
class RingMetadata:
    """Ring rows of one step: `block * capacity + p % capacity`, -1 for padding and the null block 0."""

    slots: Tensor  # int64 [T]
    token_to_req_indices: Tensor  # int32 [T]
    query_start_loc: Tensor  # int32 [R + 1]


def ring_metadata(batch: StepBatch, window: SparseSWAMetadata) -> RingMetadata:
    """Ring metadata of a step.

    Raises:
        ArgumentError: the batch has no ring slots.
    """
    if RING not in batch.slot_mappings:
        raise ArgumentError(
            "batch.slot_mappings", sorted(batch.slot_mappings), f"slots of group {RING!r}"
        )
    return RingMetadata(
        slots=batch.slot_mappings[RING],
        token_to_req_indices=window.token_to_req_indices,
        query_start_loc=batch.query_start_loc,
    )
