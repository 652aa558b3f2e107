"""The kernel bodies for Hopper and which of them runs a call, in blocks of how many heads: one table.

attend.cu      blocks of 64, 32 or 16 heads of a token (`wgmma`); fewer heads cost as much as a whole block
few_heads.cu   blocks of 8 heads (`mma.sync`)

Every block is work of its own: 64 heads of one token are done soonest as 8 rows of 8 heads, on 64 multiprocessors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
SHARED_BYTES = 232_448
"""Dynamic shared memory of a CTA, what a multiprocessor has; the sources state the same number."""
HEADS_OF_A_TILE = 8
"""A block is one tile of heads, or several."""
MICROSECONDS: dict[int, dict[int, float]] = {
    8: {
        1: 6.4,
        15: 7.4,
        16: 8.3,
        30: 9.1,
        31: 10.0,
        39: 10.6,
        40: 11.4,
        66: 12.1,
        67: 15.1,
        128: 17.2,
        256: 30.7,
        512: 53.3,
    },
    16: {1: 8.1, 15: 8.7, 30: 9.9, 31: 10.7, 66: 12.5, 67: 17.1, 128: 18.3, 256: 32.5, 512: 60.3},
    32: {
        1: 10.4,
        15: 10.9,
        23: 11.9,
        24: 12.0,
        66: 13.9,
        67: 18.6,
        128: 19.7,
        256: 36.0,
        512: 68.2,
    },
    64: {1: 14.4, 15: 15.3, 16: 16.4, 66: 17.6, 67: 23.9, 128: 24.9, 256: 46.8, 512: 95.3},
}
"""Time of a launch by heads of a block and rows of work (tokens x blocks); `block_heads` takes the least.

Measured on an H200 with one block a token (docs/performance.md, 528-byte rows, 128 + 512 keys), on both sides of where
rows are shared out to fewer CTAs. Other records and longer lists are taken to order the bodies alike.
"""
BLOCKS = tuple(MICROSECONDS)
"""Heads of every block."""
SEVERAL_BLOCKS = {8: 0.92, 16: 0.92, 32: 0.97, 64: 1.0}
"""Share of that time where blocks of one token read the same rows, from the L2."""
SECOND_LAUNCH = 2.0
"""Microseconds that a second launch of a call must save: it costs the host time of its own."""
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
    threads: tuple[tuple[int, int], ...]
    """(tiles of heads of a block, threads of a CTA)."""

    def threads_of(self, head_tiles: int) -> int:
        """Threads of a CTA that works on blocks of so many tiles of heads."""
        return dict(self.threads)[head_tiles]

    def source(self, folder: Path = SOURCE_FOLDER) -> str:
        """The whole translation unit, headers inlined, of the files in a folder."""
        text = (folder / self.file).read_text()
        for name in self.headers:
            header = (folder / name).read_text().replace("#pragma once", "")
            text = text.replace(f'#include "{name}"', header)
        return text


MANY_HEADS = Body(
    "many heads",
    "attend.cu",
    (
        "arguments.cuh",
        "instructions.cuh",
        "attend_parts.cuh",
        "attend_rows.cuh",
        "attend_query.cuh",
        "attend_values.cuh",
        "attend_scores.cuh",
    ),
    ((2, 640), (4, 640), (8, 512)),
)
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
    ((1, 640),),
)

BODIES = {8: FEW_HEADS, 16: MANY_HEADS, 32: MANY_HEADS, 64: MANY_HEADS}
"""Which source works on blocks of so many heads."""
CLUSTERS_OF_132: dict[int, tuple[tuple[int, int], ...]] = {
    8: ((8, 15), (4, 30), (3, 39), (2, 66)),
    16: ((4, 30), (2, 66)),
    32: ((4, 23), (2, 66)),
    64: ((4, 15), (2, 66)),
}
"""By heads of a block: (CTAs that share a row, as a cluster; rows at most that are shared so on 132 multiprocessors), largest first.

Measured on an H200. Clusters that are not resident together start when others are done: 15 of 8 CTAs are, 30 of 4, 39
of 3, 66 of 2, and a row more takes twice as long. From 16 heads on clusters of 8 take longer than those of 4.
"""
BF16_BLOCKS = tuple(block for block, body in BODIES.items() if body is MANY_HEADS)
"""Blocks whose products can take bf16 numbers."""


@functools.cache
def block_heads(
    num_heads: int, num_tokens: int, batch_invariant: bool, blocks: tuple[int, ...] = BLOCKS
) -> int:
    """Heads of a block of work with which a call runs, one of `blocks`.

    A batch-invariant call does not look at the number of tokens: bodies and splits round differently.
    """
    if batch_invariant:
        return next((block for block in blocks if block >= num_heads), blocks[-1])
    return min(blocks, key=lambda block: _launch_microseconds(num_heads, num_tokens, block))


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
    clusters or takes smaller blocks, as a call of so few tokens does; the least sum of `MICROSECONDS` and `SECOND_LAUNCH`
    says whether. Those are times of whole launches, one after the other. Nothing is known of other devices, nor of shorter lists, where the
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

    def cost(launches: tuple[int, ...]) -> float:
        micros = sum(_least_microseconds(num_heads, tokens, blocks) for tokens in launches)
        return micros + SECOND_LAUNCH * (len(launches) - 1)

    return min(choices, key=cost)


@functools.cache
def _least_microseconds(num_heads: int, num_tokens: int, blocks: tuple[int, ...]) -> float:
    """What one launch takes in the best of these blocks."""
    return min(_launch_microseconds(num_heads, num_tokens, block) for block in blocks)


def _launch_microseconds(num_heads: int, num_tokens: int, block: int) -> float:
    """What a call takes in blocks of so many heads."""
    blocks = -(-num_heads // block)
    share = SEVERAL_BLOCKS[block] if blocks > 1 else 1.0
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
