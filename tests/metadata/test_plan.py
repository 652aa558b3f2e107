"""Plans: how many programs share a row, what scratch that takes, and what a plan refuses."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import PlanMismatchError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadataBuilder
from sparse_mla.metadata.plan import PlanScratch, TileSchedulerPlan, build_plan, choose_splits


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "sms", "splits"),
    [
        (1, 64, 640, 132, 10),  # no more than its ten tiles
        (1, 64, 16384, 132, 16),  # never more than 16
        (8, 64, 640, 132, 8),  # 32 programs, two for each multiprocessor: 264 / 32
        (64, 64, 640, 132, 1),
        (4096, 64, 640, 132, 1),
        (1, 8, 128, 132, 2),
        (0, 64, 640, 132, 1),
        (1, 64, 0, 132, 1),
        (1, 64, 640, 0, 1),  # a CPU
    ],
)
def test_splits(tokens: int, heads: int, keys: int, sms: int, splits: int) -> None:
    assert choose_splits(tokens, heads, keys, sms) == splits


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 128])
@pytest.mark.parametrize("sms", [1, 8, 132])
def test_scratch_suffices_for_every_step(heads: int, sms: int) -> None:
    scratch = PlanScratch(heads, sms, "cpu")
    assert scratch.partial is not None
    assert scratch.arrivals is not None
    for tokens in (1, 2, 3, 7, 16, 31, 64, 132, 263, 264, 265, 1000):
        for keys in (64, 640, 16384):
            plan = build_plan(
                LayerKind.RATIO_1, tokens=tokens, num_heads=heads, window_keys=0,
                compressed_keys=keys, scratch=scratch,
            )  # fmt: skip
            if plan.splits == 1:
                assert plan.partial is None
                continue
            assert plan.partial is not None
            assert plan.arrivals is not None
            assert plan.partial.numel() == tokens * plan.splits * heads * 514
            assert plan.arrivals.numel() == tokens * -(-heads // 16)


def test_scratch_is_as_small_as_stated() -> None:
    scratch = PlanScratch(64, 132, "cpu")
    assert scratch.partial is not None
    assert scratch.arrivals is not None
    assert (scratch.partial.nbytes, scratch.arrivals.nbytes) == (8_684_544, 1_056)
    assert not scratch.arrivals.any()
    assert PlanScratch(64, 0, "cpu").partial is None, "a CPU never splits"


def test_a_builder_hands_out_one_scratch_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_mla.metadata.builder._num_sms", lambda device: 132)
    cfg = ModelConfig.deepseek_v41_flash()
    pool = CachePool.allocate(cfg, pages=4, layer_ids=[0, 2, 20])
    builder = StepMetadataBuilder(cfg, pool, max_tokens=80, max_requests=2, max_seq_len=192)
    tokens = {name: group.tokens_per_page for name, group in pool.groups.items()}
    seen = set()
    for query, splits in ((1, {2, 10}), (8, {2, 8}), (80, {1})):
        tables = {name: [[1, 2, 3]] if name != "ring" else [[1]] for name in tokens}
        step = builder.build(StepBatch.from_requests([query], [query], tables, tokens))
        assert {plan.splits for plan in step.plan.values()} == splits
        for kind, plan in step.plan.items():
            plan.check(query, 64, 128, 512 if kind.ratio else 0, torch.device("cpu"))
            if plan.partial is not None and plan.arrivals is not None:
                seen.add((plan.partial.data_ptr(), plan.arrivals.data_ptr()))
                assert plan.partial.numel() == query * plan.splits * 64 * 514
    assert len(seen) == 1


def test_batch_invariant_plans_never_split() -> None:
    plan = build_plan(
        LayerKind.RATIO_2, tokens=1, num_heads=64, window_keys=128, compressed_keys=512,
        scratch=PlanScratch(64, 132, "cpu"), batch_invariant=True,
    )  # fmt: skip
    assert (plan.splits, plan.partial) == (1, None)


def _plan() -> TileSchedulerPlan:
    return TileSchedulerPlan(
        kind=LayerKind.RATIO_1, max_tokens=4, num_heads=8, window_keys=128, compressed_keys=512,
        splits=2, batch_invariant=False, partial=torch.empty(1), arrivals=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ((5, 8, 128, 512), "got 5 tokens"),
        ((4, 16, 128, 512), r"\(16, 128, 512\); allowed: at most 4 tokens and \(8, 128, 512\)"),
        ((4, 8, 192, 512), "192"),
        ((4, 8, 128, 0), r"\(8, 128, 0\)"),
    ],
)
def test_a_plan_refuses_other_calls(call: tuple[int, int, int, int], match: str) -> None:
    _plan().check(4, 8, 128, 512, torch.device("cpu"))
    _plan().check(0, 8, 128, 512, torch.device("cpu"))
    with pytest.raises(PlanMismatchError, match=match):
        _plan().check(*call, torch.device("cpu"))


def test_a_plan_refuses_other_devices() -> None:
    with pytest.raises(PlanMismatchError, match="built on cpu, called on meta"):
        _plan().check(4, 8, 128, 512, torch.device("meta"))
