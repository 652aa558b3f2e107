"""The attention kernel compiles for GPUs that are not here, within their limits and with few spills.

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
FEW_HEADS_STACK_BYTES = 32
"""Stack of the 16-head form, none of it used in the loop of few heads."""
MANY_HEADS_STACK_BYTES = 1024
"""Stack of the 64-head form: with two records, mostly matrix descriptors around the second loop."""


def usages(target: int, *options: str) -> list[dict[str, object]]:
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT / "src"))
    command = [sys.executable, str(ROOT / "benchmarks" / "resources.py"), "--json"]
    done = subprocess.run(
        [*command, "--targets", str(target), *options], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(target: int, expected: int, *options: str) -> None:
    found = usages(target, *options)
    assert len(found) == expected
    for usage in found:
        assert usage["shared_bytes"] <= SHARED_LIMIT_BYTES[target], usage
        assert usage["registers"] <= 255, usage
        few = str(usage["config"]).startswith("16 heads")
        allowed = FEW_HEADS_STACK_BYTES if few else MANY_HEADS_STACK_BYTES
        assert usage["stack_bytes"] <= allowed, usage


def test_oldest_supported_gpu() -> None:
    check(80, 1, "--quick")


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, 120])
def test_every_variant_of_every_gpu(target: int) -> None:
    check(target, 9 if target == 90 else 6)
