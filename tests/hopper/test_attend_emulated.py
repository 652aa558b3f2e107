"""`attend.cu`, and the study that is to follow it, run thread by thread on the CPU against the float64 oracle. No GPU needed.

Covers what the sources compute, where they read and write, and how their roles wait for each other; not what only
real memory and asynchronous products can break. `tests/gpu/test_hopper_attend.py` is the same on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import SOURCE_FOLDER
from sparse_mla.kernels.hopper.build import MANY_HEADS, Variant
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent / "emulation"
SOURCES = {
    "attend": SOURCE_FOLDER / MANY_HEADS.file,
    "study": Path(__file__).parents[2] / "benchmarks" / "studies" / "keys_in_registers.cu",
}
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
SECTION = "// " + "-" * 64 + " "
BUILDS: dict[tuple[str, Variant], ctypes.CDLL] = {}
REPLACED = (  # instructions inside the roles, and what warpgroup.h has for them
    (r'if \(a\) asm volatile\("prefetch[^\n]*', ""),
    (r'asm volatile\("(fence\.mbarrier_init|setmaxnreg)[^\n]*', ""),
    (r'asm volatile\("mov\.b32[^\n]*"=r"\((\w+)\) : "r"\((\w+)\)\);', r"\1 = \2;"),
    (
        r'asm volatile\("cp\.async\.cg[^\n]*::"r"\((.*)\), "l"\((.*)\), "r"\((live[^)]*)\) : "memory"\);',
        r"copy_sized(\1, \2, \3);",
    ),
    (
        r'asm volatile\("st\.shared::cluster[^\n]*::"r"\((.*)\), '
        + ", ".join([r'"f"\((.*)\)'] * 4)
        + r' : "memory"\);',
        r"send4(\1, \2, \3, \4, \5);",
    ),
    (r"copy_row\(", "copy_row_together("),
)


def kernel_text(source: str) -> str:
    """A source without its instructions, which the headers beside `run_kernel.cpp` replace."""
    text = SOURCES[source].read_text()
    arguments = text[text.index("#define KIND_MXFP8") : text.index(SECTION + "instructions")]
    numbers = text[text.index("DI uint32_t ue8m0_pair") :]
    first, after = numbers.index("// Four e2m1 codes"), numbers.index("DI int page_of")
    roles = numbers[:first] + numbers[after:]
    for pattern, replacement in REPLACED:
        roles = re.sub(pattern, replacement, roles)
    assert "asm" not in roles
    arguments = arguments.replace("#define DI __device__ __forceinline__", "#define DI inline")
    return f"constexpr int THREADS = 512;\n{arguments}{roles}"


def library(source: str, variant: Variant, folder: Path) -> ctypes.CDLL:
    """A variant compiled for the CPU, once in a session."""
    if COMPILER is None:
        pytest.skip("g++ is not installed: the kernel cannot be emulated here")
    if (source, variant) not in BUILDS:
        folder = folder / str(len(BUILDS))
        folder.mkdir()
        (folder / "kernel.inc").write_text(kernel_text(source))
        macros = [f"-D{name}={value}" for name, value in variant.macros().items()]
        flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
        target = folder / "kernel.so"
        files = ["-I", str(folder), str(HERE / "run_kernel.cpp"), "-o", str(target)]
        done = subprocess.run(
            [COMPILER, *flags, "-DWARPGROUPS", *macros, *files],
            capture_output=True,
            text=True,
            check=False,
        )
        if "_Float16" in done.stderr:
            pytest.skip("this g++ has no _Float16: the kernel cannot be emulated here")
        assert done.returncode == 0, done.stderr
        BUILDS[source, variant] = ctypes.CDLL(str(target))
    return BUILDS[source, variant]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=list(SOURCES))
def source(request: pytest.FixtureRequest) -> str:
    if not SOURCES[request.param].is_file():
        pytest.skip(f"{SOURCES[request.param].name} is not here: only the repository has it")
    return str(request.param)


def emulate(
    source: str,
    call: AttendCall,
    out: AttendOut,
    folder: Path,
    splits: int = 1,
    ctas: int = 2,
    seed: int = 1,
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
    )
    head_blocks = hopper._head_blocks(call)
    query = hopper._readable_query(call)
    arguments = hopper._arguments(call, out, query, head_blocks)
    items = call.num_tokens * head_blocks
    grid = items * splits if splits > 1 else min(items, ctas)
    assert library(source, variant, folder).emulate(ctypes.byref(arguments), grid, seed) == 0


def check(
    source: str,
    problem: AttendProblem,
    folder: Path,
    call: AttendCall | None = None,
    *,
    splits: int = 1,
    **outputs: Any,
) -> None:
    call = call or problem.call()
    out = problem.allocate_out(**outputs)
    emulate(source, call, out, folder, splits)
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)


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
def test_records(source: str, records: tuple[str, str], splits: int, folder: Path) -> None:
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
    check(source, problem, folder, splits=splits, fp8=True)


@pytest.mark.parametrize("heads", [40, 66])
def test_heads_and_layouts(source: str, heads: int, folder: Path) -> None:
    layout = Layout.CHUNK_INTERLEAVED
    problem = make_problem(
        tokens=2, heads=heads, window_keys=70, compressed_keys=60, strided=True, **RAGGED
    )
    call = problem.call(query_layout=layout)
    check(source, problem, folder, call, fp8=True, layout=layout)


@pytest.mark.parametrize(("window_keys", "compressed_keys"), [(0, None), (0, 0), (1, 15), (0, 130)])
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_widths(
    source: str, window_keys: int, compressed_keys: int | None, lengths: str, folder: Path
) -> None:
    problem = make_problem(
        tokens=3,
        heads=64,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
    )
    check(source, problem, folder, fp8=True)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
def test_sinks_without_rotations(source: str, sink: float | None, folder: Path) -> None:
    problem = make_problem(tokens=2, heads=64, window_keys=60, compressed_keys=90, sink=sink)
    call = problem.call(rotate_query=False, unrotate_output=False)
    check(source, problem, folder, call, fp8=True)


def test_the_speed_of_warps_changes_no_bit(source: str, folder: Path) -> None:
    problem = make_problem(tokens=3, heads=64, compressed_keys=150, **RAGGED)
    outs = []
    for seed in range(5):
        out = problem.allocate_out(fp8=True)
        emulate(source, problem.call(), out, folder, ctas=1, seed=seed)
        outs.append(out)
    assert all(bool((out.data == outs[0].data).all()) for out in outs)
    assert_matches_oracle(problem.call(), outs[0], TENSOR_CORE_BODY)
