"""Where the clocks of one launch of a Hopper kernel go, by role and tile: means over the CTAs, from the CTA's start.

    python benchmarks/clock_trace.py --heads 8 --tokens 512 [--sources FOLDER]

Stamps of the multiprocessor's clock are put into a copy of the sources where EDITS say; they cost 50 to 100 clocks each. The launch is
the last of several on other rows, so that nothing of its rows is in the L2; it has all tokens, also where `attend` takes two.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from sparse_mla.kernels.hopper.bodies import BODIES, MANY_HEADS, SOURCE_FOLDER

Edits = dict[str, tuple[tuple[str, str, str], ...]]
"""File -> (what comes before, text that stands there once, what comes after it)."""
ROLES: dict[str, dict[str, tuple[slice, tuple[str, ...]]]] = {
    "few_heads.cu": {
        "producers": (slice(16, 20), ("begin", "first free", "second free", "end")),
        "scores": (slice(0, 8), ("begin", "rows", "scored", "weighed")),
        "values": (slice(8, 16), ("begin", "weights", "added", "end")),
    },
    "attend.cu": {
        "scores": (slice(8, 20), ("begin", "rows", "scored", "space", "settled", "weighed")),
        "values": (slice(0, 8), ("begin", "weights", "added", "end")),
    },
}
"""Source -> role -> (its warps, what its stamps of a tile mean)."""
TOKEN_ROLES: dict[str, dict[str, tuple[slice, tuple[str, ...]]]] = {
    "few_heads.cu": {"scores": (slice(0, 8), ("over", "told", "next query"))},
    "attend.cu": {
        "scores": (
            slice(8, 20),
            ("half free", "free", "half", "half widened", "rest", "widened"),
        ),
        "values": (slice(0, 8), ("summed", "written", "room", "sent", "come", "finished")),
    },
}
"""The same of a token; the last four of values where CTAs share it."""
FIRST_TOKEN = 56
"""Where stamps of tokens begin."""
NEVER = 1 << 31
"""No launch takes so many clocks: a stamp that was not set."""
STAMP = """// [CTA][warp][tile, or FIRST_TOKEN + token, or 63 for the start][event]
__device__ unsigned int stamps[132 * 20 * 64 * 8];
DI void stamp(int warp, int n, int event) {
  if ((threadIdx.x & 31) != 0 || n >= 64) return;
  unsigned int clocks;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clocks) :: "memory");
  stamps[((blockIdx.x * 20 + warp) * 64 + n) * 8 + event] = clocks;
}"""
SCORE_TILE = "stamp(8 + 4 * group + w, GROUPS * own + group, {});\n"
SCORE_TOKEN = f"stamp(8 + 4 * group + w, {FIRST_TOKEN} + item / 132, {{}});\n"
QUERY_HALF = f"stamp(8 + 4 * group + w, {FIRST_TOKEN} + number, {{}} + 2 * half);\n"
VALUE_TILE = "stamp(4 * g + w, done, {});\n"
VALUE_TOKEN = f"stamp(4 * g + w, {FIRST_TOKEN} + item / 132, {{}});\n"
COME = f"stamp(slab, {FIRST_TOKEN}, 4);\n"
EDITS: Edits = {
    "few_heads.cu": (
        ("", "uint8_t zero_row[1024];", "\n" + STAMP),
        ("  int seen = 0;\n", "  while (work.exists()) {\n", "    stamp(16 + w, seen, 0);\n"),
        ("", "      wait(base + EMPTY + 8 * at.place, at.round ^ 1);\n", "      stamp(16 + w, seen, 1 + h);\n"),
        ("    stamp(16 + w, seen++, 3);\n", "    ring = ring.ahead(work.blocks());\n    work = next_work;\n", ""),
        ("", "  wait_for_launch_before();\n", "  stamp(warp, 63, 0);\n"),
    ),
    "few_heads_scores.cuh": (
        ("", "  float S[4];\n", "  int seen;\n"),
        ("", "    Cursor cursor;\n", "    seen = 0;\n"),
        ("", "    const bool active = warp < work.blocks();\n", "    stamp(warp, seen, 0);\n"),
        ("", "    wait(base + FULL + 8 * at.place, at.round);\n", "    stamp(warp, seen, 1);\n"),
        ("    stamp(warp, seen, 2);\n", "    bool grew = false;\n", ""),
        ("    stamp(warp, seen++, 3);\n", "    publish(work.bits |", ""),
        (f"      stamp(warp, {FIRST_TOKEN} + n, 0);\n", "      finish(n, rank);\n", f"      stamp(warp, {FIRST_TOKEN} + n, 1);\n"),
        ("", "      q.load(base + QUERY, lane);\n", f"      if (n > 0) stamp(warp, {FIRST_TOKEN} - 1 + n, 2);\n"),
    ),
    "few_heads_values.cuh": (
        ("    int seen = 0;\n", "    while (true) {\n", "      stamp(8 + warp, seen, 0);\n"),
        ("", "      if (!work.exists()) break;\n", "      stamp(8 + warp, seen, 1);\n"),
        ("", "      add(work, ring, parity);\n", "      stamp(8 + warp, seen, 2);\n"),
        ("      stamp(8 + warp, seen++, 3);\n", "      ring = ring.ahead(work.blocks());\n", ""),
    ),
    "attend.cu": (
        ("", "uint8_t zero_row[1024];", "\n" + STAMP),
    ),
    "attend_rows.cuh": (
        ("", "    wait_for_launch_before();\n", "    stamp(warp, 63, 0);\n"),
    ),
    "attend_scores.cuh": (
        ("", "    float S[HEADS / 2];\n", SCORE_TILE.format(0)),
        ("", "    wait(base + RAW_FULL + 8 * stage, phase);\n", SCORE_TILE.format(1)),
        (SCORE_TILE.format(2), "    wait(base + WEIGHTS_EMPTY + 8 * group, (own & 1) ^ 1);\n", ""),
        (SCORE_TILE.format(3), "    const bool met = ", ""),
        ("", "    arrive_once(base + SETTLED + 8 * group);\n", SCORE_TILE.format(4)),
        ("", "    arrive_once(base + FULL + 8 * group);\n", SCORE_TILE.format(5)),
        ("", "      wait_others(base + HALF_READ);\n", SCORE_TOKEN.format(0)),
        ("", "    if (QUERIES == 1) wait_others(base + ALL_READ);\n", SCORE_TOKEN.format(1)),
        ("", "    wait(base + query_raw(number, half), (number >> 1) & 1);\n", QUERY_HALF.format(2)),
        ("", "    QueryRows(base, query_of(number), base + ANGLES + 256 * number, rows, l).widen(half, number, p.rotate_query);\n", QUERY_HALF.format(3)),
    ),
    "attend_values.cuh": (
        (VALUE_TILE.format(0), "      wait(base + FULL + 8 * group, turn);\n", VALUE_TILE.format(1)),
        (VALUE_TILE.format(2), "      if (last) {\n", ""),
        ("", "      arrive_once(base + WEIGHTS_EMPTY + 8 * group);\n", VALUE_TILE.format(3)),
        ("", "    tokens += has_keys;\n", VALUE_TOKEN.format(0)),
        ("", "    out.store_scales(0, PIECES - 1);\n", VALUE_TOKEN.format(1)),
        ("", "    wait_for_cluster(base + PARTS_ROOM, 0);\n", VALUE_TOKEN.format(2)),
        ("", "    parts.send(acc);\n", VALUE_TOKEN.format(3)),
        ("", "      wait_for_cluster(s.base + PARTS_FULL, 0);\n", COME),
        ("", "    parts.finish(acc, out);\n", VALUE_TOKEN.format(5)),
    ),
}  # fmt: skip
"""Where the stamps are."""


def edited(name: str, text: str, edits: Edits) -> str:
    """A source with what `edits` put into it.

    Raises:
        ValueError: a place is not there, or not once: the kernel has changed, and the edits must follow.
    """
    for before, place, after in edits.get(name, ()):
        if text.count(place) != 1:
            raise ValueError(f"{name} has {text.count(place)} times: {place!r}")
        text = text.replace(place, before + place + after)
    return text


def edit_folder(sources: Path, to: Path, edits: Edits) -> None:
    """Copies all sources, with what `edits` put into them, into a folder that is there."""
    for path in (*sources.glob("*.cu"), *sources.glob("*.cuh")):
        (to / path.name).write_text(edited(path.name, path.read_text(), edits))


def keep_modules() -> list[Any]:
    """What the CUDA driver loads from now on is in this list, the newest last."""
    from cuda.bindings import driver

    modules = []
    load = driver.cuModuleLoadData

    def load_and_keep(code: bytes) -> tuple[Any, ...]:
        result = load(code)
        modules.append(result[1])
        return result

    driver.cuModuleLoadData = load_and_keep
    return modules


def read_global(module: Any, name: bytes, kind: Any) -> Any:
    """A copy of a module's global array of numbers of one kind."""
    import numpy as np
    from cuda.bindings import driver

    _, address, size = driver.cuModuleGetGlobal(module, name)
    numbers = np.zeros(size // np.dtype(kind).itemsize, kind)
    driver.cuMemcpyDtoH(numbers.ctypes.data, address, size)
    return numbers


def clocks_of(heads: int, tokens: int, sources: Path) -> tuple[Any, Any]:
    """int64 array [CTA 132, warp 20, tile or token 64, event 8], clocks since the CTA's start, or NEVER; and the launch."""
    import numpy as np
    import torch
    from attend import Case
    from hopper_sources import calls_of, one_launch_a_call, use

    from sparse_mla.kernels.hopper import attend as hopper

    modules = keep_modules()
    calls, out = calls_of(Case(tokens, heads))
    with tempfile.TemporaryDirectory() as folder:
        edit_folder(sources, Path(folder), EDITS)
        use(Path(folder))
        one_launch_a_call()
        for call in calls[:4] * 2:
            hopper.attend(call, out)
    torch.cuda.synchronize()
    stamps = read_global(modules[-1], b"stamps", np.uint32)
    clocks = stamps.reshape(132, 20, 64, 8).astype(np.int64)
    stamped_warps = np.where(clocks[:, :, 63, 0] == 0, NEVER << 1, clocks[:, :, 63, 0])
    start = stamped_warps.min(axis=1)
    (part,) = hopper.launches_of(calls[0], 132)
    return np.where(clocks == 0, NEVER, (clocks - start[:, None, None, None]) & 0xFFFFFFFF), part


def line(clocks: Any, events: tuple[str, ...]) -> str:
    """Means over CTAs and those warps that have a stamp of the event."""
    row = []
    for number, event in enumerate(events):
        set_ones = clocks[..., number][clocks[..., number] < NEVER]
        row.append(f"{event} {set_ones.mean():7.0f}" if set_ones.size else f"{event} never")
    return "  ".join(row)


def main() -> None:
    """Trace one kind of call."""
    parser = argparse.ArgumentParser(description="Clocks of one launch of a Hopper kernel.")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sources", type=Path, default=SOURCE_FOLDER)
    options = parser.parse_args()
    clocks, part = clocks_of(options.heads, options.tokens, options.sources)
    many = BODIES[part.block] is MANY_HEADS
    body = "attend.cu" if many else "few_heads.cu"
    rows = options.tokens * -(-options.heads // part.block) * part.splits
    rounds = -(-rows // 132)
    ctas = slice(0, rows - 132 * (rounds - 1))  # those with most rows
    tiles = -(-(10 if many else 5) // part.splits) * rounds
    for tile in range(min(tiles, FIRST_TOKEN)):
        for role, (warps, events) in ROLES[body].items():
            print(f"tile {tile:2} {role:9} {line(clocks[ctas, warps, tile], events)}")
    for token in range(min(rounds, 63 - FIRST_TOKEN)):
        for role, (warps, events) in TOKEN_ROLES[body].items():
            print(
                f"token {token} {role:9} {line(clocks[ctas, warps, FIRST_TOKEN + token], events)}"
            )


if __name__ == "__main__":
    main()
