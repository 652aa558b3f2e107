"""Remember what some requests got, so that it can be checked afterwards."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.engine.scheduler import Request, Work
from sparse_mla.nn.step import StepState


@dataclass(frozen=True, slots=True)
class KeptLists:
    """What one index source chose for each position of some content; rows not computed are -1."""

    positions: Tensor  # int32 [rows, index_topk]
    candidates: Tensor | None  # int32 [rows, candidate_topk_blocks], on the candidate source only


class Recorder:
    """Outputs and chosen lists of the kept requests, on the CPU.

    A request that began with a prefix hit has two kinds of lists: its own, from its replay on, and
    those that chose for the shared prefix when it was first computed. The second are kept by content
    (stream), because another request may have computed it.
    """

    def __init__(self, cfg: ModelConfig, layer_ids: Sequence[int], kept: Iterable[Request]) -> None:
        self._cfg = cfg
        self._sources = [i for i in layer_ids if layer_topology(cfg, i).runs_indexer]
        self._outputs: dict[int, Tensor] = {}
        self._last: dict[tuple[int, int], KeptLists] = {}  # (request, layer), newest start
        self._fresh: dict[tuple[int, int], KeptLists] = {}  # (stream, layer), without a replay
        self._works: Sequence[Work] = ()
        for request in kept:
            self._outputs[request.request_id] = torch.full(
                (request.rows, cfg.hidden_size), torch.nan
            )
            for layer_id in self._sources:
                self._last[request.request_id, layer_id] = self._empty(layer_id, request.rows)
                for stream in {request.stream_at(0), request.stream_at(request.rows - 1)}:
                    rows = (
                        request.shared_tokens if stream == request.shared_stream else request.rows
                    )
                    known = self._fresh.get((stream, layer_id))
                    if known is None or len(known.positions) < rows:
                        self._fresh[stream, layer_id] = self._empty(layer_id, rows)

    def output(self, request_id: int) -> Tensor:
        """float32 [rows, hidden]; rows below the request's last prefix hit are NaN or stale."""
        return self._outputs[request_id]

    def lists(self, request: Request) -> dict[int, KeptLists]:
        """By index source: the request's lists since its last start."""
        return {layer_id: self._last[request.request_id, layer_id] for layer_id in self._sources}

    def fresh_lists(self, request: Request, rows: int) -> dict[int, KeptLists]:
        """By index source: the lists of the request's first rows, as computed without a replay."""
        return {layer_id: self._stitch(request, layer_id, rows) for layer_id in self._sources}

    def digest(self) -> bytes:
        """32 bytes that depend on every bit of the kept outputs and lists."""
        found = hashlib.sha256()
        lists = [*self._last.values(), *self._fresh.values()]
        for kept in lists:
            found.update(_bytes(kept.positions))
            if kept.candidates is not None:
                found.update(_bytes(kept.candidates))
        for output in self._outputs.values():
            found.update(_bytes(output))
        return found.digest()

    def begin_step(self, works: Sequence[Work]) -> None:
        """Say which rows the next lists and outputs belong to."""
        self._works = works

    def on_selection(self, layer_id: int, step: StepState) -> None:
        """Copy the lists that an index source has just filled."""
        visible = step.metadata.compressed[layer_topology(self._cfg, layer_id).ratio].visible
        positions = step.buffers.topk.cpu()
        candidates = None
        if layer_topology(self._cfg, layer_id).publishes_candidates:
            count = step.num_tokens
            published = visible[:count, None] > self._cfg.index_topk
            candidates = torch.where(published, step.buffers.candidates[:count], -1).cpu()
        first = 0
        for work in self._works:
            rows = slice(first, first + work.count)
            first += work.count
            request = work.request
            for begin, end, target in self._targets(request, work, layer_id):
                span = slice(rows.start + begin - work.start, rows.start + end - work.start)
                target.positions[begin:end] = positions[span]
                if candidates is not None and target.candidates is not None:
                    target.candidates[begin:end] = candidates[span]

    def end_step(self, x: Tensor) -> None:
        """Copy the outputs, float32 [T, hidden]; rows that only refill a window are left out."""
        first = 0
        for work in self._works:
            kept = self._outputs.get(work.request.request_id)
            if kept is not None:
                rows = x[first + work.replayed : first + work.count]
                kept[work.start + work.replayed : work.end] = rows.to(kept.device)
            first += work.count

    def _targets(
        self, request: Request, work: Work, layer_id: int
    ) -> list[tuple[int, int, KeptLists]]:
        """(first position, end, where to) for every store that wants rows of this work."""
        found = []
        last = self._last.get((request.request_id, layer_id))
        if last is not None:
            found.append((work.start, work.end, last))
        if request.hit == 0:
            border = request.shared_tokens
            for begin, end, stream in (
                (work.start, min(work.end, border), request.shared_stream),
                (max(work.start, border), work.end, request.stream),
            ):
                fresh = self._fresh.get((stream, layer_id))
                if fresh is not None and begin < end:
                    found.append((begin, min(end, len(fresh.positions)), fresh))
        return [target for target in found if target[0] < target[1]]

    def _stitch(self, request: Request, layer_id: int, rows: int) -> KeptLists:
        lists = self._empty(layer_id, rows)
        border = min(rows, request.shared_tokens)
        for begin, end, stream in (
            (0, border, request.shared_stream),
            (border, rows, request.stream),
        ):
            if begin < end:
                fresh = self._fresh[stream, layer_id]
                lists.positions[begin:end] = fresh.positions[begin:end]
                if lists.candidates is not None and fresh.candidates is not None:
                    lists.candidates[begin:end] = fresh.candidates[begin:end]
        return lists

    def _empty(self, layer_id: int, rows: int) -> KeptLists:
        def full(columns: int) -> Tensor:
            return torch.full((rows, columns), -1, dtype=torch.int32)

        publishes = layer_topology(self._cfg, layer_id).publishes_candidates
        return KeptLists(
            positions=full(self._cfg.index_topk),
            candidates=full(self._cfg.candidate_topk_blocks) if publishes else None,
        )


def _bytes(values: Tensor) -> bytes:
    """The bytes of a CPU tensor."""
    values = values.contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes)
