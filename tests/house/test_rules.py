"""The house rules hold, and each of them fires on a planted breach."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_rules() -> ModuleType:
    """The module beside `scripts/check`."""
    spec = importlib.util.spec_from_file_location("house_rules", ROOT / "scripts/house_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RULES = load_rules()


def test_this_checkout_follows_the_rules() -> None:
    assert RULES.check_tree(ROOT) == []


def test_every_module_has_a_storey() -> None:
    package = ROOT / "src" / "sparse_mla"
    here = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert here - set(RULES.STOREYS) - {"__init__", "__pycache__"} == set()


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
PARAMETERS = ", ".join(f"a{number}" for number in range(11))
PLANTED = [
    # file below the package, its text, what the rule says
    ("config/a.py", "from sparse_mla.cache import records\n", "storey 2 from config, storey 1"),
    ("cache/a.py", "def f():\n    import sparse_mla.ops.attend\n", "storey 5 from cache, storey 2"),
    ("errors.py", "from sparse_mla import config\n", "storey 1 from errors, storey 0"),
    ("ops/a.py", "import triton\n", "import of triton: allowed only below kernels/triton/"),
    (
        "engine/a.py",
        "import vllm.config\n",
        "import of vllm: allowed only below integrations/vllm/",
    ),
    ("nn/a.py", "import requests\n", "import of requests: not one of"),
    ("extra/a.py", "", "extra has no storey"),
    ("ops/a.py", "x = 1\n" * 601, "601 lines; allowed: 600"),
    ("ops/a.py", LONG_FUNCTION, "f has 61 lines; allowed: 60"),
    ("ops/a.py", f"def f({PARAMETERS}): ...\n", "f takes 11 parameters; allowed: 10"),
    ("ops/a.py", "ROW = 16 * 528\n", "literal 528: take it from cache/records.py"),
    ("ops/a.py", "def f(n=288): ...\n", "literal 288"),
    ("kernels/hopper/a.cu", "int x; // 584\nint row = 584;\n", "a.cu:2: literal 584"),
    ("ops/a.py", "import os\nx = os.environ\n", "environment variable outside settings.py"),
    ("ops/a.py", "from os import getenv\n", "environment variable outside settings.py"),
    ("ops/a.py", "try:\n    pass\nexcept Exception:\n    pass\n", "handler for every exception"),
    ("ops/a.py", "try:\n    pass\nexcept:\n    pass\n", "handler for every exception"),
    ("ops/a.py", "try:\n    pass\nexcept (KeyError, BaseException):\n    pass\n", "for every exc"),
    ("ops/a.py", "# TO" + "DO later\n", "unfinished work"),
]


@pytest.mark.parametrize(("path", "text", "words"), PLANTED)
def test_a_planted_breach_is_found(tmp_path: Path, path: str, text: str, words: str) -> None:
    file = tmp_path / "src" / "sparse_mla" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (found,) = RULES.check_tree(tmp_path)
    assert words in found
    assert found.startswith(f"src/sparse_mla/{path}:")


ALLOWED = [
    ("cli/a.py", "from sparse_mla.ops import attend\nimport rich\nimport os\n"),
    ("ops/a.py", "from sparse_mla.backends import select\nimport torch\n"),
    ("cache/records.py", "ROW = 528\n"),
    ("settings.py", "import os\nx = os.environ\n"),
    ("ops/a.py", "N = 512\nx = 528.0\n"),
    ("ops/a.py", '"""Rows of 528 bytes."""\n'),
    (
        "kernels/triton/a.py",
        f"import triton\n@triton.jit\ndef f({PARAMETERS}):\n" + "    x = 1\n" * 90,
    ),
    ("ops/a.py", 'def f():\n    """' + "words\n" * 80 + '"""\n    return 1\n'),
    ("ops/a.py", f"def _f({PARAMETERS}): ...\n"),
    ("kernels/hopper/a.cu", "/* 584\n528 */ int row = ROW_BYTES; // 288\n"),
]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_the_rules_allow(tmp_path: Path, path: str, text: str) -> None:
    file = tmp_path / "src" / "sparse_mla" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert RULES.check_tree(tmp_path) == []


def test_a_long_test_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("\n" * 601)
    assert RULES.check_tree(tmp_path) == ["tests/test_a.py:1: 601 lines; allowed: 600; split it"]
