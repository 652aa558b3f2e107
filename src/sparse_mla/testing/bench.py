"""Timing, limits of the machine, and result lines: what `sparse-mla bench` and `benchmarks/` share.

On a GPU a time is that of one launch: a CUDA graph holds launches for several input sets in turn, whose
rows together exceed twice the L2 cache, is replayed, and the median of the replays counts. Work that a
graph cannot hold (it allocates or waits) is timed from its first to its last kernel, launch gaps included. On
a CPU it is the median of single runs.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from sparse_mla._checks import check_at_least
from sparse_mla.backends.problem import DeviceInfo
from sparse_mla.errors import TraceError

L2_BYTES = 60 * 2**20
"""L2 of an H200; smaller caches are exceeded all the more."""
GRAPH_MICROSECONDS = 500.0
"""What a graph takes at least: the start of a replay costs 7 us of its own, which are not the launches'."""
CPU_SECONDS = 0.3
"""Time that the timed runs of one case take on a CPU, at least three runs."""


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

    @property
    def case(self) -> tuple[object, ...]:
        """What makes two lines the same case, the machine included."""
        return (self.gpu, self.op, self.backend, self.heads, self.tokens, self.window_keys,
                self.compressed_keys, self.window_record, self.compressed_record, self.output)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine reaches, measured beside the cases."""

    tflops: float  # GPU: bf16 product of 8192 x 8192; CPU: float32 batched products of attention's shapes
    gbps: float  # copy, bytes read and written
    what: str

    def microseconds(self, flops: float, moved_bytes: float) -> float:
        """The best time for so much work: the slower of the two."""
        return max(flops / self.tflops / 1e6, moved_bytes / self.gbps / 1e3)


def input_sets(bytes_of_one: int, least: int = 2, most: int = 256) -> int:
    """How many input sets are needed so that together they exceed twice the L2 cache."""
    return max(least, min(most, -(-2 * L2_BYTES // max(bytes_of_one, 1))))


def time_launches(launches: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one launch, all of them captured in one CUDA graph, as often as makes it long enough.

    Args:
        launches: one callable per input set; each launches on the current stream and allocates nothing
            that outlives the call.
        replays: timed replays of the graph.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.synchronize()
    graph = _captured(launches)
    graph.replay()
    rounds = math.ceil(GRAPH_MICROSECONDS / max(_elapsed(graph.replay), 1.0))
    if rounds > 1:
        graph = _captured(list(launches) * rounds)
    for _ in range(3):
        graph.replay()
    times = [_elapsed(graph.replay) for _ in range(replays)]
    return statistics.median(times) / (rounds * len(launches))


def _captured(launches: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of these launches, one after the other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def time_stream(launch: Callable[[], object], repeats: int = 15) -> float:
    """Median microseconds from the first to the last kernel of one run on a GPU."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    return statistics.median(_elapsed(launch) for _ in range(repeats))


def time_cpu(launches: Sequence[Callable[[], object]], seconds: float = CPU_SECONDS) -> float:
    """Median microseconds of single runs after a warm-up, input sets in turn."""
    launches[0]()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        launch = launches[len(times) % len(launches)]
        start = time.perf_counter()
        launch()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def time_on(
    device: torch.device, launches: Sequence[Callable[[], object]], *, graph: bool = True
) -> float:
    """Median microseconds of one launch on a device."""
    check_at_least("number of launches", len(launches), 1)
    if device.type == "cpu":
        return time_cpu(launches)
    return time_launches(launches) if graph else time_stream(launches[0])


@functools.cache
def measure_limits(device: torch.device) -> Limits:
    """Product and copy rates of the device, measured now."""
    if device.type == "cpu":
        q, k, p = torch.randn(4, 64, 512), torch.randn(4, 640, 512), torch.randn(4, 64, 640)

        def products() -> None:
            torch.bmm(q, k.transpose(1, 2))
            torch.bmm(p, k)

        a, b = torch.empty(2, 2**26, dtype=torch.uint8).unbind()
        flops = 4 * 4 * 64 * 640 * 512 / time_cpu([products])
        copied = 2 * 2**26 / time_cpu([lambda: b.copy_(a)])
        threads = torch.get_num_threads()
        return Limits(flops / 1e6, copied / 1e3, f"float32 products and copy, {threads} threads")
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    flops = 2 * 8192**3 / time_launches([lambda: torch.matmul(x, x, out=y)], replays=7)
    what = "bf16 product of 8192 x 8192 and copy of 2 GiB"
    return Limits(flops / 1e6, copy_rate(device) / 1e9, what)


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy of 2 GiB on a GPU, read and written: the quicker of the driver's own copy
    and a kernel (the driver's may be the slower one by a third inside a graph).
    """
    source = torch.ones(2**29, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / (min(time_launches([way], replays=7) for way in ways) * 1e-6)


def attention_flops(tokens: int, heads: int, keys: int) -> int:
    """Multiplications and additions of the two products."""
    return 4 * tokens * heads * keys * 512


@functools.cache
def provenance(device: torch.device) -> dict[str, str]:
    """Date, commit, device and versions of this run."""
    commit = "unknown"
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        )  # fmt: skip
        commit = done.stdout.strip() or commit
    except OSError:  # no git here
        pass
    info = DeviceInfo.detect(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "gpu": _cpu_name() if device.type == "cpu" else info.name,
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def append_lines(results: Iterable[Result], path: Path) -> Path:
    """Append result lines to a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(result.line() + "\n" for result in results)
    return path


def read_lines(path: Path) -> list[Result]:
    """Result lines of a file; of lines of one case the last counts.

    Raises:
        TraceError: a line that is no result; names file and line.
    """
    names = {field.name for field in fields(Result)}
    newest: dict[tuple[object, ...], Result] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise TraceError(str(path), number, f"no JSON: {error}") from error
        if not isinstance(values, dict) or names - set(values):
            missing = ", ".join(sorted(names - set(values))) if isinstance(values, dict) else "all"
            raise TraceError(str(path), number, f"not a result line; missing fields: {missing}")
        result = Result(**{name: values[name] for name in names})
        newest.pop(result.case, None)
        newest[result.case] = result
    return list(newest.values())


def _elapsed(run: Callable[[], object]) -> float:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _cpu_name() -> str:
    """`CPU` and, where Linux says it, the model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # another system
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"CPU {models[0]}" if models else f"CPU {platform.machine()}"


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
