"""A shrunken configuration on disk, and the command line as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparse_mla.cli.main import app

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "hidden_size": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "rms_norm_eps": 1e-20,
    "sliding_window": 128,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5, 6],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 20,
    "candidate_block_size": 4,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 4096,
}

Run = Callable[..., Any]


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n150,3\n40,2\n260,2\n230,4\n")
    return path


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke
