"""Both Hopper bodies run thread by thread on the CPU against the float64 oracle. No GPU needed.

The number of heads chooses the body, as in batch-invariant calls: `few_heads.cu` up to 8, `attend.cu` beyond. Covers what
the sources compute, where they read and write, and how their roles wait for each other; not what only real memory
and asynchronous products can break. `tests/gpu/test_hopper.py` is the same on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import BODIES, FEW_HEADS, MANY_HEADS, Body, block_heads
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import make_problem

RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
EACH_BODY = pytest.mark.parametrize("heads", [8, 32, 64])


def body_of(heads: int) -> Body:
    """The body that a batch-invariant call of so many heads runs."""
    return BODIES[block_heads(heads, 1, True)]


def slow(*values: object) -> Any:
    """A case that is left to `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("records", "heads", "splits"),
    [
        (("mxfp8", "mxfp8"), 8, 1),
        (("mxfp8", "mxfp8"), 32, 2),
        (("mxfp8", "nvfp4"), 16, 1),
        (("v4", "v4"), 8, 1),
        (("v4", "mxfp8"), 32, 1),
        (("mxfp8_planar", "nvfp4_planar"), 24, 1),
        slow(("mxfp8", "mxfp8"), 8, 3),
        slow(("mxfp8_planar", "mxfp8_planar"), 8, 8),
        slow(("nvfp4", "nvfp4"), 32, 1),
        slow(("nvfp4", "v4"), 8, 2),
        slow(("v4", "nvfp4"), 16, 4),
        slow(("mxfp8", "nvfp4_planar"), 8, 1),
        (("mxfp8", "nvfp4"), 64, 1),
        (("v4", "v4"), 64, 1),
        (("mxfp8_planar", "mxfp8_planar"), 64, 2),
        (("mxfp8_planar", "mxfp8_planar"), 32, 4),
        slow(("mxfp8_planar", "nvfp4_planar"), 64, 1),
        slow(("nvfp4", "v4"), 64, 1),
        slow(("mxfp8", "mxfp8"), 64, 4),
        slow(("v4", "v4"), 64, 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_records(records: tuple[str, str], heads: int, splits: int, emulator: Any) -> None:
    many = body_of(heads) is MANY_HEADS
    problem = make_problem(
        tokens=(3 if many else 5) if splits == 1 else (1 if many else 2),
        heads=heads,
        window_keys=128,
        compressed_keys=400 if many and splits > 1 else 270,
        window_record=records[0],
        compressed_record=records[1],
        window_page_rows=48,
        compressed_page_rows=1 if splits > 1 else 64,
        page_padding_bytes=4096,
        offset_rows=3,
        **RAGGED,
    )
    emulator.check(body_of(heads), problem, splits=splits, fp8=True)


@pytest.mark.parametrize("heads", [1, 7, 13, 30, 40, 66])
def test_heads_and_layouts(heads: int, emulator: Any) -> None:
    layout = Layout.CHUNK_INTERLEAVED
    problem = make_problem(
        tokens=2 if heads > 32 else 4,
        heads=heads,
        window_keys=133,
        compressed_keys=70,
        strided=True,
        **RAGGED,
    )
    call = problem.call(query_layout=layout)
    emulator.check(body_of(heads), problem, call, fp8=True, layout=layout)


@EACH_BODY
@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"), [(0, None), (0, 0), (1, 15), (16, 17), (0, 130)]
)
@pytest.mark.parametrize("lengths", ["zero", "random"])
def test_widths(
    window_keys: int, compressed_keys: int | None, lengths: str, heads: int, emulator: Any
) -> None:
    problem = make_problem(
        tokens=4,
        heads=heads,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
    )
    emulator.check(body_of(heads), problem, fp8=True)


@EACH_BODY
@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
def test_sinks_without_rotations(sink: float | None, heads: int, emulator: Any) -> None:
    problem = make_problem(tokens=2, heads=heads, window_keys=60, compressed_keys=90, sink=sink)
    call = problem.call(rotate_query=False, unrotate_output=False)
    emulator.check(body_of(heads), problem, call, fp8=True)


@pytest.mark.parametrize("lse", [False, True])
def test_one_statistic_without_the_other(lse: bool, emulator: Any) -> None:
    problem = make_problem(tokens=3, heads=64, compressed_keys=150, **RAGGED)
    emulator.check(MANY_HEADS, problem, lse=lse, max_logits=not lse)


@pytest.mark.parametrize(
    ("heads", "tokens", "ctas", "seeds"), [(8, 6, 2, 12), (16, 4, 1, 5), (64, 3, 1, 5)]
)
def test_the_speed_of_warps_changes_no_bit(
    heads: int, tokens: int, ctas: int, seeds: int, emulator: Any
) -> None:
    problem = make_problem(
        tokens=tokens, heads=heads, compressed_keys=300 if heads == 8 else 150, **RAGGED
    )
    outs = []
    for seed in range(seeds):
        out = problem.allocate_out(fp8=True)
        emulator.run(body_of(heads), problem.call(), out, ctas=ctas, seed=seed)
        outs.append(out)
    assert all(bool((out.data == outs[0].data).all()) for out in outs)
    assert_matches_oracle(problem.call(), outs[0], HOPPER_BODY)


@EACH_BODY
@pytest.mark.parametrize(
    "window_lengths",
    [
        [0, 10, 64, 0, 65, 1, 1, 130, 0, 30, 128, 5, 0],
        [1, 0, 0],
        [129, 7],
        [7, 129, 130],
        [65, 3, 66, 2],
    ],
    ids=str,
)
def test_tokens_of_none_one_and_several_tiles_in_turn(
    window_lengths: list[int], heads: int, emulator: Any
) -> None:
    """One multiprocessor works on all of them: two groups of warps take turns over tiles and share every query."""
    problem = make_problem(
        tokens=len(window_lengths), heads=heads, window_keys=130, compressed_keys=None
    )
    lengths = torch.tensor(window_lengths, dtype=torch.int32)
    call = problem.call()
    call = replace(call, window=replace(call.window, lengths=lengths))
    for seed in range(4):
        out = problem.allocate_out(fp8=True)
        emulator.run(body_of(heads), call, out, ctas=1, seed=seed)
        assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize(
    ("block", "splits", "statistics"),
    [
        (64, 4, True),
        (32, 2, False),
        slow(64, 2, True),
        slow(64, 4, False),
        slow(32, 4, True),
        slow(16, 4, False),
        slow(16, 2, True),
    ],
)
def test_tokens_whose_tiles_are_fewer_than_the_ctas_that_share_them(
    block: int, splits: int, statistics: bool, emulator: Any
) -> None:
    """A CTA without tiles has its share of the output to write, and others send it theirs while it waits or is late."""
    problem = make_problem(
        tokens=4, heads=64, window_keys=130, compressed_keys=400, sink=None, hole_probability=0.1
    )
    call = problem.call()
    assert call.compressed is not None
    window = torch.tensor([0, 64, 0, 130], dtype=torch.int32)
    compressed = torch.tensor([0, 0, 70, 400], dtype=torch.int32)
    call = replace(
        call,
        window=replace(call.window, lengths=window),
        compressed=replace(call.compressed, lengths=compressed),
    )
    for seed in range(3):
        out = problem.allocate_out(fp8=True, lse=statistics, max_logits=statistics)
        emulator.run(MANY_HEADS, call, out, splits=splits, seed=seed, block=block)
        assert_matches_oracle(call, out, HOPPER_BODY)


RANDOM_PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("v4", "v4"),
    ("mxfp8_planar", "nvfp4_planar"),
    ("v4", "mxfp8"),
]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 200))]
)
def test_random_problems(seed: int, emulator: Any) -> None:
    """`attend.cu`, blocks of any size: tokens of any number of tiles in turn, whole or split, warps as fast as the seed says."""
    choose = random.Random(seed).choice
    splits = choose([1, 1, 1, 2, 4])
    window, compressed = choose(RANDOM_PAIRS)
    tokens = choose(range(1, 8)) if splits == 1 else 1
    problem = make_problem(
        tokens=tokens,
        heads=choose([33, 40, 64, 66, 128]),
        window_keys=choose([1, 63, 64, 65, 128, 130, 200]),
        compressed_keys=choose([None, 0, 5, 64, 70, 130, 260] if splits == 1 else [200, 400, 600]),
        window_record=window,
        compressed_record=compressed,
        strided=choose([False, True]),
        seed=seed,
        **RAGGED,
    )
    layout = choose(list(Layout))
    call = problem.call(query_layout=layout)
    assert call.window.lengths is not None
    most = torch.tensor([choose([0, 1, 30, 64, 65, 200]) for _ in range(tokens)], dtype=torch.int32)
    lengths = call.window.lengths.minimum(most)  # what lies behind the old ones is poison
    call = replace(call, window=replace(call.window, lengths=lengths))
    lse = choose([False, True])
    out = problem.allocate_out(
        fp8=choose([False, True]), layout=layout, lse=lse, max_logits=lse and choose([False, True])
    )
    block = choose([16, 32, 64, 64])
    emulator.run(MANY_HEADS, call, out, splits=splits, ctas=choose([1, 2]), seed=seed, block=block)
    assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize("key_scale", [2.0**-12, 64.0])
def test_small_and_large_keys(key_scale: float, emulator: Any) -> None:
    problem = make_problem(tokens=4, heads=8, compressed_keys=400, key_scale=key_scale)
    emulator.check(FEW_HEADS, problem, fp8=True)


@EACH_BODY
def test_saturated_queries_stay_finite(heads: int, emulator: Any) -> None:
    problem = make_problem(
        tokens=2, heads=heads, compressed_keys=150, key_scale=60_000.0, sink=None, **RAGGED
    )
    call = replace(problem.call(), q=problem.q * 1e36)
    out = problem.allocate_out(fp8=True)
    emulator.run(body_of(heads), call, out)
    assert bool(torch.isfinite(out.data.float()).all())


@EACH_BODY
@pytest.mark.parametrize("position", [2**40, -(2**40), 2**31 + 5, -1])
def test_positions_beyond_32_bits_are_clamped_as_the_oracle_does(
    position: int, heads: int, emulator: Any
) -> None:
    problem = make_problem(tokens=2, heads=heads, window_keys=60, compressed_keys=None)
    positions = torch.full_like(problem.positions, position, dtype=torch.int64)
    call = replace(problem.call(), positions=positions)
    emulator.check(body_of(heads), problem, call, fp8=True)


@EACH_BODY
@pytest.mark.parametrize("query_scale", [4.0, 8.0])
def test_weights_far_below_the_largest_are_not_lost(
    query_scale: float, heads: int, emulator: Any
) -> None:
    """Where the heavier of two keys is zero, the lighter one is the output, were its weight 2^-24 of the other's."""
    problem = make_problem(tokens=6, heads=heads, window_keys=2, compressed_keys=None, sink=None)
    call = replace(problem.call(), q=problem.q * query_scale)
    cache, record = call.window.cache, call.window.cache.record
    for slots in call.window.indices.tolist():
        for number, slot in enumerate(
            slots
        ):  # one key has no dims 128 .. 255, the other no 256 .. 383
            first = slot % cache.page_rows * record.data_stride + 128 * (1 + number)
            cache.pages[slot // cache.page_rows].view(-1)[first : first + 128] = 0
    emulator.check(body_of(heads), problem, call)


@EACH_BODY
@pytest.mark.parametrize("lse", [False, True])
def test_logits_that_grow_from_tile_to_tile(lse: bool, heads: int, emulator: Any) -> None:
    """Tiles without holes, where only a weight that came out too large tells that the reference must move."""
    problem = make_problem(tokens=3, heads=heads, window_keys=128, compressed_keys=320, sink=None)
    call = replace(problem.call(), q=problem.q * 16)
    out = problem.allocate_out(lse=lse, max_logits=False)
    emulator.run(body_of(heads), call, out)
    assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "bf16_numbers", lambda: True)


@pytest.mark.parametrize("records", [("mxfp8", "nvfp4"), ("v4", "v4"), ("nvfp4", "mxfp8_planar")])
def test_bf16_numbers(records: tuple[str, str], bf16: None, emulator: Any) -> None:
    for heads in (64, 5) if records[0] == "v4" else (64,):
        problem = make_problem(
            tokens=3, heads=heads, window_keys=128, compressed_keys=200, window_record=records[0],
            compressed_record=records[1], **RAGGED,
        )  # fmt: skip
        emulator.check(MANY_HEADS, problem, fp8=True)


@pytest.mark.parametrize("record", ["mxfp8", "v4"])
def test_values_beyond_f16_are_right_in_bf16(record: str, bf16: None, emulator: Any) -> None:
    """Keys up to 2^24, whose scales and products f16 cannot hold."""
    problem = make_problem(
        tokens=2, heads=64, compressed_keys=90, key_scale=2.0**22, window_record=record,
        compressed_record=record,
    )  # fmt: skip
    call = replace(problem.call(), q=problem.q * 2.0**-22)
    emulator.check(MANY_HEADS, problem, call)


@EACH_BODY
def test_a_query_that_is_nan_is_nan_in_its_row_and_nowhere_else(heads: int, emulator: Any) -> None:
    problem = make_problem(tokens=2, heads=heads, compressed_keys=90)
    q = problem.q.clone()
    q[0, 1, 5] = float("nan")
    clean, nan = problem.allocate_out(), problem.allocate_out()
    emulator.run(body_of(heads), problem.call(), clean)
    emulator.run(body_of(heads), replace(problem.call(), q=q), nan)
    assert bool(nan.data[0, 1].isnan().all())
    clean.data[0, 1] = nan.data[0, 1] = 0
    assert torch.equal(nan.data, clean.data)
    assert nan.lse is not None
    assert nan.lse.isnan().nonzero().tolist() == [[0, 1]]
