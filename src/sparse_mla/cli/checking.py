"""The check of `sparse-mla run`: sampled requests against a dense computation of each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_mla.engine.record import KeptLists, Recorder
from sparse_mla.engine.run import Engine
from sparse_mla.nn.weights import random_layer
from sparse_mla.testing.dense import DenseResult, DenseStack, Replay, Selection

SAMPLE_ROWS = 1200
"""Longest request that is sampled while a shorter one exists: the dense computation takes about as long as
serving those rows."""
LONG_SAMPLE_ROWS = 4096
"""Longest request that is sampled only because no shorter one fills an index list."""
CACHED_LAYERS = 8
"""Layers whose weights stay in memory while several requests are checked."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One request's served outputs against the dense ones."""

    request_id: int
    rows: int
    hit: int  # tokens of its prefix that came from the caches
    error: float  # relative L2 error of the residual stream after the last layer
    bound: float  # what the error must stay below, from the formats and the depth
    list_entries: int  # entries of index lists where there was something to choose
    list_differences: int  # of these, chosen differently (equal scores within rounding)
    faults: tuple[str, ...]  # lists that no rounding explains

    @property
    def passed(self) -> bool:
        """Whether outputs and lists are what the dense computation allows."""
        return not self.faults and self.error <= self.bound

    @property
    def sentence(self) -> str:
        """The result in one line."""
        prefix = f", {self.hit} from shared pages" if self.hit else ""
        lists = f"{self.list_differences:,} of {self.list_entries:,} list entries differ"
        text = f"request {self.request_id} ({self.rows:,} rows{prefix}): relative error "
        text += f"{self.error:.2e}, bound {self.bound:.2e}; {lists}"
        return text + (f"; {len(self.faults)} faults: {self.faults[0]}" if self.faults else "")

    def as_dict(self) -> dict[str, Any]:
        """Every field, the verdict and the sentence, ready for JSON."""
        return {**asdict(self), "passed": self.passed, "sentence": self.sentence}


def sample_requests(engine: Engine) -> list[int]:
    """A few requests: the longest affordable one, the last with a shared prefix, the shortest.

    If none of them is longer than an index list, the shortest longer one is added, up to a limit: only
    there does the indexer choose.
    """
    by_rows = sorted(engine.requests, key=lambda request: request.rows)
    affordable = [request for request in by_rows if request.rows <= SAMPLE_ROWS] or by_rows[:1]
    sample = [affordable[0], affordable[-1]]
    replayed = engine.scheduler.limits.replay_tokens
    likely = [request for request in affordable if request.shared_tokens > replayed]
    sample += sorted(likely, key=lambda request: request.request_id)[-1:]
    if affordable[-1].rows <= engine.cfg.index_topk:
        longer = [request for request in by_rows if request.rows > engine.cfg.index_topk]
        sample += [request for request in longer[:1] if request.rows <= LONG_SAMPLE_ROWS]
    return sorted({request.request_id for request in sample})


def check_requests(
    engine: Engine,
    recorder: Recorder,
    request_ids: Sequence[int],
    advance: Callable[[int], None],
) -> list[CheckResult]:
    """Compute each request densely and compare; `advance` hears of finished rows."""

    @functools.lru_cache(maxsize=CACHED_LAYERS)
    def weights_of(layer_id: int) -> dict[str, Tensor]:
        return random_layer(engine.cfg, layer_id, engine.options.seed)

    dense = DenseStack(engine.cfg, engine.layer_ids, weights_of, engine.caches.records)
    results = []
    for request_id in request_ids:
        results.append(check_request(engine, recorder, request_id, dense))
        advance(engine.requests[request_id].rows)
    return results


@torch.inference_mode()
def check_request(
    engine: Engine, recorder: Recorder, request_id: int, dense: DenseStack
) -> CheckResult:
    """Compare a served request with its dense computation, from the end of its prefix hit on.

    After a bounded replay the dense computation follows the same rule: shared entries of the hit, windows
    that end where the replay began. After an exact replay it is the plain one.
    """
    request, hit = engine.requests[request_id], engine.requests[request_id].hit
    hidden = engine.request_hidden(request_id).cpu()
    lists = recorder.lists(request)
    fresh = recorder.fresh_lists(request, hit)
    if hit and not engine.replay_is_exact:
        replay = Replay(request.replay_start, hit, _selections(fresh))
        result = dense.run(hidden, _selections(lists), replay)
    else:
        whole = {i: _joined(fresh[i], kept, hit) for i, kept in lists.items()} if hit else lists
        result = dense.run(hidden, _selections(whole))
    return _compare(request_id, hit, result, recorder.output(request_id))


def _compare(request_id: int, hit: int, result: DenseResult, output: Tensor) -> CheckResult:
    error = result.error(output, hit)
    return CheckResult(
        request_id=request_id,
        rows=len(output),
        hit=hit,
        error=error if error == error else float("inf"),
        bound=result.tolerance,
        list_entries=sum(check.entries for check in result.checks),
        list_differences=sum(check.differing for check in result.checks),
        faults=tuple(result.faults),
    )


def _selections(lists: dict[int, KeptLists]) -> dict[int, Selection]:
    return {i: Selection(kept.positions, kept.candidates) for i, kept in lists.items()}


def _joined(first: KeptLists, then: KeptLists, border: int) -> KeptLists:
    """Rows below `border` of one, the rest of the other."""
    candidates = None
    if first.candidates is not None and then.candidates is not None:
        candidates = torch.cat([first.candidates[:border], then.candidates[border:]])
    return KeptLists(torch.cat([first.positions[:border], then.positions[border:]]), candidates)
