"""How each kernel here is launched: measured tables, nothing is tuned in a step.

A config is chosen from sizes that do not change what is compiled more than the table has rows; every
other size is a run-time value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """Shape of one program of the attention kernel."""

    heads: int  # heads of a program, at least 16
    keys: int  # keys of a tile
    num_warps: int
    query_through_out: bool = False  # see `_load_query`
    ahead: bool = True  # rows one tile ahead, in registers; see `_attend_tiles`
    registers: int | None = None  # most registers of a thread; None = the compiler's choice


FEW_HEADS = AttendConfig(16, 64, 8)
"""16 rows are the smallest matrix instruction of every GPU; 84 KB of shared memory fit all of them.
H200, 8 heads, 128 tokens, 640 keys: 49.4 to 51.6 us; 32 keys a tile 1.4 times, 4 warps 1.6, keys on the rows of the
matrix instruction 1.3, 16 warps or two programs on a multiprocessor 1.4 to 1.9 times as long."""
MANY_HEADS_HOPPER = AttendConfig(64, 64, 8, query_through_out=True, ahead=False)
"""64 rows are what Hopper's matrix instruction needs; 8 warps hold the 64 x 512 accumulator.
H200, 64 heads, 128 tokens: 84.8 us; the query kept in registers 137.5, 32 keys a tile 92.0, and
FEW_HEADS, which widens every key four times, 226."""

MAX_SPLITS = 16


def attend_config(
    capability: tuple[int, int], num_heads: int, num_tokens: int, num_sms: int
) -> AttendConfig:
    """The config of a call.

    Many heads share a program only where the instruction set rewards it and where small blocks would
    not all run at once (H200, 64 heads: 32 tokens 56 us in small blocks and 71 in large ones, 64
    tokens 145 and 76).
    """
    small_programs = num_tokens * -(-num_heads // FEW_HEADS.heads)
    if capability[0] == 9 and num_heads > FEW_HEADS.heads and small_programs > num_sms:
        return MANY_HEADS_HOPPER
    return FEW_HEADS


def attend_splits(
    config: AttendConfig, num_tokens: int, num_heads: int, num_keys: int, num_sms: int
) -> int:
    """Programs that share the keys of one token, 1 = none: as many as run at once.

    One program fills a multiprocessor (registers); a second wave cost more than it gave (8 tokens, 64
    heads: 4 splits 28.5 us, 8 splits 46.4; 32 tokens: 1 split 56.1, 2 splits 74.4). Many heads are never
    split: a second accumulator, to add the parts up, does not fit beside the first (1040 bytes of spills;
    64 tokens, 64 heads: 1 split 76.1 us, 2 splits 105.6).
    """
    if config.heads >= MANY_HEADS_HOPPER.heads:
        return 1
    programs = num_tokens * -(-num_heads // config.heads)
    tiles = -(-num_keys // config.keys)
    return max(1, min(num_sms // max(programs, 1), tiles, MAX_SPLITS))


WRITE_ROWS, WRITE_WARPS = 1, 1
"""Rows of a program of the writer. H200, 1 / 128 / 4096 rows of 528 bytes: 1.7 / 1.9 / 5.6 us, 4 rows in 4 warps
2.1 / 2.2 / 6.0."""
GATHER_ROWS = 8
"""Rows of a program of the gather."""
METADATA_ROWS = 64
"""Rows of a program of the per-row metadata kernels."""
LANES = 256
"""Lanes of a list that a metadata kernel handles at a time."""
