"""The Hopper body for few heads: its budget, and how the host chooses and splits. No GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sparse_mla.cache.records import MXFP8, MXFP8_PLANAR, NVFP4, V4
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import (
    FEW_HEADS,
    MOST_TOKENS_OF_FEW_HEADS,
    head_tiles,
)
from sparse_mla.kernels.hopper.build import MANY_HEADS, Variant
from sparse_mla.testing.inputs import make_problem

NVCC = shutil.which("nvcc")
VARIANTS = {
    "8 heads": (Variant(MXFP8, MXFP8, 1, True, True, False, 1), 32),
    "16 heads, nvfp4": (Variant(MXFP8, NVFP4, 1, True, False, False, 2), 32),
    "24 heads, planar split": (Variant(MXFP8_PLANAR, MXFP8_PLANAR, 8, True, True, True, 3), 64),
    "8 heads, v4": (Variant(V4, V4, 3, False, False, False, 1), 32),
    "32 heads": (Variant(MXFP8, MXFP8, 1, True, True, False, 4), 420),
}
"""Variant and the bytes that it may spill."""
REGISTERS_AT_ENTRY = 96  # 65,536 over 640 threads, in steps of 8


@pytest.mark.parametrize("name", list(VARIANTS))
def test_registers_and_spills(name: str, tmp_path: Path) -> None:
    if NVCC is None:
        pytest.skip("nvcc is not installed: the budget cannot be checked here")
    variant, most_spilled = VARIANTS[name]
    (tmp_path / "few_heads.cu").write_text(variant.body.source())
    macros = [f"-D{key}={value}" for key, value in variant.macros().items()]
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [NVCC, *target, *macros, "-o", str(tmp_path / "a.cubin"), str(tmp_path / "few_heads.cu")],
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    if "Unsupported gpu architecture" in text:
        pytest.skip("this nvcc does not know sm_90a")
    assert done.returncode == 0, text
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
    ("heads", "tiles"),
    [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3), (25, 4), (32, 4), (33, 0), (64, 0)],
)
def test_heads_choose_the_body(heads: int, tiles: int) -> None:
    for tokens in (1, 128, 4096):
        assert head_tiles(heads, tokens, batch_invariant=True) == tiles
    assert head_tiles(heads, 1, batch_invariant=False) == tiles


def test_a_limit_of_tokens_counts_unless_the_batch_must_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MOST_TOKENS_OF_FEW_HEADS, 32, 64)
    assert head_tiles(32, 64, batch_invariant=False) == 4
    assert head_tiles(32, 65, batch_invariant=False) == 0
    assert head_tiles(32, 65, batch_invariant=True) == 4


@pytest.mark.parametrize(
    ("tokens", "tiles", "splits"),
    [
        *((1, 10, 8), (15, 10, 8), (16, 10, 4), (30, 10, 4), (31, 10, 3), (39, 10, 3)),
        *((40, 10, 2), (66, 10, 2), (67, 10, 1), (1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 7, 4)),
    ],
)
def test_splits_keep_every_cluster_resident(tokens: int, tiles: int, splits: int) -> None:
    assert hopper.choose_splits(FEW_HEADS, tokens, tiles, 132) == splits


def test_a_call_is_split_by_its_body() -> None:
    few = make_problem(tokens=32, heads=8, window_keys=128, compressed_keys=512).call()
    assert hopper.splits_of(few, 132) == 3
    assert hopper.splits_of(replace(few, batch_invariant=True), 132) == 1
    many = make_problem(tokens=32, heads=64, window_keys=128, compressed_keys=512).call()
    assert hopper.splits_of(many, 132) == 2
