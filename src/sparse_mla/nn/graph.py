"""A step of a stack captured into a CUDA graph, and replayed with other lengths, tables and positions.

What may change between replays lies in the metadata builder's and the caches' tensors, whose addresses
never move: build the next step's metadata, then `run`. What may not change is what the host decides by:
the number of rows and the longest length that the batch states. A batch that is to be captured
therefore states the longest length of any replay (`stating_longest`); every row still sees only what its
own length gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_mla.errors import PlanMismatchError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepState


@dataclass(frozen=True, slots=True)
class KeptLists:
    """What an index source chose in the last step, kept while later sources overwrite the buffers."""

    topk: Tensor  # int32 [T, index_topk]
    candidates: Tensor | None  # int32 [T, candidate_topk_blocks], on the candidate source only


class StepGraph:
    """Steps of one stack with one number of rows.

    On a CPU nothing is captured: `run` computes the step, with the same buffers and the same results.

    Args:
        stack: the layers. Their `on_selection` is not called by captured steps.
        state: the first step. On a GPU it is computed twice to compile and warm up, which writes its
            rows into the caches (a step may be repeated: it writes the same bytes), then captured.
        keep_lists: keep what each index source chose, in `lists`.
    """

    def __init__(
        self, stack: AttentionStack, state: StepState, *, keep_lists: bool = False
    ) -> None:
        rows, device = state.num_tokens, state.positions.device
        self.stack = stack
        self.lists: dict[int, KeptLists] = {}
        self._hidden = torch.zeros(rows, stack.cfg.hidden_size, device=device)
        self._out = torch.zeros_like(self._hidden)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._facts = _facts(state)
        if keep_lists:
            self._allocate_lists(state)
        if device.type == "cuda":
            self._capture(state)

    @property
    def num_tokens(self) -> int:
        """Rows of every step, padding included."""
        return self._hidden.shape[0]

    def run(self, hidden: Tensor, state: StepState) -> Tensor:
        """Compute one step; float32 [n, hidden_size] in, [n, hidden_size] out, n <= `num_tokens`.

        The result is overwritten by the next call. Rows past n are padding.

        Raises:
            ShapeError: more rows than were captured.
            PlanMismatchError: the step has another number of rows, states another longest length, or
                lies at other addresses than the captured one.
        """
        rows = hidden.shape[0]
        if rows > self.num_tokens:
            raise ShapeError("hidden", f"{rows} rows", f"at most {self.num_tokens} rows")
        if _facts(state) != self._facts:
            raise PlanMismatchError(
                f"graph: got a step of (rows, requests, longest, addresses) {_facts(state)}; "
                f"allowed: {self._facts}; pad the step alike and use the same builder"
            )
        self._hidden[:rows].copy_(hidden)
        if self._graph is None:
            self._out.copy_(self._compute(state))
        else:
            self._graph.replay()
        return self._out[:rows]

    def release(self) -> None:
        """Free the captured graph; the object cannot run any more. NCCL waits for this before it ends."""
        if self._graph is not None:
            self._graph.reset()

    def _capture(self, state: StepState) -> None:
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute(state)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may go on asking the device during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._out = self._compute(state)
        self._graph = graph

    def _compute(self, state: StepState) -> Tensor:
        watchers: list[tuple[DeepseekV41Attention, Callable[[int, StepState], None] | None]] = []
        for layer in self.stack.attention_layers():
            watchers.append((layer, layer.on_selection))
            layer.on_selection = self._keep if self.lists else None
        try:
            out: Tensor = self.stack(self._hidden, state)
        finally:
            for layer, watcher in watchers:
                layer.on_selection = watcher
        return out

    def _allocate_lists(self, state: StepState) -> None:
        rows, buffers = state.num_tokens, state.buffers
        for layer in self.stack.attention_layers():
            if layer.layer.runs_indexer:
                publishes = layer.layer.publishes_candidates
                self.lists[layer.layer_id] = KeptLists(
                    torch.empty_like(buffers.topk[:rows]),
                    torch.empty_like(buffers.candidates[:rows]) if publishes else None,
                )

    def _keep(self, layer_id: int, step: StepState) -> None:
        kept, rows = self.lists[layer_id], step.num_tokens
        kept.topk.copy_(step.buffers.topk[:rows])
        if kept.candidates is not None:
            kept.candidates.copy_(step.buffers.candidates[:rows])

    def state_of(self, layer_id: int, state: StepState) -> StepState:
        """The step as it was when that index source had filled the shared lists."""
        kept, buffers = self.lists[layer_id], state.buffers
        candidates = buffers.candidates if kept.candidates is None else kept.candidates
        return replace(state, buffers=replace(buffers, topk=kept.topk, candidates=candidates))


def stating_longest(batch: StepBatch, longest: int) -> StepBatch:
    """The batch, now stating that no request of any replay is longer than `longest` tokens.

    Raises:
        ShapeError: a request of the batch is longer already.
    """
    if batch.max_seq_len > longest:
        raise ShapeError("batch.max_seq_len", batch.max_seq_len, f"at most {longest}")
    return replace(batch, max_seq_len=longest)


def _facts(state: StepState) -> tuple[int, ...]:
    """What a captured step is bound to."""
    batch = state.metadata.batch
    return (
        batch.num_tokens,
        batch.num_requests,
        batch.max_seq_len,
        batch.positions.data_ptr(),
        state.buffers.topk.data_ptr(),
    )
