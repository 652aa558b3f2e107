"""Index keys and queries for tests and benchmarks of the indexer, and a check of chosen lists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_rows, gather_rows, scatter_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat, ScaleFormat
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    IndexTopkCall,
    PrepareIndexQueriesCall,
    Ring,
)
from sparse_mla.kernels.torch.prepare_index_queries import prepare_index_queries

SUM_ROUNDINGS = 2.0**-21
"""What a float32 score may be off, relative to the sum of its terms' magnitudes: tensor cores keep at
least 22 bits of a partial sum, and a few heads' roundings of 2**-24 come on top."""


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Sizes of an indexer's call."""

    record: RecordFormat  # of keys and queries
    topk: int = 12
    heads: int = 8
    page_rows: int = 8
    block_size: int = 4  # keys of a candidate block


def make_index_call(
    contexts: list[int],
    query_lens: list[int],
    sizes: IndexSizes,
    *,
    padding: int = 0,
    exact: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> IndexTopkCall:
    """Requests whose last row sees `contexts[i]` keys; every byte that no key names is 0xFF.

    Args:
        contexts: keys of each request.
        query_lens: rows of each request.
        sizes: everything else that has a size.
        padding: rows at the end that belong to no request.
        exact: small whole numbers, whose scores every order of summing gives exactly, with many ties
            (for 2, 8 or 32 heads: the factor of the weights is then a power of two).
        seed: of everything drawn.
        device: where the call's tensors lie.
    """
    generator = torch.Generator().manual_seed(seed)
    storage, table = _paged_keys(contexts, sizes, exact, generator)
    visible, requests, offsets = [], [], [0]
    for request, (context, count) in enumerate(zip(contexts, query_lens, strict=True)):
        visible += [max(context - count + 1 + i, 0) for i in range(count)]
        requests += [request] * count
        offsets.append(offsets[-1] + count)
    queries = _queries(offsets[-1] + padding, sizes, exact, generator)
    scales = None if queries.scales is None else queries.scales.to(device)
    width = sizes.page_rows * sizes.record.row_bytes
    return IndexTopkCall(
        queries=IndexQueries(
            sizes.record, queries.codes.to(device), scales, queries.weights.to(device)
        ),
        keys=PagedCache(storage.to(device)[:, :width], sizes.record, sizes.page_rows),
        block_table=table.to(device),
        visible=torch.tensor(visible + [0] * padding, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(offsets, dtype=torch.int32),
        max_visible=max([*contexts, 0]),
        topk=sizes.topk,
        candidate_block_size=sizes.block_size,
        request_ids=torch.tensor(requests + [0] * padding, dtype=torch.int32, device=device),
    )


def make_large_call(
    contexts: list[int],
    sizes: IndexSizes,
    *,
    rows_each: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> IndexTopkCall:
    """Random key bytes made where they lie, for contexts too long to be quantised; no NaN among them.

    Every row of a request sees all of its keys but those of the rows after it.
    """
    generator = torch.Generator(device).manual_seed(seed)
    record, rows = sizes.record, sizes.page_rows
    pages_of = [-(-context // rows) for context in contexts]
    shape = (sum(pages_of), rows * record.row_bytes)
    pages = torch.empty(shape, dtype=torch.uint8, device=device)
    for first in range(0, shape[0], 1 << 16):
        pages[first : first + (1 << 16)].random_(0, 256, generator=generator)
    cache = PagedCache(pages, record, rows)
    scales = cache.scale_view()
    if record.scale_format is ScaleFormat.F32:
        cache.data_view().bitwise_and_(0xF7)  # no code has all bits of its exponent set
        scales.copy_(torch.tensor([2.0**-8], device=device).view(torch.uint8))
    else:
        scales.bitwise_and_(3).add_(124)
    order = torch.randperm(shape[0], generator=generator, device=device).int()
    table = torch.full((len(contexts), max(pages_of)), -1, dtype=torch.int32, device=device)
    first = 0
    for request, count in enumerate(pages_of):
        table[request, :count] = order[first : first + count]
        first += count
    visible = [context - rows_each + 1 + i for context in contexts for i in range(rows_each)]
    ids = torch.arange(len(contexts), dtype=torch.int32).repeat_interleave(rows_each)
    queries = _queries(len(visible), sizes, False, torch.Generator().manual_seed(seed))
    query_scales = None if queries.scales is None else queries.scales.to(device)
    return IndexTopkCall(
        queries=IndexQueries(
            record, queries.codes.to(device), query_scales, queries.weights.to(device)
        ),
        keys=cache,
        block_table=table,
        visible=torch.tensor(visible, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(0, len(visible) + 1, rows_each, dtype=torch.int32),
        max_visible=max(contexts),
        topk=sizes.topk,
        candidate_block_size=sizes.block_size,
        request_ids=ids.to(device),
    )


def _draw(exact: bool, generator: torch.Generator, *shape: int) -> Tensor:
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


def _paged_keys(
    contexts: list[int], sizes: IndexSizes, exact: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Pages with padding behind each, keys on shuffled ones, and the block table."""
    rows = sizes.page_rows
    pages_of = [-(-context // rows) for context in contexts]
    total = sum(pages_of) + 3
    order = torch.randperm(total, generator=generator).tolist()
    size = rows * sizes.record.row_bytes
    storage = torch.full((total, size + 16 - size % 16), 0xFF, dtype=torch.uint8)
    cache = PagedCache(storage[:, :size], sizes.record, rows)
    table = torch.full((len(contexts), max([*pages_of, 1]) + 1), -1, dtype=torch.int32)
    for request, context in enumerate(contexts):
        mine = torch.tensor([order.pop() for _ in range(pages_of[request])], dtype=torch.int32)
        table[request, : len(mine)] = mine
        if context:
            key = torch.arange(context)
            slots = mine.long()[key // rows] * rows + key % rows
            scatter_rows(cache, slots, _draw(exact, generator, context, 128))
    return storage, table


def _queries(
    tokens: int, sizes: IndexSizes, exact: bool, generator: torch.Generator
) -> IndexQueries:
    weights = _draw(exact, generator, tokens, sizes.heads)
    if exact:
        weights = torch.exp2(weights) * torch.where(weights > 0, -1.0, 1.0)
    return prepare_index_queries(
        PrepareIndexQueriesCall(
            queries=_draw(exact, generator, tokens, sizes.heads, 128).to(torch.bfloat16),
            weights=weights.to(torch.bfloat16),
            positions=torch.zeros(tokens, dtype=torch.int64),
            rope=torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1),
            record=sizes.record,
        )
    )


def exact_scores(call: IndexTopkCall, row: int) -> tuple[Tensor, Tensor]:
    """float64 scores of the keys that a row sees, and the sums of their terms' magnitudes."""
    seen, queries = int(call.visible[row]), call.queries
    assert call.request_ids is not None
    pages = call.block_table[int(call.request_ids[row])].long()
    key = torch.arange(seen, device=pages.device)
    slots = pages[key // call.keys.page_rows] * call.keys.page_rows + key % call.keys.page_rows
    keys = gather_rows(call.keys, slots).double()
    codes = queries.codes[row]
    if queries.record.scale_format is ScaleFormat.F32:
        one = torch.ones(queries.num_heads, 1, device=codes.device).view(torch.uint8)
        values = decode_rows(queries.record, codes, one)
    else:
        assert queries.scales is not None
        values = decode_rows(queries.record, codes, queries.scales[row])
    weights = queries.weights[row].double()
    wide = values.double()
    scores = weights @ (wide @ keys.T).relu()
    return scores, weights.abs() @ (wide.abs() @ keys.abs().T)


def selection_faults(call: IndexTopkCall, row: int, positions: Tensor) -> list[str]:
    """What is wrong with a row's list, against float64 scores; entries tied at the cut may differ.

    Args:
        call: what was asked.
        row: which row.
        positions: int32 [topk], its list.
    """
    seen = int(call.visible[row])
    wanted = min(seen, call.topk)
    chosen = positions[positions >= 0].long()
    if seen <= call.topk:
        return [] if chosen.tolist() == list(range(seen)) else ["not every visible position"]
    scores, magnitudes = exact_scores(call, row)
    allowed = torch.ones(seen, dtype=torch.bool, device=scores.device)
    if call.candidates is not None:
        block = torch.arange(seen, device=scores.device) // call.candidate_block_size
        allowed = torch.isin(block.int(), call.candidates[row])
        wanted = min(call.topk, int(allowed.sum()))
    faults = []
    if len(chosen) != wanted or bool((positions[wanted:] != -1).any()):
        faults.append(f"{len(chosen)} entries instead of {wanted}, or not a prefix")
    if bool((chosen[1:] <= chosen[:-1]).any()) or bool((chosen >= seen).any()):
        return [*faults, "not ascending, or past the visible keys"]
    if not bool(allowed[chosen].all()):
        faults.append("a position outside the candidate blocks")
    left = allowed.clone()
    left[chosen] = False
    if bool(left.any()) and len(chosen):
        slack = 2 * SUM_ROUNDINGS * float(magnitudes.max())
        short = float(scores[left].max()) - float(scores[chosen].min())
        if short > slack:
            faults.append(f"a key left out scores {short:.3g} more than one chosen ({slack:.3g})")
    return faults


def ring_of(blocks: list[int], query_lens: list[int], starts: list[int], rows: Tensor) -> Ring:
    """Ring of a step: request i has `query_lens[i]` rows from position `starts[i]` in `blocks[i]`.

    Args:
        blocks: by request; 0 is the null block.
        query_lens: rows of each request.
        starts: first position of each request.
        rows: float32 [blocks, capacity, 2 * dim], the state.
    """
    capacity = rows.shape[1]
    slots, ids = [], []
    for request, (block, count, start) in enumerate(zip(blocks, query_lens, starts, strict=True)):
        for position in range(start, start + count):
            slots.append(block * capacity + position % capacity if block else -1)
            ids.append(request)
    return Ring(
        rows=rows,
        slots=torch.tensor(slots, dtype=torch.int64),
        request_ids=torch.tensor(ids, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
    )


def wild_rows(rows: int, seed: int = 0) -> Tensor:
    """bf16 [rows, 128] over many binades; the first seven hold zeros, infinities and NaN of both signs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, 128, generator=generator)
    drawn *= torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    drawn[0] = 0.0
    drawn[1, ::3] = -0.0
    drawn[2] = torch.exp2(torch.arange(128).float() - 64)
    drawn[3, 5] = torch.inf
    drawn[4, 7], drawn[4, 40] = torch.nan, -torch.nan
    drawn[5] = 3e38
    drawn[6, :64] = 1e-38
    return drawn.to(torch.bfloat16)
