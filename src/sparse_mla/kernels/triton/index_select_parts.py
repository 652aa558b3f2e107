"""Exact selection for steps of few rows: many programs cut a row down, the last to finish chooses.

With one program a row, most of a GPU idles and the time is the passes of that program over as many values
as its registers hold. So each row is shared out in parts, one program each, in the same launch:

1. Every program finds a floor that at least K values of the row reach. Groups' best scores are folded
   to `LANES // FOLD` values (the best of neighbours; each is a score of the row), and a value that K to
   K + K / 8 of those reach will do, which takes a few passes and no exact rank.
2. It lists its part's columns that reach the floor, with their values, in ascending order. Whatever the
   floor, a part needs no more than its own best K (equal ones by the lower column): a part where more
   reach it takes exactly those, so lists are bounded by K entries each.
3. The last program to arrive chooses the best K among the lists, taken in order. Of
   random scores 600 to 900 of 131,072 are listed for K = 512, and a pass over them is short.

The result is that of `select_positions_kernel`, bit for bit, and does not depend on the number of parts or
on which program arrives last. The counter of arrivals was set to zero by the kernel that made the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.index_scores import ABSENT
from sparse_mla.kernels.triton.index_select import (
    NEVER,
    bounds,
    collect,
    count_cuts,
    count_kept,
    fill_rest,
    kth_held,
    kth_streamed,
    place_kept,
    thirds,
    write_kept,
)

MAX_PARTS = tl.constexpr(128)  # of a row; `_listed` finds a part of that many in four steps
HEADER = tl.constexpr(3 * 128)  # of a row's lists: arrivals; counts of the parts; first places


@triton.jit
def _fold(value, LANES: tl.constexpr, FOLD: tl.constexpr):
    """int32 [LANES] -> [LANES // FOLD], the best of neighbours."""
    return tl.max(tl.reshape(value, [LANES // FOLD, FOLD]), 1)


@triton.jit
def _floor(value, need, enough):
    """A value that at least `need` of int32 [N] reach, `enough` at most where values differ.

    The lowest value that may be chosen if fewer than `need` may be.
    """
    low, high, reached = bounds(value)
    short = reached < need
    high = tl.where(short, low, high)
    while (low < high) & (reached > enough):
        near, far = thirds(low, high)
        both = count_cuts(value, near, far)
        at_near, at_far = both & 0xFFFF, both >> 16
        to_far, to_near = at_far >= need, at_near >= need
        high = tl.where(to_far, high, tl.where(to_near, far, near) - 1)
        low = tl.where(to_far, far, tl.where(to_near, near, low))
        reached = tl.where(to_far, at_far, tl.where(to_near, at_near, reached))
    return tl.where(short, NEVER + 1, low)


@triton.jit
def _whole_groups(columns, GROUP: tl.constexpr):
    """How many groups `columns` take, up to a whole number of loads of four; `_load_part` says why."""
    return ((columns + GROUP - 1) // GROUP + 3) // 4 * 4


@triton.jit
def _load_part(values, begin, end, KEYS: tl.constexpr):
    """(columns, values) of a tile of a part, int32 [KEYS].

    Scores and their groups come by tiles of at least 4 groups, absent keys included. So masks may be
    as coarse as that, and a thread loads four values at once.
    """
    column = begin + tl.arange(0, KEYS)
    return column, tl.load(values + column, mask=column < (end + 3) // 4 * 4, other=ABSENT)


@triton.jit
def _list_part(
    kept_values,  # int32 [room]
    kept_columns,  # int32 [room]
    values,
    begin,
    end,
    column,  # of the part's first tile
    value,
    floor,
    room,
    KEYS: tl.constexpr,
):
    """List a part's columns that reach `floor`, or its best `room` if these are more; return how many."""
    taken = 0
    for first in range(begin, end, KEYS):
        if first > begin:
            column, value = _load_part(values, first, end, KEYS)
        reaches = value >= floor
        one = reaches.to(tl.int32)
        place = taken + tl.cumsum(one, 0) - one
        keep = reaches & (place < room)
        tl.store(kept_values + place, value, mask=keep)
        tl.store(kept_columns + place, column, mask=keep)
        taken += tl.sum(one, 0)
    if taken > room:
        threshold, need = kth_streamed(values + begin, values, end - begin, room, KEYS, 1)
        tl.debug_barrier()  # the list is written again, by other threads
        taken = 0
        tied = 0
        for first in range(begin, end, KEYS):
            column, value = _load_part(values, first, end, KEYS)
            keep, place, better, equal = place_kept(value, threshold, need, taken, tied)
            keep = keep & (place < room)
            tl.store(kept_values + place, value, mask=keep)
            tl.store(kept_columns + place, column, mask=keep)
            taken, tied = count_kept(better, equal, need, taken, tied)
    return tl.minimum(taken, room)


@triton.jit
def _quarter(places, part, entry, STRIDE: tl.constexpr):
    """The last of parts `part`, `part + STRIDE`, .. (four) whose first place is not behind the entry."""
    later = (tl.load(places + part + STRIDE) <= entry).to(tl.int32)
    later += (tl.load(places + part + 2 * STRIDE) <= entry).to(tl.int32)
    later += (tl.load(places + part + 3 * STRIDE) <= entry).to(tl.int32)
    return part + later * STRIDE


@triton.jit
def _listed(kept_values, kept_columns, places, first, total, room, LANES: tl.constexpr):
    """(columns, values) of entries `first ..` of the lists taken together, int32 [LANES]."""
    entry = first + tl.arange(0, LANES)
    part = tl.zeros([LANES], tl.int32)
    part = _quarter(places, part, entry, MAX_PARTS // 4)
    part = _quarter(places, part, entry, MAX_PARTS // 16)
    part = _quarter(places, part, entry, MAX_PARTS // 64)
    part += (tl.load(places + part + 1) <= entry).to(tl.int32)
    at = part * room + (entry - tl.load(places + part))
    here = entry < total
    value = tl.load(kept_values + at, mask=here, other=ABSENT)
    return tl.load(kept_columns + at, mask=here, other=0), value


@triton.jit
def _choose(
    out,  # int32 [wanted]
    counts,  # int32 [MAX_PARTS]
    places,  # int32 [MAX_PARTS]
    kept_values,  # int32 [parts, wanted]
    kept_columns,
    chosen,  # int32, block of each `block_size` columns, if MAPPED
    active,  # parts that have a list
    wanted,
    block_size,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Write the best columns of all lists, or what `chosen` calls them, ascending, -1 behind."""
    part = tl.arange(0, MAX_PARTS)
    count = tl.load(counts + part, mask=part < active, other=0)
    tl.store(places + part, tl.cumsum(count, 0) - count)
    total = tl.sum(count, 0)
    tl.debug_barrier()  # places are read by other threads than wrote them
    if total <= FEW:
        column, value = _listed(kept_values, kept_columns, places, 0, total, wanted, FEW)
        threshold, need = kth_held(value, wanted)
        taken, _ = write_kept(
            out, column, value, threshold, need, 0, 0, chosen, wanted, block_size, MAPPED
        )
        fill_rest(out, tl.minimum(taken, wanted), wanted, FEW)
    else:
        for first in range(0, total, MANY):  # close the gaps; an entry never moves up
            column, value = _listed(kept_values, kept_columns, places, first, total, wanted, MANY)
            tl.debug_barrier()
            entry = first + tl.arange(0, MANY)
            tl.store(kept_values + entry, value, mask=entry < total)
            tl.store(kept_columns + entry, column, mask=entry < total)
        tl.debug_barrier()
        collect(out, kept_values, kept_columns, chosen, total, wanted, block_size, MANY, 0, MAPPED)


@triton.jit(
    do_not_specialize=[
        "first_row", "topk", "limit", "num_candidates", "block_size", "parts", "scores_stride",
        "maxima_stride", "lists_stride", "positions_stride", "candidates_stride",
    ],
    do_not_specialize_on_alignment=["visible", "candidates", "positions", "lists"],
)  # fmt: skip
def select_parts_kernel(
    positions,  # int32 [T, topk]
    lists,  # int32 [rows, HEADER + 2 * parts * topk] scratch, first column zero
    scores,  # int32 [rows, columns]
    maxima,  # int32 [rows, groups]
    visible,  # int32 [T]
    candidates,  # int32 [T, num_candidates]
    first_row: tl.int64,
    topk: tl.int32,
    limit: tl.int32,
    num_candidates: tl.int32,
    block_size: tl.int32,
    parts: tl.int32,  # programs of a row, at most MAX_PARTS
    scores_stride: tl.int64,
    maxima_stride: tl.int64,
    lists_stride: tl.int64,
    positions_stride: tl.int64,
    candidates_stride: tl.int64,
    LANES: tl.constexpr,
    FOLD: tl.constexpr,
    KEYS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    GROUP: tl.constexpr,
    FILTER: tl.constexpr,
):
    """A part of a row; the last of the row's programs to arrive writes its list."""
    local = tl.program_id(0) // parts
    part = tl.program_id(0) - local * parts
    row = first_row + local
    best = maxima + local.to(tl.int64) * (maxima_stride // 4 * 4)  # a multiple that is seen
    most = limit
    if FILTER:
        most = num_candidates * block_size
    lane = tl.arange(0, LANES)
    # Loaded before the row's length is known: one wait for memory, not two. What lies behind the row's own
    # groups is replaced below.
    here = lane < tl.where(limit > topk, _whole_groups(most, GROUP), 0)
    value = tl.load(best + lane, mask=here, other=ABSENT)
    seen = tl.minimum(tl.load(visible + row), limit)
    out = positions + row * positions_stride
    if seen <= topk:
        if part == 0:
            for first in range(0, topk, KEYS):
                entry = first + tl.arange(0, KEYS)
                tl.store(out + entry, tl.where(entry < seen, entry, -1), mask=entry < topk)
    else:
        count = seen
        if FILTER:
            count = most
        tiles = (count + KEYS - 1) // KEYS
        share = tl.maximum((tiles + parts - 1) // parts, 1)
        active = tl.maximum((tiles + share - 1) // share, 1)
        if part < active:
            begin = part * (share * KEYS)
            end = tl.minimum(begin + share * KEYS, count)
            values = scores + local.to(tl.int64) * (scores_stride // GROUP * GROUP)
            column, own = _load_part(values, begin, end, KEYS)
            groups = _whole_groups(count, GROUP)
            folded = _fold(tl.where(lane < groups, value, ABSENT), LANES, FOLD)
            for first in range(LANES, groups, LANES):
                value = tl.load(best + first + lane, mask=first + lane < groups, other=ABSENT)
                folded = tl.maximum(folded, _fold(value, LANES, FOLD))
            floor = _floor(folded, topk, topk + topk // 8)

            mine = lists + local.to(tl.int64) * lists_stride
            counts, places = mine + MAX_PARTS, mine + 2 * MAX_PARTS
            kept_values, kept_columns = mine + HEADER, mine + HEADER + parts * topk
            taken = _list_part(
                kept_values + part * topk, kept_columns + part * topk, values, begin, end, column, own,
                floor, topk, KEYS,
            )  # fmt: skip
            tl.store(counts + part, taken)
            arrived = active - 1
            if active > 1:
                tl.debug_barrier()
                arrived = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if arrived == active - 1:
                chosen = candidates + row * candidates_stride
                _choose(
                    out, counts, places, kept_values, kept_columns, chosen, active, topk, block_size,
                    FEW, MANY, FILTER,
                )  # fmt: skip
