"""What the sub-commands share: consoles, exit codes, and how options are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, SparseMLAError

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def console() -> Console:
    """Where results go. Wide enough for a table when the output is not a terminal."""
    return _console(sys.stdout)


def error_console() -> Console:
    """Where progress and complaints go."""
    return _console(sys.stderr)


def _console(stream: object) -> Console:
    out = Console(file=stream, highlight=False, soft_wrap=False)  # type: ignore[arg-type]
    if not out.is_terminal:
        out.width = max(out.width, 120)
    return out


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Turn this library's errors into one message and exit code 2."""
    try:
        yield
    except SparseMLAError as error:
        error_console().print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(EXIT_BAD_INPUT) from error


def load_config(path: Path | None) -> ModelConfig:
    """The configuration of a file, or the one inside this package."""
    return ModelConfig.deepseek_v41_flash() if path is None else ModelConfig.from_json(path)


def parse_layers(text: str, cfg: ModelConfig) -> tuple[int, ...]:
    """Layer ids of a list such as `0,2,20-23` or `all` (the backbone).

    Raises:
        ArgumentError: not such a list, or no such backbone layer.
    """
    allowed = f"ids 0..{cfg.num_hidden_layers - 1} such as 0,2,20-23, or all"
    if text.strip().lower() == "all":
        return tuple(range(cfg.num_hidden_layers))
    ids: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if match is None:
            raise ArgumentError("--layers", repr(text), allowed)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < cfg.num_hidden_layers:
            raise ArgumentError("--layers", repr(part.strip()), allowed)
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def parse_bytes(text: str, name: str = "--memory") -> int:
    """Bytes of a size such as `80GiB`, `141GB`, `16g` or `1000000`.

    Raises:
        ArgumentError: not a size above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower(), re.ASCII)
    units = {**_UNITS, **_BINARY_UNITS}
    size = 0
    if match is not None and match[2] in units:
        size = int(float(match[1]) * units[match[2]])
    if size < 1:
        raise ArgumentError(name, repr(text), "a size such as 80GiB, 141GB or 1000000")
    return size


def human_bytes(count: float) -> str:
    """`1.5 MiB`; whole numbers of bytes below 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
