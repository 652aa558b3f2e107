"""What every benchmark here shares: timing through CUDA graphs on rotating inputs, and result lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparse_mla.testing.bench import (
    L2_BYTES,
    Result,
    append_lines,
    attention_flops,
    input_sets,
    read_lines,
    time_launches,
)

__all__ = [
    "BASELINES",
    "L2_BYTES",
    "Result",
    "append_results",
    "attention_flops",
    "input_sets",
    "read_lines",
    "time_launches",
]

BASELINES = Path(__file__).parent / "baselines"


def append_results(results: Sequence[Result], name: str) -> Path:
    """Append result lines to `baselines/<name>.jsonl` and return its path."""
    return append_lines(results, BASELINES / f"{name}.jsonl")
