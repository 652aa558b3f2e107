"""Exact selection in Triton: the K best of a row of integers, equal ones by the lower column.

Four passes over the row find the K-th value, eight bits each: a histogram of the next digit among the
values that share the digits found so far. A fifth pass writes the columns in ascending order. All
lengths are run-time values, nothing is sorted, and two runs give the same bits.

Long rows are cut down first: with the best value of each group of `GROUP` columns at hand, the K best
groups (equal ones by the lower group) contain the K best columns. For, let t be the K-th best group
maximum: K values are at least t, so every chosen value is; those above t lie in groups above t; and of
columns equal to t, each group that counts holds one, at lower columns than any group that is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.index_scores import ABSENT

NEVER = tl.constexpr(-0x7F800001)  # -inf in integer order: it and `ABSENT` are never chosen
PINNED = tl.constexpr(0x7F800000)  # +inf


@triton.jit
def _lanes(values, members, first, count, LANES: tl.constexpr, GROUP: tl.constexpr):
    """(columns, order-preserving uint32, whether it may be chosen) of lanes `first ..`."""
    lane = first + tl.arange(0, LANES)
    here = lane < count
    column = lane
    if GROUP > 1:
        member = tl.load(members + lane // GROUP, mask=here, other=0)
        column = member * GROUP + lane % GROUP
    value = tl.load(values + column, mask=here, other=ABSENT)
    ordered = value.to(tl.uint32, bitcast=True) ^ 0x80000000
    return column, ordered, here & (value > NEVER)


@triton.jit
def _kth(values, members, count, wanted, LANES: tl.constexpr, GROUP: tl.constexpr):
    """(the value of rank `wanted`, how many equal to it are among the best `wanted`)."""
    threshold = tl.zeros([1], tl.uint32)
    need = wanted
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, count, LANES):
            _, ordered, live = _lanes(values, members, first, count, LANES, GROUP)
            if step > 0:
                live = live & ((ordered >> (shift + 8)) == (threshold >> (shift + 8)))
            each = ((ordered >> shift) & 255).to(tl.int32)
            counts += tl.histogram(each, 256, mask=live)
        if step == 0:
            need = tl.minimum(need, tl.sum(counts, 0))
        reach = tl.cumsum(counts, 0, reverse=True)  # values whose digit is at least this one
        digit = tl.sum((reach >= need).to(tl.int32), 0) - 1
        need -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        threshold = threshold | (digit.to(tl.uint32) << shift)
    return threshold, need


@triton.jit
def _collect(
    out,  # int32 [wanted]
    values,
    members,
    blocks,  # int32, block of each `block_size` columns, if MAPPED
    count,
    wanted,
    block_size,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Write the best columns, or what `blocks` calls them, ascending, -1 behind; return how many."""
    threshold, need = _kth(values, members, count, wanted, LANES, GROUP)
    taken = 0
    tied = 0
    for first in range(0, count, LANES):
        column, ordered, live = _lanes(values, members, first, count, LANES, GROUP)
        equal = (live & (ordered == threshold)).to(tl.int32)
        before = tied + tl.cumsum(equal, 0) - equal
        keep = live & ((ordered > threshold) | ((equal != 0) & (before < need)))
        kept = keep.to(tl.int32)
        place = taken + tl.cumsum(kept, 0) - 1
        name = column
        if MAPPED:
            entry = column // block_size
            block = tl.load(blocks + entry, mask=keep, other=0)
            name = block * block_size + (column - entry * block_size)
        tl.store(out + place, name, mask=keep & (place < wanted))
        taken += tl.sum(kept, 0)
        tied += tl.sum(equal, 0)
    taken = tl.minimum(taken, wanted)
    for first in range(0, wanted, LANES):
        lane = first + tl.arange(0, LANES)
        tl.store(out + lane, tl.full([LANES], -1, tl.int32), mask=(lane >= taken) & (lane < wanted))
    return taken


