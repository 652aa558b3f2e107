"""The README's Python runs and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_a_snippet() -> None:
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_prints_what_it_says(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "README.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", snippet, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_the_commands_named_are_targets_and_scripts() -> None:
    root = Path(__file__).parents[2]
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE)
    for name in re.findall(r"make ([a-z-]+)", README):
        assert name in targets, name
    for name in re.findall(r"(?<![\w/])(scripts/[a-z-]+|\.ci/run)", README):
        assert (root / name).is_file(), name
