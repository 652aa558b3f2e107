"""Tile-scheduler plans: how one launch of attention shares its rows and keys out over the chip.

One plan per layer kind and step serves all layers of that kind. A plan names the scratch that a launch
needs (partial results of split rows); a `PlanScratch` owns it for all steps, so a step allocates nothing
and CUDA graphs see fixed addresses. `check` compares a plan with a call by sizes only; it reads no tensor
value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import PlanMismatchError

PROGRAMS_PER_SM = 2
"""Programs of a split launch that one multiprocessor should get."""
MAX_SPLITS = 16
TILE_KEYS = 64
"""Keys of a tile, the least that a split is worth."""
TILE_HEADS = 16
"""Fewest heads of a program, which bounds the arrival counters of a row."""
PARTIAL_WIDTH = 512 + 2
"""Float32 values of one partial result: the output, its maximum and its total."""


@dataclass(frozen=True, slots=True)
class TileSchedulerPlan:
    """How attention of one layer kind is launched for up to `max_tokens` rows."""

    kind: LayerKind
    max_tokens: int  # rows that the scratch suffices for
    num_heads: int
    window_keys: int  # list width of the window set
    compressed_keys: int  # list width of the compressed set, 0 = none
    splits: int  # programs that share one row's keys; 1 = none
    batch_invariant: bool  # a row's result must not depend on the other rows
    partial: (
        Tensor | None
    )  # float32 [max_tokens * splits * num_heads * 514]; None if nothing is split
    arrivals: Tensor | None  # int32 [max_tokens * ceil(num_heads / 16)], zero between launches

    def check(
        self,
        num_tokens: int,
        num_heads: int,
        window_keys: int,
        compressed_keys: int,
        device: torch.device,
    ) -> None:
        """Raise `PlanMismatchError` unless the plan was built for such a call."""
        got = (num_heads, window_keys, compressed_keys)
        wanted = (self.num_heads, self.window_keys, self.compressed_keys)
        if got != wanted or num_tokens > self.max_tokens:
            raise PlanMismatchError(
                f"plan: got {num_tokens} tokens and (heads, window keys, compressed keys) {got}; "
                f"allowed: at most {self.max_tokens} tokens and {wanted}; build a plan for this call"
            )
        if self.partial is not None and self.partial.device != device:
            raise PlanMismatchError(
                f"plan: built on {self.partial.device}, called on {device}; build one there"
            )


def choose_splits(tokens: int, heads: int, keys: int, num_sms: int, tile_heads: int = 16) -> int:
    """Programs that share one row's keys, so that small steps fill the chip; 1 = none.

    As many as give every multiprocessor `PROGRAMS_PER_SM` programs, no more than the row has tiles.

    Args:
        tokens: rows of the step.
        heads: query heads.
        keys: lanes of both sets together.
        num_sms: multiprocessors; 0 (a CPU) never splits.
        tile_heads: heads of one program.
    """
    programs = tokens * -(-heads // tile_heads)
    if num_sms == 0 or programs == 0:
        return 1
    tiles = -(-keys // TILE_KEYS)
    return max(1, min(PROGRAMS_PER_SM * num_sms // programs, tiles, MAX_SPLITS))


class PlanScratch:
    """Scratch of split launches, shared by all plans of a builder: their launches follow one another.

    At most `max(PROGRAMS_PER_SM * num_sms * 16, num_heads)` partial rows of 514 float32 values exist
    whatever the step, since a step is split only while its programs leave multiprocessors idle: 8.7 MB on
    132 multiprocessors with 64 heads. The counters are zero between launches; a kernel that counts puts
    them back to zero.
    """

    def __init__(self, num_heads: int, num_sms: int, device: torch.device | str) -> None:
        """Allocate it; nothing if the device has no multiprocessors to fill."""
        check_at_least("num_heads", num_heads, 1)
        check_at_least("num_sms", num_sms, 0)
        self.num_heads, self.num_sms = num_heads, num_sms
        self.partial: Tensor | None = None
        self.arrivals: Tensor | None = None
        if num_sms:
            programs = PROGRAMS_PER_SM * num_sms
            rows = max(programs * TILE_HEADS, num_heads)
            self.partial = torch.empty(rows * PARTIAL_WIDTH, dtype=torch.float32, device=device)
            self.arrivals = torch.zeros(programs, dtype=torch.int32, device=device)


def build_plan(
    kind: LayerKind,
    *,
    tokens: int,
    num_heads: int,
    window_keys: int,
    compressed_keys: int,
    scratch: PlanScratch,
    batch_invariant: bool = False,
) -> TileSchedulerPlan:
    """The plan of one layer kind for steps of `tokens` rows.

    A batch-invariant plan never splits, whatever the step.
    """
    splits = 1
    if not batch_invariant:
        keys = window_keys + compressed_keys
        splits = choose_splits(tokens, num_heads, keys, scratch.num_sms)
    partial = arrivals = None
    if splits > 1 and scratch.partial is not None and scratch.arrivals is not None:
        partial = scratch.partial[: tokens * splits * num_heads * PARTIAL_WIDTH]
        arrivals = scratch.arrivals[: tokens * -(-num_heads // TILE_HEADS)]
    return TileSchedulerPlan(
        kind=kind,
        max_tokens=tokens,
        num_heads=num_heads,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        splits=splits,
        batch_invariant=batch_invariant,
        partial=partial,
        arrivals=arrivals,
    )
