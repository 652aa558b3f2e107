"""The portable attention kernel in Triton's interpreter against the float64 oracle."""

from dataclasses import replace

import pytest
import torch

from sparse_mla.kernels.contract import Layout
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

pytest.importorskip("triton")

from sparse_mla.kernels.triton import attend as body
from sparse_mla.kernels.triton.configs import AttendConfig, attend_config, attend_splits

SMALL = AttendConfig(16, 32, 4)
SPREAD = AttendConfig(16, 64, 8)
"""The config of few heads, which another loop serves; see `attend_spread.py`."""
TRAPS = {
    "hole_probability": 0.2,
    "beyond_probability": 0.1,
    "lengths": "random",
    "page_padding_bytes": 64,
    "offset_rows": 3,
}


def check(
    problem: AttendProblem,
    *,
    config: AttendConfig = SMALL,
    splits: int = 1,
    fp8: bool = False,
    layout: Layout = Layout.STANDARD,
    query_layout: Layout = Layout.STANDARD,
    rotate_query: bool = True,
    unrotate_output: bool = True,
) -> None:
    call = problem.call(
        query_layout=query_layout, rotate_query=rotate_query, unrotate_output=unrotate_output
    )
    out = problem.allocate_out(fp8=fp8, layout=layout)
    tokens, heads = problem.q.shape[:2]
    rows = tokens * splits * heads
    partial = torch.full((rows * 514,), torch.nan)
    arrivals = torch.zeros(tokens, -(-heads // 16), dtype=torch.int32)
    body.launch_attend(call, out, body.Launch(config, splits, partial, rows * 512, arrivals))
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)
    assert int(arrivals.abs().sum()) == 0  # the counters are ready for the next launch


@pytest.mark.parametrize("config", [SMALL, SPREAD])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_trap_at_once(fp8: bool, splits: int, config: AttendConfig) -> None:
    problem = make_problem(tokens=3, heads=8, window_keys=70, compressed_keys=130, **TRAPS)
    check(problem, config=config, fp8=fp8, splits=splits)


@pytest.mark.parametrize(
    ("window", "compressed"),
    [
        ("v4", "v4"),
        ("mxfp8", "nvfp4"),
        ("mxfp8_planar", "mxfp8_planar"),
        ("mxfp8_planar", "nvfp4_planar"),
        ("v4", "mxfp8"),
        ("nvfp4", "nvfp4"),
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("config", [SMALL, SPREAD])
def test_records(window: str, compressed: str, splits: int, config: AttendConfig) -> None:
    problem = make_problem(
        tokens=2,
        heads=4,
        window_keys=33,
        compressed_keys=65,
        window_record=window,
        compressed_record=compressed,
        **TRAPS,
    )
    check(problem, config=config, splits=splits)


@pytest.mark.parametrize("heads", [1, 2, 12, 16, 48])
def test_heads_without_padding(heads: int) -> None:
    check(make_problem(tokens=2, heads=heads, window_keys=20, compressed_keys=20, **TRAPS))


@pytest.mark.parametrize(
    "config",
    [
        AttendConfig(64, 64, 8, query_through_out=True, ahead=False),
        AttendConfig(16, 32, 8, ahead=False),
        AttendConfig(32, 32, 8),
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_configs(config: AttendConfig, fp8: bool) -> None:
    problem = make_problem(tokens=2, heads=72, window_keys=70, compressed_keys=20, **TRAPS)
    check(problem, config=config, fp8=fp8, splits=2, layout=Layout.CHUNK_INTERLEAVED)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("query_layout", list(Layout))
@pytest.mark.parametrize("fp8", [False, True])
def test_layouts(layout: Layout, query_layout: Layout, fp8: bool) -> None:
    problem = make_problem(tokens=2, heads=24, window_keys=40, **TRAPS)
    check(problem, fp8=fp8, layout=layout, query_layout=query_layout)


@pytest.mark.parametrize("fp8", [False, True])
def test_spread_form_with_interleaved_layouts(fp8: bool) -> None:
    problem = make_problem(tokens=2, heads=24, window_keys=40, **TRAPS)
    layout = Layout.CHUNK_INTERLEAVED
    check(problem, config=SPREAD, fp8=fp8, layout=layout, query_layout=layout)


@pytest.mark.parametrize("config", [SMALL, SPREAD])
@pytest.mark.parametrize("rotate_query", [False, True])
@pytest.mark.parametrize("unrotate_output", [False, True])
def test_rotations_are_independent(
    rotate_query: bool, unrotate_output: bool, config: AttendConfig
) -> None:
    problem = make_problem(tokens=2, heads=8, window_keys=40, positions_dtype=torch.int32)
    check(problem, config=config, rotate_query=rotate_query, unrotate_output=unrotate_output)


@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf"), "random"])
@pytest.mark.parametrize("lengths", ["full", "zero"])
def test_sinks_and_empty_rows(sink: object, lengths: str) -> None:
    problem = make_problem(
        tokens=2, heads=8, window_keys=40, compressed_keys=8, sink=sink, lengths=lengths
    )
    check(problem, splits=2, fp8=True)


@pytest.mark.parametrize("config", [SMALL, SPREAD])
@pytest.mark.parametrize("width", [0, 1, 31, 32, 33, 133])
def test_list_widths(width: int, config: AttendConfig) -> None:
    problem = make_problem(tokens=2, heads=8, window_keys=width, compressed_keys=9, **TRAPS)
    check(problem, config=config)


@pytest.mark.parametrize("page_rows", [1, 2, 7, 64])
def test_page_sizes_and_strided_inputs(page_rows: int) -> None:
    problem = make_problem(
        tokens=2,
        heads=8,
        window_keys=40,
        compressed_keys=30,
        window_page_rows=page_rows,
        compressed_page_rows=2 * page_rows,
        strided=True,
        **TRAPS,
    )
    check(problem)


def test_first_tiles_without_a_key() -> None:
    problem = make_problem(tokens=2, heads=8, window_keys=128)
    problem.window.indices[:, :70] = -1
    check(problem, splits=3)


def test_garbage_positions_are_clamped() -> None:
    problem = make_problem(tokens=3, heads=8, window_keys=16)
    problem.positions.copy_(torch.tensor([-5, 10**12, 4095]))
    check(problem)


def test_entry_point_without_tokens() -> None:
    problem = make_problem(tokens=0, heads=8, window_keys=16)
    out = problem.allocate_out()
    body.attend(problem.call(), out)
    assert out.data.shape == (0, 8, 512)


@pytest.mark.parametrize("heads", [8, 64])
def test_batch_invariant_calls_ignore_their_size(heads: int) -> None:
    """Without a plan, too: one token or many, the launch has the same config and no splits."""
    launches = set()
    for tokens in (1, 5, 40):
        problem = make_problem(tokens=tokens, heads=heads, window_keys=200, compressed_keys=100)
        launch = body.plan_launch(replace(problem.call(), batch_invariant=True))
        launches.add((launch.config, launch.splits))
    assert len(launches) == 1
    assert launches.pop()[1] == 1


@pytest.mark.parametrize("padding", [-1, 0, 7, 2**31 - 1])
def test_padding_rows_do_not_touch_the_others(padding: int) -> None:
    """The last two rows hold garbage; the others keep their bits and no NaN appears in them."""
    problem = make_problem(tokens=5, heads=8, window_keys=40, compressed_keys=70, lengths="random")
    results = []
    for turn in range(2):
        if turn:
            for keys in (problem.window, problem.compressed):
                keys.indices[3:] = padding
                keys.lengths[3:] = keys.width
            problem.positions[3:] = padding
        out = problem.allocate_out(fp8=True)
        body.attend(problem.call(), out)
        results.append([part[:3].clone() for part in (out.data, out.scales, out.lse)])
    assert not results[0][2].isnan().any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_launch_table_of_hopper() -> None:
    """(heads of a program, splits) by tokens, 132 multiprocessors, 640 keys."""

    def launch(tokens: int, heads: int) -> tuple[int, int]:
        config = attend_config((9, 0), heads, tokens, 132)
        return config.heads, attend_splits(config, tokens, heads, 640, 132)

    many = {tokens: launch(tokens, 64) for tokens in (1, 8, 32, 33, 34, 64, 66, 128)}
    assert many == {
        1: (16, 10), 8: (16, 4), 32: (16, 1), 33: (16, 1), 34: (64, 1), 64: (64, 1), 66: (64, 1),
        128: (64, 1),
    }  # fmt: skip
    assert [launch(tokens, 8) for tokens in (1, 16, 66, 128)] == [
        (16, 10),
        (16, 8),
        (16, 2),
        (16, 1),
    ]


def test_entry_point_splits_small_calls() -> None:
    problem = make_problem(tokens=1, heads=8, window_keys=200, compressed_keys=100, **TRAPS)
    call, out = problem.call(), problem.allocate_out()
    assert body.plan_launch(call).splits > 1
    body.attend(call, out)
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)
