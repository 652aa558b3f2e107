"""Score index keys and keep the best positions of each row, exactly.

Selections do not depend on how a step is batched. The dot product of two rows of 128 codes has at
most 43 significant bits in FP8 (products are multiples of 2**-18 below 2**18, 128 of them are
summed), so float64 holds it exactly whatever the order of the sum; MXFP4 sums are exact unless the
scales inside one row differ by more than 2**30. It is rounded to float32 once, and heads are added
in ascending order in float32.

Scratch: rows are processed in chunks, so that no tensor has the shape of all rows x context. A
chunk holds `rows` rows with `rows * keys * BYTES_PER_SCORE <= SCORE_SCRATCH_BYTES` (at least one
row), and a tile of dot products takes at most `DOT_SCRATCH_BYTES` per copy, of which there are two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_rows, gather_rows
from sparse_mla.kernels.index_contract import IndexQueries, IndexTopkCall, IndexTopkOut, host_rows

SCORE_SCRATCH_BYTES = 64 << 20
"""What the scores and sort keys of a chunk of rows may take."""
BYTES_PER_SCORE = 36
"""float32 score, int64 sort key, and top-k's own copy of values and indices."""
DOT_SCRATCH_BYTES = 8 << 20
"""What the float64 products of one tile of keys may take."""
MAX_ROWS = 256
MIN_TILE_KEYS = 64

_ABSENT = torch.iinfo(torch.int32).max


def scratch_bytes(max_visible: int, num_heads: int) -> int:
    """Upper bound of what `index_topk` allocates beside its arguments, for any number of rows.

    One row of a context longer than `SCORE_SCRATCH_BYTES / BYTES_PER_SCORE` keys (1.8 million) is
    the only way past the first constant.
    """
    scores = max(SCORE_SCRATCH_BYTES, max_visible * BYTES_PER_SCORE)
    dots = max(DOT_SCRATCH_BYTES, num_heads * MIN_TILE_KEYS * 8)
    return scores + 2 * dots


def index_topk(call: IndexTopkCall, out: IndexTopkOut) -> None:
    """Fill the lists of every row; the rule is that of `IndexTopkCall` and `IndexTopkOut`.

    A row that sees at most `topk` keys takes all of them, whatever their scores and candidates, and
    publishes no candidates (-1): the consumers of this step see the same count and never ask. If
    that holds for every row nothing is scored. Otherwise the best scores win, equal scores go to
    the lower position, and -inf is never chosen. A row's lists do not depend on the other rows.
    """
    everything = torch.arange(call.topk, dtype=torch.int32, device=out.positions.device)
    all_visible = everything < call.visible[:, None]
    out.positions.copy_(torch.where(all_visible, everything, -1))
    if out.candidates is not None:
        out.candidates.fill_(-1)
    limit = call.max_visible
    if call.visible.device.type == "cpu" and call.visible.numel():
        limit = min(limit, int(call.visible.max()))
    if limit <= call.topk:
        return
    for request, (first, last) in enumerate(host_rows(call.query_start_loc)):
        _select_request(call, out, request, first, last, limit)


