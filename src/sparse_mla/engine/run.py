"""The engine: a request list in, attention outputs and a report out.

The model is attention only. A token's hidden state is a fixed function of its content (`hidden.py`) and
passes through a residual stack of attention layers, so a row's result does not depend on what else its
step computes. One step:

    scheduler.schedule() -> works          which rows of which requests, pages allocated
    StepBatch            -> StepMetadata   slots, key lists, plans
    AttentionStack                         each layer writes its caches, attends, adds
    scheduler.complete(works)              pages freed, prefixes offered
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import cache_groups, layer_topology, with_sources
from sparse_mla.engine.graphs import DecodeGraphs
from sparse_mla.engine.hidden import hidden_states
from sparse_mla.engine.record import Recorder
from sparse_mla.engine.scheduler import RING, WINDOW, Limits, PageGroup, Request, Scheduler, Work
from sparse_mla.engine.trace import TraceRequest
from sparse_mla.errors import ArgumentError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadataBuilder
from sparse_mla.nn.graph import stating_longest
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepBuffers, StepState, rope_tables
from sparse_mla.ops.bodies import metadata_rules

BLOCK_TOKENS = 64
"""Tokens that one page of a compressed cache covers."""
WINDOW_PAGE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a request list is served."""

    layer_ids: tuple[int, ...]  # backbone layers; missing sources are added
    kv_cache_dtype: str = "auto"
    max_batched_tokens: int = 512  # rows of a step
    max_requests: int = 16  # running at a time
    shared_prefix_tokens: int = 0  # tokens that the requests of a family have in common
    families: int = 2  # request i belongs to family i % families
    prefix_reuse: bool = True
    replay_tokens: int = 128  # recomputed before the end of a prefix hit
    seed: int = 0  # of the weights and the hidden states
    device: str = "cpu"
    pages: Mapping[str, int] | None = None  # by group; None = enough for any `max_requests`
    graphs: bool | None = None  # decode steps padded and replayed; None = on a GPU

    def __post_init__(self) -> None:
        check_at_least("families", self.families, 1)
        check_at_least("shared_prefix_tokens", self.shared_prefix_tokens, 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did."""

    rows: int
    decode_rows: int  # rows of requests past their prompt
    replayed_rows: int  # rows that only refilled a window after a prefix hit
    running: int  # requests
    waiting: int
    kv_bytes: int  # pages in use, the prefix cache included
    seconds: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a whole run did."""

    steps: tuple[StepRecord, ...]
    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int  # tokens of prefix hits that were not computed again
    preemptions: int
    pages_total: Mapping[str, int]
    pages_peak: Mapping[str, int]
    page_bytes: Mapping[str, int]  # one page of a group, all layers of the group side by side

    @property
    def rows(self) -> int:
        """Rows that passed through the layers."""
        return sum(step.rows for step in self.steps)

    @property
    def seconds(self) -> float:
        """Time in steps, set-up not counted."""
        return sum(step.seconds for step in self.steps)

    @property
    def kv_bytes_peak(self) -> int:
        """Most bytes of pages in use during any step."""
        return max((step.kv_bytes for step in self.steps), default=0)

    @property
    def kv_bytes_allocated(self) -> int:
        """Bytes of the arenas."""
        return sum(self.pages_total[name] * size for name, size in self.page_bytes.items())


class Engine:
    """Serves one request list; build it, `run` it once."""

    def __init__(
        self,
        cfg: ModelConfig,
        trace: Sequence[TraceRequest],
        options: EngineOptions,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate weights, caches and buffers, and queue every request.

        Args:
            cfg: the model.
            trace: the requests.
            options: how they are served.
            ranks: the process group that shares the heads out. Every rank serves the same requests in the
                same steps; nothing but sums of layer outputs passes between them.

        Raises:
            ArgumentError: no request, a draft layer, or a context longer than the model takes.
            OutOfPagesError: a request does not fit the pools even alone.
        """
        self.cfg, self.options = cfg, options
        self.ranks = Ranks(0, 1) if ranks is None else ranks
        self.device = torch.device(options.device)
        self.layer_ids, self.added_layer_ids = with_sources(cfg, options.layer_ids)
        _check(cfg, self.layer_ids, trace)
        limits = Limits(
            max_batched_tokens=options.max_batched_tokens,
            max_requests=options.max_requests,
            window=cfg.sliding_window,
            replay_tokens=options.replay_tokens,
            prefix_reuse=options.prefix_reuse,
        )
        self.requests = [self._request(index, line) for index, line in enumerate(trace)]
        pages = _enough_pages(cfg, self.layer_ids, self.requests, limits)
        self.caches = CachePool.allocate(
            cfg,
            pages={**pages, **(options.pages or {})},
            kv_cache_dtype=options.kv_cache_dtype,
            device=options.device,
            block_size=BLOCK_TOKENS,
            window_page_rows=WINDOW_PAGE_TOKENS,
            layer_ids=self.layer_ids,
        )
        self.scheduler = Scheduler(_page_groups(self.caches), limits)
        for request in self.requests:
            self.scheduler.submit(request)
        self.stack = AttentionStack(cfg, self.layer_ids, device=self.device, ranks=self.ranks)
        self.stack.reset_parameters(options.seed)
        longest = max(request.rows for request in self.requests)
        self.rope = rope_tables(
            cfg,
            num_positions=longest,
            layer_ids=self.layer_ids,
            device=self.device,
        )
        self.buffers = StepBuffers.allocate(cfg, limits.max_batched_tokens, self.device)
        self.builder = StepMetadataBuilder(
            cfg,
            self.caches,
            max_tokens=limits.max_batched_tokens,
            max_requests=limits.max_requests,
            max_seq_len=longest,
            num_heads=self.stack.num_heads,
            device=self.device,
            rules=metadata_rules(self.device),
        )
        self._longest = longest
        most = min(limits.max_batched_tokens, limits.max_requests)
        wanted = self.device.type == "cuda" if options.graphs is None else options.graphs
        self.graphs = DecodeGraphs(self.stack, most) if wanted else None
        self._recorder: Recorder | None = None

    @property
    def replay_is_exact(self) -> bool:
        """Whether a replay covers a window for each layer, so that no row of a hit misses a key."""
        return self.options.replay_tokens >= self.cfg.sliding_window * len(self.layer_ids)

    def keep(self, request_ids: Iterable[int]) -> Recorder:
        """Remember these requests' outputs and lists; call it before the first step."""
        kept = [self.requests[index] for index in request_ids]
        self._recorder = Recorder(self.cfg, self.layer_ids, kept)
        for layer in self.stack.attention_layers() if kept else ():
            layer.on_selection = self._recorder.on_selection
        return self._recorder

    def request_hidden(self, request_id: int) -> Tensor:
        """float32 [rows, hidden]: what the request feeds into the first layer."""
        request = self.requests[request_id]
        return self._hidden([Work(request, 0, request.rows)])

    def run(self, on_step: Callable[[StepRecord], None] | None = None) -> RunReport:
        """Serve every request to its end."""
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            if on_step is not None:
                on_step(steps[-1])
        groups = self.caches.groups
        return RunReport(
            steps=tuple(steps),
            prompt_tokens=sum(request.prompt_tokens for request in self.requests),
            generated_tokens=sum(r.rows - r.prompt_tokens + 1 for r in self.requests),
            reused_tokens=sum(request.replay_start for request in self.requests),
            preemptions=sum(request.preemptions for request in self.requests),
            pages_total={name: group.num_pages for name, group in self.scheduler.groups.items()},
            pages_peak={name: pages.peak for name, pages in self.scheduler.allocators.items()},
            page_bytes={name: group.block_bytes for name, group in groups.items()},
        )

    def release(self) -> None:
        """Free captured steps; a process group may end only after this."""
        if self.graphs is not None:
            self.graphs.release()

    @torch.inference_mode()
    def step(self) -> StepRecord:
        """Compute one step."""
        began = time.perf_counter()  # the step ends with a sync, so this is its true time
        works = self.scheduler.schedule()
        if self._recorder is not None:
            self._recorder.begin_step(works)
        x = self._compute(works)
        if self._recorder is not None:
            self._recorder.end_step(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        in_use = self.scheduler.pages_in_use()
        running = len(self.scheduler.running)
        self.scheduler.complete(works)
        return StepRecord(
            rows=sum(work.count for work in works),
            decode_rows=sum(w.count for w in works if w.start >= w.request.prompt_tokens),
            replayed_rows=sum(work.replayed for work in works),
            running=running,
            waiting=len(self.scheduler.waiting),
            kv_bytes=sum(n * self.caches.groups[name].block_bytes for name, n in in_use.items()),
            seconds=time.perf_counter() - began,
        )

    def _compute(self, works: Sequence[Work]) -> Tensor:
        """float32 [rows, hidden]: the stream after the last layer."""
        pad_to = None if self.graphs is None else self.graphs.rows_for(works)
        batch = self._batch(works, pad_to)
        if pad_to is not None:
            batch = stating_longest(batch, self._longest)
        state = StepState(self.caches, self.builder.build(batch), self.buffers, self.rope)
        if self.graphs is not None and pad_to is not None:
            return self.graphs.run(state, self._hidden(works), self._recorder)
        x: Tensor = self.stack(self._hidden(works), state)
        return x

    def _request(self, index: int, line: TraceRequest) -> Request:
        options = self.options
        shared = min(options.shared_prefix_tokens, line.prompt_tokens)
        return Request(
            request_id=index,
            prompt_tokens=line.prompt_tokens,
            rows=line.rows,
            stream=2 * index,
            shared_stream=2 * (index % options.families) + 1,
            shared_tokens=shared,
        )

    def _batch(self, works: Sequence[Work], pad_to: int | None = None) -> StepBatch:
        """The step of these works; padded, it also has as many requests as rows, empty ones last."""
        requests = [work.request for work in works]
        groups = self.scheduler.groups
        empty = max(0, (pad_to or 0) - len(works))
        nothing: list[list[int]] = [[]] * empty
        return StepBatch.from_requests(
            [work.count for work in works] + [0] * empty,
            [work.end for work in works] + [0] * empty,
            {name: [request.pages[name] for request in requests] + nothing for name in groups},
            {name: group.page_tokens for name, group in groups.items()},
            pad_to=pad_to,
            replay_start=[request.replay_start for request in requests] + [0] * empty,
            replay_tokens=self.options.replay_tokens,
            device=self.device,
        )

    def _hidden(self, works: Sequence[Work]) -> Tensor:
        positions = torch.cat([torch.arange(work.start, work.end) for work in works])
        streams = torch.tensor(
            [w.request.stream_at(p) for w in works for p in range(w.start, w.end)]
        )
        device, seed = self.device, self.options.seed
        return hidden_states(streams.to(device), positions.to(device), self.cfg.hidden_size, seed)


def _check(cfg: ModelConfig, layer_ids: Sequence[int], trace: Sequence[TraceRequest]) -> None:
    check_at_least("number of requests", len(trace), 1)
    drafts = [layer_id for layer_id in layer_ids if layer_topology(cfg, layer_id).is_draft]
    if drafts or not layer_ids:
        raise ArgumentError(
            "layers", drafts or "none", f"backbone layers 0..{cfg.num_hidden_layers - 1}"
        )
    longest = max(request.rows for request in trace)
    if longest > cfg.max_position_embeddings:
        raise ArgumentError(
            "trace", f"a request of {longest} tokens", f"at most {cfg.max_position_embeddings}"
        )


def _enough_pages(
    cfg: ModelConfig, layer_ids: Sequence[int], requests: Sequence[Request], limits: Limits
) -> dict[str, int]:
    """Pages so that the largest requests run together: nothing is preempted, prefixes find room."""
    running = min(limits.max_requests, len(requests))
    largest = sorted((request.rows for request in requests), reverse=True)[:running]
    around = cfg.sliding_window // WINDOW_PAGE_TOKENS + 2  # a request's pages besides its chunk
    pages = {
        WINDOW: limits.max_batched_tokens // WINDOW_PAGE_TOKENS + running * around,
        RING: running + 1,  # block 0 is the null block
    }
    blocks = sum(-(-rows // BLOCK_TOKENS) for rows in largest)
    names = [group.name for group in cache_groups(cfg, layer_ids)]
    return {name: pages.get(name, blocks) for name in names}


def _page_groups(caches: CachePool) -> list[PageGroup]:
    return [
        PageGroup(
            name=name,
            page_tokens=layout.tokens_per_page,
            num_pages=layout.num_blocks - layout.first_block,
            first=layout.first_block,
        )
        for name, layout in caches.groups.items()
    ]
