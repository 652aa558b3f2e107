"""`sparse-mla bench`: named suites, each case checked before it is timed, the peer beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sparse_mla.cache.records import RecordFormat
from sparse_mla.cli import bench_report
from sparse_mla.cli.check import check_backend, parse_device
from sparse_mla.cli.common import EXIT_CHECK_FAILED, bad_input_exits, error_console
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.testing import bench, bench_attend, bench_steps, peer

SUITES: dict[str, Callable[[torch.device, bool], Sequence[Any]]] = {
    "decode": bench_attend.decode_suite,
    "prefill": bench_attend.prefill_suite,
    "records": bench_attend.records_suite,
    "writers": bench_attend.writers_suite,
    "metadata": bench_steps.metadata_suite,
    "layer": bench_steps.layer_suite,
    "step": bench_steps.step_suite,
}
DEFAULT_SUITES = "decode,prefill,records,writers,metadata"

Suite = Annotated[str, typer.Option(help=f"Of {', '.join(SUITES)}; several with commas, or all.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few sizes of each suite.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")]
Backend = Annotated[str, typer.Option(help="A backend by name; auto: what the library would take.")]
Peer = Annotated[
    Path | None,
    typer.Option(
        "--peer", help="FlashMLA's library, _flashmla_C.abi3.so, timed beside ours (CUDA)."
    ),
]
Write = Annotated[Path | None, typer.Option(help="Append result lines (JSONL) to this file.")]
Baseline = Annotated[Path | None, typer.Option(help="Compare with the result lines of this file.")]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw time over tokens and the roofline (PNG or SVG; matplotlib)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


class BenchCase(Protocol):
    """One case of a suite."""

    @property
    def suite(self) -> str: ...  # noqa: D102
    @property
    def op(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def heads(self) -> int | None: ...  # noqa: D102
    @property
    def window(self) -> RecordFormat: ...  # noqa: D102
    @property
    def compressed(self) -> RecordFormat | None: ...  # noqa: D102
    @property
    def window_keys(self) -> int | None: ...  # noqa: D102
    @property
    def compressed_keys(self) -> int | None: ...  # noqa: D102
    @property
    def output(self) -> str: ...  # noqa: D102

    def prepare(self, backend: str, device: torch.device) -> bench_attend.Prepared:
        """Check, and build what is timed."""

    def peer_launches(self, device: torch.device) -> bench_attend.Launches | None:
        """The same work of the peer."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A case that was timed, or why it was not."""

    suite: str
    label: str
    result: bench.Result | None
    share: float | None  # best possible time / time
    problem: str = ""  # a refusal, or the fault that forbids timing
    wrong: bool = False  # the check failed

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("bench")
    def _bench(
        suite: Suite = DEFAULT_SUITES,
        quick: Quick = False,
        device: Device = "auto",
        backend: Backend = "auto",
        peer_library: Peer = None,
        write: Write = None,
        baseline: Baseline = None,
        plot: Plot = None,
        as_json: Json = False,
    ) -> None:
        """Measure suites. Nothing is timed that does not pass its check first (exit code 1 then)."""
        with bad_input_exits():
            place = parse_device(device)
            check_backend(backend, place)
            names = parse_suites(suite)
            if baseline is not None and not baseline.is_file():
                raise ArgumentError("--baseline", str(baseline), "a file of result lines")
            before = [] if baseline is None else bench.read_lines(baseline)
            if peer_library is not None:
                if place.type != "cuda":
                    raise ArgumentError("--peer", f"with device {place}", "a CUDA device")
                peer.load_peer(peer_library)
            if plot is not None:
                bench_report.check_plot(plot)
        measured = measure(names, place, backend, quick=quick, with_peer=peer_library is not None)
        limits = bench.measure_limits(place)
        results = [one.result for one in measured if one.result is not None]
        if write is not None:
            bench.append_lines(results, write)
        if plot is not None:
            bench_report.draw(results, limits, plot)
        changes = bench_report.compare(before, results)
        if as_json:
            typer.echo(json.dumps({
                "device": bench.provenance(place)["gpu"],
                "limits": asdict(limits),
                "cases": [one.as_dict() for one in measured],
                "changes": [change.as_dict() for change in changes],
            }, indent=2))  # fmt: skip
        else:
            bench_report.show(measured, limits, place)
            bench_report.show_changes(changes, baseline)
        if any(one.wrong for one in measured):
            raise typer.Exit(EXIT_CHECK_FAILED)


def measure(
    suites: Sequence[str],
    device: torch.device,
    backend: str,
    *,
    quick: bool = False,
    with_peer: bool = False,
) -> list[Measured]:
    """Check and time every case of some suites, with a progress bar on stderr."""
    measured = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        for name in suites:
            task = bar.add_task(f"{name}: preparing", total=None)
            cases = SUITES[name](device, quick)
            bar.update(task, total=len(cases))
            for case in cases:
                bar.update(task, description=f"{name}: {case.label}"[:70])
                measured.append(measure_case(case, device, backend, with_peer=with_peer))
                bar.advance(task)
            bar.remove_task(task)
    return measured


def measure_case(
    case: BenchCase, device: torch.device, backend: str, *, with_peer: bool = False
) -> Measured:
    """Check one case; time it, and the peer, if it is right."""
    try:
        ready = case.prepare(backend, device)
    except UnsupportedError as error:
        return Measured(case.suite, case.label, None, None, "; ".join(error.reasons))
    if ready.fault is not None:
        sentence = f"not timed: {ready.fault.sentence}"
        return Measured(case.suite, case.label, None, None, sentence, wrong=True)
    ours = bench.time_on(device, ready.launches, graph=ready.graph)
    theirs = None
    launches = case.peer_launches(device) if with_peer else None
    if launches is not None:
        theirs = bench.time_on(device, launches)
    result = bench.Result(
        **bench.provenance(device),
        op=case.op,
        backend=ready.backend,
        heads=case.heads,
        tokens=case.tokens,
        window_keys=case.window_keys,
        compressed_keys=case.compressed_keys if case.compressed is not None else None,
        window_record=case.window.name,
        compressed_record=None if case.compressed is None else case.compressed.name,
        output=case.output,
        microseconds=round(ours, 2),
        tflops=round(ready.flops / ours / 1e6, 3) if ready.flops else None,
        gbps=round(ready.moved_bytes / ours / 1e3, 2),
        peer=peer.NAME if theirs else None,
        peer_microseconds=round(theirs, 2) if theirs else None,
        ratio=round(round(theirs, 2) / round(ours, 2), 3) if theirs else None,  # of what is written
    )
    best = bench.measure_limits(device).microseconds(ready.flops, ready.moved_bytes)
    share = round(best / ours, 4) if best else None
    return Measured(case.suite, case.label, result, share)


def parse_suites(text: str) -> tuple[str, ...]:
    """Names of suites: several with commas, or "all".

    Raises:
        ArgumentError: no such suite.
    """
    if text == "all":
        return tuple(SUITES)
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names or ("",):
        if name not in SUITES:
            raise ArgumentError("--suite", repr(name), f"{', '.join(SUITES)}, or all")
    return names
