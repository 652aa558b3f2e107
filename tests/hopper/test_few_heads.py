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
    BLOCKS,
    BODIES,
    FEW_HEADS,
    MANY_HEADS,
    MICROSECONDS,
    SEVERAL_BLOCKS,
    SHARED_BYTES,
    block_heads,
    estimated_microseconds,
)
from sparse_mla.kernels.hopper.build import Variant
from sparse_mla.testing.inputs import make_problem

VARIANTS = {
    "mxfp8": Variant(MXFP8, MXFP8, 1, True, True, False, 1),
    "nvfp4": Variant(MXFP8, NVFP4, 1, True, False, False, 1),
    "planar split": Variant(MXFP8_PLANAR, MXFP8_PLANAR, 8, True, True, True, 1),
    "v4 bf16 split": Variant(V4, V4, 3, False, False, False, 1),
    "nvfp4 and v4": Variant(NVFP4, V4, 1, True, False, False, 1),
}
REGISTERS_AT_ENTRY = 96  # 65,536 over 640 threads, in steps of 8


@pytest.mark.parametrize("name", list(VARIANTS))
def test_registers_and_spills(
    name: str, ptxas: Callable[[Variant, Path], str], tmp_path: Path
) -> None:
    text = ptxas(VARIANTS[name], tmp_path)
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    assert used is not None
    assert spilled is not None
    assert int(used[1]) == REGISTERS_AT_ENTRY
    assert int(spilled[1]) == 0, text


def test_the_launch_is_what_the_source_says() -> None:
    text = FEW_HEADS.source()
    threads = FEW_HEADS.threads_of(1)
    assert f"THREADS = {threads};" in text
    assert f"FITTING = ({SHARED_BYTES} - ROWS)" in text
    assert threads * REGISTERS_AT_ENTRY <= 65_536
    assert '#include "few_heads' not in text


def test_variants_have_the_macros_of_their_body() -> None:
    few = Variant(MXFP8, NVFP4, 1, True, False, False, 1)
    assert few.macros()["HEAD_TILES"] == 1
    assert "WITH_LSE" not in few.macros()
    assert few.body is FEW_HEADS
    many = replace(few, head_tiles=4)
    assert many.body is MANY_HEADS
    assert many.macros()["HEAD_TILES"] == 4
    assert "WITH_LSE" in many.macros()
    assert [variant.threads for variant in (few, many, replace(many, head_tiles=8))] == [
        640,
        640,
        512,
    ]


@pytest.mark.parametrize(
    ("heads", "block"),
    [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (24, 32), (32, 32), (33, 64), (128, 64)],
)
def test_a_batch_invariant_call_looks_at_heads_only(heads: int, block: int) -> None:
    for tokens in (1, 128, 4096):
        assert block_heads(heads, tokens, batch_invariant=True) == block


@pytest.mark.parametrize(
    ("heads", "tokens", "block"),
    [
        *((1, 1, 8), (8, 39, 8), (8, 40, 16), (8, 66, 8), (8, 4096, 8)),
        *((16, 1, 8), (16, 15, 8), (16, 16, 16), (16, 4096, 16)),
        *((20, 10, 8), (20, 11, 16), (20, 33, 16), (20, 34, 32), (20, 512, 32)),
        *((32, 1, 8), (32, 4, 8), (32, 5, 16), (32, 33, 16), (32, 34, 32), (32, 4096, 32)),
        *((33, 1, 8), (33, 128, 64), (64, 1, 8), (64, 4, 16), (64, 16, 16), (64, 17, 32)),
        *((64, 33, 32), (64, 34, 64), (64, 128, 64), (64, 4096, 64), (66, 24, 16), (66, 66, 64)),
        *((100, 18, 16), (100, 19, 64), (128, 1, 8), (128, 2, 16), (128, 16, 32), (128, 17, 64)),
        (128, 512, 64),
        *CHOSEN,  # what tests/gpu runs
    ],
)
def test_the_least_time_chooses_the_block(heads: int, tokens: int, block: int) -> None:
    assert block_heads(heads, tokens, batch_invariant=False) == block


def test_times_between_and_beyond_the_entries() -> None:
    few, many = MICROSECONDS[8], MICROSECONDS[64]
    assert estimated_microseconds(8, 1) == few[1]
    assert estimated_microseconds(8, 8) == pytest.approx(few[1] + 7 / 14 * (few[15] - few[1]))
    assert [estimated_microseconds(64, rows) for rows in (66, 67, 132)] == [
        many[66],
        many[67],
        many[128],
    ]
    assert [estimated_microseconds(64, rows) for rows in (133, 264)] == [many[256]] * 2
    assert estimated_microseconds(64, 528) == many[512]
    slope = (many[512] - many[256]) / 256
    assert estimated_microseconds(64, 529) == pytest.approx(many[512] + 128 * slope)  # a round
    assert estimated_microseconds(64, 5280) == pytest.approx(many[512] + 4608 * slope)


def test_every_block_has_times_in_order() -> None:
    assert (8, 16, 32, 64) == BLOCKS == tuple(BODIES) == tuple(SEVERAL_BLOCKS)
    for times in MICROSECONDS.values():
        assert next(iter(times)) == 1
        assert list(times) == sorted(times)
        assert list(times.values()) == sorted(times.values())


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
    assert hopper.choose_splits(8, tokens, tiles, 132) == splits


@pytest.mark.parametrize(
    ("heads", "tokens", "block", "splits"),
    [
        (8, 32, 8, 3),
        (64, 1, 8, 8),  # 8 rows of 8 heads
        (64, 20, 32, 2),  # 40 rows of 32 heads
        (64, 40, 64, 2),
    ],
)
def test_a_call_is_split_by_its_body(heads: int, tokens: int, block: int, splits: int) -> None:
    call = make_problem(tokens=tokens, heads=heads, compressed_keys=512).call()
    assert hopper.launches_of(call, 132) == ((range(tokens), block, splits),)
    alone = hopper.launches_of(replace(call, batch_invariant=True), 132)
    assert alone == ((range(tokens), heads, 1),)
