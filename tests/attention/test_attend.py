"""Every kernel body against the oracle: sizes, records, pages, masks, sinks, views, repeatability."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_mla.cache.records import KV_RECORDS, MXFP8
from sparse_mla.kernels.contract import KeySet, Layout
from sparse_mla.kernels.reference.attend import attend_exact
from sparse_mla.testing.cases import Case, attend_cases
from sparse_mla.testing.compare import output_values
from sparse_mla.testing.inputs import AttendProblem


@pytest.mark.parametrize("case", attend_cases(), ids=lambda case: case.name)
def test_case_matches_the_oracle(body, case: Case):
    result = body.run_case(case)
    assert result.passed, result


def test_bf16_output_is_within_two_ulp_of_its_own_size(body):
    """Beside the worst-case bound: the error over all values is that of one bf16 rounding."""
    problem = body.problem(tokens=8, heads=16, window_keys=128, compressed_keys=512)
    call, out = problem.call(), problem.allocate_out()
    body.attend(call, out)
    exact = attend_exact(call).output
    error = (output_values(out).double() - exact).norm() / exact.norm()
    assert error <= 2.0**-8  # one rounding is about 2**-9.3 in this norm; bf16 weights add as much


@pytest.mark.parametrize("masked", [1, 16, 32, 64, 127, 128])
@pytest.mark.parametrize("compressed", [None, 48])
def test_first_lanes_masked(body, masked: int, compressed: int | None):
    problem = body.problem(tokens=3, heads=8, window_keys=128, compressed_keys=compressed)
    problem.window.indices[:, :masked] = -1
    out = body.check(problem)
    if masked == 128 and compressed is None:
        assert torch.all(out.data == 0)
        assert torch.all(out.lse == torch.inf)
        assert torch.all(out.max_logits == -torch.inf)


@pytest.mark.parametrize("compressed", [None, 64])
def test_short_history_has_holes_on_one_side(body, compressed: int | None):
    """Tokens at positions 0..127: row p sees p + 1 keys, the rest of its list is -1."""
    problem = body.problem(tokens=128, heads=2, window_keys=128, compressed_keys=compressed)
    lane = torch.arange(128, device=body.device)
    for right_aligned in (False, True):
        hole = lane[None] < 127 - lane[:, None] if right_aligned else lane[None] > lane[:, None]
        indices = problem.window.indices.masked_fill(hole, -1)
        body.check(replace(problem, window=replace(problem.window, indices=indices)))


@pytest.mark.parametrize("record", KV_RECORDS, ids=lambda record: record.name)
def test_unnamed_bytes_change_nothing(body, record):
    """The same problem with every unnamed byte 0xFF and with every unnamed byte 0: equal bits."""
    fields = {
        "tokens": 4,
        "heads": 8,
        "window_keys": 32,
        "compressed_keys": 40,
        "window_record": record,
        "compressed_record": record,
        "lengths": "random",
        "hole_probability": 0.2,
        "page_padding_bytes": 1024,
        "offset_rows": 2,
    }
    poisoned = body.problem(**fields)
    clean = body.problem(**fields, poison=False)
    assert torch.equal(poisoned.window.indices, clean.window.indices)
    first, second = body.run(poisoned), body.run(clean)
    assert torch.equal(first.data, second.data)
    assert torch.equal(first.lse, second.lse)
    assert bool(torch.isfinite(first.data).all())


def test_poison_is_poison(body):
    """The generator's unnamed rows do decode to NaN: naming one of them shows."""
    problem = body.problem(tokens=1, heads=4, window_keys=8)
    raw = problem.window.cache.pages
    slots = torch.arange(problem.window.cache.num_slots, device=body.device)
    unnamed = raw.view(len(slots), -1).eq(0xFF).all(dim=1).nonzero().view(-1)
    assert len(unnamed) >= 32
    problem.window.indices[0, 3] = int(unnamed[0])
    out = body.run(problem)
    assert bool(torch.isnan(out.data.float()).any())


