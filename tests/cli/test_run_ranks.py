"""`sparse-mla run --tp N` under torchrun: one report, of all ranks; and its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from sparse_mla.nn.parallel import Ranks

TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
)  # fmt: skip
OPTIONS = ("--shared-prefix", "200", "--max-batched-tokens", "96", "--layers", "0,1,2,3,5")


def torchrun(
    folder: Path, ranks: int, *arguments: object, seconds: float = 200
) -> subprocess.CompletedProcess[str]:
    """`python -m sparse_mla` on some ranks, in a folder."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    launcher = (*TORCHRUN, str(ranks))
    return subprocess.run(
        [sys.executable, *launcher, "-m", "sparse_mla", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_ranks_report_once_what_one_rank_reports(
    cli, small_config: Path, trace: Path, tmp_path: Path
) -> None:
    arguments = ("run", "--config", small_config, "--trace", trace, *OPTIONS, "--json")
    done = torchrun(tmp_path, 2, *arguments, "--tp", 2, "--plot", "two.png")
    assert done.returncode == 0, done.stderr
    several = json.loads(done.stdout)  # one object: the second rank prints nothing
    one = json.loads(cli(*arguments).stdout)
    assert (several["ranks"], several["heads_per_rank"], several["ranks_agree"]) == (2, 4, True)
    assert (one["ranks"], one["heads_per_rank"], one["ranks_agree"]) == (1, 8, True)
    assert several["passed"] is True
    same = ("layers", "requests", "rows", "steps", "reused_tokens", "pages", "kv_bytes_peak")
    assert {name: several[name] for name in same} == {name: one[name] for name in same}
    assert len(several["checks"]) == len(one["checks"]) > 1
    for mine, other in zip(several["checks"], one["checks"], strict=True):
        assert mine["passed"]
        assert mine["list_entries"] == other["list_entries"]
        assert 0 < mine["error"] <= mine["bound"]
    assert (tmp_path / "two.png").is_file()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_ranks_that_cannot_share_the_heads_run_nothing(
    small_config: Path, trace: Path, tmp_path: Path
) -> None:
    done = torchrun(tmp_path, 3, "run", "--config", small_config, "--trace", trace, "--tp", 3)
    assert done.returncode == 1  # torchrun's own, whatever its processes end with
    assert "tp_size: got 3; allowed: a divisor of 8 heads" in " ".join(done.stderr.split())
    assert "exitcode  : 2" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "run-report.png").exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (("--tp", 0), {}, "--tp"),
        (("--tp", 2), {}, "--tp: got 2 with no torchrun; allowed: as many ranks as torchrun"),
        (("--tp", 2), {"WORLD_SIZE": "4"}, "--tp: got 2 with 4 processes"),
        ((), {"WORLD_SIZE": "2"}, "--tp: got 1 with 2 processes"),
        (("--tp", 2), {"WORLD_SIZE": "many"}, "environment variable WORLD_SIZE: got 'many'"),
    ],
)
def test_a_wrong_start_exits_with_2(
    cli,
    small_config: Path,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    variables: dict[str, str],
    complaint: str,
) -> None:
    if variables:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = cli("run", "--config", small_config, "--trace", trace, *arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_ranks_that_disagree_fail_the_run(
    cli, small_config: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "agree", lambda self, digest: len(digest) != 32)
    result = cli("run", "--config", small_config, "--trace", trace, "--layers", "0", "--json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert (summary["ranks_agree"], summary["passed"]) == (False, False)
    assert all(check["passed"] for check in summary["checks"])
