"""Both Hopper bodies against the float64 oracle, and what serving needs of them. Needs an SM90 GPU: `pytest -m gpu`.

The number of heads chooses the body here, as in batch-invariant calls: `few_heads.cu` up to 32 of them, in steps of 8, `attend.cu`
above; `test_hopper_blocks.py` has blocks of heads and the choice by time. Every cache is
poisoned: what no valid lane names is NaN. The cases of 300 tokens and 32 heads also catch copies that overwrite rows too early. Tests of thousands of launches stand first, so that they do not run alone at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import KV_RECORDS, RecordFormat, record_named
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import BODIES, MANY_HEADS, block_heads
from sparse_mla.kernels.reference.attend import attend_exact
from sparse_mla.testing.compare import (
    HOPPER_BODY,
    assert_matches_oracle,
    output_values,
    same_bits,
)
from sparse_mla.testing.inputs import AttendProblem, make_problem, poisoned_cache

DEVICE = "cuda"
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HOPPER, reason="needs a GPU of compute capability 9.0"),
]
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
TRAPS: dict[str, Any] = {**RAGGED, "page_padding_bytes": 4096, "offset_rows": 3}
FEW_SPLITS = {8: 6, 4: 20, 3: 35, 2: 50, 1: 150}
"""CTAs that share a row of a block of 8 heads -> a number of rows that so many share on 132 multiprocessors."""
MANY_SPLITS = {4: 12, 2: 50, 1: 150}
"""The same of larger blocks."""
SPLITS = [(8, splits) for splits in FEW_SPLITS]
SPLITS += [(heads, splits) for heads in (16, 32, 64) for splits in MANY_SPLITS]
NAMES = [record.name for record in KV_RECORDS]
SERVED = [  # pairs of records that models and older caches have
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("v4", "v4"),
    ("mxfp8_planar", "mxfp8_planar"),
    ("mxfp8_planar", "nvfp4_planar"),
]
PAIRS = [*SERVED, ("nvfp4", "nvfp4"), ("v4", "nvfp4"), ("nvfp4", "v4")]
LAYOUTS = list(Layout)


@pytest.fixture(autouse=True)
def body_chosen_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of a token in one block, or in blocks of 64."""
    monkeypatch.setattr(hopper, "block_heads", lambda heads, *_: block_heads(heads, 1, True))


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """For tests that take gigabytes: other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def run(problem: AttendProblem, call: AttendCall | None = None, **out_options: Any) -> AttendOut:
    """Poisoned output, one launch, finished."""
    out = problem.allocate_out(**out_options)
    hopper.attend(call or problem.call(), out)
    torch.cuda.synchronize()
    return out


def check(problem: AttendProblem, call: AttendCall | None = None, **out_options: Any) -> AttendOut:
    """Run a call and compare it with the oracle; many heads also without lse, which sums other weights."""
    call = call or problem.call()
    exact = attend_exact(call)
    if BODIES[block_heads(call.num_heads, 1, True)] is MANY_HEADS:
        bare = run(problem, call, **{"lse": False, "max_logits": False} | out_options)
        assert_matches_oracle(call, bare, HOPPER_BODY, exact)
    out = run(problem, call, **out_options)
    assert_matches_oracle(call, out, HOPPER_BODY, exact)
    return out


def model_problem(tokens: int, heads: int, **fields: Any) -> AttendProblem:
    """128 + 512 keys, some of them missing."""
    return make_problem(
        **{"tokens": tokens, "heads": heads, "compressed_keys": 512, "device": DEVICE}
        | RAGGED
        | fields
    )


def check_records(window: str, compressed: str, heads: int, splits: int, fp8: bool) -> None:
    """One pair of records in a call that is shared out to `splits` CTAs a row."""
    problem = model_problem(
        (FEW_SPLITS if heads <= 8 else MANY_SPLITS)[splits],
        heads,
        compressed_keys=192 if splits == 1 else 512,
        window_record=window,
        compressed_record=compressed,
        window_page_rows=48,
        compressed_page_rows=1 if splits in (8, 2) else 64,
        **TRAPS,
    )
    assert [part.splits for part in hopper.launches_of(problem.call(), 132)] == [splits]
    check(problem, fp8=fp8)


# ------------------------------------------------------------------------------------ many launches, many rows


@pytest.mark.slow
@pytest.mark.timeout(200, method="thread")  # a hung launch is not interrupted, the process ends
@pytest.mark.parametrize(
    ("heads", "tokens", "splits"),
    [(8, 15, 8), (16, 30, 4), (32, 23, 4), (32, 66, 2), (64, 15, 4), (64, 66, 2)],
)
def test_twenty_thousand_launches_of_the_worst_shape_do_not_hang(
    heads: int, tokens: int, splits: int
) -> None:
    """As many clusters as there are of a size, most of them as many as are resident together."""
    problem = model_problem(tokens, heads)
    call, out = problem.call(), problem.allocate_out(fp8=True)
    assert [part.splits for part in hopper.launches_of(call, 132)] == [splits]
    first = run(problem, fp8=True)
    for _ in range(20_000):
        hopper.attend(call, out)
    torch.cuda.synchronize()
    assert same_bits(first, out)


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_seventy_thousand_rows_equal_the_rows_alone(heads: int, memory_given_back: None) -> None:
    """With 32 and 64 heads the query and the output lie past 2**31 and 2**32 bytes."""
    problem = model_problem(70_000, heads, window_keys=8, compressed_keys=None)
    whole = run(problem, lse=False, max_logits=False)
    rows = torch.cat((torch.arange(140), torch.arange(69_860, 70_000))).to(DEVICE)
    some = problem.rows(rows)
    alone = check(some, lse=False, max_logits=False)
    assert torch.equal(whole.data[rows], alone.data)
    assert bool(torch.isfinite(whole.data).all())


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_long_rows_after_many_short_ones_of_a_multiprocessor(heads: int) -> None:
    """Warps that copy no block of a short row must not be ahead of the others by a round of the ring."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    problem = model_problem(43 * sms, heads, window_keys=128, compressed_keys=None, lengths="full")
    number = torch.arange(43 * sms, device=DEVICE) // sms  # of the row in its multiprocessor
    lengths = torch.where(number < 40, 10, 128).to(torch.int32)
    problem = replace(problem, window=replace(problem.window, lengths=lengths))
    whole = run(problem, lse=False, max_logits=False)
    rows = torch.arange(39 * sms, 43 * sms, device=DEVICE)
    alone = check(problem.rows(rows), lse=False, max_logits=False)
    assert torch.equal(whole.data[rows], alone.data)


