"""Serve a stack of layers step by step through paged caches, with the schedule in the caller's hands.

The engine decides what a step holds; here a test does: any chunks, any mix of requests, padding rows,
drafts that are overwritten later. Pages are dealt out in a shuffled order and never returned.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_mla.cache.kv_dtype import RecordSet
from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadataBuilder
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepBuffers, StepState, rope_tables
from sparse_mla.ops.bodies import metadata_rules
from sparse_mla.testing.dense import Selection


@dataclass(slots=True)
class Served:
    """One request: where its state lies and what its rows gave."""

    length: int  # rows that it will have
    pages: dict[str, list[int]]
    outputs: Tensor  # float32 [length, hidden]
    selections: dict[int, Selection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start .. start + len(hidden) - 1` of a request in a step."""

    request: Served
    start: int
    hidden: Tensor  # float32 [rows, hidden]


class StackServer:
    """A stack, its caches, and the lists and outputs of its requests.

    Args:
        stack: the layers, with weights; where they live is where everything happens.
        records: how rows are stored.
        capacity_tokens: tokens of all requests together.
        max_tokens: rows of a step, padding included.
        num_spec_tokens: drafts of a step, which size the ring.
        seed: of the page order.
    """

    def __init__(
        self,
        stack: AttentionStack,
        records: RecordSet,
        *,
        capacity_tokens: int,
        max_tokens: int,
        max_requests: int = 8,
        num_spec_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        self.stack = stack
        self.cfg: ModelConfig = stack.cfg
        self.device = next(stack.parameters()).device
        pages = capacity_tokens // 32 + 2 * max_requests
        self.caches = CachePool.allocate(
            self.cfg,
            pages=pages,
            kv_cache_dtype=records,
            device=self.device,
            layer_ids=stack.layer_ids,
            num_spec_tokens=num_spec_tokens,
        )
        self.free: dict[str, list[int]] = {}
        for name, group in self.caches.groups.items():
            ids = list(range(group.first_block, group.num_blocks))
            random.Random(f"{seed}/{name}").shuffle(ids)
            self.free[name] = ids
        self.builder = StepMetadataBuilder(
            self.cfg,
            self.caches,
            max_tokens=max_tokens,
            max_requests=max_requests,
            num_heads=stack.num_heads,
            num_spec_tokens=num_spec_tokens,
            rules=metadata_rules(self.device),
        )
        self.buffers = StepBuffers.allocate(self.cfg, max_tokens, self.device)
        self.rope = rope_tables(
            self.cfg,
            num_positions=capacity_tokens,
            layer_ids=stack.layer_ids,
            device=self.device,
        )
        self.parts: list[Part] = []
        for layer in stack.attention_layers():
            layer.on_selection = self._record

    def request(self, length: int) -> Served:
        """A new request with pages for `length` rows."""
        pages = {}
        for name, group in self.caches.groups.items():
            count = 1 if name == "ring" else -(-length // group.tokens_per_page)
            pages[name] = [self.free[name].pop() for _ in range(count)]
        served = Served(length, pages, torch.full((length, self.cfg.hidden_size), torch.nan))
        for layer_id in self.stack.layer_ids:
            layer = layer_topology(self.cfg, layer_id)
            if layer.runs_indexer:
                columns = self.cfg.candidate_topk_blocks
                served.selections[layer_id] = Selection(
                    torch.full((length, self.cfg.index_topk), -1, dtype=torch.int32),
                    torch.full((length, columns), -1, dtype=torch.int32)
                    if layer.publishes_candidates
                    else None,
                )
        return served

    def state(
        self, parts: Sequence[Part], *, pad_to: int | None = None, causal: bool = True
    ) -> StepState:
        """The step of these parts."""
        groups = self.caches.groups
        batch = StepBatch.from_requests(
            [len(part.hidden) for part in parts],
            [part.start + len(part.hidden) for part in parts],
            {name: [part.request.pages[name] for part in parts] for name in groups},
            {name: group.tokens_per_page for name, group in groups.items()},
            pad_to=pad_to,
            causal=causal,
            device=self.device,
        )
        return StepState(self.caches, self.builder.build(batch), self.buffers, self.rope)

    def step(self, parts: Sequence[Part], *, pad_to: int | None = None) -> Tensor:
        """Run one step, keep each request's outputs and lists; float32 [rows, hidden], padding too.

        Padding rows of the input are NaN.
        """
        self.parts = list(parts)
        state = self.state(parts, pad_to=pad_to)
        hidden = torch.cat([part.hidden for part in parts])
        padding = torch.full((state.num_tokens - len(hidden), self.cfg.hidden_size), torch.nan)
        out: Tensor = self.stack(torch.cat([hidden, padding]).to(self.device), state)
        first = 0
        for part in parts:
            rows = slice(part.start, part.start + len(part.hidden))
            part.request.outputs[rows] = out[first : first + len(part.hidden)]
            first += len(part.hidden)
        return out

    def serve(self, hidden: Tensor, chunk: int) -> Served:
        """One request alone, in chunks of `chunk` rows."""
        request = self.request(len(hidden))
        for start in range(0, len(hidden), chunk):
            self.step([Part(request, start, hidden[start : start + chunk])])
        return request

    def _record(self, layer_id: int, step: StepState) -> None:
        first = 0
        for part in self.parts:
            rows, count = slice(part.start, part.start + len(part.hidden)), len(part.hidden)
            here = slice(first, first + count)
            kept = part.request.selections[layer_id]
            kept.positions[rows] = step.buffers.topk[here]
            if kept.candidates is not None:
                kept.candidates[rows] = step.buffers.candidates[here]
            first += count
