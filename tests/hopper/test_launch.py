"""The host side of the Hopper kernel: splits, division, refusals. No GPU needed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sparse_mla.cache.records import INDEX_FP8
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import block_heads, tokens_of_launches
from sparse_mla.testing.inputs import make_problem


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 31, 32, 33, 48, 64, 100, 127, 256, 12_345])
def test_division_by_multiplication(divisor: int) -> None:
    mul, shift = hopper.division(divisor)
    draw = random.Random(divisor)
    values = [draw.randrange(2**31) for _ in range(500)]
    values += [0, divisor - 1, divisor, 2 * divisor - 1, 2**31 - 1]
    for value in values:
        got = value if divisor == 1 else (value * mul >> 32) >> shift
        assert got == value // divisor
    assert mul < 2**32
    assert (mul == 0) == (divisor == 1)


@pytest.mark.parametrize(
    ("block", "items", "tiles", "splits"),
    [
        *((64, 1, 10, 4), (64, 15, 10, 4), (64, 16, 10, 2), (64, 66, 10, 2), (64, 67, 10, 1)),
        *((32, 23, 10, 4), (32, 24, 10, 2), (16, 30, 10, 4), (16, 31, 10, 2), (16, 66, 10, 2)),
        *((64, 1, 1, 1), (64, 1, 2, 2), (64, 1, 3, 2), (64, 1, 7, 4), (64, 70_000, 10, 1)),
    ],
)
def test_splits_keep_every_cluster_resident(
    block: int, items: int, tiles: int, splits: int
) -> None:
    assert hopper.choose_splits(block, items, tiles, 132) == splits


def test_fewer_multiprocessors_split_less() -> None:
    assert hopper.choose_splits(64, 15, 10, 78) == 2
    assert hopper.choose_splits(64, 40, 10, 78) == 1


@pytest.mark.parametrize(
    ("tokens", "heads", "first"),
    [(1, 64, True), (256, 64, True), (257, 64, False), (512, 32, True), (513, 8, False)],
)
def test_rows_leave_the_l2_first_where_query_and_output_can_stay(
    tokens: int, heads: int, first: bool
) -> None:
    policy = hopper.row_policy(tokens, heads)
    assert policy == (hopper.EVICT_FIRST if first else hopper.EVICT_NORMAL)


def test_batch_invariant_calls_are_never_shared_out() -> None:
    call = make_problem(tokens=1, heads=64, window_keys=128, compressed_keys=512).call()
    assert hopper.launches_of(call, 132) == ((range(1), 8, 8),)
    assert hopper.launches_of(replace(call, batch_invariant=True), 132) == ((range(1), 64, 1),)


def test_refusals_name_what_is_wrong() -> None:
    call = make_problem(tokens=1, heads=64, window_keys=4, compressed_keys=4).call()
    assert hopper.refusals(call) == []
    assert "scale: got 0.0" in hopper.refusals(replace(call, scale=0.0))[0]
    cache = replace(call.window.cache, record=INDEX_FP8)
    wrong = replace(call, window=replace(call.window, cache=cache))
    assert "window record: got index_fp8; allowed: mxfp8" in hopper.refusals(wrong)[0]


def test_a_refused_call_raises_before_anything_is_written() -> None:
    problem = make_problem(tokens=1, heads=64, window_keys=4, compressed_keys=4)
    out = problem.allocate_out()
    with pytest.raises(UnsupportedError, match="scale: got -1.0; allowed: a positive number"):
        hopper.attend(replace(problem.call(), scale=-1.0), out)
    assert bool(out.data.isnan().all())


def test_a_query_is_copied_only_where_the_kernel_cannot_read_it() -> None:
    call = make_problem(tokens=4, heads=64, window_keys=4, compressed_keys=4).call()
    strided = torch.empty(9, 70, 520, dtype=torch.bfloat16)[1:9:2, 3:67, 8:]
    shifted = torch.empty(4, 64, 513, dtype=torch.bfloat16)[..., 1:]
    repeated = call.q[:1].expand(4, 64, 512)
    for q, mapped in ((call.q, True), (strided, True), (repeated, False)):
        assert hopper._readable_query(replace(call, q=q), mapped=mapped) is q
    for q, mapped in ((shifted, False), (repeated, True)):
        read = hopper._readable_query(replace(call, q=q), mapped=mapped)
        assert read.is_contiguous()
        assert torch.equal(read.view(torch.int16), q.view(torch.int16))


def test_no_tokens_is_no_launch() -> None:
    problem = make_problem(tokens=0, heads=64, window_keys=4, compressed_keys=4)
    hopper.attend(problem.call(), problem.allocate_out())


@pytest.mark.parametrize("num_heads", [8, 16, 24, 32, 33, 64, 66, 128])
@pytest.mark.parametrize("widths", [(128, 512), (128, 0), (1, 0)])
def test_warm_up_launches_every_variant_of_a_step(
    num_heads: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "_multiprocessors", lambda index: 132)
    hopper.warm_up_tokens.cache_clear()
    tiles = hopper.tiles_of(widths)

    def variants(call_tokens: int) -> set[tuple[int, int]]:
        found = set()
        for tokens in tokens_of_launches(num_heads, call_tokens, tiles, 132):
            heads = block_heads(num_heads, tokens, False)
            items = tokens * -(-num_heads // heads)
            found.add((heads, hopper.choose_splits(heads, items, tiles, 132)))
        return found

    sizes = hopper.warm_up_tokens(num_heads, widths, 700, 0)
    assert sizes[0] == 1
    warm: set[tuple[int, int]] = set()
    for tokens in sizes:
        assert not variants(tokens) <= warm
        warm |= variants(tokens)
    assert warm == set().union(*map(variants, range(1, 701)))
    hopper.warm_up_tokens.cache_clear()
