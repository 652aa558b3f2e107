"""Tensor parallel over NCCL, one process a GPU: what one GPU gives, and the same on all ranks.

Prefill in chunks, decode steps and their sums replayed from CUDA graphs, a layer of every kind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPUS = torch.cuda.device_count()


def load_worker() -> ModuleType:
    """The module that serves a request list on some ranks."""
    path = Path(__file__).parents[1] / "engine" / "parallel_worker.py"
    spec = importlib.util.spec_from_file_location("engine_parallel_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WORKER = load_worker()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "heads", "groups"),
    [
        pytest.param(2, 64, 8, id="32-heads-a-rank"),
        pytest.param(2, 32, 8, id="16-heads-a-rank-of-2"),
        pytest.param(4, 64, 8, id="16-heads-a-rank-of-4"),
    ],
)
def test_nccl_ranks_give_what_one_gpu_gives(
    tmp_path: Path, ranks: int, heads: int, groups: int
) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, here are {GPUS}")
    case = WORKER.Case("cuda", ranks, heads, groups)
    one, several = WORKER.results_of(case, tmp_path)
    for result in (one, *several):
        print(WORKER.measured(result, one))
    WORKER.compare(case, one, several)
    assert all(result["multicast"] == "0" for result in several)


def run_command(folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """`sparse-mla run` with a small model on some ranks."""
    config = WORKER.Case("cuda", ranks, 64, 8).config(64)
    fields = {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if name != "rope_scaling"
    }
    (folder / "config.json").write_text(
        json.dumps({**fields, "rope_scaling": None, "model_type": "deepseek_v41"})
    )
    (folder / "trace.csv").write_text("prompt,output\n150,9\n40,12\n260,4\n")
    launcher = (*WORKER.TORCHRUN, str(ranks))
    options = ("--config", "config.json", "--trace", "trace.csv", "--max-batched-tokens", "96")
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, *launcher, "-m", "sparse_mla", "run", "--device", "cuda", *options,
         "--tp", str(ranks), "--json"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_the_command_serves_on_two_gpus(tmp_path: Path) -> None:
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, here are {GPUS}")
    done = run_command(tmp_path, 2)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert (summary["ranks"], summary["heads_per_rank"], summary["ranks_agree"]) == (2, 32, True)
    assert summary["passed"] is True
    assert len(summary["checks"]) > 1


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    done = run_command(tmp_path, GPUS + 1)
    assert done.returncode == 1
    here = "1 GPU" if GPUS == 1 else f"{GPUS} GPUs"
    complaint = f"--tp: got {GPUS + 1} ranks on a machine with {here}; allowed: one rank a GPU"
    assert complaint in " ".join(done.stderr.split())
    assert done.stdout == ""
