"""Compressor and indexer kernels on a GPU: against PyTorch's bodies, at long contexts, in graphs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, INDEX_RECORDS, RecordFormat
from sparse_mla.kernels.index_contract import (
    CompressCall,
    IndexTopkCall,
    IndexTopkOut,
    PrepareIndexQueriesCall,
    Ring,
    WriteIndexKeysCall,
)
from sparse_mla.kernels.torch.compress import compress as wanted_compress
from sparse_mla.kernels.torch.index_topk import index_topk as wanted_topk
from sparse_mla.kernels.torch.prepare_index_queries import prepare_index_queries as wanted_queries
from sparse_mla.kernels.torch.write_index_keys import write_index_keys as wanted_keys
from sparse_mla.testing.index_inputs import (
    IndexSizes,
    make_index_call,
    make_large_call,
    selection_faults,
    wild_rows,
)
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    from sparse_mla.kernels.triton import index_topk as body
    from sparse_mla.kernels.triton.compress import compress
    from sparse_mla.kernels.triton.index_scores import row_scores_kernel, shared_scores_kernel
    from sparse_mla.kernels.triton.index_scores_hopper import hopper_scores_kernel
    from sparse_mla.kernels.triton.index_select import select_positions_kernel
    from sparse_mla.kernels.triton.index_select_parts import select_parts_kernel
    from sparse_mla.kernels.triton.prepare_index_queries import prepare_index_queries
    from sparse_mla.kernels.triton.write_index_keys import write_index_keys

RECORDS = pytest.mark.parametrize("record", INDEX_RECORDS, ids=lambda record: record.name)
PORTABLE = pytest.mark.parametrize("portable", [False, True], ids=["chosen", "portable"])
MODEL = {"topk": 512, "heads": 32, "page_rows": 64, "block_size": 8}


def choose_scores(monkeypatch: pytest.MonkeyPatch, portable: bool) -> None:
    """The kernel that this GPU would take, or the one for every GPU."""
    if portable:
        monkeypatch.setattr(body, "use_hopper_scores", lambda facts, mode: False)


@RECORDS
def test_queries_are_byte_exact(record: RecordFormat) -> None:
    results = []
    for device, prepare in (("cuda", prepare_index_queries), ("cpu", wanted_queries)):
        weights = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
        call = PrepareIndexQueriesCall(
            queries=wild_rows(96).view(3, 32, 128).to(device),
            weights=weights.to(torch.bfloat16).to(device),
            positions=torch.tensor([0, 131, 10**12], device=device),
            rope=plain_rope_table(4096, device=device),
            record=record,
        )
        results.append(prepare(call))
    got, wanted = results
    assert torch.equal(got.codes.cpu(), wanted.codes)
    assert torch.equal(got.weights.cpu(), wanted.weights)
    if wanted.scales is not None:
        assert torch.equal(got.scales.cpu(), wanted.scales)


@RECORDS
@pytest.mark.parametrize("exact", [True, False])
def test_keys_are_byte_exact_where_their_norm_is(record: RecordFormat, exact: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(300, 128, generator=generator)
    if exact:
        keys = torch.sign(keys) * torch.exp2(torch.arange(300).float() % 5 - 2)[:, None]
    slots = torch.randperm(340, generator=generator)[:300]
    slots[::7] = -1
    stored = []
    for device, write in (("cuda", write_index_keys), ("cpu", wanted_keys)):
        cache = poisoned_cache(
            record, num_pages=49, page_rows=7, page_padding_bytes=12, offset_rows=1, device=device
        )
        write(
            WriteIndexKeysCall(
                keys=keys.to(torch.bfloat16).to(device),
                norm_weight=torch.linspace(0.5, 1.5, 128, device=device),
                eps=1e-20,
                positions=torch.arange(500, 800, device=device),
                ratio=2,
                rope=plain_rope_table(4096, device=device),
                cache=cache,
                slots=slots.to(device),
            )
        )
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        stored.append(whole.set_(cache.pages.untyped_storage()).cpu())
    differing = float((stored[0] != stored[1]).float().mean())
    assert differing == 0 if exact else differing < 0.01


def test_compressor_and_its_ring() -> None:
    lens, starts, blocks = [3, 0, 5, 1, 900, 2], [7, 4, 2, 9, 1, 3], [3, 1, 2, 4, 5, 0]
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(6, 8, 1024, generator=generator)
    projected = torch.randn(sum(lens) + 2, 1024, generator=generator)
    projected[-2:] = torch.nan
    slots, ids, positions = [], [], []
    for request, (block, count, start) in enumerate(zip(blocks, lens, starts, strict=True)):
        for position in range(start, start + count):
            slots.append(block * 8 + position % 8 if block else -1)
            ids.append(request)
            positions.append(position)
    offsets = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    outs, rings = [], []
    for device, run in (("cuda", compress), ("cpu", wanted_compress)):
        ring = Ring(
            state.clone().to(device),
            torch.tensor([*slots, -1, -1], device=device),
            torch.tensor([*ids, 0, 0], dtype=torch.int32, device=device),
            offsets.to(device),
        )
        where = torch.tensor([*positions, 2**31 - 1, -5], device=device)
        gain = torch.linspace(0.5, 1.5, 512, device=device)
        outs.append(run(CompressCall(projected.to(device), 2, where, gain, 1e-20, ring)).cpu())
        rings.append(ring.rows[1:].cpu())
    assert torch.equal(*rings)
    # Two roundings to bf16, before and after the norm; where the two pooled rows nearly cancel, also the
    # float32 roundings of their weights: 8 of a value below 6, on rows of a mean square above 1/4.
    assert float(projected[:-2, :512].abs().max()) < 6
    cancelled = 8 * 2.0**-24 * 6 / 0.5 * 1.5
    error = (outs[0].float() - outs[1].float()).abs()
    bound = 2 * 2.0**-8 * outs[1].float().abs() + cancelled
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} of the bound"
    assert float((outs[0] != outs[1]).float().mean()) < 0.01


def empty_out(call: IndexTopkCall, candidates: int | None = None) -> IndexTopkOut:
    """Lists that hold garbage."""

    def full(width: int) -> Tensor:
        shape = (call.queries.num_tokens, width)
        return torch.full(shape, 77, dtype=torch.int32, device=call.visible.device)

    return IndexTopkOut(full(call.topk), None if candidates is None else full(candidates))


@RECORDS
@pytest.mark.parametrize(("share", "portable"), [(1, False), (100, False), (100, True)])
@pytest.mark.parametrize(
    ("heads", "page_rows", "block_size"), [(32, 64, 8), (32, 192, 8), (8, 24, 5), (128, 1, 7)]
)
def test_exact_scores_give_the_lists_of_pytorch(
    record: RecordFormat,
    share: int,
    portable: bool,
    heads: int,
    page_rows: int,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mixed batch of whole numbers with many ties, candidates, then the consumers of them.

    Exact scores need head weights that are powers of two: 8, 32 or 128 heads.
    """
    monkeypatch.setattr(body, "ROWS_TO_SHARE", share)
    choose_scores(monkeypatch, portable)
    contexts, lens = [2000, 9, 0, 70, 1333], [5, 2, 0, 1, 19]
    results: dict[str, list[Tensor | None]] = {}
    for device, run in (("cuda", body.index_topk), ("cpu", wanted_topk)):
        sizes = IndexSizes(record, 64, heads, page_rows, block_size)
        options = {"padding": 2, "exact": True, "device": device}
        call = make_index_call(contexts, lens, sizes, **options)
        out = empty_out(call, 40)
        run(call, out)
        again = make_index_call(contexts, lens, sizes, seed=9, **options)
        consumer = dataclasses.replace(again, candidates=out.candidates)
        lists = empty_out(consumer)
        run(consumer, lists)
        results[device] = [out.positions.cpu(), out.candidates.cpu(), lists.positions.cpu()]
    for got, wanted in zip(results["cuda"], results["cpu"], strict=True):
        assert torch.equal(got, wanted)


