"""Decode steps by replay: steps of one row a request, padded to a few sizes, one graph for each size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparse_mla.engine.record import Recorder
from sparse_mla.engine.scheduler import Work
from sparse_mla.nn.graph import StepGraph
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepState


class DecodeGraphs:
    """Captured decode steps of an engine.

    Args:
        stack: the layers.
        most: rows of the largest step, the smaller of the engine's limits on rows and requests.
    """

    def __init__(self, stack: AttentionStack, most: int) -> None:
        self._stack, self._most = stack, most
        self._graphs: dict[int, StepGraph] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that were captured so far."""
        return tuple(sorted(self._graphs))

    def rows_for(self, works: Sequence[Work]) -> int | None:
        """Rows to pad a step to, or None if it is no decode step."""
        if not works or any(work.count != 1 or work.replayed for work in works):
            return None
        return min(1 << (len(works) - 1).bit_length(), self._most)

    def run(self, state: StepState, hidden: Tensor, recorder: Recorder | None) -> Tensor:
        """float32 [rows of hidden, hidden_size] of a step padded to `rows_for`."""
        graph = self._graphs.get(state.num_tokens)
        if graph is None:
            graph = StepGraph(self._stack, state, keep_lists=recorder is not None)
            self._graphs[state.num_tokens] = graph
        out = graph.run(hidden, state)
        if recorder is not None:
            for layer_id in graph.lists:
                recorder.on_selection(layer_id, graph.state_of(layer_id, state))
        return out

    def release(self) -> None:
        """Free every graph; steps of a size seen before are then captured anew."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
