"""`sparse-mla info`: versions, devices, and for each backend whether it runs here and why not."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from sparse_mla.backends.problem import KNOWN_MACHINES, DeviceInfo, Problem
from sparse_mla.backends.select import BackendChoice, explain, select
from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.cli.common import bad_input_exits, console
from sparse_mla.errors import UnsupportedError

PACKAGES = ("sparse-mla", "torch", "triton", "cuda-bindings", "matplotlib", "vllm")

Machine = Annotated[
    str | None,
    typer.Option(help="Ask about a machine that need not be here: cpu, 8.0, 9.0, sm120, ..."),
]
Heads = Annotated[int, typer.Option(min=1, help="Local query heads of the attention call.")]
KvDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="Format of the caches.")]
Output = Annotated[str, typer.Option(help="What attention writes: fp8 or bf16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("info")
    def _info(
        machine: Machine = None,
        heads: Heads = 64,
        kv_cache_dtype: KvDtype = "auto",
        output: Output = "fp8",
        as_json: Json = False,
    ) -> None:
        """Show devices, versions, and every backend with its reasons."""
        with bad_input_exits():
            report = gather(machine, heads, kv_cache_dtype, output)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            _print(report)


def gather(
    machine: str | None = None,
    heads: int = 64,
    kv_cache_dtype: str = "auto",
    output: str = "fp8",
) -> dict[str, Any]:
    """Everything that the command prints, ready for JSON.

    Args:
        machine: a machine as `DeviceInfo.from_capability` takes it; None = the devices here.
        heads: query heads of the attention call that backends are asked about.
        kv_cache_dtype: name of a cache format.
        output: "fp8" or "bf16".

    Raises:
        ArgumentError: an unknown machine, format or output.
    """
    records = resolve_kv_cache_dtype(kv_cache_dtype)
    problem = Problem(
        op="attend",
        num_heads=heads,
        window_record=records.window.name,
        compressed_record=records.compressed.name,
        window_keys=128,
        compressed_keys=512,
        output=output,
    )
    devices = _devices() if machine is None else [DeviceInfo.from_capability(machine)]
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "problem": problem.describe(),
        "devices": [_device(device, problem) for device in devices],
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _devices() -> list[DeviceInfo]:
    here = [DeviceInfo.detect("cpu")]
    here += [DeviceInfo.detect(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    return here


def _device(device: DeviceInfo, problem: Problem) -> dict[str, Any]:
    choice: BackendChoice | None = None
    try:
        choice = select(problem, device, "auto")
    except UnsupportedError as error:
        reason = str(error)
    else:
        reason = choice.reason
    return {
        "kind": device.kind,
        "name": device.describe(),
        "multiprocessors": device.num_sms,
        "auto": None if choice is None else choice.name,
        "reason": reason,
        "backends": [
            {"name": backend.name, "runs": not reasons, "reasons": list(reasons)}
            for backend, reasons in explain(problem, device)
        ],
    }


def _print(report: dict[str, Any]) -> None:
    out = console()
    versions = Table("package", "version", title="Versions", title_justify="left")
    for name, version in report["versions"].items():
        versions.add_row(name, version or "not installed")
    out.print(versions)
    title = f"Backends for {report['problem']}"
    backends = Table("device", "backend", "runs", "why", title=title, title_justify="left")
    for device in report["devices"]:
        for row in device["backends"]:
            chosen = row["name"] == device["auto"]
            why = "; ".join(row["reasons"]) or (device["reason"] if chosen else "by name only")
            runs = "auto" if chosen else "yes" if row["runs"] else "no"
            backends.add_row(escape(device["name"]), row["name"], runs, escape(why))
        backends.add_section()
    out.print(backends)
    out.print(f"Ask about other machines with --machine: {', '.join(KNOWN_MACHINES)}.")
