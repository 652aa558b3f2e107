"""`sparse-mla check`: random and adversarial cases against the oracle, on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from sparse_mla.backends.declarations import KERNEL_BACKENDS
from sparse_mla.backends.problem import DeviceInfo
from sparse_mla.cli.common import EXIT_CHECK_FAILED, bad_input_exits, console, error_console
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.settings import BACKEND_NAMES
from sparse_mla.testing.check import CheckCase, CheckReport, backends_there, in_turn, run_checks
from sparse_mla.testing.check_attend import named_attend, quick_attend, random_attend
from sparse_mla.testing.check_caches import cache_checks

RANDOM_CASES = {"quick": 8, "normal": 60, "all": 400}
"""Random attention cases of each extent."""
SECONDS = 50.0
"""No case begins later than this unless `--seconds` says otherwise: GPUs spend most time compiling."""

Quick = Annotated[
    bool, typer.Option("--quick", help="The model's own calls and a few random ones.")
]
All = Annotated[
    bool,
    typer.Option("--all", help="Every named corner, 400 random cases, each backend that runs."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the random cases.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")]
Backend = Annotated[str, typer.Option(help="A backend by name; auto: what the library would take.")]
Seconds = Annotated[
    float, typer.Option(min=0.0, help="No case begins later than this; 0 = no limit.")
]
Processes = Annotated[
    int,
    typer.Option(min=1, help="Processes that share the cases: kernels then compile side by side."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("check")
    def _check(
        quick: Quick = False,
        every: All = False,
        seed: Seed = 0,
        device: Device = "auto",
        backend: Backend = "auto",
        seconds: Seconds = SECONDS,
        processes: Processes = 1,
        as_json: Json = False,
    ) -> None:
        """Compare what the kernels here compute with the oracle. Exit code 1 if anything is wrong."""
        with bad_input_exits():
            if quick and every:
                raise ArgumentError("--quick", "with --all", "one of the two")
            place = parse_device(device)
            check_backend(backend, place)
        extent = "quick" if quick else "all" if every else "normal"
        names = backends_there(place) if every and backend == "auto" else (backend,)
        report = run(
            place,
            names,
            extent=extent,
            seed=seed,
            seconds=seconds,
            processes=processes,
            quiet=as_json,
        )
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            show(report)
        if not report.good:
            raise typer.Exit(EXIT_CHECK_FAILED)


def run(
    device: torch.device,
    backends: tuple[str, ...],
    *,
    extent: str,
    seed: int = 0,
    seconds: float = 0.0,
    processes: int = 1,
    quiet: bool = False,
) -> CheckReport:
    """Run the cases of an extent ("quick", "normal" or "all") with a progress bar on stderr."""
    cases = choose_cases(extent, seed, device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=error_console(), transient=True, disable=quiet) as bar:
        task = bar.add_task("check", total=len(cases) * len(backends))

        def advance(case: CheckCase, backend: str) -> None:
            bar.update(task, advance=1, description=escape(f"{backend}: {case.name}"[:60]))

        return run_checks(
            cases,
            device=device,
            backends=backends,
            seed=seed,
            seconds=seconds,
            processes=processes,
            on_case=advance,
        )


def choose_cases(extent: str, seed: int, device: torch.device) -> list[CheckCase]:
    """The cases of an extent, each kind in turn."""
    randoms = random_attend(seed, RANDOM_CASES[extent], few_variants=device.type != "cpu")
    caches = cache_checks(seed)
    if extent == "quick":
        return in_turn(quick_attend(), randoms, caches[::3])
    return in_turn(quick_attend(), named_attend(), randoms, caches)


def parse_device(text: str) -> torch.device:
    """The device of a name; "auto" is a GPU if there is one.

    Raises:
        ArgumentError: no such device here.
    """
    if text == "auto":
        return _with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ArgumentError("--device", repr(text), "auto, cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ArgumentError("--device", repr(text), f"{count} CUDA devices are here", "use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("--device", repr(text), "auto, cpu, cuda or cuda:N")
    return _with_index(device)


def _with_index(device: torch.device) -> torch.device:
    """`cuda` as `cuda:N`, which is what tensors there say."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_backend(name: str, device: torch.device) -> None:
    """Raise unless a backend of that name runs on the device.

    Raises:
        ArgumentError: no such backend.
        UnsupportedError: it does not run there; the message holds the reasons.
    """
    if name not in BACKEND_NAMES:
        raise ArgumentError("--backend", repr(name), ", ".join(BACKEND_NAMES))
    info = DeviceInfo.detect(device)
    for body in KERNEL_BACKENDS:
        refusals = body.device_refusals(info) if body.name == name else []
        if refusals:
            raise UnsupportedError(f"backend {name!r} on {info.describe()}", refusals)


def show(report: CheckReport) -> None:
    """Tables and verdict."""
    out = console()
    table = Table(
        "op", "backend", "passed", title=f"Check on {report.device}", title_justify="left"
    )
    for key, count in sorted(report.passed.items()):
        table.add_row(*key.split(), str(count))
    out.print(table)
    for key, reasons in sorted(report.refused.items()):
        out.print(f"not run, {key}: {'; '.join(reasons)}", markup=False)
    for failure in report.failures:
        print_failure(failure.as_dict())
    total = sum(report.passed.values())
    left = f"; {report.left_out} left out (time or failures)" if report.left_out else ""
    verdict = "passed" if report.good else "FAILED"
    out.print(f"check {verdict}: {total} cases right, {len(report.failures)} wrong{left}, "
              f"seed {report.seed}, {report.seconds:.1f} s", markup=False)  # fmt: skip


def print_failure(failure: dict[str, Any]) -> None:
    """One failure: where it is wrong, and the smallest case that shows it."""
    out = console()
    head = f"wrong: {failure['op']} on {failure['backend']}, found by {failure['name']!r}"
    out.print(head, style="red", markup=False)
    out.print(f"  {failure['sentence']}", markup=False)
    fields = ", ".join(f"{name}={value}" for name, value in failure["case"].items())
    out.print(f"  smallest case: {fields}", markup=False)
