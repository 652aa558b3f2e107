"""`few_heads.cu` compiled for the CPU and run thread by thread against the float64 oracle. No GPU needed.

Covers what the source computes, where it reads and writes, and how its roles wait for each other; not what only
real memory can break. `tests/gpu/test_hopper_few_heads.py` is the same on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, SOURCE_FOLDER, head_tiles
from sparse_mla.kernels.hopper.build import Variant
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent / "emulation"
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
SECTION = "// " + "-" * 64 + " "
BUILDS: dict[Variant, ctypes.CDLL] = {}


def kernel_text() -> str:
    """The source without its instructions, which `device.h` replaces."""
    parts = (SOURCE_FOLDER / "few_heads_parts.cuh").read_text()
    arguments = parts[parts.index("struct KeyArgs") : parts.index(SECTION + "instructions")]
    numbers = parts[parts.index(SECTION + "numbers") :]
    whole = FEW_HEADS.source()
    roles = whole[whole.index("#define KIND_MXFP8") :]
    head = "#define DI inline\n#define INF __int_as_float(0x7f800000)\n"
    return head + arguments + numbers + roles


def library(variant: Variant, folder: Path) -> ctypes.CDLL:
    """A variant compiled for the CPU, once in a session."""
    if COMPILER is None:
        pytest.skip("g++ is not installed: the kernel cannot be emulated here")
    if variant not in BUILDS:
        folder = folder / str(len(BUILDS))
        folder.mkdir()
        (folder / "kernel.inc").write_text(kernel_text())
        macros = [f"-D{name}={value}" for name, value in variant.macros().items()]
        flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
        target = folder / "kernel.so"
        sources = ["-I", str(folder), str(HERE / "run_kernel.cpp"), "-o", str(target)]
        done = subprocess.run(
            [COMPILER, *flags, *macros, *sources], capture_output=True, text=True, check=False
        )
        if "_Float16" in done.stderr:
            pytest.skip("this g++ has no _Float16: the kernel cannot be emulated here")
        assert done.returncode == 0, done.stderr
        BUILDS[variant] = ctypes.CDLL(str(target))
    return BUILDS[variant]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def emulate(
    call: AttendCall, out: AttendOut, folder: Path, splits: int = 1, ctas: int = 3, seed: int = 1
) -> None:
    """What `attend` launches, on `ctas` multiprocessors."""
    compressed = call.window if call.compressed is None else call.compressed
    variant = Variant(
        window=call.window.cache.record,
        compressed=compressed.cache.record,
        splits=splits,
        fp8_output=out.is_fp8,
        out_chunked=out.layout is Layout.CHUNK_INTERLEAVED,
        with_max=out.max_logits is not None,
        head_tiles=head_tiles(call.num_heads, call.num_tokens, False),
    )
    query = hopper._readable_query(call)
    arguments = hopper._arguments(call, out, query, 1)
    grid = call.num_tokens * splits if splits > 1 else min(call.num_tokens, ctas)
    assert library(variant, folder).emulate(ctypes.byref(arguments), grid, seed) == 0


def check(
    problem: AttendProblem, folder: Path, call: AttendCall | None = None, **options: Any
) -> None:
    call = call or problem.call()
    splits, seed = options.pop("splits", 1), options.pop("seed", 1)
    out = problem.allocate_out(**options)
    emulate(call, out, folder, splits, seed=seed)
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)


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
def test_records(records: tuple[str, str], heads: int, splits: int, folder: Path) -> None:
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
    check(problem, folder, splits=splits, fp8=True)


@pytest.mark.parametrize("heads", [1, 7, 13])
def test_heads_and_layouts(heads: int, folder: Path) -> None:
    layout = Layout.CHUNK_INTERLEAVED
    problem = make_problem(
        tokens=4, heads=heads, window_keys=133, compressed_keys=70, strided=True, **RAGGED
    )
    check(problem, folder, problem.call(query_layout=layout), fp8=True, layout=layout)


@pytest.mark.parametrize("key_scale", [2.0**-12, 64.0])
def test_small_and_large_keys(key_scale: float, folder: Path) -> None:
    problem = make_problem(tokens=4, heads=8, compressed_keys=400, key_scale=key_scale)
    check(problem, folder, fp8=True)


@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"), [(0, None), (0, 0), (1, 15), (16, 17), (0, 130)]
)
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_widths(window_keys: int, compressed_keys: int | None, lengths: str, folder: Path) -> None:
    problem = make_problem(
        tokens=4,
        heads=8,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
    )
    check(problem, folder, fp8=True)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
def test_sinks_without_rotations(sink: float | None, folder: Path) -> None:
    problem = make_problem(tokens=3, heads=8, window_keys=60, compressed_keys=90, sink=sink)
    call = problem.call(rotate_query=False, unrotate_output=False)
    check(problem, folder, call, fp8=True)


def test_the_speed_of_warps_changes_no_bit(folder: Path) -> None:
    problem = make_problem(tokens=6, heads=8, compressed_keys=300, **RAGGED)
    outs = []
    for seed in range(12):
        out = problem.allocate_out(fp8=True)
        emulate(problem.call(), out, folder, ctas=2, seed=seed)
        outs.append(out)
    assert all(bool((out.data == outs[0].data).all()) for out in outs)
    assert_matches_oracle(problem.call(), outs[0], TENSOR_CORE_BODY)
