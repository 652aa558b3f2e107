"""`sparse-mla`: serve a request list, show what runs here, size the caches."""

from __future__ import annotations

import typer

from sparse_mla.cli import bench, cache, check, info, run

app = typer.Typer(
    name="sparse-mla",
    help="DeepSeek-V4.1 sparse MLA attention. Exit codes: 0 fine, 1 a check failed, 2 bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, info, cache, check, bench):
    command.register(app)


def main() -> None:
    """Entry point of the `sparse-mla` script."""
    app()
