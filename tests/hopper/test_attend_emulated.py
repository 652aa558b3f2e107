"""`attend.cu`, and the study that is to follow it, run thread by thread on the CPU against the float64 oracle. No GPU needed.

Covers what the sources compute, where they read and write, and how their roles wait for each other; not what only
real memory and asynchronous products can break. `tests/gpu/test_hopper_attend.py` is the same on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper.bodies import Body
from sparse_mla.kernels.hopper.build import MANY_HEADS
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import make_problem

STUDY = Path(__file__).parents[2] / "benchmarks" / "studies" / "keys_in_registers.cu"
BODIES = {
    "attend": MANY_HEADS,
    "study": replace(MANY_HEADS, name="study", file=str(STUDY)),
}
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}


@pytest.fixture(params=list(BODIES))
def body(request: pytest.FixtureRequest) -> Body:
    if request.param == "study" and not STUDY.is_file():
        pytest.skip(f"{STUDY.name} is not here: only the repository has it")
    return BODIES[request.param]


@pytest.mark.parametrize(
    ("records", "splits"),
    [
        (("mxfp8", "nvfp4"), 1),
        (("v4", "v4"), 1),
        (("mxfp8_planar", "mxfp8_planar"), 4),
        pytest.param(("mxfp8_planar", "nvfp4_planar"), 1, marks=pytest.mark.slow),
        pytest.param(("nvfp4", "v4"), 1, marks=pytest.mark.slow),
        pytest.param(("mxfp8", "mxfp8"), 8, marks=pytest.mark.slow),
        pytest.param(("v4", "v4"), 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_records(body: Body, records: tuple[str, str], splits: int, emulator: Any) -> None:
    problem = make_problem(
        tokens=3 if splits == 1 else 1,
        heads=64,
        window_keys=128,
        compressed_keys=200 if splits == 1 else 400,
        window_record=records[0],
        compressed_record=records[1],
        window_page_rows=48,
        compressed_page_rows=1 if splits > 1 else 64,
        page_padding_bytes=4096,
        offset_rows=3,
        **RAGGED,
    )
    emulator.check(body, problem, splits=splits, fp8=True)


@pytest.mark.parametrize("heads", [40, 66])
def test_heads_and_layouts(body: Body, heads: int, emulator: Any) -> None:
    layout = Layout.CHUNK_INTERLEAVED
    problem = make_problem(
        tokens=2, heads=heads, window_keys=70, compressed_keys=60, strided=True, **RAGGED
    )
    call = problem.call(query_layout=layout)
    emulator.check(body, problem, call, fp8=True, layout=layout)


@pytest.mark.parametrize(("window_keys", "compressed_keys"), [(0, None), (0, 0), (1, 15), (0, 130)])
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_widths(
    body: Body, window_keys: int, compressed_keys: int | None, lengths: str, emulator: Any
) -> None:
    problem = make_problem(
        tokens=3,
        heads=64,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
    )
    emulator.check(body, problem, fp8=True)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
def test_sinks_without_rotations(body: Body, sink: float | None, emulator: Any) -> None:
    problem = make_problem(tokens=2, heads=64, window_keys=60, compressed_keys=90, sink=sink)
    call = problem.call(rotate_query=False, unrotate_output=False)
    emulator.check(body, problem, call, fp8=True)


def test_the_speed_of_warps_changes_no_bit(body: Body, emulator: Any) -> None:
    problem = make_problem(tokens=3, heads=64, compressed_keys=150, **RAGGED)
    outs = []
    for seed in range(5):
        out = problem.allocate_out(fp8=True)
        emulator.run(body, problem.call(), out, ctas=1, seed=seed)
        outs.append(out)
    assert all(bool((out.data == outs[0].data).all()) for out in outs)
    assert_matches_oracle(problem.call(), outs[0], TENSOR_CORE_BODY)
