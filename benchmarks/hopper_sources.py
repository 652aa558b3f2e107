"""Several versions of the Hopper kernels side by side: each checked against the oracle, then timed in one process.

    python benchmarks/hopper_sources.py "8x128 8x512 64x512 64x128:v4 64x132+3968" landed other=FOLDER

A case is HEADSxTOKENS, then the records (`:mxfp8` unless stated, `:nvfp4` of the compressed set, `:v4` of both) and the compressed
keys (512 unless stated). `landed` are the sources of the package, a folder holds .cu and .cuh files of the same names. With
`--check` results are compared and nothing is timed, so that several processes can compile at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import common
import torch
from attend import Case, build, ragged_problem

from sparse_mla.cache.records import MXFP8, NVFP4, V4
from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper import build as builder
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, SOURCE_FOLDER, Body
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle

RECORDS = {"mxfp8": (MXFP8, MXFP8), "nvfp4": (MXFP8, NVFP4), "v4": (V4, V4)}
CHECKED_TOKENS = ((5, True), (9, False), (300, False))
"""(tokens, batch-invariant): few rows, rows that are split, more rows than multiprocessors and a rest of their rounds."""
REPEATS = 20
LANDED_SOURCE = Body.source
LANDED_THREADS = Body.threads_of


def case_of(text: str) -> Case:
    """`HEADSxTOKENS[:record][+keys]`."""
    found = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?(?:\+(\d+))?", text)
    if found is None or (found[3] or "mxfp8") not in RECORDS:
        raise SystemExit(f"{text} is no case, see --help")
    window, compressed = RECORDS[found[3] or "mxfp8"]
    return Case(int(found[2]), int(found[1]), window, compressed, 128, int(found[4] or 512))


def threads_of_few_heads(folder: Path) -> int:
    """Threads of a CTA of `few_heads.cu`, as the one in this folder says."""
    found = re.search(r"\bTHREADS = (\d+);", (folder / FEW_HEADS.file).read_text())
    assert found is not None
    return int(found[1])


def use(folder: Path) -> None:
    """Launches take the sources of this folder from now on."""
    few = threads_of_few_heads(folder)
    Body.source = lambda body: LANDED_SOURCE(body, folder)  # type: ignore[method-assign]
    Body.threads_of = (  # type: ignore[method-assign]
        lambda body, tiles: few if body is FEW_HEADS else LANDED_THREADS(body, tiles)
    )
    builder.function.cache_clear()


def one_launch_a_call() -> None:
    """Calls are one launch from now on, also where the last tokens would get one of their own: for what is read of a launch."""
    hopper.tokens_of_launches = lambda *call: (call[1],)


def check(case: Case) -> None:
    """The oracle and bitwise equal repeats, for split rows and for many; raises if either does not hold."""
    for tokens, invariant in CHECKED_TOKENS:
        few = Case(tokens, case.heads, case.window, case.compressed)
        problem = ragged_problem(few, tokens)
        call = replace(problem.call(), batch_invariant=invariant)
        for lse in (True, False):
            out = problem.allocate_out(
                fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=lse, max_logits=lse
            )
            hopper.attend(call, out)
            assert_matches_oracle(call, out, HOPPER_BODY)
            first = out.data.clone().view(torch.uint8)
            for _ in range(REPEATS):
                hopper.attend(call, out)
            assert torch.equal(first, out.data.view(torch.uint8)), "repeats differ"


def calls_of(case: Case) -> tuple[list[AttendCall], AttendOut]:
    """The calls of a case, one for each input set, and the output that all of them write."""
    problem, calls = build(case, case.window, case.compressed)
    out = problem.allocate_out(
        fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=False, max_logits=False
    )
    return calls, out


def turns(case: Case, folders: dict[str, Path]) -> Iterator[tuple[str, float]]:
    """Each version twice, there and back, with the same calls for all: its name and microseconds, while it is the one in use."""
    calls, out = calls_of(case)
    for name in (*folders, *reversed(folders)):
        use(folders[name])
        hopper.attend(calls[0], out)  # compiles
        micros = common.time_launches(
            [lambda call=call: hopper.attend(call, out) for call in calls]
        )
        torch.cuda.synchronize()
        yield name, micros


def measure(case: Case, folders: dict[str, Path]) -> dict[str, float]:
    """Microseconds of each version, the least of its turns."""
    best = dict.fromkeys(folders, float("inf"))
    for name, micros in turns(case, folders):
        best[name] = min(best[name], micros)
    return best


def folders_of(sources: list[str]) -> dict[str, Path]:
    """The folder of each version: `landed` or NAME=FOLDER."""
    named = [source.partition("=") for source in sources]
    return {name: Path(path) if path else SOURCE_FOLDER for name, _, path in named}


def main() -> None:
    """Check and time every version that was named."""
    parser = argparse.ArgumentParser(description="Versions of the Hopper kernels.")
    parser.add_argument("cases", help="in one argument, see above")
    parser.add_argument("sources", nargs="+", help="`landed` or NAME=FOLDER")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    folders = folders_of(arguments.sources)
    for case in map(case_of, arguments.cases.split()):
        for folder in folders.values():
            use(folder)
            check(case)
        if arguments.check:
            continue
        times = measure(case, folders)
        row = "  ".join(f"{name} {micros:8.2f} us" for name, micros in times.items())
        records = f"{case.window.name} {case.compressed.name}"
        keys = f"{case.window_keys}+{case.compressed_keys}"
        print(
            f"heads {case.heads:3} tokens {case.tokens:4} {records:13} {keys:8} {row}", flush=True
        )


if __name__ == "__main__":
    main()
