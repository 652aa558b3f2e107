"""The portable attention kernel on a GPU against the float64 oracle, and what serving needs of it."""

from dataclasses import replace

import pytest
import torch

from sparse_mla.kernels.contract import KeySet, Layout
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem, poisoned_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from sparse_mla.kernels.triton import attend as body
    from sparse_mla.kernels.triton.attend_kernel import attend_kernel
    from sparse_mla.kernels.triton.configs import attend_config
    from sparse_mla.kernels.triton.launch import device_facts

TRAPS = {
    "hole_probability": 0.15,
    "beyond_probability": 0.1,
    "lengths": "random",
    "page_padding_bytes": 64,
    "offset_rows": 3,
    "device": "cuda",
}
INTERLEAVED = Layout.CHUNK_INTERLEAVED


def run(problem: AttendProblem, fp8: bool = True, splits: int = 1, like_tokens: int | None = None):
    """Attend with a number of splits and the config of a call of `like_tokens` tokens."""
    tokens, heads = problem.q.shape[:2]
    layout = INTERLEAVED if fp8 else Layout.STANDARD
    call = problem.call(query_layout=layout)
    out = problem.allocate_out(fp8=fp8, layout=layout)
    facts = device_facts(problem.q.device)
    config = attend_config(facts.capability, heads, like_tokens or tokens, facts.num_sms)
    launch = body.Launch(config, 1, None, 0, None)
    if splits > 1:
        rows = tokens * splits * heads
        partial = torch.full((rows * 514,), torch.nan, device="cuda")
        arrivals = torch.zeros(tokens * -(-heads // 16), dtype=torch.int32, device="cuda")
        launch = body.Launch(config, splits, partial, rows * 512, arrivals)
    body.launch_attend(call, out, launch)
    return call, out


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 48, 64, 96, 128])
@pytest.mark.parametrize(("splits", "like_tokens"), [(1, 512), (4, 1)])
def test_heads(heads: int, splits: int, like_tokens: int) -> None:
    problem = make_problem(tokens=5, heads=heads, window_keys=128, compressed_keys=200, **TRAPS)
    for fp8 in (False, True):
        call, out = run(problem, fp8, splits, like_tokens)
        assert_matches_oracle(call, out, TENSOR_CORE_BODY)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(
    ("window", "compressed"),
    [
        ("v4", "v4"),
        ("mxfp8", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("mxfp8_planar", "mxfp8_planar"),
        ("mxfp8_planar", "nvfp4_planar"),
    ],
)
def test_records(window: str, compressed: str, heads: int) -> None:
    problem = make_problem(
        tokens=4,
        heads=heads,
        window_keys=130,
        compressed_keys=193,
        window_record=window,
        compressed_record=compressed,
        **TRAPS,
    )
    for splits, like_tokens in ((1, 512), (3, 1)):
        call, out = run(problem, True, splits, like_tokens)
        assert_matches_oracle(call, out, TENSOR_CORE_BODY)


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 133, 640, 1152])
def test_list_widths_sinks_and_pages(width: int) -> None:
    sinks = [None, 20.0, float("inf"), float("-inf")]
    problem = make_problem(
        tokens=3,
        heads=8,
        window_keys=width,
        compressed_keys=width // 2,
        window_page_rows=(1, 7, 256)[width % 3],
        sink=sinks[width % 4],
        strided=True,
        **TRAPS,
    )
    call, out = run(problem, width % 2 == 0, 1 + width % 5)
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_repeats_are_bitwise_equal(tokens: int) -> None:
    problem = make_problem(tokens=tokens, heads=64, window_keys=128, compressed_keys=512, **TRAPS)
    results = []
    for _ in range(20):
        out = problem.allocate_out(fp8=True, layout=INTERLEAVED)
        body.attend(problem.call(), out)
        results.append((out.data.clone(), out.scales.clone(), out.lse.clone()))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    problem = make_problem(tokens=40, heads=64, window_keys=128, compressed_keys=512, **TRAPS)
    order = torch.randperm(40, device="cuda")
    _, whole = run(problem, fp8=False)
    _, permuted = run(problem.rows(order), fp8=False)
    assert torch.equal(permuted.data, whole.data[order])
    for row in (0, 17, 39):
        _, alone = run(problem.rows(torch.tensor([row], device="cuda")), False, 1, 40)
        assert torch.equal(alone.data[0], whole.data[row])


