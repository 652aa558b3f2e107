"""The Hopper body for at most 32 heads against the float64 oracle. Needs an SM90 GPU: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle, same_bits
from sparse_mla.testing.inputs import AttendProblem, make_problem

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HOPPER, reason="needs a GPU of compute capability 9.0"),
]
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
RECORDS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("v4", "v4"),
    ("mxfp8_planar", "mxfp8_planar"),
    ("mxfp8_planar", "nvfp4_planar"),
    ("nvfp4", "nvfp4"),
    ("v4", "nvfp4"),
    ("nvfp4", "v4"),
]


def run(problem: AttendProblem, call: AttendCall | None = None, **out_options: Any) -> AttendOut:
    """Poisoned output, one launch, finished."""
    out = problem.allocate_out(**out_options)
    hopper.attend(call or problem.call(), out)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("heads", [8, 16, 24, 32])
@pytest.mark.parametrize(("tokens", "fp8"), [(6, True), (150, False)], ids=["split", "not split"])
@pytest.mark.parametrize("records", RECORDS, ids="-".join)
def test_records(records: tuple[str, str], tokens: int, fp8: bool, heads: int) -> None:
    problem = make_problem(
        tokens=tokens,
        heads=heads,
        window_keys=128,
        compressed_keys=512 if tokens < 100 else 192,
        window_record=records[0],
        compressed_record=records[1],
        window_page_rows=48,
        compressed_page_rows=1 if tokens == 6 else 64,
        page_padding_bytes=4096,
        offset_rows=3,
        device="cuda",
        **RAGGED,
    )
    assert_matches_oracle(problem.call(), run(problem, fp8=fp8), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 15, 16, 31, 36, 41, 66, 67, 133, 300])
def test_splits(tokens: int, heads: int) -> None:
    problem = make_problem(tokens=tokens, heads=heads, compressed_keys=512, device="cuda", **RAGGED)
    assert_matches_oracle(problem.call(), run(problem, fp8=True), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 9, 12, 15, 17, 20, 23, 25, 28, 31])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_heads_and_layouts(heads: int, layout: Layout) -> None:
    problem = make_problem(
        tokens=5, heads=heads, window_keys=128, compressed_keys=200, device="cuda", **RAGGED
    )
    call = problem.call(query_layout=layout)
    assert_matches_oracle(call, run(problem, call, fp8=True, layout=layout), TENSOR_CORE_BODY)
    assert_matches_oracle(call, run(problem, call, layout=layout), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"),
    [(0, None), (0, 0), (1, 15), (16, 17), (133, 257), (128, None), (0, 130), (192, 2048)],
)
@pytest.mark.parametrize("lengths", ["full", "random", "zero"])
def test_widths(window_keys: int, compressed_keys: int | None, lengths: str, heads: int) -> None:
    problem = make_problem(
        tokens=3,
        heads=heads,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
        strided=True,
        positions_dtype=torch.int32,
        device="cuda",
    )
    assert_matches_oracle(problem.call(), run(problem), TENSOR_CORE_BODY)


@pytest.mark.parametrize("lengths", ["random", "zero"])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_a_cta_takes_several_rows(heads: int, lengths: str) -> None:
    problem = make_problem(
        tokens=700,
        heads=heads,
        window_keys=40,
        compressed_keys=150,
        lengths=lengths,
        hole_probability=0.3,
        device="cuda",
    )
    assert_matches_oracle(problem.call(), run(problem, fp8=True), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("rotations", [(True, False), (False, True), (False, False)])
def test_sinks_and_rotations(sink: float | None, rotations: tuple[bool, bool], heads: int) -> None:
    problem = make_problem(tokens=3, heads=heads, compressed_keys=130, sink=sink, device="cuda")
    call = problem.call(rotate_query=rotations[0], unrotate_output=rotations[1])
    assert_matches_oracle(call, run(problem, call), TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [8, 16, 24, 32])
@pytest.mark.parametrize("key_scale", [2.0**-12, 2.0**-4, 8.0, 64.0])
def test_small_and_large_keys(key_scale: float, heads: int) -> None:
    """Large keys move the running maximum again and again; small ones need f16 scales below 2^-14."""
    problem = make_problem(
        tokens=140, heads=heads, compressed_keys=600, key_scale=key_scale, device="cuda"
    )
    assert_matches_oracle(problem.call(), run(problem), TENSOR_CORE_BODY)


def test_saturated_values_stay_finite() -> None:
    problem = make_problem(
        tokens=2, heads=8, compressed_keys=64, key_scale=60_000.0, sink=None, device="cuda"
    )
    assert bool(torch.isfinite(run(problem).data).all())
    large = replace(problem, q=problem.q * 1e36)
    assert bool(torch.isfinite(run(large).data).all())


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 32, 64, 300])
def test_twenty_repeats_are_bitwise_equal(tokens: int, heads: int) -> None:
    problem = make_problem(tokens=tokens, heads=heads, compressed_keys=512, device="cuda", **RAGGED)
    first = run(problem, fp8=True)
    for _ in range(19):
        assert same_bits(first, run(problem, fp8=True))


@pytest.mark.parametrize("heads", [8, 32])
def test_a_row_does_not_depend_on_its_batch_mates(heads: int) -> None:
    problem = make_problem(tokens=300, heads=heads, compressed_keys=512, device="cuda", **RAGGED)
    whole = run(problem, replace(problem.call(), batch_invariant=True))
    rows = torch.randperm(300, device="cuda")[:7]
    some = problem.rows(rows)
    alone = run(some, replace(some.call(), batch_invariant=True))
    assert torch.equal(whole.data[rows], alone.data)
    assert whole.lse is not None
    assert alone.lse is not None
    assert torch.equal(whole.lse[rows], alone.lse)


def test_many_tokens_equal_the_rows_alone() -> None:
    problem = make_problem(
        tokens=70_000, heads=8, window_keys=8, compressed_keys=None, device="cuda", **RAGGED
    )
    whole = run(problem, lse=False, max_logits=False)
    rows = torch.cat((torch.arange(140), torch.arange(69_860, 70_000))).cuda()
    alone = run(problem.rows(rows), lse=False, max_logits=False)
    assert torch.equal(whole.data[rows], alone.data)


def test_no_tokens_is_no_launch() -> None:
    problem = make_problem(tokens=0, heads=8, window_keys=4, compressed_keys=4, device="cuda")
    hopper.attend(problem.call(), problem.allocate_out())


def test_a_graph_replays_what_eager_writes() -> None:
    problem = make_problem(tokens=8, heads=8, compressed_keys=512, device="cuda")
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


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 32])
def test_twenty_thousand_launches_do_not_hang(heads: int) -> None:
    problem = make_problem(tokens=15, heads=heads, compressed_keys=512, device="cuda", **RAGGED)
    first = run(problem, fp8=True)
    out = problem.allocate_out(fp8=True)
    call = problem.call()
    for _ in range(20_000):
        hopper.attend(call, out)
    torch.cuda.synchronize()
    assert same_bits(first, out)
