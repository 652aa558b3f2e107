"""The public namespace, a light and pure import, and pages that are generated."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import sparse_mla
from sparse_mla.backends.matrix import support_matrix

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr == ""
    return done.stdout


def test_all_names_exist_and_are_sorted() -> None:
    assert sorted(sparse_mla.__all__) == sparse_mla.__all__
    for name in sparse_mla.__all__:
        value = getattr(sparse_mla, name)
        assert value.__doc__, name
        assert name in dir(sparse_mla)
    with pytest.raises(AttributeError, match="no attribute 'flash_mla'"):
        _ = sparse_mla.flash_mla


def test_all_is_about_a_dozen_names_and_matches_the_typed_imports() -> None:
    assert 10 <= len(sparse_mla.__all__) <= 16
    assert set(sparse_mla._HOMES) | {"nn"} == set(sparse_mla.__all__)
    text = (ROOT / "src/sparse_mla/__init__.py").read_text()
    typed = text.split("if TYPE_CHECKING:")[1].split("__version__")[0]
    for name, home in sparse_mla._HOMES.items():
        assert f"from {home} import" in typed, name
        assert name in typed.split(f"from {home} import")[1], name


def test_import_is_light_and_pure() -> None:
    code = """
import sys
import sparse_mla
heavy = [name for name in ("torch", "triton", "vllm", "matplotlib", "rich", "typer") if name in sys.modules]
print(heavy)
"""
    assert python(code) == "[]\n"


def test_using_every_public_name_imports_no_kernel_library_and_touches_no_gpu() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import sparse_mla
for name in sparse_mla.__all__:
    getattr(sparse_mla, name)
import sparse_mla.backends.matrix
sparse_mla.backends.matrix.support_matrix()
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps([sorted(new & {"triton", "cuda", "vllm", "matplotlib", "rich", "typer"}),
                  torch.cuda.is_initialized()]))
"""
    assert json.loads(python(code)) == [[], False]


def test_the_version_is_the_installed_one() -> None:
    assert metadata.version("sparse-mla") == sparse_mla.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {sparse_mla.__version__}" in changelog


def test_the_licence_is_apache() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert project["requires-python"] == ">=3.11,<3.14"
    core = {line.split(">")[0] for line in project["dependencies"]}
    assert core == {"torch", "typer", "rich"}


def test_the_support_matrix_in_the_readme_is_fresh() -> None:
    text = (ROOT / "README.md").read_text()
    assert support_matrix() in text, "run .venv/bin/python scripts/readme"


def test_pages_name_no_machine_of_ours() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]:
        text = path.read_text()
        assert "/work/" not in text, path
        assert "/root/" not in text, path


def test_scripts_are_executable() -> None:
    scripts = ("check", "docs", "readme", "setup-venv", "setup-vllm-venv", "vllm-page")
    for name in (*(f"scripts/{script}" for script in scripts), ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o111, name
