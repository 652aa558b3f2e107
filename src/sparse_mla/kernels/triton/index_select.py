"""Exact selection in Triton: the K best of a row of integers, equal ones by the lower column.

The K-th value is found by cutting an interval that holds it into three: how many values reach each of
the two cuts, until the interval is a point or exactly K values reach a cut. Then the columns are written in ascending order. A row
that fits into the registers of a program is loaded once, a longer one in every pass. All lengths are
run-time values, nothing is sorted, and two runs give the same bits.

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
    """(columns, values) of lanes `first ..`, int32 [LANES]; `ABSENT` for what is never chosen.

    GROUP 1: a lane is a column. More: the columns of the groups that `members` lists. 0: `members` lists
    the columns, `values` lies beside it.
    """
    lane = first + tl.arange(0, LANES)
    if GROUP > 1:
        group = first // GROUP + tl.arange(0, LANES // GROUP)
        member = tl.load(members + group, mask=group * GROUP < count, other=0)
        inside = tl.arange(0, GROUP)[None, :]
        here = (group * GROUP < count)[:, None] & (inside >= 0)
        column = tl.reshape((member * GROUP)[:, None] + inside, [LANES])
        value = tl.load((values + member * GROUP)[:, None] + inside, mask=here, other=ABSENT)
        value = tl.reshape(value, [LANES])
    else:
        column = lane
        if GROUP == 0:
            column = tl.load(members + lane, mask=lane < count, other=0)
        value = tl.load(values + lane, mask=lane < count, other=ABSENT)
    return column, tl.where(value > NEVER, value, ABSENT)


@triton.jit
def thirds(low, high):
    """Two int32 that cut low + 1 .. high, low < high, into three; they may be equal."""
    distance = (high - low).to(tl.uint32, bitcast=True)
    step = (distance + 2) // 3
    far = tl.minimum(2 * step, distance)
    return low + step.to(tl.int32, bitcast=True), low + far.to(tl.int32, bitcast=True)


@triton.jit
def count_cuts(value, near, far):
    """How many of int32 [LANES] are at least `near`, and at least `far` in the high half."""
    return tl.sum((value >= near).to(tl.int32) + ((value >= far).to(tl.int32) << 16), 0)


@triton.jit
def _narrow(low, high, above, need, near, far, at_near, at_far):
    """(low, high, values above high) after so many values turned out to be at least `near` and `far`.

    At least `need` values reach `low`, fewer lie above `high`. If exactly `need` reach a cut, the
    interval becomes the point below it.
    """
    reaches_far, reaches_near = at_far >= need, at_near >= need
    below = tl.where(reaches_near, near, low)
    rest = tl.where(reaches_near, far, near) - 1
    left = tl.where(reaches_near, at_far, at_near)
    below = tl.where(reaches_far, far, below)
    rest = tl.where(reaches_far, high, rest)
    left = tl.where(reaches_far, above, left)
    exact = (at_far == need) | (at_near == need)
    point = tl.where(at_far == need, far, near) - 1
    return (
        tl.where(exact, point, below),
        tl.where(exact, point, rest),
        tl.where(exact, need, left),
    )


@triton.jit
def bounds(value):
    """(lowest and highest value that may be chosen, how many may be) of int32 [LANES]."""
    live = value > NEVER
    low = tl.min(tl.where(live, value, 0x7FFFFFFF), 0)
    return low, tl.max(value, 0), tl.sum(live.to(tl.int32), 0)


@triton.jit
def kth_held(value, wanted):
    """(the value of rank `wanted`, how many equal to it are among the best `wanted`) of int32 [LANES]."""
    low, high, live = bounds(value)
    need = tl.minimum(wanted, live)
    above = 0
    high = tl.maximum(tl.where(need > 0, high, low), low)
    low = tl.where(need > 0, low, high)
    while low < high:
        near, far = thirds(low, high)
        both = count_cuts(value, near, far)
        low, high, above = _narrow(low, high, above, need, near, far, both & 0xFFFF, both >> 16)
    return low, need - above


@triton.jit
def kth_streamed(values, members, count, wanted, LANES: tl.constexpr, GROUP: tl.constexpr):
    """The same of a row that is read in every pass."""
    low = tl.full([], 0x7FFFFFFF, tl.int32)
    high = tl.full([], ABSENT, tl.int32)
    live = 0
    for first in range(0, count, LANES):
        _, value = _lanes(values, members, first, count, LANES, GROUP)
        least, most, some = bounds(value)
        low, high, live = tl.minimum(low, least), tl.maximum(high, most), live + some
    need = tl.minimum(wanted, live)
    above = 0
    high = tl.maximum(tl.where(need > 0, high, low), low)
    low = tl.where(need > 0, low, high)
    while low < high:
        near, far = thirds(low, high)
        at_near = 0
        at_far = 0
        for first in range(0, count, LANES):
            _, value = _lanes(values, members, first, count, LANES, GROUP)
            both = count_cuts(value, near, far)
            at_near += both & 0xFFFF
            at_far += both >> 16
        low, high, above = _narrow(low, high, above, need, near, far, at_near, at_far)
    return low, need - above


@triton.jit
def place_kept(value, threshold, need, taken, tied):
    """(whether kept, place in the list, above the threshold, equal to it) of int32 [LANES].

    `taken` were kept and `tied` equal to the threshold before; the first `need` of the equal ones are kept.
    """
    equal = (value == threshold).to(tl.int32)
    better = (value > threshold).to(tl.int32)
    counts = better + (equal << 16)  # both prefix sums in one
    sums = tl.cumsum(counts, 0)
    before = sums - counts
    equal_before = tied + (before >> 16)
    keep = (better != 0) | ((equal != 0) & (equal_before < need))
    kept_equal = tl.minimum(equal_before, need) - tl.minimum(tied, need)
    return keep, taken + (before & 0xFFFF) + kept_equal, better, equal


@triton.jit
def count_kept(better, equal, need, taken, tied):
    """(kept, equal to the threshold) so far, these lanes included."""
    all_better = tl.sum(better, 0)
    all_equal = tl.sum(equal, 0)
    kept_equal = tl.minimum(tied + all_equal, need) - tl.minimum(tied, need)
    return taken + all_better + kept_equal, tied + all_equal


@triton.jit
def write_kept(
    out,
    column,
    value,
    threshold,
    need,
    taken,
    tied,
    blocks,
    wanted,
    block_size,
    MAPPED: tl.constexpr,
):
    """Write the lanes that are kept behind the `taken` before; (kept, equal to the threshold) so far."""
    keep, place, better, equal = place_kept(value, threshold, need, taken, tied)
    name = column
    if MAPPED:
        entry = column // block_size
        block = tl.load(blocks + entry, mask=keep, other=0)
        name = block * block_size + (column - entry * block_size)
    tl.store(out + place, name, mask=keep & (place < wanted))
    return count_kept(better, equal, need, taken, tied)


@triton.jit
def fill_rest(out, taken, wanted, LANES: tl.constexpr):
    """-1 behind the `taken` entries of int32 [wanted]."""
    for first in range(0, wanted, LANES):
        lane = first + tl.arange(0, LANES)
        tl.store(out + lane, tl.full([LANES], -1, tl.int32), mask=(lane >= taken) & (lane < wanted))


@triton.jit
def collect(
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
    taken = 0
    tied = 0
    if count <= LANES:
        column, value = _lanes(values, members, 0, count, LANES, GROUP)
        threshold, need = kth_held(value, wanted)
        taken, tied = write_kept(
            out, column, value, threshold, need, taken, tied, blocks, wanted, block_size, MAPPED
        )
    else:
        threshold, need = kth_streamed(values, members, count, wanted, LANES, GROUP)
        for first in range(0, count, LANES):
            column, value = _lanes(values, members, first, count, LANES, GROUP)
            taken, tied = write_kept(
                out, column, value, threshold, need, taken, tied, blocks, wanted, block_size, MAPPED
            )
    taken = tl.minimum(taken, wanted)
    fill_rest(out, taken, wanted, LANES)
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
        values = scores + local * (
            scores_stride // GROUP * GROUP
        )  # multiples that the compiler sees
        best = maxima + local * (maxima_stride // 4 * 4)
        chosen = candidates + row * candidates_stride
        count = (columns + GROUP - 1) // GROUP
        members = collect(mine, best, mine, chosen, count, topk, 1, LANES, 1, False)
        tl.debug_barrier()  # the list of groups is read by other threads than wrote it
        collect(out, values, mine, chosen, members * GROUP, topk, block_size, LANES, GROUP, FILTER)


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
    collect(out, values, out, out, count, num_candidates, 1, LANES, 1, False)