def test_strided_pages_equal_their_contiguous_copy(body):
    """A view with a storage offset and pages far apart gives the bits of a compact cache."""
    problem = body.problem(
        tokens=3, heads=8, window_keys=64, compressed_keys=64, page_padding_bytes=1_200_000
    )
    compact = replace(
        problem,
        window=_compact(problem.window),
        compressed=_compact(problem.compressed),
    )
    assert compact.window.cache.page_stride_bytes < problem.window.cache.page_stride_bytes
    assert torch.equal(body.run(problem).data, body.run(compact).data)


def _compact(keys: KeySet) -> KeySet:
    copied = replace(keys.cache, pages=keys.cache.pages.contiguous())
    return replace(keys, cache=copied)


def test_large_page_offsets(body):
    """Rows past byte 2**31 and past 2**32 of a cache read like rows below."""
    page_rows = 64
    stride = page_rows * MXFP8.row_bytes
    base = body.problem(tokens=2, heads=4, window_keys=16, window_page_rows=page_rows)
    if body.device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    small = base.window.cache
    borders = (2**31 // stride, 2**32 // stride)
    storage = torch.empty((borders[1] + 8) * stride, dtype=torch.uint8, device=body.device)
    pages = storage.view(-1, stride)  # untouched pages of this size take no memory on a CPU
    wanted = body.run(base)
    for border in borders:
        first = border - 1  # the small cache's pages lie on both sides of the border
        pages[first : first + small.num_pages] = small.pages
        indices = base.window.indices + first * page_rows
        cache = replace(small, pages=pages)
        moved = replace(base, window=KeySet(cache, indices, base.window.lengths))
        assert (first + small.num_pages) * stride > (2**31 if border == borders[0] else 2**32)
        got = body.run(moved)
        assert torch.equal(got.data, wanted.data)
        assert torch.equal(got.lse, wanted.lse)


@pytest.mark.parametrize("tokens", [65_535, 65_536, 65_537, 70_000])
def test_many_tokens(body, tokens: int):
    problem = body.problem(
        tokens=tokens, heads=1, window_keys=2, compressed_keys=1, lengths="random", pool_rows=64
    )
    out = body.run(problem)
    assert bool(torch.isfinite(out.data).all()), "a row was not written"
    assert not bool(torch.isnan(out.lse).any())
    rows = torch.tensor([0, 1, 32_767, 32_768, 65_534, tokens - 2, tokens - 1], device=body.device)
    some = problem.rows(rows)
    body.check(some)
    assert torch.equal(body.run(some).data, out.data[rows])


def test_repeat_is_bitwise_equal(body):
    problem = body.problem(
        tokens=7, heads=64, window_keys=128, compressed_keys=192, hole_probability=0.1
    )
    first, second = body.run(problem, fp8=True), body.run(problem, fp8=True)
    assert torch.equal(first.data, second.data)
    assert torch.equal(first.scales, second.scales)
    assert torch.equal(first.lse, second.lse)


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_batch_order_and_company_do_not_matter(body, heads: int):
    """Permuted rows give permuted bits; a row alone, or in seven other batches, gives its bits.

    The torch body gives it on a CPU without being asked; a GPU body promises it when the call asks.
    """
    if (body.name, body.device) == ("torch", "cuda"):
        pytest.skip("cuBLAS may choose another product for another batch size")
    problem = body.problem(
        tokens=37, heads=heads, window_keys=64, compressed_keys=96, hole_probability=0.1
    )

    def bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        some = problem.rows(rows)
        call = replace(some.call(), batch_invariant=True)
        out = some.allocate_out()
        body.attend(call, out)
        return out.data, out.lse

    everything = torch.arange(37, device=body.device)
    data, lse = bits(everything)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(body.device)
    permuted = bits(order)
    assert torch.equal(permuted[0], data[order])
    assert torch.equal(permuted[1], lse[order])
    for size in (1, 2, 3, 5, 8, 16, 30):
        rows = torch.cat((everything[20:21], everything[:size]))
        got = bits(rows)
        assert torch.equal(got[0][0], data[20]), f"in a batch of {size + 1}"
        assert torch.equal(got[1][0], lse[20])
    alone = bits(everything[20:21])
    assert torch.equal(alone[0][0], data[20])


def test_chunks_give_the_bits_of_one_chunk(body, monkeypatch):
    if (body.name, body.device) != ("torch", "cpu"):
        pytest.skip("only the torch body works in chunks, bit for bit on a CPU")
    from sparse_mla.kernels.torch import attend as module

    problem = body.problem(tokens=23, heads=8, window_keys=40, compressed_keys=30, lengths="random")
    whole = body.run(problem, fp8=True)
    for size in (1, 400_000, 900_000):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)
        assert 1 <= module.chunk_tokens(problem.call()) < 23
        part = body.run(problem, fp8=True)
        assert torch.equal(part.data, whole.data)
        assert torch.equal(part.scales, whole.scales)
        assert torch.equal(part.lse, whole.lse)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("heads_per_group", [1, 2, 4, 8, 16])