def rows_at(near: KeySet, far: PagedCache, first: int) -> KeySet:
    """The same keys, their rows copied to the slots of `far` from `first` on."""
    slots = torch.arange(near.cache.num_slots, device=DEVICE)
    far.write_rows(slots + first, *near.cache.read_rows(slots))
    shifted = torch.where(near.indices < 0, near.indices, near.indices + first)
    return KeySet(far, shifted, near.lengths)


def far_cache(record: RecordFormat, shape: str, num_rows: int) -> tuple[PagedCache, float]:
    """A poisoned cache that reaches `num_rows` past 2**32 bytes, and how many bytes it takes for each row."""
    page_rows = {"pages of one row": 1, "one page": 2**32 // record.data_stride + num_rows}
    rows = page_rows.get(shape, 64)
    page_bytes = record.page_bytes(rows, record.row_alignment_bytes)
    padding = 1_228_800 - page_bytes if shape == "pages far apart" else 0
    each = record.data_stride if shape == "one page" else (page_bytes + padding) / rows
    pages = 1 if shape == "one page" else -(-int(2**32 / each + num_rows) // rows)
    far = poisoned_cache(
        record, num_pages=pages, page_rows=rows, page_padding_bytes=padding, device=DEVICE
    )
    return far, each


def byte_of(cache: PagedCache, slot: int) -> int:
    """Where the data of a row begins, from the first page on."""
    page, row = divmod(slot, cache.page_rows)
    return page * cache.page_stride_bytes + cache.record.value_offset(row, 0, cache.page_rows)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(
    "shape", ["pages side by side", "pages far apart", "pages of one row", "one page"]
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_past_two_and_four_gibibytes_are_read(
    name: str, shape: str, heads: int, memory_given_back: None
) -> None:
    near = model_problem(
        4, heads, window_record=name, compressed_record=name, beyond_probability=0.0
    )
    assert near.compressed is not None
    wanted = check(near, fp8=True)
    rows = near.window.cache.num_slots + near.compressed.cache.num_slots
    far, each = far_cache(record_named(name), shape, rows)
    for borders in ((2**31, 2**32), (2**32, 2**31)):
        moved = []
        for keys, border in zip((near.window, near.compressed), borders, strict=True):
            first = int(border / each) - keys.cache.num_slots // 2
            assert byte_of(far, first) < border <= byte_of(far, first + keys.cache.num_slots - 1)
            moved.append(rows_at(keys, far, first))
        got = run(replace(near, window=moved[0], compressed=moved[1]), fp8=True)
        assert same_bits(got, wanted)


# ------------------------------------------------------------------------------------ records, splits, outputs


@pytest.mark.parametrize("compressed", NAMES)
@pytest.mark.parametrize("window", NAMES)
@pytest.mark.parametrize(("heads", "splits"), SPLITS)
def test_every_pair_of_records_is_read_in_every_split(
    heads: int, splits: int, window: str, compressed: str
) -> None:
    check_records(window, compressed, heads, splits, fp8=True)


@pytest.mark.parametrize("pair", SERVED, ids="-".join)
@pytest.mark.parametrize("splits", MANY_SPLITS)
def test_many_heads_write_bf16_in_every_split(splits: int, pair: tuple[str, str]) -> None:
    check_records(*pair, heads=64, splits=splits, fp8=False)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("heads", [8, 16, 24, 32])
def test_few_heads_write_bf16_of_every_pair(heads: int, pair: tuple[str, str]) -> None:
    check_records(*pair, heads=heads, splits=1, fp8=False)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("heads", [16, 24, 32])
def test_sixteen_and_more_heads_read_every_pair_split(heads: int, pair: tuple[str, str]) -> None:
    check_records(*pair, heads=heads, splits=4, fp8=True)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 15, 16, 23, 24, 31, 36, 41, 66, 67, 133, 300])
def test_every_number_of_tokens_at_the_borders_of_splits(tokens: int, heads: int) -> None:
    check(model_problem(tokens, heads), fp8=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize(("heads", "splits"), [(8, 8), (16, 4), (32, 4), (64, 4), (128, 2)])
def test_the_rest_of_a_round_is_a_launch_of_its_own(
    heads: int, splits: int, layout: Layout
) -> None:
    """140 tokens: 132, then 8, which are shared out."""
    problem = model_problem(140, heads, strided=True)
    call = problem.call(query_layout=layout)
    parts = hopper.launches_of(call, 132)
    assert [(len(part.tokens), part.splits) for part in parts] == [(132, 1), (8, splits)]
    for fp8 in (True, False):
        check(problem, call, fp8=fp8, layout=layout)


@pytest.mark.parametrize(
    "heads",
    [
        *(1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 23, 24, 25, 28, 31, 32),
        *(33, 40, 48, 63, 64, 65, 66, 96, 127, 128),
    ],
)
@pytest.mark.parametrize("out_layout", LAYOUTS, ids=lambda layout: f"out {layout.value}")
@pytest.mark.parametrize("query_layout", LAYOUTS, ids=lambda layout: f"query {layout.value}")
def test_heads_layouts_and_outputs(query_layout: Layout, out_layout: Layout, heads: int) -> None:
    problem = model_problem(5, heads, compressed_keys=200)
    call = problem.call(query_layout=query_layout)
    for fp8 in (True, False):
        check(problem, call, fp8=fp8, layout=out_layout)


@pytest.mark.parametrize("heads", [8, 64])
def test_lse_and_max_logits_are_optional(heads: int) -> None:
    problem = model_problem(5, heads)
    for lse, max_logits in ((True, False), (False, True), (False, False)):
        check(problem, fp8=True, lse=lse, max_logits=max_logits)


# ------------------------------------------------------------------------------------ lists


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize(
    ("window_keys", "compressed_keys"),
    [
        *((0, None), (0, 0), (1, 15), (1, 63), (16, 17), (64, 65)),
        *((133, 257), (128, None), (0, 130), (192, 2048)),
    ],
)
@pytest.mark.parametrize("lengths", ["full", "random", "zero"])
def test_list_widths_of_strided_inputs(
    lengths: str, window_keys: int, compressed_keys: int | None, heads: int
) -> None:
    problem = make_problem(
        tokens=3,
        heads=heads,
        window_keys=window_keys,
        compressed_keys=compressed_keys,
        lengths=lengths,
        strided=True,
        positions_dtype=torch.int32,
        device=DEVICE,
    )
    check(problem)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "lists",
    [{"hole_probability": 1.0}, {"beyond_probability": 1.0}, {"lengths": "zero"}],
    ids=["all negative", "all beyond the cache", "all lengths zero"],
)
@pytest.mark.parametrize("tokens", [3, 150], ids=["split", "not split"])
def test_rows_without_a_key_are_zero(
    tokens: int, lists: dict[str, Any], sink: float | None, heads: int
) -> None:
    problem = make_problem(
        tokens=tokens, heads=heads, compressed_keys=130, sink=sink, device=DEVICE, **lists
    )
    for fp8 in (True, False):
        out = check(problem, fp8=fp8)
        assert out.lse is not None
        assert out.max_logits is not None
        assert bool((output_values(out) == 0).all())
        assert bool((out.lse == torch.inf).all())
        assert bool((out.max_logits == -torch.inf).all())


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [5, 300])
def test_what_no_lane_names_changes_no_bit(tokens: int, heads: int) -> None:
    """NaN everywhere, or zeros: unnamed rows, page tails, the space between pages and before them."""
    poisoned, clean = (
        model_problem(tokens, heads, poison=poison, **TRAPS) for poison in (True, False)
    )
    assert same_bits(run(poisoned, fp8=True), run(clean, fp8=True))


