"""Steps through `StepGraph`, on a CPU without capture: padding and the stated length change no bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sparse_mla.errors import PlanMismatchError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.nn.graph import StepGraph, stating_longest
from sparse_mla.nn.step import StepState
from sparse_mla.testing.serve import Part, Served, StackServer

LONGEST = 200


def prompts(lab, server: StackServer) -> tuple[list[Served], list[Tensor]]:
    """Two requests, one shorter than a list and one longer, with their prompts computed."""
    lengths = (9, 60)
    hidden = [lab.hidden(length + 8, seed=length) for length in lengths]
    requests = [server.request(length + 8) for length in lengths]
    for request, rows, length in zip(requests, hidden, lengths, strict=True):
        server.step([Part(request, 0, rows[:length])])
    return requests, hidden


def decode_state(server: StackServer, parts: list[Part], rows: int) -> StepState:
    """A decode step padded to `rows` rows and as many requests, stating `LONGEST`."""
    groups, empty = server.caches.groups, rows - len(parts)
    batch = StepBatch.from_requests(
        [1] * len(parts) + [0] * empty,
        [part.start + 1 for part in parts] + [0] * empty,
        {name: [part.request.pages[name] for part in parts] + [[]] * empty for name in groups},
        {name: group.tokens_per_page for name, group in groups.items()},
        pad_to=rows,
    )
    metadata = server.builder.build(stating_longest(batch, LONGEST))
    return StepState(server.caches, metadata, server.buffers, server.rope)


def test_padded_steps_equal_plain_steps_bit_for_bit(lab) -> None:
    plain, padded = lab.server(seed=5), lab.server(seed=5)
    (requests, hidden), (mine, _) = prompts(lab, plain), prompts(lab, padded)
    graph: StepGraph | None = None
    for step in range(4):
        live = range(2) if step != 2 else range(1, 2)  # a request pauses, so rows shift
        starts = [(9, 60)[i] + step for i in live]
        parts = [
            Part(requests[i], p, hidden[i][p : p + 1]) for i, p in zip(live, starts, strict=True)
        ]
        plain.step(parts)
        parts = [Part(mine[i], p, hidden[i][p : p + 1]) for i, p in zip(live, starts, strict=True)]
        state = decode_state(padded, parts, 4)
        if graph is None:
            graph = StepGraph(padded.stack, state, keep_lists=True)
        out = graph.run(torch.cat([part.hidden for part in parts]), state)
        for row, (i, p) in enumerate(zip(live, starts, strict=True)):
            assert torch.equal(out[row], requests[i].outputs[p])
            for layer_id in graph.lists:
                lists = graph.state_of(layer_id, state).buffers.topk
                assert torch.equal(lists[row], requests[i].selections[layer_id].positions[p])
    assert graph is not None
    assert graph.num_tokens == 4
    assert sorted(graph.lists) == [1, 3, 5, 6]
    assert graph.lists[3].candidates is not None
    # The watcher of plain steps is back in its place.
    assert all(layer.on_selection is not None for layer in padded.stack.attention_layers())


def test_steps_that_differ_from_the_captured_one_are_refused(lab) -> None:
    server = lab.server()
    requests, hidden = prompts(lab, server)
    part = Part(requests[1], 60, hidden[1][60:61])
    state = decode_state(server, [part], 2)
    graph = StepGraph(server.stack, state)
    assert not graph.lists
    with pytest.raises(ShapeError, match="hidden: got 3 rows; allowed: at most 2 rows"):
        graph.run(torch.zeros(3, 256), state)
    with pytest.raises(PlanMismatchError, match="pad the step alike"):
        graph.run(part.hidden, decode_state(server, [part], 3))
    batch = dataclasses.replace(state.metadata.batch, max_seq_len=61)
    other = dataclasses.replace(state, metadata=dataclasses.replace(state.metadata, batch=batch))
    with pytest.raises(PlanMismatchError, match="longest"):
        graph.run(part.hidden, other)
    with pytest.raises(ShapeError, match="max_seq_len: got 61; allowed: at most 60"):
        stating_longest(batch, 60)
