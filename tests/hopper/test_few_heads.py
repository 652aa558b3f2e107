"""The Hopper body for few heads: its budget, and how the host chooses and splits. No GPU needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chosen_blocks import CHOSEN

from sparse_mla.cache.records import MXFP8, MXFP8_PLANAR, NVFP4, V4
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import (
    FEW_HEADS,
    MANY_HEADS_BLOCK,
    MICROSECONDS,
    block_heads,
    estimated_microseconds,
    head_tiles,
)
from sparse_mla.kernels.hopper.build import MANY_HEADS, Variant
from sparse_mla.testing.inputs import make_problem

VARIANTS = {
    "8 heads": (Variant(MXFP8, MXFP8, 1, True, True, False, 1), 0),
    "16 heads, nvfp4": (Variant(MXFP8, NVFP4, 1, True, False, False, 2), 0),
    "24 heads, planar split": (Variant(MXFP8_PLANAR, MXFP8_PLANAR, 8, True, True, True, 3), 80),
    "8 heads, v4": (Variant(V4, V4, 3, False, False, False, 1), 0),
    "32 heads": (Variant(MXFP8, MXFP8, 1, True, True, False, 4), 160),
    "32 heads, nvfp4 and v4": (Variant(NVFP4, V4, 1, True, False, False, 4), 220),
}
"""Variant and the bytes that it may spill."""
REGISTERS_AT_ENTRY = 96  # 65,536 over 640 threads, in steps of 8


@pytest.mark.parametrize("name", list(VARIANTS))
def test_registers_and_spills(
    name: str, ptxas: Callable[[Variant, Path], str], tmp_path: Path
) -> None:
    variant, most_spilled = VARIANTS[name]
    text = ptxas(variant, tmp_path)
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    assert used is not None
    assert spilled is not None
    assert int(used[1]) == REGISTERS_AT_ENTRY
    assert int(spilled[1]) <= most_spilled, text


def test_the_launch_is_what_the_source_says() -> None:
    text = FEW_HEADS.source()
    assert f"THREADS = {FEW_HEADS.threads};" in text
    assert f"FITTING = ({FEW_HEADS.shared_bytes} - ROWS)" in text
    assert FEW_HEADS.threads * REGISTERS_AT_ENTRY <= 65_536
    assert '#include "few_heads' not in text


def test_variants_name_their_body() -> None:
    few = Variant(MXFP8, NVFP4, 1, True, False, False, 3)
    assert few.body is FEW_HEADS
    assert few.macros()["HEAD_TILES"] == 3
    many = replace(few, head_tiles=0)
    assert many.body is MANY_HEADS
    assert "HEAD_TILES" not in many.macros()


@pytest.mark.parametrize(
    ("heads", "block"),
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (17, 24),
        (24, 24),
        (25, 32),
        (32, 32),
        (33, 64),
        (128, 64),
    ],
)
def test_a_batch_invariant_call_looks_at_heads_only(heads: int, block: int) -> None:
    for tokens in (1, 128, 4096):
        assert block_heads(heads, tokens, batch_invariant=True) == block


@pytest.mark.parametrize(
    ("heads", "tokens", "block"),
    [
        *(
            (1, 1, 8),
            (8, 4096, 8),
            (16, 1, 8),
            (16, 32, 8),
            (16, 64, 16),
            (16, 4096, 16),
            (20, 512, 24),
        ),
        *((32, 1, 8), (32, 32, 16), (32, 48, 16), (32, 64, 64), (32, 128, 64), (32, 4096, 64)),
        *((33, 1, 8), (64, 1, 8), (64, 2, 8), (64, 3, 16), (64, 26, 16), (64, 27, 64)),
        *((64, 128, 64), (64, 4096, 64), (66, 24, 24), (66, 32, 64), (100, 8, 16)),
        *((128, 1, 8), (128, 2, 16), (128, 13, 16), (128, 14, 64), (128, 512, 64)),
        *CHOSEN,  # what tests/gpu runs
    ],
)
def test_the_least_time_chooses_the_block(heads: int, tokens: int, block: int) -> None:
    assert block_heads(heads, tokens, batch_invariant=False) == block


@pytest.mark.parametrize(
    ("block", "rows", "microseconds"),
    [
        *((8, 1, 6.7), (8, 8, 6.7 + 7 / 31 * 3.9), (16, 64, 15.9), (16, 96, 19.35)),
        *((16, 132, 22.8), (64, 133, 55.8), (64, 264, 55.8), (64, 528, 102.2)),
        *((64, 529, 102.2 + 128 / 256 * 46.4), (8, 5280, 56.5 + 4608 / 384 * 37.5)),
    ],
)
def test_times_between_and_beyond_the_entries(block: int, rows: int, microseconds: float) -> None:
    assert estimated_microseconds(block, rows) == pytest.approx(microseconds)


def test_every_block_has_times_in_order() -> None:
    assert list(MICROSECONDS) == [8, 16, 24, 32, MANY_HEADS_BLOCK]
    for times in MICROSECONDS.values():
        assert next(iter(times)) == 1
        assert list(times) == sorted(times)
        assert list(times.values()) == sorted(times.values())
    assert [head_tiles(block) for block in MICROSECONDS] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("blocks", range(2, 17))
def test_blocks_are_divided_by_multiplication(blocks: int) -> None:
    problem = make_problem(tokens=1, heads=8, window_keys=4)
    call, out = problem.call(), problem.allocate_out()
    mul = hopper._arguments(call, out, call.q, blocks, range(1)).block_mul
    for item in (0, 1, blocks - 1, blocks, 12_345, 2**28 // blocks * blocks - 1, 2**28 - 1):
        assert item * mul >> 32 == item // blocks
    assert hopper._arguments(call, out, call.q, 1, range(1)).block_mul == 0


@pytest.mark.parametrize(
    ("tokens", "tiles", "splits"),
    [
        *((1, 10, 8), (15, 10, 8), (16, 10, 4), (30, 10, 4), (31, 10, 3), (39, 10, 3)),
        *((40, 10, 2), (66, 10, 2), (67, 10, 1), (1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 7, 4)),
    ],
)
def test_splits_keep_every_cluster_resident(tokens: int, tiles: int, splits: int) -> None:
    assert hopper.choose_splits(FEW_HEADS, tokens, tiles, 132) == splits


@pytest.mark.parametrize(
    ("heads", "tokens", "block", "splits"),
    [
        (8, 32, 8, 3),
        (64, 1, 8, 8),  # 8 rows of 8 heads
        (64, 20, 16, 1),  # 80 rows of 16 heads
        (64, 40, 64, 2),
    ],
)
def test_a_call_is_split_by_its_body(heads: int, tokens: int, block: int, splits: int) -> None:
    call = make_problem(tokens=tokens, heads=heads, compressed_keys=512).call()
    assert hopper.launches_of(call, 132) == ((range(tokens), block, splits),)
    alone = hopper.launches_of(replace(call, batch_invariant=True), 132)
    assert alone == ((range(tokens), heads, 1),)