def test_output_groups(body, layout: Layout, heads_per_group: int):
    """The dequantised output does not depend on grouping and order; its bytes do."""
    problem = body.problem(tokens=5, heads=16, window_keys=30)
    out = problem.allocate_out(fp8=True, heads_per_group=heads_per_group, layout=layout)
    body.attend(problem.call(query_layout=layout), out)
    plain = problem.allocate_out(fp8=True, heads_per_group=16)
    body.attend(problem.call(), plain)
    assert torch.equal(output_values(out), output_values(plain))
    assert out.data.shape == (5, 16 // heads_per_group, heads_per_group * 512)


def test_positions_of_padding_rows_may_be_garbage(body):
    problem = body.problem(tokens=6, heads=4, window_keys=16)
    wanted = body.run(problem)
    positions = problem.positions.clone()
    positions[4:] = torch.tensor([2**31 - 1, -(2**31)], device=body.device)
    got = body.run(replace(problem, positions=positions))
    assert torch.equal(got.data[:4], wanted.data[:4])
    assert bool(torch.isfinite(got.data).all())


def test_int32_and_int64_positions_agree(body):
    problem = body.problem(tokens=5, heads=4, window_keys=16)
    narrow = replace(problem, positions=problem.positions.int())
    assert torch.equal(body.run(problem).data, body.run(narrow).data)


def test_duplicates_count_twice(body):
    problem = body.problem(tokens=1, heads=4, window_keys=2, sink=None)
    twice = problem.window.indices.clone()
    twice[0, 1] = twice[0, 0]
    once = replace(problem, window=replace(problem.window, indices=twice[:, :1]))
    doubled = replace(problem, window=replace(problem.window, indices=twice))
    first, second = body.run(once), body.run(doubled)
    assert torch.allclose(second.lse - first.lse, torch.tensor(2.0, device=body.device).log())
    assert torch.allclose(first.data.float(), second.data.float(), rtol=2**-7, atol=1e-6)


def _sinks(problem: AttendProblem, value: float | None) -> AttendProblem:
    sink = None if value is None else torch.full_like(problem.sink, value)
    return replace(problem, sink=sink)


@pytest.mark.parametrize("heads", [1, 8, 64])
@pytest.mark.parametrize("compressed", [None, 32])
def test_sink_acts_on_every_path(body, heads: int, compressed: int | None):
    problem = body.problem(tokens=3, heads=heads, window_keys=64, compressed_keys=compressed)
    plain = body.run(_sinks(problem, None))
    assert float(body.run(_sinks(problem, 20.0)).data.float().abs().max()) < 1e-4
    assert torch.equal(body.run(_sinks(problem, -torch.inf)).data, plain.data)
    nothing = body.run(_sinks(problem, torch.inf))
    assert torch.all(nothing.data == 0)
    assert torch.equal(nothing.lse, plain.lse), "the lse excludes the sink"
    assert torch.equal(nothing.max_logits, plain.max_logits)
