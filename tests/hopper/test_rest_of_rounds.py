"""Calls whose last tokens would fill little of a round of the multiprocessors: two launches. No GPU needed."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparse_mla.config.topology import LayerKind
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import (
    FEW_HEADS,
    MANY_HEADS,
    MICROSECONDS,
    tokens_of_launches,
)
from sparse_mla.metadata.plan import PlanScratch, build_plan
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import make_problem

STANDARD, CHUNKED = Layout.STANDARD, Layout.CHUNK_INTERLEAVED
RAGGED: dict[str, Any] = {"lengths": "random", "hole_probability": 0.1, "beyond_probability": 0.05}
TILES = 10  # 128 + 512 keys


# ------------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize(
    ("heads", "tokens", "launches"),
    [
        *((64, 1, (1,)), (64, 132, (132,)), (64, 133, (132, 1)), (64, 140, (132, 8))),
        *((64, 198, (132, 66)), (64, 199, (199,)), (64, 264, (264,)), (64, 265, (264, 1))),
        *((64, 4096, (4092, 4)), (64, 70_000, (69_960, 40))),
        *((8, 132, (132,)), (8, 178, (132, 46)), (8, 179, (179,)), (8, 270, (264, 6))),
        *((32, 150, (132, 18)), (24, 270, (264, 6))),
        # two blocks a token
        *((128, 66, (66,)), (128, 67, (66, 1)), (128, 99, (66, 33)), (128, 100, (100,))),
        (128, 133, (132, 1)),
    ],
)
def test_launches_of_the_least_time(heads: int, tokens: int, launches: tuple[int, ...]) -> None:
    assert tokens_of_launches(heads, tokens, TILES, 132) == launches


@pytest.mark.parametrize("heads", [1, 16, 24, 33, 64, 66, 100, 128])
def test_launches_cover_all_tokens_and_whole_rounds_come_first(heads: int) -> None:
    for tokens in range(1, 1200):
        launches = tokens_of_launches(heads, tokens, TILES, 132)
        assert sum(launches) == tokens
        assert len(launches) in (1, 2)
        if len(launches) == 2:
            rows = [-(-heads // block) for block in MICROSECONDS]  # of a token
            assert any(-launches[0] * n % 132 < n for n in rows)  # no token more fits in the round


def test_only_what_was_measured_is_divided() -> None:
    for tiles, multiprocessors in ((9, 132), (2, 132), (10, 78), (10, 133), (10, 1)):
        assert tokens_of_launches(64, 140, tiles, multiprocessors) == (140,)
    assert tokens_of_launches(64, 140, 66, 132) == (132, 8)


def call_of(tokens: int, heads: int = 64) -> AttendCall:
    """128 + 512 keys."""
    return make_problem(tokens=tokens, heads=heads, compressed_keys=512).call()


def test_each_launch_is_that_of_its_tokens_alone() -> None:
    call = call_of(140)
    assert hopper.launches_of(call, 132) == ((range(132), 64, 1), (range(132, 140), 16, 2))
    assert hopper.launches_of(call_of(132), 132) == ((range(132), 64, 1),)
    assert hopper.launches_of(call_of(8), 132) == ((range(8), 16, 2),)
    assert hopper.launches_of(call, 131) == ((range(140), 64, 1),)


def test_bf16_numbers_leave_blocks_of_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "bf16_numbers", lambda: True)
    assert hopper.launches_of(call_of(1, 8), 132) == ((range(1), 16, 4),)
    assert hopper.launches_of(call_of(1), 132) == ((range(1), 16, 4),)
    assert hopper.launches_of(call_of(128), 132) == ((range(128), 64, 1),)
    invariant = replace(call_of(5, 8), batch_invariant=True)
    assert hopper.launches_of(invariant, 132) == ((range(5), 16, 1),)


@pytest.mark.parametrize("heads", [8, 64])
def test_batch_invariant_calls_and_plans_are_one_launch(heads: int) -> None:
    call = call_of(140, heads)
    assert len(hopper.launches_of(call, 132)) == 2
    sizes: dict[str, Any] = {"tokens": 140, "num_heads": heads, "window_keys": 128}
    for invariant in (True, False):
        plan = build_plan(
            LayerKind.RATIO_2,
            compressed_keys=512,
            scratch=PlanScratch(heads, 132, "cpu"),
            batch_invariant=invariant,
            **sizes,
        )
        parts = hopper.launches_of(replace(call, plan=plan), 132)
        assert len(parts) == (1 if invariant else 2)
    one = ((range(140), heads, 1),)
    assert hopper.launches_of(replace(call, batch_invariant=True), 132) == one


# ------------------------------------------------------------------------------------ arguments


def from_row(tensor: Tensor | None, first: int) -> Any:
    """A view without the first rows."""
    return None if tensor is None else tensor[first:]


def keys_from(keys: KeySet | None, first: int) -> Any:
    """A key set without its first tokens."""
    if keys is None:
        return None
    return KeySet(keys.cache, keys.indices[first:], from_row(keys.lengths, first))


def call_from(call: AttendCall, first: int) -> AttendCall:
    """A call without its first tokens."""
    return replace(
        call,
        q=call.q[first:],
        window=keys_from(call.window, first),
        compressed=keys_from(call.compressed, first),
        positions=from_row(call.positions, first),
    )


def out_from(out: AttendOut, first: int) -> AttendOut:
    """An output without its first tokens."""
    names = ("data", "scales", "lse", "max_logits")
    return replace(out, **{name: from_row(getattr(out, name), first) for name in names})


def fields_of(structure: ctypes.Structure) -> dict[str, Any]:
    """All fields by name, structures among them too."""
    found: dict[str, Any] = {}
    for name, *_ in structure._fields_:
        value = getattr(structure, name)
        inner = isinstance(value, ctypes.Structure)
        found[name] = fields_of(value) if inner else value
    return found


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"compressed_keys": 90, "strided": True, **RAGGED}, {"fp8": True, "layout": CHUNKED}),
        ({"compressed_keys": 90, "positions_dtype": torch.int32}, {"fp8": True, "lse": False}),
        ({"compressed_keys": None, **RAGGED}, {"fp8": False, "max_logits": False}),
        ({"compressed_keys": 0, "strided": True}, {"fp8": False}),
    ],
    ids=["strided, lengths, fp8", "int32, no lengths", "one set, bf16", "an empty set"],
)
@pytest.mark.parametrize("query_layout", list(Layout), ids=lambda layout: layout.value)
def test_arguments_are_those_of_a_call_of_the_tokens(
    query_layout: Layout, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    problem = make_problem(tokens=9, heads=24, window_keys=70, **fields)
    call, out = problem.call(query_layout=query_layout), problem.allocate_out(**options)
    got = fields_of(hopper._arguments(call, out, call.q, 3, range(6, 9)))
    views, view_out = call_from(call, 6), out_from(out, 6)
    wanted = fields_of(hopper._arguments(views, view_out, views.q, 3, range(3)))
    if problem.compressed is None or problem.compressed.width == 0:
        assert got["b"].pop("pages") == call.q.data_ptr()  # anything that may be read
        del wanted["b"]["pages"]
    assert got == wanted
    assert got["tokens"] == 3
    assert got["q"] == call.q.data_ptr() + 6 * call.q.stride(0) * 2
    assert got["positions"] == problem.positions.data_ptr() + 6 * problem.positions.element_size()
    if out.scales is not None:
        assert got["scales"] == out.scales.data_ptr() + 6 * 4
        assert got["scale_stride"] == 12  # 9 tokens, padded to a multiple of four


# ------------------------------------------------------------------------------------ both launches run


class Forced:
    """The first five of seven tokens in one launch, the last two in another, on four multiprocessors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, rest: int) -> None:
        """`first`, `rest`: heads of the blocks of each."""
        monkeypatch.setattr(hopper, "tokens_of_launches", lambda *_: (5, 2))
        monkeypatch.setattr(
            hopper, "block_heads", lambda _, tokens, *__: {5: first, 2: rest}[tokens]
        )


