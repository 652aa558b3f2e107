"""Hopper attention in blocks of a token's heads against the float64 oracle. Needs an SM90 GPU: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_blocks import CHOSEN

from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import block_heads
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle, same_bits
from sparse_mla.testing.inputs import AttendProblem, make_problem

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HOPPER, reason="needs a GPU of compute capability 9.0"),
]
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
RECORDS = [("mxfp8", "mxfp8"), ("mxfp8", "nvfp4"), ("v4", "v4"), ("mxfp8_planar", "nvfp4_planar")]


def problem_of(heads: int, tokens: int, records: tuple[str, str] = RECORDS[0]) -> AttendProblem:
    return make_problem(
        tokens=tokens,
        heads=heads,
        window_keys=128,
        compressed_keys=512,
        window_record=records[0],
        compressed_record=records[1],
        device="cuda",
        **RAGGED,
    )


def run(problem: AttendProblem, call: AttendCall | None = None, **out_options: Any) -> AttendOut:
    """Poisoned output, one launch, finished."""
    out = problem.allocate_out(**out_options)
    hopper.attend(call or problem.call(), out)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize(("heads", "tokens", "block"), CHOSEN)
def test_chosen_blocks(heads: int, tokens: int, block: int, layout: Layout) -> None:
    assert block_heads(heads, tokens, batch_invariant=False) == block
    problem = problem_of(heads, tokens)
    call = problem.call(query_layout=layout)
    for fp8 in (True, False):
        out = run(problem, call, fp8=fp8, layout=layout)
        assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize(
    ("heads", "tokens", "blocks"),
    [(64, 140, [64, 16]), (32, 134, [32, 8]), (128, 68, [64, 16]), (24, 270, [32, 8])],
)
def test_a_rest_runs_in_smaller_blocks(heads: int, tokens: int, blocks: list[int]) -> None:
    problem = problem_of(heads, tokens)
    call = problem.call(query_layout=Layout.CHUNK_INTERLEAVED)
    assert [part.block for part in hopper.launches_of(call, 132)] == blocks
    for fp8 in (True, False):
        out = run(problem, call, fp8=fp8, layout=Layout.CHUNK_INTERLEAVED)
        assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize("records", RECORDS, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_records(tokens: int, records: tuple[str, str]) -> None:
    problem = problem_of(64, tokens, records)
    assert_matches_oracle(problem.call(), run(problem, fp8=True), HOPPER_BODY)


@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 5, 9, 20, 70])
@pytest.mark.parametrize(("heads", "heads_per_group"), [(64, 16), (66, 33), (100, 5), (128, 128)])
def test_every_block_and_split(
    heads: int, heads_per_group: int, tokens: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups span blocks or are cut by them, clusters of every size, CTAs with several items."""
    monkeypatch.setattr(hopper, "block_heads", lambda *_: block)
    problem = problem_of(heads, tokens)
    layout = Layout.CHUNK_INTERLEAVED
    out = run(problem, fp8=True, layout=layout, heads_per_group=heads_per_group)
    assert_matches_oracle(problem.call(), out, HOPPER_BODY)


@pytest.mark.parametrize(("heads", "tokens"), [(64, 1), (64, 8), (128, 1), (100, 3)])
def test_twenty_repeats_are_bitwise_equal(heads: int, tokens: int) -> None:
    problem = problem_of(heads, tokens)
    first = run(problem, fp8=True)
    for _ in range(19):
        assert same_bits(first, run(problem, fp8=True))


def test_a_graph_replays_what_eager_writes() -> None:
    problem = problem_of(64, 1)
    eager = run(problem, fp8=True)
    out = problem.allocate_out(fp8=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.attend(problem.call(), out)
    for _ in range(3):
        out.data.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(eager, out)
