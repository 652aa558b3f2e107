"""The Hopper kernel compiles for sm_90a and keeps the budget at the head of its source. No GPU needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_mla.cache.records import MXFP8, MXFP8_PLANAR, NVFP4, V4
from sparse_mla.kernels.hopper import build
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, MANY_HEADS, SHARED_BYTES, Body
from sparse_mla.kernels.hopper.build import Variant, source

MAX_SPILL_BYTES = 80
VARIANTS = {
    "mxfp8": Variant(MXFP8, MXFP8, 1, True, False, False),
    "mxfp8 lse": Variant(MXFP8, MXFP8, 1, True, True, False, with_lse=True),
    "mxfp8 split": Variant(MXFP8, MXFP8, 4, True, False, True, with_lse=True),
    "nvfp4": Variant(MXFP8, NVFP4, 1, True, False, False),
    "v4 bf16": Variant(V4, V4, 1, False, False, False),
    "bf16 numbers": Variant(MXFP8, NVFP4, 1, True, False, False, with_lse=True, bf16_numbers=True),
    "planar chunked": Variant(MXFP8_PLANAR, MXFP8_PLANAR, 2, True, True, False),
    "32 heads": Variant(MXFP8, MXFP8, 1, True, True, False, head_tiles=4),
    "32 heads, v4 lse": Variant(NVFP4, V4, 2, True, True, True, head_tiles=4, with_lse=True),
    "16 heads": Variant(MXFP8, NVFP4, 1, True, True, False, head_tiles=2),
    "16 heads, bf16 numbers": Variant(
        MXFP8_PLANAR, V4, 4, False, True, False, head_tiles=2, with_lse=True, bf16_numbers=True
    ),
}
MORE_SPILL_BYTES = {VARIANTS["bf16 numbers"]: 144}
"""What a variant may spill that needs more; it was 76 before there were blocks of other sizes, see docs/performance.md."""


@pytest.fixture(scope="module", params=list(VARIANTS), ids=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def report(
    variant: Variant,
    ptxas: Callable[[Variant, Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """What ptxas says about one variant."""
    return ptxas(variant, tmp_path_factory.mktemp("hopper"))


def test_registers_and_spills(variant: Variant, report: str) -> None:
    used = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    assert used is not None
    assert spills is not None
    assert int(used[1]) <= 65_536 // variant.threads
    assert int(spills[1]) <= MORE_SPILL_BYTES.get(variant, MAX_SPILL_BYTES), report


def test_products_are_not_serialised(report: str) -> None:
    assert "Potential Performance Loss" not in report


def test_source_states_the_shared_memory_that_the_launch_asks_for() -> None:
    text = source()
    assert f"constexpr int SHARED_BYTES = {SHARED_BYTES};" in text
    assert f"shared memory {SHARED_BYTES:,} bytes" in text
    assert SHARED_BYTES <= 232_448


@pytest.mark.parametrize("body", [MANY_HEADS, FEW_HEADS], ids=lambda body: body.name)
def test_no_address_is_a_constant(body: Body) -> None:
    """The compiler keeps those in device memory, 3,400 clocks from a CTA's first copy; the host passes the one of zeros."""
    assert body.source().count("zero_row") == 1


def test_register_split_fits_the_register_file() -> None:
    text = source()
    found = re.findall(r"#define VALUES_REGISTERS (\d+)\n#define SCORES_REGISTERS (\d+)", text)
    assert len(found) == len(MANY_HEADS.threads)
    for (values, scores), (_, threads) in zip(found, reversed(MANY_HEADS.threads), strict=True):
        at_entry = 65_536 // threads // 8 * 8  # all that a CTA has to share out
        assert 256 * int(values) + (threads - 256) * int(scores) <= threads * at_entry
        assert int(values) % 8 == int(scores) % 8 == 0


def test_macros_follow_the_records() -> None:
    macros = Variant(MXFP8, NVFP4, 1, True, False, False).macros()
    assert macros["A_ROW_UNITS"] * 16 == MXFP8.row_bytes
    assert macros["B_ROW_UNITS"] * 16 == NVFP4.row_bytes
    assert macros["A_KIND"] != macros["B_KIND"]
    planar = Variant(MXFP8_PLANAR, V4, 1, True, False, False).macros()
    assert planar["A_ROW_UNITS"] * 16 == MXFP8_PLANAR.data_bytes
    assert planar["B_SCALE_STRIDE"] == V4.scale_bytes


def test_every_kv_record_is_read() -> None:
    assert {record.name for record in build.RECORDS} == {
        "v4",
        "mxfp8",
        "mxfp8_planar",
        "nvfp4",
        "nvfp4_planar",
    }
