"""Attention over shards of the keys, merged by their lse."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.kernels.contract import KeySet
from sparse_mla.kernels.reference.attend import attend_exact
from sparse_mla.ops.attend import AttendOptions, sparse_attention
from sparse_mla.ops.merge import merge_lse
from sparse_mla.testing.inputs import AttendProblem, make_problem


def _attend(problem: AttendProblem, window: KeySet, compressed: KeySet | None):
    result = sparse_attention(
        problem.q,
        window=window,
        compressed=compressed,
        scale=problem.scale,
        options=AttendOptions(return_lse=True),
    )
    return result.bf16, result.lse


def _cut(keys: KeySet, start: int, stop: int) -> KeySet:
    return KeySet(keys.cache, keys.indices[:, start:stop])


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("sink", [None, "random"])
def test_shards_give_the_unsplit_attention(shards: int, sink):
    problem = make_problem(
        tokens=4, heads=8, window_keys=67, compressed_keys=40, hole_probability=0.3, sink=sink
    )
    edges = [round(67 * part / shards) for part in range(shards + 1)]
    parts = [
        _attend(problem, _cut(problem.window, start, stop), None)
        for start, stop in itertools.pairwise(edges)
    ]
    parts.append(_attend(problem, problem.compressed, None))
    merged, lse = merge_lse(*zip(*parts, strict=True), sink=problem.sink)
    exact = attend_exact(problem.call(rotate_query=False, unrotate_output=False))
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)
    # each shard's output was rounded to bf16 once: 2**-8 of its magnitude at most
    bound = 2.0**-8 * exact.magnitude + 1e-6
    assert bool(((merged.double() - exact.output).abs() <= bound).all())


def test_two_and_eight_equal_logits():
    """Shards of 2 and 8 keys with one logit: weights 0.2 and 0.8, lse grows by the logarithm."""
    first, second = torch.full((1, 1, 4), 10.0), torch.full((1, 1, 4), 20.0)
    base = torch.full((1, 1), 3.0)
    merged, lse = merge_lse(
        [first, second], [base + torch.tensor(2.0).log(), base + torch.tensor(8.0).log()]
    )
    torch.testing.assert_close(merged, torch.full((1, 1, 4), 18.0))
    torch.testing.assert_close(lse, base + torch.tensor(10.0).log())


@pytest.mark.parametrize("empty", [torch.inf, -torch.inf])
def test_empty_shard_has_weight_zero(empty: float):
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    nothing = torch.full((3, 2, 8), torch.nan)
    gone = torch.full((3, 2), empty)
    for order in ([0, 1], [1, 0]):
        outs, lses = [out, nothing], [lse, gone]
        merged, total = merge_lse([outs[n] for n in order], [lses[n] for n in order])
        assert torch.equal(merged, out)
        assert torch.equal(total, lse)


def test_rows_without_any_key():
    nothing = torch.full((2, 1, 8), torch.nan)
    gone = torch.full((2, 1), torch.inf)
    for sink in (None, torch.tensor([0.5]), torch.tensor([torch.inf]), torch.tensor([-torch.inf])):
        merged, lse = merge_lse([nothing, nothing], [gone, gone], sink)
        assert torch.equal(merged, torch.zeros(2, 1, 8))
        assert torch.equal(lse, gone)


def test_sink_is_applied_once():
    out, lse = torch.ones(1, 3, 8), torch.full((1, 3), 2.3132616875)
    sink = torch.tensor([0.5, torch.inf, -torch.inf])
    merged, total = merge_lse([out], [lse], sink)
    torch.testing.assert_close(merged[0, :, 0], torch.tensor([0.8597556168, 0.0, 1.0]))
    assert torch.equal(total, lse)


def test_large_lses_do_not_overflow():
    out = torch.ones(1, 1, 8)
    merged, lse = merge_lse([out, 3 * out], [torch.full((1, 1), 1e4), torch.full((1, 1), 1e4)])
    assert torch.equal(merged, 2 * out)
    torch.testing.assert_close(lse, torch.full((1, 1), 1e4 + 0.6931472))


def test_refusals():
    out, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ArgumentError, match="outs: got 0 outputs and 0 lses"):
        merge_lse([], [])
    with pytest.raises(ArgumentError, match="outs: got 2 outputs and 1 lses"):
        merge_lse([out, out], [lse])
    with pytest.raises(ShapeError, match=r"outs\[1\]: got shape \[2, 3, 4\]"):
        merge_lse([out, out[..., :4]], [lse, lse])
    with pytest.raises(ShapeError, match=r"lses\[1\]: got shape \[3, 2\]"):
        merge_lse([out, out], [lse, lse.T])
    with pytest.raises(DTypeError, match=r"lses\[0\]: got dtype float64"):
        merge_lse([out], [lse.double()])
    with pytest.raises(ShapeError, match=r"sink: got shape \[2\]; allowed: shape \[3\]"):
        merge_lse([out], [lse], torch.zeros(2))
