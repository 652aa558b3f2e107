"""What every benchmark here shares: timing through CUDA graphs on rotating inputs, and result lines.

Times are per launch: a graph holds one launch for each of several input sets whose rows together are
larger than the L2 cache, is replayed until the clock is steady, and the median of the replays counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

L2_BYTES = 60 * 2**20
"""L2 of an H200; smaller caches are exceeded all the more."""
BASELINES = Path(__file__).parent / "baselines"


@dataclass(frozen=True)
class Result:
    """One measured case; a line of `benchmarks/baselines/<gpu>.jsonl`."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str
    op: str
    backend: str
    heads: int | None
    tokens: int
    window_keys: int | None
    compressed_keys: int | None
    window_record: str
    compressed_record: str | None
    output: str
    microseconds: float
    tflops: float | None
    gbps: float
    peer: str | None
    peer_microseconds: float | None
    ratio: float | None  # peer / ours

    def line(self) -> str:
        """The case as one JSON line."""
        return json.dumps(asdict(self))


def input_sets(bytes_of_one: int, least: int = 2, most: int = 256) -> int:
    """How many input sets are needed so that together they exceed twice the L2 cache."""
    return max(least, min(most, -(-2 * L2_BYTES // max(bytes_of_one, 1))))


def time_launches(launches: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one launch, all of them captured in one CUDA graph.

    Args:
        launches: one callable per input set; each launches on the current stream and allocates nothing
            that outlives the call.
        replays: timed replays of the graph.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def attention_flops(tokens: int, heads: int, keys: int) -> int:
    """Multiplications and additions of the two products."""
    return 4 * tokens * heads * keys * 512


def append_results(results: Sequence[Result], name: str) -> Path:
    """Append result lines to `baselines/<name>.jsonl` and return its path."""
    BASELINES.mkdir(exist_ok=True)
    path = BASELINES / f"{name}.jsonl"
    with path.open("a") as file:
        file.writelines(result.line() + "\n" for result in results)
    return path
