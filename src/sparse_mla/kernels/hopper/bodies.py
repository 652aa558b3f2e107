"""The kernel bodies for Hopper and which of them runs a call, in blocks of how many heads: one table.

attend.cu      blocks of 64 heads of a token (`wgmma`); fewer heads cost as much
few_heads.cu   blocks of 8, 16, 24 or 32 heads (`mma.sync`, keys on the rows)

Every block is work of its own: 64 heads of one token are done soonest as 8 rows of 8 heads, on 64 multiprocessors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
HEADS_OF_A_TILE = 8
"""`few_heads.cu` works on blocks of 1 to 4 tiles of heads."""
MANY_HEADS_BLOCK = 64
"""Heads of a block of `attend.cu`."""
MICROSECONDS: dict[int, dict[int, float]] = {
    8: {1: 6.7, 32: 10.6, 64: 13.1, 128: 19.0, 512: 56.5},
    16: {1: 7.7, 32: 12.8, 64: 15.9, 128: 22.8, 512: 70.1},
    24: {1: 9.9, 32: 15.6, 64: 19.5, 128: 28.6, 512: 92.7},
    32: {1: 11.5, 32: 17.5, 64: 23.2, 128: 31.6, 512: 101.4},
    MANY_HEADS_BLOCK: {1: 15.3, 32: 19.4, 64: 20.8, 128: 30.0, 256: 55.8, 512: 102.2},
}
"""Time of a launch by heads of a block and rows of work (tokens x blocks); `block_heads` takes the least.

Measured on an H200 with one block a token (docs/performance.md, 528-byte rows, 128 + 512 keys). Other records and longer
lists are taken to order the bodies alike.
"""
BLOCKS = tuple(MICROSECONDS)
"""Heads of every block."""
SEVERAL_BLOCKS = 0.92
"""Share of that time where blocks of one token read the same rows, from the L2: 0.89 to 0.92 for 2, 4 and 8 blocks."""
HALF_EMPTY = 0.92
"""Share of that time which `attend.cu` takes for at most half of its heads, from 128 rows on."""
ROWS_OF_A_ROUND = 132
"""Multiprocessors of an H200."""
TILES_OF_A_ROW = 10
"""64-key tiles of the rows that `MICROSECONDS` was measured with."""


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

    def source(self, folder: Path = SOURCE_FOLDER) -> str:
        """The whole translation unit, headers inlined, of the files in a folder."""
        text = (folder / self.file).read_text()
        for name in self.headers:
            header = (folder / name).read_text().replace("#pragma once", "")
            text = text.replace(f'#include "{name}"', header)
        return text


FEW_HEADS = Body(
    "few heads",
    "few_heads.cu",
    (
        "few_heads_parts.cuh",
        "arguments.cuh",
        "instructions.cuh",
        "few_heads_scores.cuh",
        "few_heads_values.cuh",
    ),
    640,
    232_448,
    ((8, 15), (4, 30), (3, 39), (2, 66)),
)
"""Shared memory is what an SM has: the source fills it with tiles. Rows beyond the resident clusters start when others
are done: 32 tokens of 8 heads take 13.6 us in clusters of 3, 23.3 us in clusters of 4."""


@functools.cache
def block_heads(num_heads: int, num_tokens: int, batch_invariant: bool) -> int:
    """Heads of a block of work with which a call runs: `MANY_HEADS_BLOCK` in `attend.cu`, fewer in `few_heads.cu`.

    A batch-invariant call does not look at the number of tokens: bodies and splits round differently.
    """
    if batch_invariant:
        return next((n for n in MICROSECONDS if n >= num_heads), MANY_HEADS_BLOCK)
    return min(MICROSECONDS, key=lambda n: _launch_microseconds(num_heads, num_tokens, n))


@functools.cache
def tokens_of_launches(
    num_heads: int,
    num_tokens: int,
    tiles: int,
    multiprocessors: int,
    blocks: tuple[int, ...] = BLOCKS,
) -> tuple[int, ...]:
    """Numbers of tokens of the launches of a call, in order: all of them, or those of whole rounds and the rest.

    A round takes as long for one row as for 132. A rest is done sooner by a launch of its own, which shares its rows out to
    clusters or takes smaller blocks, as a call of so few tokens does; the least sum of `MICROSECONDS` says whether. Those
    are times of whole launches, one after the other. Nothing is known of other devices, nor of shorter lists, where the
    start of a second launch weighs more: they take one launch.

    Args:
        num_heads: of the call.
        num_tokens: of the call.
        tiles: 64-key tiles of its list widths.
        multiprocessors: of the device.
        blocks: heads of the blocks that it may run in.
    """
    one: tuple[int, ...] = (num_tokens,)
    if multiprocessors != ROWS_OF_A_ROUND or tiles < TILES_OF_A_ROW:
        return one
    choices = [one]
    for block in blocks:
        rows = -(-num_heads // block)  # of a token
        rounds = num_tokens * rows // ROWS_OF_A_ROUND
        whole = rounds * ROWS_OF_A_ROUND // rows
        if 0 < whole < num_tokens:
            choices.append((whole, num_tokens - whole))
    return min(choices, key=lambda c: sum(_least_microseconds(num_heads, n, blocks) for n in c))


@functools.cache
def _least_microseconds(num_heads: int, num_tokens: int, blocks: tuple[int, ...]) -> float:
    """What one launch takes in the best of these blocks."""
    return min(_launch_microseconds(num_heads, num_tokens, block) for block in blocks)


def _launch_microseconds(num_heads: int, num_tokens: int, block: int) -> float:
    """What a call takes in blocks of so many heads."""
    blocks = -(-num_heads // block)
    share = SEVERAL_BLOCKS if blocks > 1 and block != MANY_HEADS_BLOCK else 1.0
    if block == MANY_HEADS_BLOCK and num_heads <= block // 2:
        share = HALF_EMPTY
    return share * estimated_microseconds(block, num_tokens * blocks)


def estimated_microseconds(heads: int, rows: int) -> float:
    """`MICROSECONDS` of blocks of so many heads, linear between its entries and beyond the last one.

    More rows than multiprocessors run in rounds: 133 rows take as long as 264, which is the entry of 256.
    """
    entries = list(MICROSECONDS[heads].items())
    if rows > 128:
        rows = 128 * -(-rows // ROWS_OF_A_ROUND)
    last = len(entries) - 1
    above = next((i for i in range(1, last) if entries[i][0] >= rows), last)
    (left, low), (right, high) = entries[above - 1], entries[above]
    return low + (rows - left) * (high - low) / (right - left)


def head_tiles(heads: int) -> int:
    """`Variant.head_tiles` of blocks of so many heads."""
    return 0 if heads == MANY_HEADS_BLOCK else heads // HEADS_OF_A_TILE
