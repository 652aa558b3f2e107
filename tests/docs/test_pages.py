"""The pages of docs/ are fresh, their examples and commands run, their links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from sparse_mla.cache.records import ATTEND_RECORDS, INDEX_RECORDS, MXFP8, V4
from sparse_mla.cli.main import app
from sparse_mla.compat import flash_mla

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ("formats", "support", "flash_mla", "adding_a_gpu", "adding_a_record")
TEXT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}


def generator() -> ModuleType:
    """scripts/doc_pages.py as a module."""
    spec = importlib.util.spec_from_file_location("doc_pages", ROOT / "scripts" / "doc_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doc_pages"] = module
    spec.loader.exec_module(module)
    return module


PAGES = generator()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT[name], flags=re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[str]:
    """Every `sparse-mla ...` of the page: console blocks, indented lines, running text."""
    found = re.findall(r"^ *\$ (sparse-mla [^#\n]*)", TEXT[name], flags=re.MULTILINE)
    found += re.findall(r"^ {4}(sparse-mla [^#\n]*)", TEXT[name], flags=re.MULTILINE)
    found += re.findall(r"`(sparse-mla [^`<]*)`", TEXT[name])
    return [command.strip() for command in dict.fromkeys(found)]


# ---------------------------------------------------------------------------------------- generated parts


def test_generated_blocks_are_fresh():
    for path, wanted in PAGES.pages().items():
        assert path.read_text(encoding="utf-8") == wanted, "run .venv/bin/python scripts/docs"


def test_a_stale_page_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "formats.md").write_text(TEXT["formats"].replace("| 528 |", "| 529 |", 1))
    monkeypatch.setattr(PAGES, "DOCS", tmp_path)
    (path, wanted), *rest = PAGES.pages().items()
    assert not rest
    assert path.read_text() != wanted == TEXT["formats"]
    with pytest.raises(KeyError, match="no generator named 'nothing'"):
        PAGES.fresh("<!-- begin nothing: written by scripts/docs -->\n<!-- end nothing -->")


def test_the_script_says_what_is_stale():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert (ROOT / "scripts" / "docs").stat().st_mode & 0o111


def test_every_record_is_drawn_and_every_box_has_its_bytes():
    for record in (*ATTEND_RECORDS, *INDEX_RECORDS):
        assert f"| `{record.name}` | {record.row_bytes} |" in TEXT["formats"]
        assert f"**`{record.name}`: a " in TEXT["formats"]
        planar = record in INDEX_RECORDS or record.placement.value == "planar"
        segments = PAGES.page_segments(record) if planar else PAGES.row_segments(record)
        assert sum(segment.size for segment in segments) == record.row_bytes
        drawn = PAGES.draw(segments, planar=planar).splitlines()
        assert len({len(line) for line in drawn[1:]}) == 1
        assert drawn[1] == drawn[3]
        assert drawn[0].split()[-1] == str(record.row_bytes)
        for segment in segments:
            assert segment.text in drawn[2]


def test_formulas_give_the_worked_addresses():
    """Slot 35 with 32 rows a page, as in the format notes: row 3 of page 1 at stride 19008."""
    assert 19008 + V4.value_offset(3, 447, 32) == 21183
    assert 19008 + V4.scale_offset(3, 447, 32) == 37470
    assert 19008 + MXFP8.value_offset(3, 450, 32) == 21042
    text = PAGES.formulas(MXFP8)
    offsets = dict(re.findall(r"- (value|scale):? byte `(.*?)`", text))
    names = {"o": 3, "d": 450, "P": 32}
    assert 19008 + eval(offsets["value"], {}, names) == 21042
    assert 19008 + eval(offsets["scale"], {}, names) == 21118


@pytest.mark.parametrize("record", [*ATTEND_RECORDS, *INDEX_RECORDS], ids=lambda r: r.name)
def test_formulas_equal_the_offsets_of_the_code(record):
    lines = PAGES.formulas(record).splitlines()
    for o, d, rows in ((0, 0, 1), (3, 77, 32), (63, record.dim - 1, 64)):
        names = {"o": o, "d": d, "P": rows}
        kind = "value" if d < record.quantised_dims else "bf16 value"
        line = next(line for line in lines if line.startswith(f"- {kind}"))
        expression = re.search(r"byte `(.*?)`", line)
        assert expression is not None
        assert eval(expression[1], {}, names) == record.value_offset(o, d, rows)
        if record.scales_per_row and d < record.quantised_dims:
            line = next(line for line in lines if line.startswith("- scale"))
            expression = re.search(r"byte `(.*?)`", line)
            assert expression is not None
            assert eval(expression[1], {}, names) == record.scale_offset(o, d, rows)


# --------------------------------------------------------------------------------- examples and commands


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in NAMES for i in range(len(blocks(name, "python")))]
)
def test_examples_run_and_print_what_they_say(name, number, monkeypatch):
    monkeypatch.setattr(flash_mla, "kv_layout", flash_mla.kv_layout)
    code = blocks(name, "python")[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{name}.md", "exec"), {"__name__": "__main__"})
    wanted = re.findall(r"^print\(.*?\)  # (.*)$", code, flags=re.MULTILINE)
    assert printed.getvalue().splitlines() == wanted


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name in NAMES for command in commands(name)]
)
def test_commands_and_their_options_exist(name, command):
    _, sub, *arguments = command.split()
    helped = CliRunner().invoke(app, [sub, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert helped.exit_code == 0, helped.output
    for option in arguments:
        if option.startswith("--"):
            assert option in helped.stdout, f"{name}.md: sparse-mla {sub} has no {option}"


QUICK = sorted(
    {
        command
        for name in NAMES
        for command in commands(name)
        if "<" not in command
        and ("--device cpu" in command or command.startswith("sparse-mla info"))
    }
)


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run(command):
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output


def test_every_option_of_check_and_bench_is_described():
    for sub in ("check", "bench"):
        helped = CliRunner().invoke(app, [sub, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        options = set(re.findall(r"--[a-z]+", helped.stdout)) - {"--help"}
        missing = {option for option in options if option not in TEXT["support"]}
        assert not missing, f"docs/support.md does not mention {missing} of {sub}"


@pytest.mark.parametrize("name", NAMES)
def test_links_and_paths_exist(name):
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT[name]):
        assert (DOCS / target).exists(), f"{name}.md links to {target}"
    for path in re.findall(r"`((?:src|scripts|tests|benchmarks)/[\w./]+)`", TEXT[name]):
        assert (ROOT / path).exists(), f"{name}.md names {path}"
    for module in re.findall(
        r"`((?:cache|kernels|backends|testing)/\w+(?:/\w+)?\.py)`", TEXT[name]
    ):
        assert (ROOT / "src" / "sparse_mla" / module).exists(), f"{name}.md names {module}"


def test_the_differences_are_all_on_the_page():
    for row in flash_mla.DIFFERENCES:
        assert f"| {row.what} | {row.flash_mla} | {row.here} |" in TEXT["flash_mla"]
