"""`sparse-mla run`: serve a request list through a stack of attention layers and check the result."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparse_mla.cli import checking, report
from sparse_mla.cli.common import (
    EXIT_CHECK_FAILED,
    bad_input_exits,
    console,
    error_console,
    load_config,
    parse_layers,
)
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import LayerKind, layer_topology, with_sources
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest, default_trace, read_trace
from sparse_mla.errors import ArgumentError

DEFAULT_PLOT = Path("run-report.png")


class Replay(enum.Enum):
    """How much of a prefix hit is recomputed to refill the window caches."""

    BOUNDED = "bounded"
    EXACT = "exact"


Config = Annotated[
    Path | None, typer.Option(help="HF config.json; without it DeepSeek-V4.1-Flash.")
]
Trace = Annotated[Path | None, typer.Option(help="Request list (CSV); without it a small own one.")]
Layers = Annotated[
    str | None,
    typer.Option(help="Layer ids such as 0,2,20-23, or all; without it one layer of each kind."),
]
KvDtype = Annotated[
    str,
    typer.Option("--kv-cache-dtype", help="auto, fp8, fp8_ds_mla, nvfp4_ds_mla, fp8_ds_mla_v4."),
]
Requests = Annotated[int, typer.Option(min=1, help="Serve the first N requests.")]
MaxTokens = Annotated[int, typer.Option("--max-batched-tokens", min=1, help="Rows of a step.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Requests that run at a time.")]
SharedPrefix = Annotated[
    int, typer.Option(min=0, help="Leading tokens that every second request has in common.")
]
ReplayMode = Annotated[
    Replay,
    typer.Option(
        help="Recompute, after a prefix hit, one window (bounded, as engines do) or one for each "
        "layer of the stack (exact)."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Seed = Annotated[int, typer.Option(help="Of weights and hidden states.")]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Compare sampled requests with a dense run.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Plot = Annotated[
    Path | None, typer.Option(help=f"PNG of memory and batches; without it {DEFAULT_PLOT}.")
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one `sparse-mla run`."""

    config: Path | None = None
    trace: Path | None = None
    layers: str | None = None  # None = one of each kind
    kv_cache_dtype: str = "auto"
    requests: int = 8
    max_batched_tokens: int = 512
    max_requests: int = 16
    shared_prefix: int = 256
    replay: Replay = Replay.BOUNDED
    device: str = "cpu"
    seed: int = 0
    check: bool = True
    as_json: bool = False
    plot: Path | None = None


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    d = RunOptions()

    @app.command("run")
    def _run(
        config: Config = d.config,
        trace: Trace = d.trace,
        layers: Layers = d.layers,
        kv_cache_dtype: KvDtype = d.kv_cache_dtype,
        requests: Requests = d.requests,
        max_batched_tokens: MaxTokens = d.max_batched_tokens,
        max_requests: MaxRequests = d.max_requests,
        shared_prefix: SharedPrefix = d.shared_prefix,
        replay: ReplayMode = d.replay,
        device: Device = d.device,
        seed: Seed = d.seed,
        check: Check = d.check,
        as_json: Json = d.as_json,
        plot: Plot = d.plot,
    ) -> None:
        """Serve a request list through attention layers; check samples against dense attention."""
        options = RunOptions(
            config=config,
            trace=trace,
            layers=layers,
            kv_cache_dtype=kv_cache_dtype,
            requests=requests,
            max_batched_tokens=max_batched_tokens,
            max_requests=max_requests,
            shared_prefix=shared_prefix,
            replay=replay,
            device=device,
            seed=seed,
            check=check,
            as_json=as_json,
            plot=plot,
        )
        with bad_input_exits():
            passed = serve(options)
        if not passed:
            raise typer.Exit(EXIT_CHECK_FAILED)


def serve(options: RunOptions) -> bool:
    """Run, print, plot.

    Returns:
        Whether every check passed (True without checks).

    Raises:
        SparseMLAError: bad input; nothing has run then.
    """
    engine = build_engine(options)
    sampled = checking.sample_requests(engine) if options.check else []
    recorder = engine.keep(sampled)
    if engine.added_layer_ids:
        added = ", ".join(str(layer_id) for layer_id in engine.added_layer_ids)
        error_console().print(f"added layers {added}: the chosen ones read their caches or lists")
    with _progress(sum(request.rows for request in engine.requests), "serving") as advance:
        served = engine.run(lambda step: advance(step.rows))
    with _progress(sum(engine.requests[i].rows for i in sampled), "checking") as advance:
        checks = checking.check_requests(engine, recorder, sampled, advance)
    plot = report.save_plot(served, options.plot or DEFAULT_PLOT)
    summary = report.summarise(engine, served, checks, plot)
    if options.as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        report.print_summary(console(), summary)
    return all(check.passed for check in checks)


def build_engine(options: RunOptions) -> Engine:
    """Read and check every input, then allocate.

    Raises:
        SparseMLAError: bad input.
    """
    cfg = load_config(options.config)
    layer_ids = default_layers(cfg) if options.layers is None else parse_layers(options.layers, cfg)
    _check_device(options.device)
    if options.plot is not None:
        report.check_plot(options.plot)
    stack = len(with_sources(cfg, layer_ids)[0])
    depth = stack if options.replay is Replay.EXACT else 1
    return Engine(
        cfg,
        _read(options, cfg),
        EngineOptions(
            layer_ids=layer_ids,
            kv_cache_dtype=options.kv_cache_dtype,
            max_batched_tokens=options.max_batched_tokens,
            max_requests=options.max_requests,
            shared_prefix_tokens=options.shared_prefix,
            replay_tokens=cfg.sliding_window * depth,
            seed=options.seed,
            device=options.device,
        ),
    )


def default_layers(cfg: ModelConfig) -> tuple[int, ...]:
    """The first backbone layer of each kind, and the first behind the candidate filter."""
    layers = [layer_topology(cfg, layer_id) for layer_id in range(cfg.num_hidden_layers)]
    first: dict[tuple[LayerKind, bool], int] = {}
    for layer in layers:
        first.setdefault((layer.kind, layer.consumes_candidates), layer.layer_id)
    return tuple(sorted(first.values()))


def _read(options: RunOptions, cfg: ModelConfig) -> list[TraceRequest]:
    most = cfg.max_position_embeddings
    if options.trace is None:
        return default_trace(limit=options.requests, max_rows=most)
    return read_trace(options.trace, limit=options.requests, max_rows=most)


def _check_device(text: str) -> None:
    allowed = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if text not in (*allowed, "cuda") or (text == "cuda" and len(allowed) == 1):
        raise ArgumentError("--device", repr(text), " or ".join(allowed))


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts rows; it shows nothing when stderr is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
    )
    shown = error_console()
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda rows: bar.advance(task, rows)