@triton.jit(
    do_not_specialize=[
        "first_row", "topk", "limit", "num_candidates", "block_size", "scores_stride",
        "maxima_stride", "groups_stride", "positions_stride", "candidates_stride",
    ],
    do_not_specialize_on_alignment=["visible", "candidates", "positions", "groups"],
)  # fmt: skip
def select_positions_kernel(
    positions,  # int32 [T, topk]
    groups,  # int32 [rows, topk] scratch
    scores,  # int32 [rows, columns]
    maxima,  # int32 [rows, groups]
    visible,  # int32 [T]
    candidates,  # int32 [T, num_candidates]
    first_row: tl.int64,
    topk: tl.int32,
    limit: tl.int32,
    num_candidates: tl.int32,
    block_size: tl.int32,
    scores_stride: tl.int64,
    maxima_stride: tl.int64,
    groups_stride: tl.int64,
    positions_stride: tl.int64,
    candidates_stride: tl.int64,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    FILTER: tl.constexpr,
):
    """A row's list: every visible position, or the best `topk`."""
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    seen = tl.minimum(tl.load(visible + row), limit)
    out = positions + row * positions_stride
    if seen <= topk:
        for first in range(0, topk, LANES):
            lane = first + tl.arange(0, LANES)
            tl.store(out + lane, tl.where(lane < seen, lane, -1), mask=lane < topk)
    else:
        columns = seen
        if FILTER:
            columns = num_candidates * block_size
        mine = groups + local * groups_stride
        values = scores + local * scores_stride
        best = maxima + local * maxima_stride
        chosen = candidates + row * candidates_stride
        count = (columns + GROUP - 1) // GROUP
        members = _collect(mine, best, mine, chosen, count, topk, 1, LANES, 1, False)
        tl.debug_barrier()  # the list of groups is read by other threads than wrote it
        _collect(out, values, mine, chosen, members * GROUP, topk, block_size, LANES, GROUP, FILTER)


@triton.jit(
    do_not_specialize=[
        "first_row", "topk", "limit", "num_blocks", "block_size", "scores_stride", "best_stride",
    ],
    do_not_specialize_on_alignment=["visible"],
)  # fmt: skip
def block_maxima_kernel(
    best,  # int32 [rows, num_blocks]
    scores,  # int32 [rows, columns]
    visible,  # int32 [T]
    first_row: tl.int64,
    topk: tl.int32,
    limit: tl.int32,
    num_blocks: tl.int32,
    block_size: tl.int32,
    scores_stride: tl.int64,
    best_stride: tl.int64,
    BLOCKS: tl.constexpr,
):
    """The best score of each candidate block, +inf for the newest visible one."""
    parts = (num_blocks + BLOCKS - 1) // BLOCKS
    local = tl.program_id(0) // parts
    block = (tl.program_id(0) - local * parts) * BLOCKS + tl.arange(0, BLOCKS)
    seen = tl.minimum(tl.load(visible + (first_row + local)), limit)
    seen = tl.where(seen > topk, seen, 0)
    most = tl.full([BLOCKS], ABSENT, tl.int32)
    values = scores + local.to(tl.int64) * scores_stride
    for offset in range(block_size):
        position = block * block_size + offset
        value = tl.load(values + position, mask=position < seen, other=ABSENT)
        most = tl.maximum(most, value)
    newest = (seen - 1) // block_size
    most = tl.where((block == newest) & (seen > 0), PINNED, most)
    at = best + local.to(tl.int64) * best_stride + block
    tl.store(at, most, mask=block * block_size < seen)


@triton.jit(
    do_not_specialize=[
        "first_row", "topk", "limit", "block_size", "num_candidates", "best_stride",
        "candidates_stride",
    ],
    do_not_specialize_on_alignment=["visible", "candidates"],
)  # fmt: skip
def select_blocks_kernel(
    candidates,  # int32 [T, num_candidates]
    best,  # int32 [rows, num_blocks]
    visible,  # int32 [T]
    first_row: tl.int64,
    topk: tl.int32,
    limit: tl.int32,
    block_size: tl.int32,
    num_candidates: tl.int32,
    best_stride: tl.int64,
    candidates_stride: tl.int64,
    LANES: tl.constexpr,
):
    """A row's candidate blocks; none if the row takes every position."""
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    seen = tl.minimum(tl.load(visible + row), limit)
    out = candidates + row * candidates_stride
    values = best + local * best_stride
    count = tl.where(seen > topk, (seen + block_size - 1) // block_size, 0)
    _collect(out, values, out, out, count, num_candidates, 1, LANES, 1, False)
