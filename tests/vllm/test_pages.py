"""The pages about engines say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_mla.errors import UnsupportedError
from sparse_mla.integrations.vllm.memory import memory_table
from sparse_mla.integrations.vllm.names import BACKENDS, TESTED_VERSIONS
from sparse_mla.integrations.vllm.refusals import Wanted, default_kv_dtype, kv_dtypes, refusals

ROOT = Path(__file__).parents[2]
VLLM, SGLANG = (ROOT / "docs" / f"{name}.md" for name in ("vllm", "sglang"))


def test_the_memory_table_is_fresh() -> None:
    assert memory_table() in VLLM.read_text(), "run .venv/bin/python scripts/vllm-page"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/vllm-page"), "--check"], check=False, cwd=ROOT
    )
    assert done.returncode == 0


def test_the_memory_table_has_the_models_numbers() -> None:
    """Bytes of a token over all layers, from the records: V4, MXFP8, NVFP4 with FP8 index keys."""
    per_token = re.findall(r"([\d,]+) B \| [\d.]+ MiB", memory_table())
    assert per_token == ["1,790", "1,650", "1,650", "1,050"]
    shares = re.findall(r"(\d+)% \|", memory_table())
    assert shares == ["100", "92", "92", "59"]


def test_names_versions_and_dtypes_are_on_the_page() -> None:
    text = VLLM.read_text()
    for name in BACKENDS:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` | "))
        assert f"`auto` = `{default_kv_dtype(name)}`" in row
        for dtype in kv_dtypes(name):
            assert f"`{dtype}`" in row
    for version in TESTED_VERSIONS:
        assert f"pip install vllm=={version}" in text
        assert f'vllm = ["vllm=={version};' in (ROOT / "pyproject.toml").read_text()


def test_the_refusal_on_the_page_is_the_real_one() -> None:
    wanted = Wanted("SPARSE_MLA_MEGA_DSV41", "0.33.0", (10, 0), "auto", 64, 8)
    error = UnsupportedError(f"attention backend {wanted.backend}", refusals(wanted))
    assert f"UnsupportedError: {error}\n" in VLLM.read_text()


def test_the_log_line_on_the_page_is_the_real_one() -> None:
    source = (ROOT / "src/sparse_mla/integrations/vllm/layer.py").read_text()
    pattern = re.search(r'"(sparse_mla: %s on layers[^"]*)"', source)
    assert pattern is not None
    line = pattern.group(1) % (
        "SPARSE_MLA_MEGA_DSV41", 2, 8, "hopper (tuned for SM90)", "nvfp4_ds_mla", "528 B + 288 B"
    )  # fmt: skip
    assert line in VLLM.read_text()


def test_the_snippet_for_sglang_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", SGLANG.read_text(), flags=re.DOTALL)
    exec(compile(snippet, "sglang.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", snippet, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
