"""Clocks of a CTA, and the rate at which the GPU ran them, for versions of the Hopper kernels beside their microseconds.

    python benchmarks/clock_rate.py "64x128 64x132+3968" landed other=FOLDER

Cases and sources as in `hopper_sources.py`, which checks them; nothing is checked here, and all tokens are one launch. A GPU lowers its clock under load at once, and
further while it stays hot, by more than most changes of a kernel gain: what clocks say is the kernel, what microseconds say is both.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clock_trace import Edits, edit_folder, keep_modules, read_global

TICKS = """// Sums over all CTAs: clocks, nanoseconds, CTAs.
__device__ unsigned long long ticks[3];
DI unsigned long long nanoseconds() {
  unsigned long long r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r) :: "memory");
  return r;
}"""
BEGIN = """    if (threadIdx.x == {thread}) {{
      atomicAdd(ticks, 0ull - clock64());
      atomicAdd(ticks + 1, 0ull - nanoseconds());
    }}
"""
END = """    if (threadIdx.x == {thread}) {{
      atomicAdd(ticks, 0ull + clock64());
      atomicAdd(ticks + 1, nanoseconds());
      atomicAdd(ticks + 2, 1ull);
    }}
"""
EDITS: Edits = {
    "few_heads.cu": (
        ("", "uint8_t zero_row[1024];", "\n" + TICKS),
        ("", "  wait_for_launch_before();\n", BEGIN.format(thread=256)),
        ("", "    values.run(rank, step);\n", END.format(thread=256)),
    ),
    "attend.cu": (
        ("", "uint8_t zero_row[1024];", "\n" + TICKS),
        (
            "",
            "    add_values(p, base, group, w, lane, rank, item0, item_step);\n",
            END.format(thread=0),
        ),
    ),
    "attend_rows.cuh": (("", "    wait_for_launch_before();\n", BEGIN.format(thread=0)),),
}
"""Where a warp of values begins, the launch ahead being over, and has stored its last output."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of a launch of one version."""

    microseconds: float  # from launch to launch
    clocks: float  # of a CTA, mean
    megahertz: float


def measure(text: str, folders: dict[str, Path], modules: list[Any]) -> dict[str, Rate]:
    """The fastest of each version's turns."""
    import numpy as np
    from hopper_sources import case_of, turns

    best: dict[str, Rate] = {}
    for name, micros in turns(case_of(text), folders):
        ticks = read_global(modules[-1], b"ticks", np.uint64)
        clocks, nanoseconds, ctas = (int(x) for x in ticks)
        rate = Rate(micros, clocks / ctas, 1e3 * clocks / nanoseconds)
        best[name] = min(best.get(name, rate), rate, key=lambda rate: rate.microseconds)
    return best


def main() -> None:
    """Time every version that was named."""
    parser = argparse.ArgumentParser(description="Clocks and their rate.")
    parser.add_argument("cases", help="in one argument, see hopper_sources.py")
    parser.add_argument("sources", nargs="+", help="`landed` or NAME=FOLDER")
    arguments = parser.parse_args()
    from hopper_sources import folders_of, one_launch_a_call

    modules = keep_modules()
    one_launch_a_call()
    with tempfile.TemporaryDirectory() as made:
        folders = {}
        for name, path in folders_of(arguments.sources).items():
            folders[name] = Path(made) / name
            folders[name].mkdir()
            edit_folder(path, folders[name], EDITS)
        for text in arguments.cases.split():
            for name, rate in measure(text, folders, modules).items():
                print(
                    f"{text:16} {name:12} {rate.microseconds:8.2f} us {rate.clocks:9.0f} clocks"
                    f" {rate.megahertz:6.0f} MHz",
                    flush=True,
                )


if __name__ == "__main__":
    main()
