"""Tensor parallel over gloo: two processes give the result of one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sparse_mla.errors import ArgumentError
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.parallel import Ranks

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_ranks_give_the_result_of_one(tmp_path: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1", TRITON_INTERPRET="0")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    spec = importlib.util.spec_from_file_location("parallel_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    wanted = worker.serve(64, None)[1]
    for process in started:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said[-2000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["owned"]
    assert second["owned"]
    # Each rank rounds its shares of z and y to bf16 in every layer, and so does their sum.
    error = float((first["all chosen"] - wanted).norm() / wanted.norm())
    assert error < len(worker.LAYERS) * 2.0**-8 * 2**0.5
    assert torch.equal(first["all chosen"], second["all chosen"])
    # Where scores decide, both ranks decide alike: nothing about positions was sent.
    assert torch.equal(first["some chosen"][0], second["some chosen"][0])
    for mine, other in zip(first["some chosen"][1], second["some chosen"][1], strict=True):
        assert torch.equal(mine, other)
        assert bool((mine[-1] >= 0).all())


def test_a_rank_outside_of_a_group_is_refused(lab) -> None:
    with pytest.raises(ArgumentError, match="init_process_group"):
        Ranks.of_group()
    cfg = lab.shrunken()
    with pytest.raises(ArgumentError, match="shard"):
        DeepseekV41Attention(cfg, 0, shard=cfg.shard(1, 2), ranks=Ranks(0, 2))
    layer = DeepseekV41Attention(cfg, 0, ranks=Ranks(1, 2))
    assert list(layer.shard.heads) == [4, 5, 6, 7]
