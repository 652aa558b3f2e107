"""The Hopper kernel against the float64 oracle. Needs an SM90 GPU: `pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper.attend import attend
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle, same_bits
from sparse_mla.testing.inputs import AttendProblem, make_problem

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HOPPER, reason="needs a GPU of compute capability 9.0"),
]
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}


def run(problem: AttendProblem, call: AttendCall | None = None, **out_options: Any) -> AttendOut:
    """Poisoned output, one launch, finished."""
    out = problem.allocate_out(**out_options)
    attend(call or problem.call(), out)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [4, 20, 40, 150], ids=["8 splits", "4", "2", "none"])
@pytest.mark.parametrize(
    "records",
    [
        ("mxfp8", "mxfp8"),
        ("mxfp8", "nvfp4"),
        ("v4", "v4"),
        ("mxfp8_planar", "mxfp8_planar"),
        ("mxfp8_planar", "nvfp4_planar"),
    ],
    ids="-".join,
)
def test_records_and_splits(records: tuple[str, str], tokens: int, fp8: bool) -> None:
    problem = make_problem(
        tokens=tokens,
        heads=64,
        window_keys=128,
        compressed_keys=512 if tokens < 100 else 192,
        window_record=records[0],
        compressed_record=records[1],
        window_page_rows=48,
        compressed_page_rows=1 if tokens == 4 else 64,
        page_padding_bytes=4096,
        offset_rows=3,
        device="cuda",
        **RAGGED,
    )
    assert_matches_oracle(problem.call(), run(problem, fp8=fp8), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [128, 96, 48, 12, 1])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_heads_and_layouts(heads: int, layout: Layout) -> None:
    problem = make_problem(
        tokens=5, heads=heads, window_keys=128, compressed_keys=200, device="cuda", **RAGGED
    )
    call = problem.call(query_layout=layout)
    assert_matches_oracle(call, run(problem, call, fp8=True, layout=layout), TENSOR_CORE_BODY)


@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"),
    [(0, None), (0, 0), (1, 63), (64, 65), (133, 257), (128, None), (0, 130), (192, 2048)],
)
@pytest.mark.parametrize("lengths", ["full", "random", "zero"])
def test_widths(window_keys: int, compressed_keys: int | None, lengths: str) -> None:
    problem = make_problem(
        tokens=3,
        heads=64,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
        strided=True,
        positions_dtype=torch.int32,
        device="cuda",
    )
    assert_matches_oracle(problem.call(), run(problem), TENSOR_CORE_BODY)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("rotations", [(True, False), (False, True), (False, False)])
def test_sinks_and_rotations(sink: float | None, rotations: tuple[bool, bool]) -> None:
    problem = make_problem(tokens=3, heads=64, compressed_keys=130, sink=sink, device="cuda")
    call = problem.call(rotate_query=rotations[0], unrotate_output=rotations[1])
    assert_matches_oracle(call, run(problem, call), TENSOR_CORE_BODY)


def test_saturated_keys_stay_finite() -> None:
    problem = make_problem(
        tokens=2, heads=64, compressed_keys=64, key_scale=60_000.0, sink=None, device="cuda"
    )
    out = run(problem)
    assert bool(torch.isfinite(out.data).all())


@pytest.mark.parametrize("tokens", [1, 32, 64, 300])
def test_twenty_repeats_are_bitwise_equal(tokens: int) -> None:
    problem = make_problem(tokens=tokens, heads=64, compressed_keys=512, device="cuda", **RAGGED)
    first = run(problem, fp8=True)
    for _ in range(19):
        assert same_bits(first, run(problem, fp8=True))


def test_many_tokens_equal_the_rows_alone() -> None:
    problem = make_problem(
        tokens=70_000, heads=64, window_keys=8, compressed_keys=None, device="cuda", **RAGGED
    )
    whole = run(problem, lse=False, max_logits=False)
    rows = torch.cat((torch.arange(70), torch.arange(69_930, 70_000))).cuda()
    alone = run(problem.rows(rows), lse=False, max_logits=False)
    assert torch.equal(whole.data[rows], alone.data)


def test_a_graph_replays_what_eager_writes() -> None:
    problem = make_problem(tokens=8, heads=64, compressed_keys=512, device="cuda")
    eager = run(problem, fp8=True)
    out = problem.allocate_out(fp8=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(problem.call(), out)
    for _ in range(3):
        out.data.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(eager, out)


@pytest.mark.slow
def test_twenty_thousand_launches_do_not_hang() -> None:
    problem = make_problem(tokens=15, heads=64, compressed_keys=512, device="cuda", **RAGGED)
    first = run(problem, fp8=True)
    out = problem.allocate_out(fp8=True)
    call = problem.call()
    for _ in range(20_000):
        attend(call, out)
    torch.cuda.synchronize()
    assert same_bits(first, out)
