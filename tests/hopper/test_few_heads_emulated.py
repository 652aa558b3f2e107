"""`few_heads.cu` compiled for the CPU and run thread by thread against the float64 oracle. No GPU needed.

Covers what the source computes, where it reads and writes, and how its roles wait for each other; not what only
real memory can break. `tests/gpu/test_hopper.py` is the same on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper.bodies import FEW_HEADS
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import make_problem

RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}


@pytest.mark.parametrize(
    ("records", "heads", "splits"),
    [
        (("mxfp8", "mxfp8"), 8, 1),
        (("mxfp8", "mxfp8"), 32, 3),
        (("mxfp8", "nvfp4"), 16, 1),
        (("v4", "v4"), 8, 1),
        (("mxfp8_planar", "nvfp4_planar"), 24, 1),
        pytest.param(("mxfp8_planar", "mxfp8_planar"), 8, 8, marks=pytest.mark.slow),
        pytest.param(("nvfp4", "nvfp4"), 32, 1, marks=pytest.mark.slow),
        pytest.param(("nvfp4", "v4"), 8, 2, marks=pytest.mark.slow),
        pytest.param(("v4", "nvfp4"), 16, 4, marks=pytest.mark.slow),
        pytest.param(("mxfp8", "nvfp4_planar"), 8, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_records(records: tuple[str, str], heads: int, splits: int, emulator: Any) -> None:
    problem = make_problem(
        tokens=5 if splits == 1 else 2,
        heads=heads,
        window_keys=128,
        compressed_keys=270,
        window_record=records[0],
        compressed_record=records[1],
        window_page_rows=48,
        compressed_page_rows=1 if splits > 1 else 64,
        page_padding_bytes=4096,
        offset_rows=3,
        **RAGGED,
    )
    emulator.check(FEW_HEADS, problem, splits=splits, fp8=True)


@pytest.mark.parametrize("heads", [1, 7, 13])
def test_heads_and_layouts(heads: int, emulator: Any) -> None:
    layout = Layout.CHUNK_INTERLEAVED
    problem = make_problem(
        tokens=4, heads=heads, window_keys=133, compressed_keys=70, strided=True, **RAGGED
    )
    emulator.check(FEW_HEADS, problem, problem.call(query_layout=layout), fp8=True, layout=layout)


@pytest.mark.parametrize("key_scale", [2.0**-12, 64.0])
def test_small_and_large_keys(key_scale: float, emulator: Any) -> None:
    problem = make_problem(tokens=4, heads=8, compressed_keys=400, key_scale=key_scale)
    emulator.check(FEW_HEADS, problem, fp8=True)


@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"), [(0, None), (0, 0), (1, 15), (16, 17), (0, 130)]
)
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_widths(window_keys: int, compressed_keys: int | None, lengths: str, emulator: Any) -> None:
    problem = make_problem(
        tokens=4,
        heads=8,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
    )
    emulator.check(FEW_HEADS, problem, fp8=True)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
def test_sinks_without_rotations(sink: float | None, emulator: Any) -> None:
    problem = make_problem(tokens=3, heads=8, window_keys=60, compressed_keys=90, sink=sink)
    call = problem.call(rotate_query=False, unrotate_output=False)
    emulator.check(FEW_HEADS, problem, call, fp8=True)


def test_the_speed_of_warps_changes_no_bit(emulator: Any) -> None:
    problem = make_problem(tokens=6, heads=8, compressed_keys=300, **RAGGED)
    outs = []
    for seed in range(12):
        out = problem.allocate_out(fp8=True)
        emulator.run(FEW_HEADS, problem.call(), out, ctas=2, seed=seed)
        outs.append(out)
    assert all(bool((out.data == outs[0].data).all()) for out in outs)
    assert_matches_oracle(problem.call(), outs[0], HOPPER_BODY)


def test_a_query_that_is_nan_is_nan_in_its_row_and_nowhere_else(emulator: Any) -> None:
    problem = make_problem(tokens=2, heads=8, compressed_keys=90)
    q = problem.q.clone()
    q[0, 1, 5] = float("nan")
    clean, nan = problem.allocate_out(), problem.allocate_out()
    emulator.run(FEW_HEADS, problem.call(), clean)
    emulator.run(FEW_HEADS, replace(problem.call(), q=q), nan)
    assert bool(nan.data[0, 1].isnan().all())
    clean.data[0, 1] = nan.data[0, 1] = 0
    assert torch.equal(nan.data, clean.data)
    assert nan.lse is not None
    assert nan.lse.isnan().nonzero().tolist() == [[0, 1]]