def _select_request(
    call: IndexTopkCall, out: IndexTopkOut, request: int, first: int, last: int, limit: int
) -> None:
    """Rows `first .. last - 1`, all of one request, in chunks of bounded scratch."""
    row = first
    while row < last:
        keys = limit
        if call.visible.device.type == "cpu":
            keys = int(call.visible[row : min(row + MAX_ROWS, last)].max())
        rows = min(
            MAX_ROWS, last - row, max(1, SCORE_SCRATCH_BYTES // (BYTES_PER_SCORE * max(keys, 1)))
        )
        chunk = slice(row, row + rows)
        row += rows
        if keys <= call.topk:
            continue
        visible = call.visible[chunk]
        takes_all = (visible <= call.topk)[:, None]
        scores = _scores(call, request, chunk, keys)
        position = torch.arange(keys, device=scores.device)
        scores.masked_fill_(position >= visible[:, None], -torch.inf)
        if out.candidates is not None:
            blocks = _block_scores(scores, visible, call.candidate_block_size)
            best = take_best(blocks, out.candidates.shape[1])
            out.candidates[chunk] = torch.where(takes_all, -1, best)
        if call.candidates is not None:
            allowed = _allowed(call.candidates[chunk], keys, call.candidate_block_size)
            scores.masked_fill_(~allowed, -torch.inf)
        chosen = take_best(scores, call.topk)
        out.positions[chunk] = torch.where(takes_all, out.positions[chunk], chosen)


def _scores(call: IndexTopkCall, request: int, chunk: slice, keys: int) -> Tensor:
    """float32 [rows, keys] of one request's rows; columns past a row's count are unspecified."""
    queries = _decode_queries(call.queries, chunk)
    rows, heads, dim = queries.shape
    weights = call.queries.weights[chunk]
    scores = torch.empty(rows, keys, dtype=torch.float32, device=queries.device)
    tile = max(MIN_TILE_KEYS, DOT_SCRATCH_BYTES // (8 * rows * heads))
    flat = queries.reshape(rows * heads, dim)
    for begin in range(0, keys, tile):
        end = min(begin + tile, keys)
        key_rows = gather_rows(call.keys, _slots(call, request, begin, end), torch.float32).double()
        dots = (flat @ key_rows.T).float().view(rows, heads, end - begin).clamp_min_(0)
        total = scores[:, begin:end].zero_()
        for head in range(heads):
            total += dots[:, head] * weights[:, head, None]
    return scores


def _slots(call: IndexTopkCall, request: int, begin: int, end: int) -> Tensor:
    """int64 slots of keys `begin .. end - 1`; keys without a page read slot 0 and stay masked."""
    page_rows = call.keys.page_rows
    key = torch.arange(begin, end, device=call.block_table.device)
    page = torch.div(key, page_rows, rounding_mode="floor")
    page = page.clamp_max(call.block_table.shape[1] - 1)
    slots = call.block_table[request].long()[page] * page_rows + key % page_rows
    return slots.clamp(0, call.keys.num_slots - 1)


def _decode_queries(queries: IndexQueries, chunk: slice) -> Tensor:
    """float64 [rows, heads, 128] values of the codes, with MXFP4 scales applied."""
    codes = queries.codes[chunk]
    rows, heads = codes.shape[:2]
    flat = codes.reshape(rows * heads, -1)
    if queries.scales is None:
        one = torch.ones(rows * heads, 1, dtype=torch.float32, device=codes.device)
        scales = one.view(torch.uint8)
    else:
        scales = queries.scales[chunk].reshape(rows * heads, -1)
    return decode_rows(queries.record, flat, scales, torch.float32).double().view(rows, heads, -1)


def _block_scores(scores: Tensor, visible: Tensor, block: int) -> Tensor:
    """float32 [rows, blocks]: best score of each block, +inf for the newest visible block."""
    keys = scores.shape[1]
    blocks = -(-keys // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - keys), value=-torch.inf)
    best = padded.view(-1, blocks, block).amax(dim=2)
    newest = torch.div(visible - 1, block, rounding_mode="floor")
    pinned = torch.arange(blocks, device=scores.device) == newest[:, None]
    return best.masked_fill_(pinned & (visible > 0)[:, None], torch.inf)


def _allowed(candidates: Tensor, keys: int, block: int) -> Tensor:
    """Bool [rows, keys]: whether a position lies in one of its row's candidate blocks."""
    blocks = -(-keys // block)
    valid = (candidates >= 0) & (candidates < blocks)
    column = torch.where(valid, candidates, blocks).long()
    mask = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    mask.scatter_(1, column, torch.ones_like(valid))
    return mask[:, :blocks].repeat_interleave(block, dim=1)[:, :keys]


def take_best(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` best scores of each row, ascending, -1 suffix; int32 [rows, count].

    Equal scores (0.0 and -0.0 are equal) go to the lower column; -inf is never taken; NaN counts as
    the best score. One int64 key per score, its order-preserving bits above the reversed column,
    makes all keys different, so any exact top-k gives the same set.
    """
    columns = scores.shape[1]
    kept = min(count, columns)
    bits = (scores + 0.0).view(torch.int32)
    bits = torch.where(scores.isnan(), _ABSENT, bits)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    column = torch.arange(columns, device=scores.device)
    keys = (ordered << 32) | (0x7FFFFFFF - column)
    best = torch.topk(keys, kept, dim=1, sorted=False).values
    chosen = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    lowest = -0x7F800001  # ordered bits of -inf
    chosen = torch.where((best >> 32) <= lowest, _ABSENT, chosen).sort(dim=1).values
    chosen = torch.where(chosen == _ABSENT, -1, chosen).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, count - kept), value=-1)
