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
from sparse_mla.engine.launch import device_of_rank, joined
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest, default_trace, read_trace
from sparse_mla.errors import ArgumentError
from sparse_mla.settings import Launch

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
Tp = Annotated[
    int,
    typer.Option(
        "--tp",
        min=1,
        help="Ranks that share the heads out, one process and one GPU each (torchrun).",
    ),
]
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
    tp: int = 1
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
        tp: Tp = d.tp,
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
            tp=tp,
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
    """Run, print, plot. Of several ranks the first one checks and prints.

    Returns:
        Whether every check passed (True without checks, and on the other ranks if all ranks agree).

    Raises:
        SparseMLAError: bad input; nothing has run then.
    """
    inputs = read_inputs(options)
    with joined(options.tp, inputs.device, inputs.launch) as ranks:
        engine = Engine(inputs.cfg, inputs.trace, inputs.engine, ranks)
        sampled = checking.sample_requests(engine) if options.check else []
        recorder = engine.keep(sampled)
        first = ranks.rank == 0
        if first and engine.added_layer_ids:
            added = ", ".join(str(layer_id) for layer_id in engine.added_layer_ids)
            error_console().print(
                f"added layers {added}: the chosen ones read their caches or lists"
            )
        rows = sum(request.rows for request in engine.requests)
        with _progress(rows, "serving", shown=first) as advance:
            served = engine.run(lambda step: advance(step.rows))
        agreed = ranks.agree(recorder.digest()) if sampled else None
        engine.release()
    if not first:
        return agreed is not False
    with _progress(sum(engine.requests[i].rows for i in sampled), "checking") as advance:
        checks = checking.check_requests(engine, recorder, sampled, advance)
    plot = report.save_plot(served, options.plot or DEFAULT_PLOT)
    summary = report.summarise(engine, served, checks, plot, agreed)
    if options.as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        report.print_summary(console(), summary)
    return bool(summary["passed"])


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads, checked; nothing is allocated yet."""

    cfg: ModelConfig
    trace: list[TraceRequest]
    engine: EngineOptions
    device: torch.device  # of this rank
    launch: Launch | None


def read_inputs(options: RunOptions) -> Inputs:
    """Read and check every input.

    Raises:
        SparseMLAError: bad input.
    """
    cfg = load_config(options.config)
    layer_ids = default_layers(cfg) if options.layers is None else parse_layers(options.layers, cfg)
    _check_device(options.device)
    launch = Launch.from_environment()
    device = device_of_rank(options.tp, options.device, launch)
    cfg.shard(0, options.tp)
    if options.plot is not None:
        report.check_plot(options.plot)
    stack = len(with_sources(cfg, layer_ids)[0])
    depth = stack if options.replay is Replay.EXACT else 1
    engine = EngineOptions(
        layer_ids=layer_ids,
        kv_cache_dtype=options.kv_cache_dtype,
        max_batched_tokens=options.max_batched_tokens,
        max_requests=options.max_requests,
        shared_prefix_tokens=options.shared_prefix,
        replay_tokens=cfg.sliding_window * depth,
        seed=options.seed,
        device=str(device),
    )
    return Inputs(cfg, _read(options, cfg), engine, device, launch)


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
def _progress(total: int, what: str, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts rows; it shows nothing when stderr is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
    )
    stream = error_console()
    with Progress(*columns, console=stream, disable=not (shown and stream.is_terminal)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda rows: bar.advance(task, rows)
