"""Both Hopper bodies on blocks of a token's heads, run thread by thread against the float64 oracle. No GPU needed.

`tests/gpu/test_hopper_blocks.py` is the same on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper.bodies import BODIES, FEW_HEADS, MANY_HEADS
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

STANDARD, CHUNKED = Layout.STANDARD, Layout.CHUNK_INTERLEAVED
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}


@pytest.mark.parametrize(
    ("heads", "block", "heads_per_group", "splits", "fp8", "layout"),
    [
        (64, 8, 16, 1, True, CHUNKED),
        (40, 16, 5, 1, True, STANDARD),
        (66, 32, 33, 1, True, CHUNKED),
        (66, 32, 11, 2, True, CHUNKED),
        (20, 8, 20, 8, False, STANDARD),
        (20, 16, 20, 4, True, CHUNKED),
        (128, 32, 128, 1, False, CHUNKED),
        pytest.param(64, 16, 64, 4, True, STANDARD, marks=pytest.mark.slow),
        pytest.param(64, 32, 8, 4, False, CHUNKED, marks=pytest.mark.slow),
        pytest.param(128, 8, 16, 8, True, CHUNKED, marks=pytest.mark.slow),
        pytest.param(128, 16, 32, 1, True, STANDARD, marks=pytest.mark.slow),
        pytest.param(40, 32, 20, 4, True, STANDARD, marks=pytest.mark.slow),
        pytest.param(40, 32, 40, 1, True, CHUNKED, marks=pytest.mark.slow),
        pytest.param(66, 8, 3, 3, True, CHUNKED, marks=pytest.mark.slow),
        pytest.param(66, 16, 22, 2, False, STANDARD, marks=pytest.mark.slow),
        pytest.param(20, 16, 5, 2, True, CHUNKED, marks=pytest.mark.slow),
        pytest.param(20, 32, 4, 1, False, CHUNKED, marks=pytest.mark.slow),
    ],
)
def test_blocks(
    heads: int,
    block: int,
    heads_per_group: int,
    splits: int,
    fp8: bool,
    layout: Layout,
    emulator: Any,
) -> None:
    """Three CTAs take several items each; groups span blocks or are cut by them; lse and maxima too."""
    problem = make_problem(
        tokens=3 if splits == 1 else 2,
        heads=heads,
        window_keys=40,
        compressed_keys=50 if splits == 1 else 210,
        strided=layout is STANDARD,
        **RAGGED,
    )
    call = problem.call(query_layout=layout)
    outputs = {"fp8": fp8, "layout": layout, "heads_per_group": heads_per_group}
    emulator.check(BODIES[block], problem, call, splits=splits, block=block, **outputs)


@pytest.mark.parametrize("block", [8, 16, 32, 64])
def test_a_row_has_the_bits_of_the_row_alone(block: int, emulator: Any) -> None:
    """Whichever group of scores has the first of its tiles."""
    problem = make_problem(tokens=4, heads=block, window_keys=128, compressed_keys=170, **RAGGED)
    whole = problem.allocate_out()
    emulator.run(BODIES[block], problem.call(), whole, ctas=1)
    for row in range(4):
        only = problem.rows(torch.tensor([row]))
        alone = only.allocate_out()
        emulator.run(BODIES[block], only.call(), alone, ctas=1)
        for name in ("data", "lse", "max_logits"):
            assert torch.equal(getattr(whole, name)[row : row + 1], getattr(alone, name)), name


def window_problem(lengths: list[int], heads: int) -> AttendProblem:
    """Tokens that have so many keys of the window each, at most 130, and no others."""
    problem = make_problem(tokens=len(lengths), heads=heads, window_keys=130, compressed_keys=None)
    window = replace(problem.window, lengths=torch.tensor(lengths, dtype=torch.int32))
    return replace(problem, window=window)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_other_records_and_empty_rows(lengths: str, splits: int, emulator: Any) -> None:
    problem = make_problem(
        tokens=3,
        heads=13,
        window_keys=20,
        compressed_keys=90,
        window_record="v4",
        compressed_record="nvfp4_planar",
        sink=20.0 if lengths == "zero" else "random",
        lengths=lengths,
    )
    emulator.check(FEW_HEADS, problem, splits=splits, block=8, fp8=True)


@pytest.mark.parametrize("block", [8, 16])
def test_a_block_has_the_bits_of_its_heads_alone(block: int, emulator: Any) -> None:
    problem = make_problem(tokens=3, heads=2 * block, window_keys=40, compressed_keys=50, **RAGGED)
    assert problem.sink is not None
    upper = replace(problem, q=problem.q[:, block:], sink=problem.sink[block:].clone())
    whole, alone = problem.allocate_out(), upper.allocate_out()
    emulator.run(BODIES[block], problem.call(), whole, block=block)
    emulator.run(BODIES[block], upper.call(), alone)
    assert torch.equal(whole.data[:, block:], alone.data)
    assert whole.lse is not None
    assert alone.lse is not None
    assert torch.equal(whole.lse[:, block:], alone.lse)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize(
    "window_lengths",
    [[0, 10, 64, 0, 65, 1, 1, 130, 0, 30], [1] * 12, [7, 129, 130], [65, 3, 66, 2]],
    ids=str,
)
def test_three_groups_of_scores_keep_several_tokens_apart(
    window_lengths: list[int], lse: bool, block: int, emulator: Any
) -> None:
    """Tokens of one tile each follow one another: a barrier of one is waited for when that of the token before has not passed."""
    problem = window_problem(window_lengths, block)
    call = problem.call()
    for seed in range(3):
        out = problem.allocate_out(fp8=True, lse=lse, max_logits=False)
        emulator.run(MANY_HEADS, call, out, ctas=1, seed=seed, block=block)
        assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_partly_filled_block_writes_nothing_behind_its_heads(splits: int, emulator: Any) -> None:
    problem = make_problem(tokens=2, heads=13, window_keys=40, compressed_keys=150)
    guarded = make_problem(tokens=4, heads=13).allocate_out()  # two tokens more than there are
    assert guarded.lse is not None
    assert guarded.max_logits is not None
    out = replace(
        guarded,
        data=guarded.data[:2],
        lse=guarded.lse[:2],
        max_logits=guarded.max_logits[:2],
    )
    emulator.run(FEW_HEADS, problem.call(), out, splits=splits, block=8)
    assert_matches_oracle(problem.call(), out, HOPPER_BODY)
    for whole in (guarded.data, guarded.lse, guarded.max_logits):
        assert bool(whole[2:].isnan().all())


@pytest.mark.parametrize("short", [10, 30])
def test_producers_stay_together_over_many_short_tokens(short: int, emulator: Any) -> None:
    """Those that copy no block of a short token must not be a round ahead at the next long one."""
    window_lengths = ([short] * 40 + [128] * 3) * 2
    problem = window_problem(window_lengths, 8)
    call = problem.call()
    for seed in range(2):
        out = problem.allocate_out(fp8=True, max_logits=False)
        emulator.run(FEW_HEADS, call, out, ctas=1, seed=seed, block=8)
        assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize("seed", [4, 7, 9])
def test_sinks_stay_until_a_late_warp_has_read_them(seed: int, emulator: Any) -> None:
    """Tokens of one tile follow one another, each with other heads than the one two before."""
    problem = make_problem(tokens=8, heads=40, window_keys=16, compressed_keys=None)
    problem = replace(problem, sink=torch.linspace(-8, 12, 40))
    out = problem.allocate_out(lse=False, max_logits=False)
    emulator.run(FEW_HEADS, problem.call(), out, ctas=1, seed=seed, block=8)
    assert_matches_oracle(problem.call(), out, HOPPER_BODY)
