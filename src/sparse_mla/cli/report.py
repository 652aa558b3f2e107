"""What `sparse-mla run` tells at its end: a summary for JSON, a table, a plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparse_mla.backends.problem import DeviceInfo, Problem
from sparse_mla.backends.select import BackendChoice, select
from sparse_mla.cache.kv_dtype import bytes_per_token
from sparse_mla.cli.checking import CheckResult
from sparse_mla.cli.common import human_bytes
from sparse_mla.config.topology import layer_topology
from sparse_mla.engine.run import Engine, RunReport
from sparse_mla.errors import ArgumentError


def summarise(
    engine: Engine,
    served: RunReport,
    checks: Sequence[CheckResult],
    plot: Path | None,
    agreed: bool | None = None,
) -> dict[str, Any]:
    """Everything that the table shows, ready for JSON. Times in seconds, sizes in bytes.

    `agreed`: whether all ranks gave the checked requests the same bits; None if nothing was compared.
    """
    cfg, records = engine.cfg, engine.caches.records
    choice = _backend(engine)
    steps = served.steps
    return {
        "layers": [
            {
                "id": i,
                "kind": layer_topology(cfg, i).kind.value,
                "added": i in engine.added_layer_ids,
            }
            for i in engine.layer_ids
        ],
        "requests": len(engine.requests),
        "prompt_tokens": served.prompt_tokens,
        "generated_tokens": served.generated_tokens,
        "rows": served.rows,
        "replayed_rows": sum(step.replayed_rows for step in steps),
        "reused_tokens": served.reused_tokens,
        "preemptions": served.preemptions,
        "steps": len(steps),
        "seconds": served.seconds,
        "rows_per_second": served.rows / max(served.seconds, 1e-9),
        "kv_cache_dtype": records.name,
        "records": {
            "window": records.window.name,
            "compressed": records.compressed.name,
            "index": records.index.name,
        },
        "kv_bytes_per_token": kv_bytes_per_token(engine),
        "kv_bytes_per_token_model": bytes_per_token(cfg, records).global_per_token,
        "kv_bytes_peak": served.kv_bytes_peak,
        "kv_bytes_allocated": served.kv_bytes_allocated,
        "pages": {
            name: {
                "peak": served.pages_peak[name],
                "total": served.pages_total[name],
                "bytes": served.page_bytes[name],
            }
            for name in served.pages_total
        },
        "device": DeviceInfo.detect(engine.device).describe(),
        "backend": choice.name,
        "backend_reason": choice.reason,
        "backend_rejected": [
            {"name": name, "reasons": list(reasons)} for name, reasons in choice.rejected
        ],
        "ranks": engine.ranks.size,
        "heads_per_rank": engine.stack.num_heads,
        "ranks_agree": agreed,
        "checks": [check.as_dict() for check in checks],
        "passed": agreed is not False and all(check.passed for check in checks),
        "plot": None if plot is None else str(plot),
    }


def print_summary(out: Console, summary: dict[str, Any]) -> None:
    """The summary as a table, and one line for each check."""
    table = Table(show_header=False, title="sparse-mla run", title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, escape(value))
    out.print(table)
    for check in summary["checks"]:
        verdict = "[green]passed[/]" if check["passed"] else "[red]FAILED[/]"
        out.print(f"check {verdict}: {escape(check['sentence'])}")
    if not summary["checks"]:
        out.print("no check was asked for")
    if summary["plot"]:
        out.print(f"plot: {summary['plot']}")


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    layers = ", ".join(
        f"{layer['id']} ({layer['kind']}{', added' if layer['added'] else ''})"
        for layer in summary["layers"]
    )
    pages = ", ".join(
        f"{name} {group['peak']} of {group['total']}" for name, group in summary["pages"].items()
    )
    records = ", ".join(f"{name} {record}" for name, record in summary["records"].items())
    rejected = "; ".join(
        f"not {entry['name']}: {'; '.join(entry['reasons'])}"
        for entry in summary["backend_rejected"]
    )
    memory = (
        f"{summary['kv_bytes_per_token']:,g} a token here, {summary['kv_bytes_per_token_model']:,g} "
        f"over all layers; {human_bytes(summary['kv_bytes_peak'])} at peak, "
        f"{human_bytes(summary['kv_bytes_allocated'])} allocated"
    )
    reuse = (
        f"{summary['reused_tokens']:,} tokens not computed again, "
        f"{summary['replayed_rows']:,} rows replayed"
    )
    backend = f"{summary['backend']} on {summary['device']}: {summary['backend_reason']}"
    return [
        ("layers", layers),
        ("requests", f"{summary['requests']} ({summary['preemptions']} preemptions)"),
        (
            "tokens",
            f"{summary['prompt_tokens']:,} prompt, {summary['generated_tokens']:,} generated",
        ),
        ("prefix reuse", reuse),
        ("steps", f"{summary['steps']:,} with {summary['rows']:,} rows"),
        ("time", f"{summary['seconds']:.1f} s, {summary['rows_per_second']:,.1f} tokens/s"),
        ("KV cache", f"{summary['kv_cache_dtype']} ({records})"),
        ("KV bytes", memory),
        ("pages, peak", pages),
        ("ranks", _ranks(summary)),
        ("backend", f"{backend}; {rejected}" if rejected else backend),
    ]


def _ranks(summary: dict[str, Any]) -> str:
    text = f"{summary['ranks']} with {summary['heads_per_rank']} heads"
    if summary["ranks"] == 1 or summary["ranks_agree"] is None:
        return text
    agree = "the same" if summary["ranks_agree"] else "DIFFERENT"
    return f"{text} each; {agree} outputs and lists of the checked requests on all ranks"


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be written.

    Raises:
        ArgumentError: no such folder, not a PNG, or matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ArgumentError(
            "--plot", str(path), "nothing without matplotlib", "install sparse-mla[plot]"
        )
    if path.suffix.lower() != ".png" or not path.parent.is_dir() or path.is_dir():
        raise ArgumentError("--plot", str(path), "a .png file in a folder that exists")


def save_plot(served: RunReport, path: Path) -> Path | None:
    """Draw KV memory and batch composition over time; None if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = served.steps
    edges = [0.0, *itertools.accumulate(step.seconds for step in steps)]
    prefill = [step.rows - step.decode_rows - step.replayed_rows for step in steps]
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    memory, rows, requests = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    used = [step.kv_bytes / 2**20 for step in steps]
    memory.stairs(used, edges, fill=True, alpha=0.4, label="pages in use")
    memory.axhline(served.kv_bytes_allocated / 2**20, linestyle=":", label="allocated")
    memory.set_ylabel("KV cache, MiB")
    rows.stairs(prefill, edges, label="prompt", linewidth=2)
    rows.stairs([step.replayed_rows for step in steps], edges, label="replayed", linewidth=2)
    rows.stairs([step.decode_rows for step in steps], edges, label="generated", linewidth=2)
    rows.set_yscale("symlog", linthresh=10)
    rows.set_ylabel("rows of a step")
    requests.stairs([step.running for step in steps], edges, label="running", linewidth=2)
    requests.stairs([step.waiting for step in steps], edges, label="waiting", linestyle="--")
    requests.set_ylabel("requests")
    requests.set_xlabel("seconds")
    for panel in (memory, rows, requests):
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    return path


def kv_bytes_per_token(engine: Engine) -> float:
    """Bytes of one more token of context in the global caches of the layers served."""
    row = engine.caches.records.compressed.row_bytes + engine.caches.records.index.row_bytes
    groups = engine.caches.groups.values()
    ratios = [g.ratio for g in groups for member in g.members if member.role == "compressed"]
    return sum(row / ratio for ratio in ratios)


def _backend(engine: Engine) -> BackendChoice:
    """What `auto` takes for the attention calls of this run."""
    cfg, records = engine.cfg, engine.caches.records
    compressed = any(layer_topology(cfg, i).ratio for i in engine.layer_ids)
    problem = Problem(
        op="attend",
        num_tokens=engine.options.max_batched_tokens,
        num_heads=engine.stack.num_heads,
        window_record=records.window.name,
        compressed_record=records.compressed.name if compressed else None,
        window_keys=cfg.sliding_window,
        compressed_keys=cfg.index_topk if compressed else 0,
    )
    return select(problem, DeviceInfo.detect(engine.device))