def spread_query(call: AttendCall) -> AttendCall:
    """The same query with other heads' values between its tokens."""
    tokens, heads, dims = call.q.shape
    base = torch.full((tokens, heads + 6, dims), torch.nan, dtype=call.q.dtype)
    q = base[:, 3 : 3 + heads]
    q.copy_(call.q)
    return replace(call, q=q)


@pytest.mark.parametrize(
    ("rest", "launches"),
    [
        (64, [(MANY_HEADS.file, 4, 1), (MANY_HEADS.file, 4, 2)]),
        (32, [(MANY_HEADS.file, 4, 1), (MANY_HEADS.file, 4, 1)]),
        (8, [(MANY_HEADS.file, 4, 1), (FEW_HEADS.file, 4, 1)]),
    ],
    ids=["shared out", "smaller blocks", "few heads"],
)
def test_two_launches_of_many_heads_are_right(
    rest: int, launches: list[Any], emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 with scales, both sets, chunk-interleaved query and output, int64 positions, rows apart from each other."""
    Forced(monkeypatch, 64, rest)
    problem = make_problem(
        tokens=7, heads=64, window_keys=70, compressed_keys=90, strided=True, **RAGGED
    )
    assert problem.positions.dtype is torch.int64
    call = spread_query(problem.call(query_layout=CHUNKED))
    out = problem.allocate_out(fp8=True, layout=CHUNKED)
    assert emulator.attend(call, out, 4) == launches
    assert_matches_oracle(call, out, HOPPER_BODY)


@pytest.mark.parametrize("fp8", [True, False])
def test_two_launches_of_few_heads_are_right(
    fp8: bool, emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard order, int32 positions, one set without lengths."""
    Forced(monkeypatch, 8, 8)
    problem = make_problem(
        tokens=7, heads=8, window_keys=150, strided=True, positions_dtype=torch.int32
    )
    out = problem.allocate_out(fp8=fp8, lse=fp8, max_logits=not fp8)
    assert emulator.attend(problem.call(), out, 4) == [
        (FEW_HEADS.file, 4, 1),
        (FEW_HEADS.file, 4, 2),
    ]
    assert_matches_oracle(problem.call(), out, HOPPER_BODY)


def test_each_tensor_map_begins_at_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of one copy of a query whose rows are repeated, which no map can tell."""
    Forced(monkeypatch, 64, 64)
    problem = make_problem(tokens=7, heads=64, window_keys=4)
    call = replace(problem.call(), q=problem.q[:1].expand(7, 64, 512))
    copies: list[Tensor] = []
    readable = hopper._readable_query

    def copied(call: AttendCall, *, mapped: bool) -> Tensor:
        copies.append(readable(call, mapped=mapped))
        return copies[-1]

    with (
        mock.patch.object(hopper, "_readable_query", copied),
        mock.patch.object(hopper, "_multiprocessors", return_value=4),
        mock.patch.object(hopper, "function", return_value=(0, 0)),
        mock.patch.object(hopper, "query_map") as query_map,
        mock.patch.object(hopper, "launch") as launch,
        mock.patch.multiple(
            torch.cuda, device=mock.MagicMock(), current_device=int, current_stream=mock.Mock()
        ),
    ):
        query_map.return_value.getPtr.return_value = 0
        hopper.attend(call, problem.allocate_out())
    (q,) = copies
    assert launch.call_count == 2
    assert [asked.args for asked in query_map.call_args_list] == [
        (q.data_ptr(), (5, 64, 512), q.stride(), False, 64),
        (q.data_ptr() + 5 * 64 * 512 * 2, (2, 64, 512), q.stride(), False, 64),
    ]
