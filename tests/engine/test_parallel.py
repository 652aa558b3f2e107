"""Tensor parallel through the engine, on gloo ranks: what one rank gives, and the same on all ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparse_mla.engine.launch import device_of_rank, joined
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest
from sparse_mla.errors import ArgumentError
from sparse_mla.nn.parallel import Ranks
from sparse_mla.settings import Launch, leave_nvlink_multicast_off


def load_worker() -> ModuleType:
    """parallel_worker.py as a module."""
    path = Path(__file__).with_name("parallel_worker.py")
    spec = importlib.util.spec_from_file_location("engine_parallel_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WORKER = load_worker()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    ("ranks", "heads", "groups"),
    [
        (2, 8, 2),
        (4, 64, 8),  # 16 heads a rank, two groups
        pytest.param(4, 64, 2, marks=pytest.mark.slow),  # 16 heads a rank, half a group
    ],
)
def test_gloo_ranks_give_what_one_rank_gives(
    tmp_path: Path, ranks: int, heads: int, groups: int
) -> None:
    case = WORKER.Case("cpu", ranks, heads, groups)
    one, several = WORKER.results_of(case, tmp_path)
    WORKER.compare(case, one, several)
    assert [result["multicast"] for result in several] == [None] * ranks


@pytest.mark.parametrize(
    ("size", "launch", "complaint"),
    [
        (0, None, "--tp: got 0; allowed: 1 or more ranks"),
        (2, None, "--tp: got 2 with no torchrun; .* `torchrun --nproc-per-node 2 -m sparse_mla"),
        (4, Launch(0, 2, 0, 2), "--tp: got 4 with 2 processes; .*--nproc-per-node 4"),
        (1, Launch(1, 2, 1, 2), "--tp: got 1 with 2 processes; .* pass --tp 2, or start without"),
    ],
)
def test_a_wrong_start_is_refused(size: int, launch: Launch | None, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        device_of_rank(size, "cpu", launch)


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Two machines of two GPUs: the third process is the first of the second machine.
    places = [device_of_rank(4, "cuda", Launch(rank, 4, rank % 2, 2)) for rank in range(4)]
    assert places == [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    assert device_of_rank(4, "cpu", Launch(3, 4, 3, 4)) == torch.device("cpu")
    assert device_of_rank(1, "cuda:1", None) == torch.device("cuda:1")
    with pytest.raises(ArgumentError, match="--tp: got 4 ranks on a machine with 2 GPUs; .*GPU"):
        device_of_rank(4, "cuda", Launch(0, 4, 0, 4))
    with pytest.raises(ArgumentError, match="--device: got 'cuda:1'; allowed: cpu or cuda"):
        device_of_rank(2, "cuda:1", Launch(0, 2, 0, 2))


def test_the_variables_of_torchrun() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Launch.from_environment(variables) == Launch(3, 4, 1, 2)
    assert Launch.from_environment({"HOME": "/"}) is None
    for name, value in (("RANK", None), ("LOCAL_RANK", "-1"), ("WORLD_SIZE", "two")):
        wrong = {key: text for key, text in {**variables, name: value}.items() if text is not None}
        with pytest.raises(ArgumentError, match=f"variable {name}: got .*; start with torchrun"):
            Launch.from_environment(wrong)


def test_nvlink_multicast_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in ((None, "0"), ("1", "1"), ("0", "0")):
        environment: dict[str, str] = {} if given is None else {"NCCL_NVLS_ENABLE": given}
        monkeypatch.setattr("os.environ", environment)
        leave_nvlink_multicast_off()
        assert environment == {"NCCL_NVLS_ENABLE": wanted}


def test_one_rank_needs_no_group() -> None:
    with joined(1, torch.device("cpu"), Launch(0, 1, 0, 1)) as ranks:
        assert ranks == Ranks(0, 1)
        assert not dist.is_initialized()
        share = torch.ones(3)
        assert ranks.add(share) is share
        assert ranks.agree(b"anything")


def test_ranks_agree_only_on_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(theirs: list[Tensor], mine: Tensor, group: Any) -> None:
        assert group is None
        assert mine.tolist() == [1, 2]
        theirs[0].copy_(mine)
        theirs[1].copy_(other)

    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_gather", gather)
    for values, agree in (([1, 2], True), ([1, 3], False)):
        other = torch.tensor(values, dtype=torch.uint8)
        assert Ranks(0, 2).agree(b"\x01\x02") is agree


def test_a_digest_depends_on_every_output_and_list() -> None:
    cfg = WORKER.Case("cpu", 1, 8, 2).config(16)
    engine = Engine(cfg, [TraceRequest(20, 2, 0.0, 2)], EngineOptions(layer_ids=(0, 1)))
    recorder = engine.keep([0])
    seen = {recorder.digest()}
    engine.run()
    seen.add(recorder.digest())
    recorder.output(0)[3, 5] += 1.0
    seen.add(recorder.digest())
    recorder.lists(engine.requests[0])[1].positions[20, 0] += 1
    seen.add(recorder.digest())
    assert len(seen) == 4
    assert all(len(digest) == 32 for digest in seen)
