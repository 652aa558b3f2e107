"""The kernel bodies for Hopper and which of them runs a call: one table.

attend.cu      64 heads of a token at a time (`wgmma`); fewer heads cost as much
few_heads.cu   at most 32 heads (`mma.sync`, keys on the rows), in steps of 8 heads
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
HEADS_OF_A_TILE = 8
"""Heads are padded to a multiple of it by `few_heads.cu`."""
MOST_TOKENS_OF_FEW_HEADS: dict[int, int | None] = {8: None, 16: None, 24: None, 32: None}
"""Padded heads and the most tokens for which `few_heads.cu` is the faster body; None = any number, not listed = none.

Measured on an H200 (docs/performance.md, 528-byte rows, T = 1 / 32 / 64 / 128 / 512): 8 heads 7.0 / 11.9 / 14.7 / 20.3 / 60.1 us,
16 heads 8.6 / 13.4 / 16.2 / 21.6 / 67.8, 32 heads 13.5 / 20.2 / 25.7 / 35.0 / 119.0; 64 heads in `attend.cu`
17.3 / 23.4 / 24.8 / 35.7 / 128.9. So 32 heads lose 4 % around 64 tokens. 24 heads were not timed.
"""


@dataclass(frozen=True, slots=True)
class Body:
    """One CUDA source and how a CTA of it is launched."""

    name: str
    file: str
    headers: tuple[str, ...]
    threads: int
    shared_bytes: int  # dynamic shared memory of a CTA
    clusters_of_132: tuple[tuple[int, int], ...]
    """(CTAs of a cluster, clusters that are resident together on 132 multiprocessors), largest first (H200)."""

    def source(self) -> str:
        """The whole translation unit, headers inlined."""
        text = (SOURCE_FOLDER / self.file).read_text()
        for name in self.headers:
            header = (SOURCE_FOLDER / name).read_text().replace("#pragma once", "")
            text = text.replace(f'#include "{name}"', header)
        return text


FEW_HEADS = Body(
    "few heads",
    "few_heads.cu",
    ("few_heads_parts.cuh", "arguments.cuh", "few_heads_scores.cuh", "few_heads_values.cuh"),
    640,
    232_448,
    ((8, 15), (4, 30), (3, 39), (2, 66)),
)
"""Shared memory is what an SM has: the source fills it with tiles. Rows beyond the resident clusters start when others
are done: 32 tokens of 8 heads take 13.6 us in clusters of 3, 23.3 us in clusters of 4."""


def head_tiles(num_heads: int, num_tokens: int, batch_invariant: bool) -> int:
    """Tiles of 8 heads with which `few_heads.cu` runs a call, or 0: the 64-head body runs it.

    A batch-invariant call does not look at the number of tokens: both bodies round differently.
    """
    tiles = -(-num_heads // HEADS_OF_A_TILE)
    padded = tiles * HEADS_OF_A_TILE
    if padded not in MOST_TOKENS_OF_FEW_HEADS:
        return 0
    most = MOST_TOKENS_OF_FEW_HEADS[padded]
    return tiles if most is None or batch_invariant or num_tokens <= most else 0
