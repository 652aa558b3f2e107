"""The end-to-end invariant: however a request is cut, mixed, padded or speculated on, its rows get the
same bits, and those are what a one-shot dense computation of the request alone gives.

On a CPU everything between two rows' inputs and outputs is row-independent by construction: products run in
tiles of a fixed number of rows, index scores are exact sums, every other operation works on one row. So
chunkings are compared bit for bit. The dense computation shares no code, sums in another order and is
compared within its derived tolerance.
"""

from __future__ import annotations

import pytest
import torch

from sparse_mla.testing.serve import Part, Served

FORMATS = [
    ("fp8_ds_mla", "auto"),
    ("fp8_ds_mla", "mxfp4"),
    ("nvfp4_ds_mla", "auto"),
    ("nvfp4_ds_mla", "fp8"),
    ("fp8_ds_mla_v4", "auto"),
]


def assert_same(one: Served, other: Served) -> None:
    """Outputs and every list, bit for bit."""
    assert torch.equal(one.outputs, other.outputs)
    for layer_id, selection in one.selections.items():
        assert torch.equal(selection.positions, other.selections[layer_id].positions)
        if selection.candidates is not None:
            candidates = other.selections[layer_id].candidates
            assert candidates is not None
            assert torch.equal(selection.candidates, candidates)


@pytest.mark.parametrize(("name", "index"), FORMATS)
def test_chunks_agree_bit_for_bit_and_with_the_dense_computation(
    lab, name: str, index: str
) -> None:
    hidden = lab.hidden(150)
    server = lab.server(lab.records(name, index))
    whole = server.serve(hidden, len(hidden))
    for chunk in (7, 64) if index == "auto" else (13,):
        assert_same(server.serve(hidden, chunk), whole)
    result = lab.dense(server).run(hidden, whole.selections)
    assert result.faults == []
    assert result.error(whole.outputs) < result.tolerance
    # Something was chosen: lists are full, candidates cut the consumers' search.
    lists = whole.selections[6].positions
    assert bool((lists[-1] >= 0).all())
    blocks = whole.selections[3].candidates
    assert blocks is not None
    assert bool((blocks[-1] >= 0).all())
    assert [check.layer_id for check in result.checks] == [1, 3, 5, 6]
    assert all(check.entries > 1000 for check in result.checks)


@pytest.mark.parametrize("layer_ids", [(0,), (1,), (1, 2), (3, 4), (3, 5), (3, 5, 6)])
def test_each_kind_alone_is_close_to_the_dense_computation(lab, layer_ids: tuple[int, ...]) -> None:
    """Few layers have a tight tolerance."""
    hidden = lab.hidden(120)
    server = lab.server(lab.records("fp8_ds_mla"), layer_ids=layer_ids)
    served = server.serve(hidden, 50)
    result = lab.dense(server).run(hidden, served.selections)
    assert result.faults == []
    assert result.error(served.outputs) < result.tolerance < 0.015


def test_token_by_token_equals_one_shot(lab) -> None:
    hidden = lab.hidden(70)
    server = lab.server()
    assert_same(server.serve(hidden, 1), server.serve(hidden, 70))


def test_chunks_of_512_in_a_long_request(lab) -> None:
    hidden = lab.hidden(1100)
    server = lab.server(capacity_tokens=2304, max_tokens=1100, layer_ids=(1, 3, 5))
    whole = server.serve(hidden, 1100)
    assert_same(server.serve(hidden, 512), whole)


def test_mixed_batches_with_padding_change_nothing(lab) -> None:
    """Prefill chunks, decode rows, an idle request and NaN padding in one step."""
    lengths = [90, 37, 64]
    states = [lab.hidden(length, seed) for seed, length in enumerate(lengths, 10)]
    alone = [lab.server().serve(rows, len(rows)) for rows in states]
    server = lab.server(seed=5)
    requests = [server.request(length) for length in lengths]
    done = [0, 0, 0]
    plan = [(0, 20), (1, 33), (2, 1)], [(2, 40), (0, 1), (1, 1)], [(1, 3), (0, 69), (2, 23)]
    for counts in plan:
        parts = []
        for index, count in counts:
            rows = states[index][done[index] : done[index] + count]
            parts.append(Part(requests[index], done[index], rows))
            done[index] += count
        server.step(parts, pad_to=sum(count for _, count in counts) + 13)
    assert done == lengths
    for request, single in zip(requests, alone, strict=True):
        assert_same(request, single)


def test_rejected_drafts_leave_no_trace(lab) -> None:
    """Steps of five speculative rows of which one to five are accepted."""
    hidden = lab.hidden(100)
    server = lab.server(num_spec_tokens=4)
    whole = server.serve(hidden, 100)
    request = server.request(110)
    server.step([Part(request, 0, hidden[:31])])
    position, step = 31, 0
    while position < 100:
        accepted = min(1 + step % 5, 100 - position)
        rows = lab.hidden(5, seed=100 + step)
        rows[:accepted] = hidden[position : position + accepted]
        server.step([Part(request, position, rows)])
        position, step = position + accepted, step + 1
    request.outputs = request.outputs[:100]
    for layer_id, selection in request.selections.items():
        candidates = selection.candidates
        short = None if candidates is None else candidates[:100]
        request.selections[layer_id] = type(selection)(selection.positions[:100], short)
    assert_same(request, whole)


def test_short_context_lists_are_everything_visible(lab) -> None:
    """While nothing has to be chosen, lists are 0..n-1 and nothing is scored or published."""
    server = lab.server()
    served = server.serve(lab.hidden(12), 5)
    for layer_id, ratio in ((1, 2), (3, 1), (5, 1), (6, 1)):
        for row, got in enumerate(served.selections[layer_id].positions.tolist()):
            visible = (row + 1) // ratio
            assert got == [*range(visible), *[-1] * (12 - visible)]
    blocks = served.selections[3].candidates
    assert blocks is not None
    assert bool((blocks == -1).all())


def test_consumers_read_the_lists_of_their_source(lab) -> None:
    """Layer 2 attends layer 1's list and layer 4 layer 3's: other lists give other outputs."""
    hidden = lab.hidden(60)
    server = lab.server(layer_ids=(1, 2))
    whole = server.serve(hidden, 60)
    layer = server.stack.attention_layers()[0]
    original = layer.on_selection
    assert original is not None

    def spoil(layer_id: int, step) -> None:
        original(layer_id, step)
        step.buffers.lengths[: step.num_tokens] = 0

    layer.on_selection = spoil
    spoilt = server.serve(hidden, 60)
    assert torch.equal(spoilt.selections[1].positions, whole.selections[1].positions)
    assert torch.equal(spoilt.outputs[0], whole.outputs[0])  # position 0 sees no entry
    assert not torch.equal(spoilt.outputs[1:], whole.outputs[1:])
