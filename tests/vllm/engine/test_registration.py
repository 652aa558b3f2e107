"""The entry point, in this process and in fresh ones; and that without it vLLM is untouched."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper
import vllm
from vllm.config.attention import AttentionConfig
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sparse_mla.integrations.vllm import plugin
from sparse_mla.integrations.vllm.names import BACKENDS

HERE = Path(__file__).parent
NAMES = ["SPARSE_MLA_MEGA_DSV41", "SPARSE_MLA_DSV41"]


def fresh(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """The JSON object that a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **fake_hopper.ENVIRONMENT, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def member(name: str) -> Any:
    load_general_plugins()
    return AttentionBackendEnum[name]


def test_a_fresh_process_registers_names_and_models_and_imports_no_model() -> None:
    blobs = [pickle.dumps(member(name)).hex() for name in NAMES]
    answer = fresh("plugins.py", *blobs)
    assert answer["entry_points"]["sparse_mla"] == "sparse_mla.integrations.vllm.plugin:register"
    assert answer["unpickled"] == NAMES
    assert answer["are_members"] == [True, True]
    assert sorted(answer["names"]) == sorted(NAMES)
    hook = "sparse_mla.integrations.vllm.hook"
    assert set(answer["modules"].values()) == {hook}
    assert answer["models_imported"] is False


def test_switched_off_vllm_is_untouched() -> None:
    off = fresh("plugins.py", VLLM_PLUGINS="")
    assert off["names"] == []
    assert off["ours_imported"] is False
    assert off["count"] == len(list(AttentionBackendEnum)) - len(NAMES)
    assert set(off["modules"].values()) == {"vllm.models.deepseek_v41"}


@pytest.mark.parametrize("name", NAMES)
def test_members_are_values_of_an_attention_config(name: str) -> None:
    ours = member(name)
    config = AttentionConfig(backend=name.lower())
    assert config.backend is ours
    assert len(config.compute_hash()) > 8
    assert copy.deepcopy(config).backend is ours
    assert pickle.loads(pickle.dumps(config)).backend is ours
    assert ours.get_class().get_name() == name
    assert ours.get_path() == BACKENDS[name]


def test_an_untested_vllm_is_left_alone_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    monkeypatch.setattr(plugin, "backend_member", never)
    monkeypatch.setattr("vllm.model_executor.models.registry.ModelRegistry.register_model", never)
    warnings: list[str] = []
    monkeypatch.setattr(
        "logging.Logger.warning", lambda self, text, *given: warnings.append(text % given)
    )
    plugin.register()
    assert "sparse_mla: vLLM 0.34.1 was not tested (tested: 0.33.0)" in warnings[0]


@pytest.mark.parametrize(
    ("name", "layer"), list(zip(NAMES, ["MegaAttention", "SparseAttention"], strict=True))
)
def test_a_spawned_worker_takes_our_layer(name: str, layer: str) -> None:
    answer = fresh("spawned.py", "select", name, "auto")
    assert answer == {
        "exit": 0,
        "architecture": "DeepseekV41ForCausalLM",
        "model": "vllm.models.deepseek_v41.nvidia.vl_model.DeepseekV41ForCausalLM",
        "backend": name,
        "is_the_member": True,
        "layer": layer,
    }


def test_a_spawned_worker_builds_the_whole_model() -> None:
    answer = fresh("spawned.py", "build", NAMES[0], "auto")
    assert answer["exit"] == 0
    assert answer["model"] == "DeepseekV41ForCausalLM"
    assert answer["layers"] == ["MegaAttention"] * 5
    prefix = "language_model.model.layers.{}.attn"
    sources = [None, prefix.format(1), prefix.format(1), prefix.format(3), prefix.format(3)]
    assert answer["sources"] == sources
    assert answer["kv_cache_dtype"] == "nvfp4_ds_mla"
    widths = answer["widths"]
    assert {widths[f"{prefix.format(n)}.swa_cache"] for n in range(5)} == {528}
    assert {widths[prefix.format(n)] for n in (1, 3)} == {288}
