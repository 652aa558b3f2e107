"""Write the request list that this package ships: `python -m sparse_mla.engine.make_requests [PATH]`.

Lengths are drawn, not recorded from anybody: prompts log-normal with a median of 220 tokens, outputs
log-normal with a median of 10, arrivals a Poisson process of one request in two seconds. The list is
short enough for a CPU, yet every eighth prompt exceeds the 512 entries that a query may attend.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from sparse_mla.engine.trace import DEFAULT_TRACE

SEED = 41
REQUESTS = 64
LONG_EVERY = 8


def make_requests(count: int = REQUESTS, seed: int = SEED) -> str:
    """The CSV text of `count` requests; the same seed gives the same text."""
    draw = random.Random(seed)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    seconds = 0.0
    for index in range(count):
        seconds += draw.expovariate(0.5)
        if index % LONG_EVERY == LONG_EVERY - 3:
            prompt = draw.randint(700, 1200)
        else:
            prompt = min(600, max(8, round(math.exp(draw.gauss(math.log(220), 0.8)))))
        generated = min(60, max(1, round(math.exp(draw.gauss(math.log(10), 0.9)))))
        minutes, rest = divmod(seconds, 60.0)
        hours, minutes = divmod(int(minutes), 60)
        lines.append(f"2026-01-01 {hours:02d}:{minutes:02d}:{rest:010.7f},{prompt},{generated}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Write the list to the path given, or in place."""
    path = Path(arguments[0]) if arguments else Path(__file__).with_name(DEFAULT_TRACE)
    path.write_text(make_requests(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
