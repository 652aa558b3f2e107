"""Compressor and indexer kernels compile for GPUs that are not here, within their limits.

In a process of its own: this one decorates kernels for the interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
STACK_BYTES = 64
"""Local memory of any kernel: a few addresses of the widest one, no value of a loop."""


def check(target: int, *options: str) -> set[str]:
    """Compile for one capability; the names of the kernels."""
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT / "src"))
    script = str(ROOT / "benchmarks" / "index_resources.py")
    done = subprocess.run(
        [sys.executable, script, "--json", "--targets", str(target), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    usages = [json.loads(line) for line in done.stdout.splitlines()]
    for usage in usages:
        assert usage["shared_bytes"] <= SHARED_LIMIT_BYTES[target], usage
        assert usage["registers"] <= 255, usage
        assert usage["stack_bytes"] <= STACK_BYTES, usage
    return {usage["kernel"] for usage in usages}


def test_oldest_supported_gpu() -> None:
    names = check(80, "--quick")
    assert len(names) == 14
    assert {"select_parts_kernel", "select_parts_kernel, filtered"} <= names
    assert {"row_scores_kernel", "row_scores_kernel, filtered", "shared_scores_kernel"} <= names


def test_hopper_has_a_kernel_of_its_own() -> None:
    names = check(90, "--quick")
    assert {"hopper_scores_kernel", "hopper_scores_kernel, filtered"} <= names
    assert len(names) == 16


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, 120])
def test_all_gpus_and_records(target: int) -> None:
    assert len(check(target)) == (16 if target == 90 else 14)
