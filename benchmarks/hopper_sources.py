"""Several sources of the 64-head Hopper kernel side by side: each checked against the oracle, then timed in one process.

    python benchmarks/hopper_sources.py landed other=other_attend.cu

`landed` is the source in the package. A source states its threads in `__launch_bounds__` and its shared
memory as the constant SHARED_BYTES; it may include the headers of the package's source.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import common
import torch
from attend import Case, build, ragged_problem

from sparse_mla.cache.records import MXFP8, NVFP4, V4, RecordFormat
from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper import attend as host
from sparse_mla.kernels.hopper import build as builder
from sparse_mla.kernels.hopper.bodies import MANY_HEADS_BLOCK, Body
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle

LANDED = builder.MANY_HEADS
CASES = {
    "T=128": Case(128, 64),
    "T=512": Case(512, 64),
    "132 x 4096": Case(132, 64, compressed_keys=3968),
}
ALL_CASES = CASES | {
    "T=1": Case(1, 64),
    "T=32": Case(32, 64),
    "T=64": Case(64, 64),
    "T=256": Case(256, 64),
    "T=4096": Case(4096, 64),
    "128 heads": Case(128, 128),
    "288 bytes": Case(128, 64, MXFP8, NVFP4),
    "584 bytes": Case(128, 64, V4, V4),
    "132 x 16384": Case(132, 64, compressed_keys=16256),
}
REPEATS = 20


def body_of(path: Path) -> Body:
    """A source file as a kernel body."""
    text = path.read_text()
    threads = re.search(r"__launch_bounds__\((\d+),", text)
    shared = re.search(r"constexpr int SHARED_BYTES = (\d+);", text)
    if threads is None or shared is None:
        raise SystemExit(f"{path} states no __launch_bounds__ or no SHARED_BYTES")
    return replace(
        LANDED,
        name=path.stem,
        file=str(path.resolve()),
        threads=int(threads[1]),
        shared_bytes=int(shared[1]),
    )


def use(body: Body) -> None:
    """Launches take this source from now on, also where another body would be faster."""
    host.block_heads = lambda *_: MANY_HEADS_BLOCK
    builder.MANY_HEADS = body
    builder.function.cache_clear()


def check(window: RecordFormat, compressed: RecordFormat, tokens: int, invariant: bool) -> None:
    """The oracle and bitwise equal repeats; raises if either does not hold."""
    problem = ragged_problem(Case(tokens, 64, window, compressed), tokens)
    call = replace(problem.call(), batch_invariant=invariant)
    for lse in (True, False):
        out = problem.allocate_out(
            fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=lse, max_logits=lse
        )
        host.attend(call, out)
        assert_matches_oracle(call, out, HOPPER_BODY)
        first = out.data.clone()
        for _ in range(REPEATS):
            host.attend(call, out)
        assert torch.equal(first.view(torch.uint8), out.data.view(torch.uint8)), "repeats differ"


def measure(case: Case, bodies: dict[str, Body]) -> list[float]:
    """Microseconds of each body, the same calls for all."""
    problem, calls = build(case, case.window, case.compressed)
    out = problem.allocate_out(
        fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=False, max_logits=False
    )
    micros = []
    for body in bodies.values():
        use(body)
        host.attend(calls[0], out)  # compiles
        micros.append(
            common.time_launches([lambda call=call: host.attend(call, out) for call in calls])
        )
    return micros


def main() -> None:
    """Check and time every source that was named."""
    parser = argparse.ArgumentParser(description="Sources of the 64-head Hopper kernel.")
    parser.add_argument("sources", nargs="+", help="`landed` or NAME=PATH of a .cu file")
    parser.add_argument("--all", action="store_true", help="every case of the table in the docs")
    arguments = parser.parse_args()
    named = [source.partition("=") for source in arguments.sources]
    bodies = {name: body_of(Path(path)) if path else LANDED for name, _, path in named}
    for name, body in bodies.items():
        use(body)
        for window, compressed in ((MXFP8, MXFP8), (MXFP8, NVFP4), (V4, V4)):
            for tokens, invariant in ((5, True), (150, False), (9, False)):
                check(window, compressed, tokens, invariant)
        print(f"{name}: matches the oracle, repeats are equal", flush=True)
    for name, case in (ALL_CASES if arguments.all else CASES).items():
        micros = measure(case, bodies)
        row = "  ".join(f"{key} {value:8.1f} us" for key, value in zip(bodies, micros, strict=True))
        print(f"{name:12}  {row}", flush=True)


if __name__ == "__main__":
    main()