def test_graph_replays_equal_eager_and_see_new_values() -> None:
    problem = make_problem(tokens=8, heads=64, window_keys=128, compressed_keys=512, **TRAPS)
    call = problem.call()
    out, eager = (problem.allocate_out(fp8=True, layout=INTERLEAVED) for _ in range(2))
    launch = body.plan_launch(call)
    lengths = problem.window.lengths
    kept = lengths.clone()
    body.launch_attend(call, out, launch)  # warm-up
    lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body.launch_attend(call, out, launch)
    for step in range(3):
        lengths.copy_((kept - step).clamp_min(0))
        problem.window.indices[6:] = torch.tensor([-1, 0, 2**31 - 1], device="cuda")[step]
        problem.positions[6:] = (-1, 0, 2**40)[step]
        graph.replay()
        body.launch_attend(call, eager, launch)
        assert torch.equal(out.data, eager.data)
        assert torch.equal(out.scales, eager.scales)
        assert_matches_oracle(call, out, TENSOR_CORE_BODY)


@pytest.mark.parametrize("record", ["mxfp8", "v4", "nvfp4_planar"])
def test_rows_past_two_and_four_gibibytes(record: str) -> None:
    small = make_problem(tokens=4, heads=16, window_keys=64, window_record=record, device="cuda",
                         window_page_rows=64)  # fmt: skip
    cache = small.window.cache
    stride = 1_228_800
    far = poisoned_cache(
        cache.record,
        num_pages=2**32 // stride + 8,
        page_rows=64,
        page_padding_bytes=stride - 64 * cache.record.row_bytes,
        device="cuda",
    )
    _, wanted = run(small, fp8=False)
    for border in (2**31, 2**32):
        first = border // stride - 1
        far.pages[first : first + cache.num_pages] = cache.pages
        shifted = small.window.indices + first * 64
        moved = replace(small, window=KeySet(far, shifted, None))
        _, got = run(moved, fp8=False)
        assert torch.equal(got.data, wanted.data)


@pytest.mark.parametrize("tokens", [65_535, 65_537, 70_000])
def test_many_tokens(tokens: int) -> None:
    problem = make_problem(tokens=tokens, heads=8, window_keys=8, device="cuda")
    _, out = run(problem, fp8=False)
    rows = torch.tensor([0, 1, 65_534, tokens - 1], device="cuda")
    some = problem.rows(rows)
    exact = some.allocate_out()
    exact.data.copy_(out.data[rows])
    exact.lse.copy_(out.lse[rows])
    exact.max_logits.copy_(out.max_logits[rows])
    assert_matches_oracle(some.call(), exact, TENSOR_CORE_BODY)
    assert bool(torch.isfinite(out.data).all())


def test_nothing_compiles_after_warm_up() -> None:
    def variants() -> int:
        return len(attend_kernel.device_caches[torch.cuda.current_device()][0])

    for tokens, width in ((1, 512), (1, 1), (132, 512)):  # split, one tile, many heads
        problem = make_problem(
            tokens=tokens, heads=64, window_keys=width, compressed_keys=0, **TRAPS
        )
        out = problem.allocate_out(fp8=True)
        body.attend(problem.call(), out)
    warm = variants()
    for tokens, width, page_rows in (
        (1, 192, 1),
        (2, 16, 16),
        (15, 1, 64),
        (17, 640, 32),
        (300, 65, 2),
    ):
        fields = dict(TRAPS, page_padding_bytes=16 * tokens)
        problem = make_problem(tokens=tokens, heads=64, window_keys=width, compressed_keys=width + 1,
                               window_page_rows=page_rows, **fields)  # fmt: skip
        body.attend(problem.call(), problem.allocate_out(fp8=True))
    assert variants() == warm
