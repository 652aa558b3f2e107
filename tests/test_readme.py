"""The commands and option tables of the README and of docs/run.md are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse_mla.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/run.md")}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def commands(page: str) -> list[list[str]]:
    """Every `sparse-mla ...` of a page, in blocks and in running text, as arguments."""
    text = PAGES[page]
    found = re.findall(r"^\$ sparse-mla ([^#\n]*)", text, flags=re.MULTILINE)
    found += re.findall(r"`sparse-mla ([^`]*)`", text)
    return [command.split() for command in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    seen = commands(page)
    assert seen
    for name, *arguments in seen:
        text = invoke(name, "--help")
        for option in arguments:
            if option.startswith("--"):
                assert option in text, f"{page}: sparse-mla {name} has no {option}"


@pytest.mark.parametrize(
    "arguments",
    sorted({tuple(c) for page in PAGES for c in commands(page) if c[0] in ("info", "cache")}),
    ids=" ".join,
)
def test_quick_commands_run(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments)


def test_every_option_of_run_is_in_its_table() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", invoke("run", "--help"))) - {"--help"}
    rows = "\n".join(
        line.split("|")[1] for line in PAGES["docs/run.md"].splitlines() if line.startswith("|")
    )
    assert set(re.findall(r"--[a-z][a-z-]+", rows)) == named
