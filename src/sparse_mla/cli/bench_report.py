"""What `sparse-mla bench` shows: the table, the comparison with earlier result lines, the plots."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from sparse_mla.cli.common import console
from sparse_mla.errors import ArgumentError
from sparse_mla.testing.bench import Limits, Result, provenance

if TYPE_CHECKING:
    from sparse_mla.cli.bench import Measured

NOTABLE = 0.05
"""Change of a time that the comparison points out."""


@dataclass(frozen=True, slots=True)
class Change:
    """One case then and now."""

    label: str
    backend: str
    before: float  # microseconds
    now: float
    ratio_before: float | None  # peer / ours in the earlier run
    ratio_now: float | None
    since: str  # date and commit of the earlier line

    @property
    def factor(self) -> float:
        """Time now / time before."""
        return self.now / self.before

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "factor": round(self.factor, 3)}


def show(measured: Sequence[Measured], limits: Limits, device: torch.device) -> None:
    """One row for each case."""
    out = console()
    where = provenance(device)
    title = f"{where['gpu']}, torch {where['torch']}, triton {where['triton']}"
    table = Table(title=title, title_justify="left")
    for head in (
        "suite",
        "case",
        "backend",
        "us",
        "TFLOP/s",
        "GB/s",
        "of limit",
        "peer us",
        "peer / ours",
    ):
        text = head in ("suite", "case", "backend")
        table.add_column(head, justify="left" if text else "right", no_wrap=not text)
    for one in measured:
        if one.result is None:
            table.add_row(one.suite, one.label, "-", *"-" * 6)
            continue
        found = one.result
        table.add_row(
            one.suite,
            one.label,
            found.backend,
            f"{found.microseconds:,.1f}",
            "-" if found.tflops is None else f"{found.tflops:.3g}",
            f"{found.gbps:.4g}" if found.gbps else "-",
            "-" if one.share is None else f"{one.share:.0%}",
            "-" if found.peer_microseconds is None else f"{found.peer_microseconds:,.1f}",
            "-" if found.ratio is None else f"{found.ratio:.2f}",
        )
    out.print(table)
    for one in measured:
        if one.problem:
            out.print(f"{one.suite}, {one.label}: {one.problem}", markup=False,
                      style="red" if one.wrong else None)  # fmt: skip
    out.print(
        f"limits measured here: {limits.tflops:.4g} TFLOP/s, {limits.gbps:.5g} GB/s ({limits.what})",
        markup=False,
    )


def compare(before: Sequence[Result], now: Sequence[Result]) -> list[Change]:
    """Cases of both runs on the same device; of several lines of a case the last counts."""
    earlier = {result.case: result for result in before}
    changes = []
    for result in now:
        old = earlier.get(result.case)
        if old is not None:
            changes.append(
                Change(
                    label=_label(result),
                    backend=result.backend,
                    before=old.microseconds,
                    now=result.microseconds,
                    ratio_before=old.ratio,
                    ratio_now=result.ratio,
                    since=f"{old.date} {old.commit}",
                )
            )
    return changes


def show_changes(changes: Sequence[Change], baseline: Path | None) -> None:
    """The comparison, or that there is nothing to compare."""
    if baseline is None:
        return
    out = console()
    if not changes:
        out.print(f"no case of {baseline} was measured here (same device and sizes)", markup=False)
        return
    table = Table(title=f"Against {baseline.name}", title_justify="left")
    for head in (
        "case",
        "backend",
        "since",
        "us then",
        "us now",
        "now / then",
        "peer / ours then",
        "now",
    ):
        text = head in ("case", "backend", "since")
        table.add_column(head, justify="left" if text else "right", no_wrap=not text)
    for change in changes:
        mark = (
            ""
            if abs(change.factor - 1) < NOTABLE
            else " slower"
            if change.factor > 1
            else " faster"
        )
        ratios = ["-" if r is None else f"{r:.2f}" for r in (change.ratio_before, change.ratio_now)]
        table.add_row(
            change.label, change.backend, change.since, f"{change.before:,.1f}",
            f"{change.now:,.1f}", f"{change.factor:.2f}{mark}", *ratios,
        )  # fmt: skip
    out.print(table)


def check_plot(path: Path) -> None:
    """Raise before anything is measured if the plot could not be drawn.

    Raises:
        ArgumentError: no matplotlib, or a file type that it does not write.
    """
    if find_spec("matplotlib") is None:
        raise ArgumentError("--plot", str(path), "nothing: matplotlib is not installed",
                            "install sparse-mla[plot]")  # fmt: skip
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ArgumentError("--plot", str(path), "a .png, .svg or .pdf file")


def draw(results: Sequence[Result], limits: Limits, path: Path) -> None:
    """Time over tokens beside the peer, and the roofline of every attention case."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(11, 4.5), layout="constrained"
    )
    times, roof = figure.subplots(1, 2)
    newest = {result.case: result for result in results}.values()
    attention = [result for result in newest if result.op == "attend" and result.tflops]
    series: dict[tuple[str, int | None], list[Result]] = {}
    for result in attention:
        if (result.window_record, result.compressed_record) == ("mxfp8", "mxfp8"):
            series.setdefault((result.backend, result.heads), []).append(result)
    for (backend, heads), some in sorted(series.items(), key=str):
        some.sort(key=lambda result: result.tokens)
        (line,) = times.plot([r.tokens for r in some], [r.microseconds for r in some],
                             marker="o", label=f"{backend}, {heads} heads")  # fmt: skip
        beside = [(r.tokens, r.peer_microseconds) for r in some if r.peer_microseconds]
        if beside:
            times.plot(*zip(*beside, strict=True), marker="x", linestyle="--",
                       color=line.get_color(), label=f"peer, {heads} heads")  # fmt: skip
    times.set(xscale="log", yscale="log", xlabel="query tokens", ylabel="microseconds",
              title="time of one launch")  # fmt: skip
    if series:
        times.legend(fontsize="small")
    edges = [0.1, limits.tflops * 1e3 / limits.gbps, 1e5]  # operations per byte
    roof.plot(edges, [min(limits.tflops, x * limits.gbps / 1e3) for x in edges], color="black")
    for result in attention:
        assert result.tflops is not None
        intensity = result.tflops * 1e3 / result.gbps
        roof.scatter(intensity, result.tflops, s=16)
        roof.annotate(f"{result.tokens}x{result.heads}", (intensity, result.tflops), fontsize=6)
    roof.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s",
             title="roofline (tokens x heads)")  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(result: Result) -> str:
    heads = "" if result.heads is None else f", {result.heads} heads"
    pair = result.window_record + (
        f" + {result.compressed_record}" if result.compressed_record else ""
    )
    return f"{result.op}, {result.tokens} tokens{heads}, {pair}"