def scores_of(
    call: IndexTopkCall, monkeypatch: pytest.MonkeyPatch, tiles: int, programs: int
) -> list[Tensor]:
    """Each row's scores and the best of its groups, by programs of so many tiles, if there are enough."""
    kept: list[Tensor] = []

    def keep(call: IndexTopkCall, out: IndexTopkOut, scratch: body._Scratch, *rest: int) -> None:
        for row, seen in enumerate(call.visible.tolist()):
            if seen > call.topk:
                kept.append(scratch.scores[row, : -(-seen // 64) * 64].clone())
                kept.append(scratch.maxima[row, : -(-seen // 64) * 4].clone())

    with monkeypatch.context() as patch:
        patch.setattr(body, "_select", keep)
        patch.setattr(body, "HOPPER_MAX_TILES", tiles)
        patch.setattr(body, "HOPPER_PROGRAMS_PER_SM", programs)
        body.index_topk(call, empty_out(call))
    return kept


def all_equal(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@RECORDS
@pytest.mark.parametrize("page_rows", [64, 128, 192, 48])
@pytest.mark.parametrize("odd", ["nothing", "pages", "scales"])
def test_tiles_looked_up_at_once_or_by_key_score_the_same(
    record: RecordFormat, page_rows: int, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits: even and odd numbers of tiles, cut ones, one alone, missing pages, f16 too narrow."""
    contexts = [131072, 131009, 70001, 8 * 64 + 1, 9 * 64, 9 * 64 + 63, 41 * 64 + 5, 1]
    sizes = IndexSizes(record, **{**MODEL, "page_rows": page_rows})
    call = make_large_call(contexts, sizes, device="cuda")
    if odd == "pages":
        call.block_table[0, 100::301] = -1
        call.block_table[1, 5] = call.keys.num_pages
        call.block_table[3, 0] = -1
        call.block_table[5, 576 // page_rows] = -1
    elif odd == "scales":
        call.keys.scale_view()[1::7, 3] += 60
    by_key = scores_of(call, monkeypatch, 64, 1)  # more tiles a program than are looked up at once
    for tiles in (1, 2, 3, 7, 32):
        assert all_equal(scores_of(call, monkeypatch, tiles, 1), by_key)
    absent = [bool((bits == -(2**31)).any()) for bits in by_key]
    assert odd != "pages" or (absent[0] and absent[2] and absent[6])


@RECORDS
@pytest.mark.parametrize("unit", [16, 4])
def test_pages_gigabytes_apart(
    record: RecordFormat, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places past 2**32 bytes; of units of 4 bytes also past 2**32 units."""
    rows, count = 1024, 6
    step = (4 << 30) + 16 if unit == 16 else (4 << 30) + 4
    if torch.cuda.mem_get_info()[0] < (count + 1) * step:
        pytest.skip("needs 28 GB")
    sizes = IndexSizes(record, **{**MODEL, "page_rows": rows})
    call = make_large_call([count * rows - 70], sizes, device="cuda")
    wide = torch.empty(count * step, dtype=torch.uint8, device="cuda")
    pages = wide.as_strided((count, rows * record.row_bytes), (step, 1))
    pages.copy_(call.keys.pages)
    apart = dataclasses.replace(call, keys=PagedCache(pages, record, rows))
    wanted = scores_of(call, monkeypatch, 32, 1)
    assert all_equal(scores_of(apart, monkeypatch, 32, 1), wanted)


@PORTABLE
@pytest.mark.parametrize("odd", ["keys", "queries", "weights"])
def test_mxfp4_scales_and_weights_that_f16_is_not_for(
    odd: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers times powers of two, next to ordinary rows: still the lists of PyTorch."""
    monkeypatch.setattr(body, "ROWS_TO_SHARE", 100)
    choose_scores(monkeypatch, portable)
    results = []
    for device, run in (("cuda", body.index_topk), ("cpu", wanted_topk)):
        call = make_index_call(
            [3000], [3], IndexSizes(INDEX_MXFP4, 64, 32, 64, 8), exact=True, device=device
        )
        queries, data, scales = call.queries, call.keys.data_view(), call.keys.scale_view()
        assert queries.scales is not None
        if odd == "keys":
            data[::5, ::7, :16] = 0
            scales[::5, ::7, 0] = 1  # as the writers store a block of zeros
            scales[1::5, 3] += 60
            scales[2::5, 4] -= 60
        elif odd == "queries":
            queries.codes[0, :, 16:32] = 0
            queries.scales[0, :, 1] = 1
            queries.scales[1] += 40
        else:
            queries.weights[1] *= 2.0**90
        out = empty_out(call)
        run(call, out)
        results.append(out.positions.cpu())
    assert torch.equal(*results)


@RECORDS
@PORTABLE
@pytest.mark.parametrize("share", [4, 100])
def test_lists_at_128k_keys_and_their_consumers(
    record: RecordFormat, portable: bool, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of several rows; then, behind 2048 candidate blocks, another layer's lists."""
    choose_scores(monkeypatch, portable)
    monkeypatch.setattr(body, "ROWS_TO_SHARE", share)
    call = make_large_call([131072, 70001], IndexSizes(record, **MODEL), rows_each=6, device="cuda")
    out = empty_out(call, 2048)
    body.index_topk(call, out)
    for row in (0, 5, 6, 11):
        assert selection_faults(call, row, out.positions[row]) == []
    assert out.candidates is not None
    assert bool((out.candidates[:, 1:] > out.candidates[:, :-1]).all())
    assert bool((out.candidates[:, -1] == (call.visible - 1) // 8).all())  # the newest block
    other = make_large_call(
        [131072, 70001], IndexSizes(record, **MODEL), rows_each=6, seed=3, device="cuda"
    )
    consumer = dataclasses.replace(other, candidates=out.candidates)
    lists = empty_out(consumer)
    body.index_topk(consumer, lists)
    for row in (0, 7):
        assert selection_faults(consumer, row, lists.positions[row]) == []


@pytest.mark.parametrize("rows_each", [1, 8])
def test_a_row_at_a_million_positions(rows_each: int) -> None:
    call = make_large_call(
        [1 << 20], IndexSizes(INDEX_FP8, **MODEL), rows_each=rows_each, device="cuda"
    )
    out = empty_out(call)
    body.index_topk(call, out)
    assert selection_faults(call, rows_each - 1, out.positions[-1]) == []


@RECORDS
@pytest.mark.parametrize(
    "contexts",
    [[131072], [1 << 20], [65536, 700, 513, 512, 40000], [131072, 0, 2049, 4096] * 4],
    ids=["128K", "1M", "ragged", "16 rows"],
)
def test_several_programs_for_a_row_choose_what_one_does(
    record: RecordFormat, contexts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits, 20 times; then all scores tied, where every part's list is full."""
    call = make_large_call(contexts, IndexSizes(record, **MODEL), device="cuda")
    for tied in (False, True):
        if tied:
            call.queries.weights.zero_()
        wanted, out = empty_out(call), empty_out(call)
        with monkeypatch.context() as patch:
            patch.setattr(body, "FEW_ROWS", 0)
            body.index_topk(call, wanted)
        for _ in range(20):
            out.positions.fill_(77)
            body.index_topk(call, out)
            assert torch.equal(out.positions, wanted.positions)
    assert out.positions[0].tolist() == list(range(512))


@RECORDS
@PORTABLE
def test_repeats_and_rows_alone_give_the_same_bits(
    record: RecordFormat, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row alone has its tiles in other programs; some MXFP4 keys have scales that f16 is not for."""
    choose_scores(monkeypatch, portable)
    call = make_large_call([40000] * 12, IndexSizes(record, **MODEL), device="cuda")
    if record is INDEX_MXFP4:
        call.keys.scale_view()[::29, 7] = 60
    first = empty_out(call, 2048)
    body.index_topk(call, first)
    for _ in range(10):
        again = empty_out(call, 2048)
        body.index_topk(call, again)
        assert torch.equal(again.positions, first.positions)
        assert torch.equal(again.candidates, first.candidates)
    queries = call.queries
    for row in (0, 11):
        alone = dataclasses.replace(
            call,
            queries=dataclasses.replace(
                queries,
                codes=queries.codes[row : row + 1].clone(),
                scales=None if queries.scales is None else queries.scales[row : row + 1].clone(),
                weights=queries.weights[row : row + 1].clone(),
            ),
            visible=call.visible[row : row + 1].clone(),
            request_ids=call.request_ids[row : row + 1].clone(),
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        )
        out = empty_out(alone)
        body.index_topk(alone, out)
        assert torch.equal(out.positions[0], first.positions[row])


def test_scratch_stays_within_its_bound() -> None:
    call = make_large_call(
        [131072] * 4, IndexSizes(INDEX_FP8, **MODEL), rows_each=200, device="cuda"
    )
    out = empty_out(call, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    body.index_topk(call, out)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= body.scratch_bytes(131072, 512) + (4 << 20), f"{taken >> 20} MiB of scratch"
    for row in (0, 799):
        assert selection_faults(call, row, out.positions[row]) == []


def test_a_captured_call_follows_counts_tables_and_requests() -> None:
    """Captured with every count 0, replayed at several contexts: equal to an eager call, no sync."""
    call = make_large_call([60000] * 4, IndexSizes(INDEX_FP8, **MODEL), device="cuda")
    assert call.request_ids is not None
    kept = call.visible.clone()
    out, eager = empty_out(call, 2048), empty_out(call, 2048)
    body.index_topk(call, out)  # compiles
    call.visible.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body.index_topk(call, out)
    for counts in ([60000, 513, 512, 0], [1, 21000, 60000, 700], [60000] * 4):
        call.visible.copy_(torch.tensor(counts, device="cuda").minimum(kept).int())
        call.block_table.copy_(call.block_table.roll(1, 0))
        call.request_ids.copy_(call.request_ids.flip(0))
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            body.index_topk(call, eager)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.positions, eager.positions)
        assert torch.equal(out.candidates, eager.candidates)


def test_nothing_compiles_after_warm_up() -> None:
    def variants() -> int:
        kernels = (
            row_scores_kernel,
            hopper_scores_kernel,
            shared_scores_kernel,
            select_positions_kernel,
            select_parts_kernel,
        )
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    def run(rows: int, context: int, page_rows: int) -> None:
        sizes = IndexSizes(INDEX_FP8, 512, 32, page_rows, 8)
        call = make_large_call([context], sizes, rows_each=rows, device="cuda")
        body.index_topk(call, empty_out(call))

    run(1, 1000, 64)
    run(8, 1000, 64)
    run(body.FEW_ROWS + 1, 1000, 64)
    warm = variants()
    for rows, context, page_rows in ((1, 5000, 32), (2, 16, 64), (16, 4096, 128), (17, 999, 32)):
        run(rows, context, page_rows)
    assert variants() == warm