@pytest.mark.parametrize("lengths", ["random", "zero"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_a_cta_takes_several_rows(heads: int, lengths: str) -> None:
    problem = make_problem(
        tokens=700,
        heads=heads,
        window_keys=40,
        compressed_keys=150,
        lengths=lengths,
        hole_probability=0.3,
        device=DEVICE,
    )
    check(problem, fp8=True)


# ------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("sink", [None, 20.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("rotations", [(True, False), (False, True), (False, False)])
def test_sinks_and_rotations(rotations: tuple[bool, bool], sink: float | None, heads: int) -> None:
    problem = make_problem(tokens=3, heads=heads, compressed_keys=130, sink=sink, device=DEVICE)
    check(problem, problem.call(rotate_query=rotations[0], unrotate_output=rotations[1]))


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("key_scale", [2.0**-12, 2.0**-4, 8.0, 64.0])
def test_small_and_large_keys(key_scale: float, heads: int) -> None:
    """Large keys move the running maximum again and again; small ones need f16 scales below 2^-14."""
    check(
        make_problem(
            tokens=140, heads=heads, compressed_keys=600, key_scale=key_scale, device=DEVICE
        )
    )


def saturated(heads: int) -> AttendProblem:
    """Keys beyond f16."""
    return make_problem(
        tokens=2, heads=heads, compressed_keys=64, key_scale=60_000.0, sink=None, device=DEVICE
    )


@pytest.mark.parametrize(
    "pair", [("mxfp8", "nvfp4"), ("v4", "v4"), ("nvfp4", "mxfp8_planar"), ("mxfp8", "mxfp8")]
)
@pytest.mark.parametrize("tokens", [3, 300])
def test_bf16_numbers(tokens: int, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "bf16_numbers", lambda: True)
    check(model_problem(tokens, 64, window_record=pair[0], compressed_record=pair[1]), fp8=True)


@pytest.mark.parametrize("record", ["mxfp8", "v4"])
def test_values_beyond_f16_are_right_in_bf16(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys up to 2^24, whose scales and products f16 cannot hold."""
    monkeypatch.setattr(hopper, "bf16_numbers", lambda: True)
    problem = make_problem(
        tokens=40, heads=64, compressed_keys=300, key_scale=2.0**22, window_record=record,
        compressed_record=record, device=DEVICE,
    )  # fmt: skip
    check(problem, replace(problem.call(), q=problem.q * 2.0**-22))


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_saturated_keys_stay_finite(heads: int) -> None:
    assert bool(torch.isfinite(run(saturated(heads)).data).all())


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_saturated_queries_stay_finite_too(heads: int) -> None:
    problem = saturated(heads)
    large = replace(problem, q=problem.q * 1e36)
    assert bool(torch.isfinite(run(large).data).all())


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("dim", [5, 500])
def test_a_query_that_is_nan_is_nan_in_the_output_and_nowhere_else(heads: int, dim: int) -> None:
    problem = make_problem(tokens=2, heads=heads, compressed_keys=90, device=DEVICE)
    q = problem.q.clone()
    q[0, 1, dim] = float("nan")
    clean, nan = run(problem), run(problem, replace(problem.call(), q=q))
    assert bool(nan.data[0, 1].isnan().all())
    clean.data[0, 1] = nan.data[0, 1] = 0
    assert torch.equal(nan.data, clean.data)
    assert nan.lse is not None
    assert nan.lse.isnan().nonzero().tolist() == [[0, 1]]


# ------------------------------------------------------------------------------------ what serving needs


@pytest.mark.parametrize(
    ("heads", "pair"),
    [
        *((heads, ("mxfp8", "mxfp8")) for heads in (8, 16, 32, 64, 128)),
        *((heads, pair) for heads in (8, 64) for pair in (("mxfp8", "nvfp4"), ("v4", "v4"))),
    ],
)
@pytest.mark.parametrize("tokens", [1, 32, 64, 300])
def test_twenty_repeats_are_bitwise_equal(tokens: int, heads: int, pair: tuple[str, str]) -> None:
    problem = model_problem(tokens, heads, window_record=pair[0], compressed_record=pair[1])
    first = run(problem, fp8=True)
    for _ in range(19):
        assert same_bits(first, run(problem, fp8=True))


def picked(out: AttendOut, rows: Tensor) -> AttendOut:
    """Some rows of an output."""
    assert out.lse is not None
    assert out.max_logits is not None
    scales = None if out.scales is None else out.scales[rows]
    return replace(
        out,
        data=out.data[rows],
        scales=scales,
        lse=out.lse[rows],
        max_logits=out.max_logits[rows],
    )


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 128])
def test_a_batch_invariant_row_has_the_bits_of_the_row_alone(heads: int, fp8: bool) -> None:
    problem = model_problem(300, heads)

    def invariant(some: AttendProblem) -> AttendOut:
        return run(some, replace(some.call(), batch_invariant=True), fp8=fp8)

    whole = invariant(problem)
    assert_matches_oracle(problem.call(), whole, HOPPER_BODY)
    order = torch.randperm(300, device=DEVICE)
    for rows in (order, order[:150], order[:7], *order[:5, None]):
        assert same_bits(invariant(problem.rows(rows)), picked(whole, rows))


@pytest.mark.parametrize("heads", [8, 64])
def test_no_tokens_is_no_launch(heads: int) -> None:
    problem = make_problem(tokens=0, heads=heads, window_keys=4, compressed_keys=4, device=DEVICE)
    hopper.attend(problem.call(), problem.allocate_out())


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("tokens", [8, 240, 140], ids=["split", "not split", "two launches"])
def test_a_graph_replays_what_eager_writes_and_sees_new_values(tokens: int, heads: int) -> None:
    problem = model_problem(tokens, heads)
    call, out = problem.call(), problem.allocate_out(fp8=True)
    run(problem, fp8=True)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.attend(call, out)
    lengths = problem.window.lengths
    assert lengths is not None
    for step in range(3):
        lengths.sub_(step).clamp_min_(0)
        problem.window.indices[-2:] = (-1, 0, 2**31 - 1)[step]
        problem.positions[-2:] = (-1, 0, 5000)[step]
        out.data.fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(check(problem, fp8=True), out)
