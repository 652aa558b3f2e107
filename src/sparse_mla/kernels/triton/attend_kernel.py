"""The portable attention kernel: rotation, attention over two key sets, merge, output, one launch.

One program serves one query token, one block of heads and one split of the token's keys. Programs of
a token lie side by side in the grid, so that they share rows through L2. If a token is split, each
program stores its partial result; the last to arrive adds them up in split order, so the result does
not depend on who was last.

Two forms share the code: 16 heads a program, the smallest matrix instruction of every GPU, so that few
heads cost few heads, and 64 heads a program for Hopper's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.attend_spread import attend_spread, finite, tile_of
from sparse_mla.kernels.triton.numbers import (
    inverse_ue8m0,
    materialise,
    product,
    product_add,
    quantise_e4m3,
    to_bf16,
    ue8m0_byte,
)
from sparse_mla.kernels.triton.rows import load_raw, widen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DIM = tl.constexpr(512)
HALF = tl.constexpr(256)
ROPE_FIRST = tl.constexpr(448)  # dims 448..511 are rotated
ROPE_PAIRS = tl.constexpr(32)
DIM_BLOCK = tl.constexpr(32)  # dims of one output scale
PARTIAL_HEADS = tl.constexpr(16)  # heads of one arrival counter


@triton.jit
def _cos_sin(positions, rope, token, num_positions):
    """float32 [32] cos and sin of the token's pairs; a garbage position is clamped into the table."""
    position = tl.load(positions + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    row = rope + position * (2 * ROPE_PAIRS)
    pair = tl.arange(0, ROPE_PAIRS)
    return tl.load(row + pair), tl.load(row + ROPE_PAIRS + pair)


@triton.jit
def _unrotate(values, positions, rope, token, num_positions, HEADS: tl.constexpr):
    """float32 [HEADS, 512] with the last 64 dims rotated back; the others pass through unchanged."""
    position = tl.load(positions + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    pair = tl.arange(0, HALF) - ROPE_FIRST // 2
    row = rope + position * (2 * ROPE_PAIRS)
    cos = tl.load(row + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(row + ROPE_PAIRS + pair, mask=pair >= 0, other=0.0)
    even, odd = tl.split(tl.reshape(values, [HEADS, HALF, 2]))
    new_even = even * cos[None, :] + odd * sin[None, :]
    new_odd = odd * cos[None, :] - even * sin[None, :]
    return tl.reshape(tl.join(new_even, new_odd), [HEADS, DIM])


@triton.jit
def _query_offsets(heads, dims, num_heads, head_stride, INTERLEAVED: tl.constexpr):
    """int64 [heads, dims] offsets of a token's query values."""
    if INTERLEAVED:
        inside = heads[:, None] * 16 + (dims // 16 * (16 * num_heads) + dims % 16)[None, :]
        return inside.to(tl.int64)
    return heads[:, None].to(tl.int64) * head_stride + dims[None, :]


@triton.jit
def _load_query(
    q,
    out,
    token,
    heads,
    num_heads,
    token_stride,
    head_stride,
    positions,
    rope,
    num_positions,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    THROUGH_OUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    MODE: tl.constexpr,
):
    """bf16 [HEADS, 512]: the token's queries, rotated on request; zero for heads that are not there.

    THROUGH_OUT parks the rotated dims in the program's own output rows and loads them from there: a
    query that comes from a load stays in shared memory, where Hopper's matrix instruction reads it,
    and leaves the registers to the accumulator.
    """
    here = (heads < num_heads)[:, None]
    dims = tl.arange(0, DIM)
    if ALIGNED:  # the compiler sees that the strides are multiples of 8
        token_stride = token_stride // 8 * 8
        head_stride = head_stride // 8 * 8
    base = q + token * token_stride
    offsets = _query_offsets(heads, dims, num_heads, head_stride, INTERLEAVED)
    if not ROTATE:
        return tl.load(base + offsets, mask=here, other=0.0)
    cos, sin = _cos_sin(positions, rope, token, num_positions)
    pair = tl.arange(0, ROPE_PAIRS)
    even_at = _query_offsets(heads, 2 * pair + ROPE_FIRST, num_heads, head_stride, INTERLEAVED)
    even = tl.load(base + even_at, mask=here, other=0.0).to(tl.float32)
    odd = tl.load(base + even_at + 1, mask=here, other=0.0).to(tl.float32)
    new_even = to_bf16(even * cos[None, :] - odd * sin[None, :], MODE)
    new_odd = to_bf16(odd * cos[None, :] + even * sin[None, :], MODE)
    rotated = tl.reshape(tl.join(new_even, new_odd), [HEADS, 2 * ROPE_PAIRS])
    if THROUGH_OUT:
        park = out.to(tl.pointer_type(tl.bfloat16)) + token.to(tl.int64) * num_heads * OUT_WORDS
        tail = tl.arange(0, 2 * ROPE_PAIRS)
        tl.store(park + heads[:, None] * OUT_WORDS + tail[None, :], rotated, mask=here)
        tl.debug_barrier()
        parked = heads[:, None] * OUT_WORDS + (dims - ROPE_FIRST)[None, :]
        pointers = tl.where((dims < ROPE_FIRST)[None, :], base + offsets, park + parked)
        return tl.load(pointers, mask=here, other=0.0)
    query = tl.load(base + offsets, mask=here, other=0.0)
    spread = tl.broadcast_to(rotated[:, None, :], [HEADS, DIM // (2 * ROPE_PAIRS), 2 * ROPE_PAIRS])
    rotated_query = tl.where((dims >= ROPE_FIRST)[None, :], tl.reshape(spread, [HEADS, DIM]), query)
    return materialise(rotated_query, MODE)


@triton.jit
def _tile_lanes(tile, boundary, first_set, second_set, KEYS: tl.constexpr, MERGED: tl.constexpr):
    """int32 [KEYS]: what the list holds in a tile's lanes, -1 past its end. Not looked at yet, so that
    the loads stay in flight until `_valid_slots`.
    """
    chosen, local = tile_of(tile, boundary, first_set, second_set, MERGED)
    lanes = local * KEYS + tl.arange(0, KEYS)
    return tl.load(chosen[1] + lanes, mask=lanes < chosen[2], other=-1)


@triton.jit
def _valid_slots(lanes, chosen):
    """int32 [KEYS]: the slots among the lanes, -1 where there is no key."""
    return tl.where((lanes >= 0) & (lanes < chosen[3]), lanes, -1)


@triton.jit
def _load_rows(chosen, slots, RECORD: tl.constexpr):
    """What `load_raw` returns, of a set."""
    return load_raw(chosen[0], slots, chosen[4], chosen[5], chosen[6], chosen[7], RECORD)


@triton.jit
def _attend_tiles(
    first,
    last,
    boundary,  # tiles of the first set, if both sets are merged into one loop
    query,  # bf16 [HEADS, 512]
    acc,  # float32 [HEADS, 512]
    running_max,  # float32 [HEADS], of logits in units of log2
    total,  # float32 [HEADS]
    first_set,  # (pages, indices, count, num_slots, page_rows, its magic and shift, page_stride)
    second_set,
    scale_log2,
    RECORD: tl.constexpr,
    KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
):
    """Add the key tiles `first .. last - 1` to the running softmax.

    Slots are loaded two tiles ahead by hand; the compiler's own pipelining waits for each load in
    turn, because rows depend on slots. With AHEAD the rows of the next tile are in flight too, in
    registers, while this one is multiplied. With few heads the sums stay lane by lane until the end, which
    saves a reduction across warps in every tile; many heads have no registers left for either.
    """
    chosen, _ = tile_of(first, boundary, first_set, second_set, MERGED)
    lanes = _tile_lanes(first, boundary, first_set, second_set, KEYS, MERGED)
    slots = _valid_slots(lanes, chosen)
    HEADS: tl.constexpr = query.shape[0]
    FEW: tl.constexpr = HEADS < 64
    lanes = _tile_lanes(first + 1, boundary, first_set, second_set, KEYS, MERGED)
    if AHEAD:
        words, scales, tail = _load_rows(chosen, slots, RECORD)
    entry_max = running_max
    if FEW:
        sums = tl.zeros([HEADS, KEYS], tl.float32)
    else:
        sums = total
    for tile in tl.range(first, last, num_stages=1):
        if not AHEAD:
            chosen, _ = tile_of(tile, boundary, first_set, second_set, MERGED)
            words, scales, tail = _load_rows(chosen, slots, RECORD)
        valid = slots >= 0
        keys = widen(words, scales, tail, RECORD, MODE)
        chosen, _ = tile_of(tile + 1, boundary, first_set, second_set, MERGED)
        slots = _valid_slots(lanes, chosen)
        if AHEAD:
            words, scales, tail = _load_rows(chosen, slots, RECORD)
        lanes = _tile_lanes(tile + 2, boundary, first_set, second_set, KEYS, MERGED)
        logits = product(query, tl.trans(keys), MODE) * scale_log2
        logits = tl.where(valid[None, :], logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        safe = finite(new_max)
        weights = tl.exp2(logits - safe[:, None])
        rescale = tl.exp2(running_max - safe)
        if FEW:
            sums = sums * rescale[:, None] + weights
        else:
            sums = sums * rescale + tl.sum(weights, 1)
        acc = product_add(to_bf16(weights, MODE), keys, acc * rescale[:, None], MODE)
        running_max = new_max
    if FEW:
        kept = total * tl.exp2(entry_max - finite(running_max))
        return acc, running_max, kept + tl.sum(sums, 1)
    else:  # noqa: RET505 - only the branch that is compiled may return
        return acc, running_max, sums


@triton.jit
def _merge_splits(
    partial,  # float32 pointer to the token's [splits, num_heads, 512]
    partial_stats,  # float32 pointer to the token's [splits, num_heads, 2]
    active,
    heads,
    num_heads,
    HEADS: tl.constexpr,
):
    """(acc [HEADS, 512], max [HEADS], total [HEADS]) over the splits, in split order."""
    here = heads < num_heads
    dims = tl.arange(0, DIM)
    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    for split in tl.range(0, active, num_stages=1):
        at = partial_stats + (split * num_heads + heads) * 2
        split_max = tl.load(at, mask=here, other=float("-inf"), cache_modifier=".cg")
        running_max = tl.maximum(running_max, split_max)
    safe = finite(running_max)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for split in tl.range(0, active, num_stages=1):
        rows = split * num_heads + heads
        at = partial_stats + rows * 2
        split_max = tl.load(at, mask=here, other=float("-inf"), cache_modifier=".cg")
        split_total = tl.load(at + 1, mask=here, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(split_max - safe)
        values = tl.load(
            partial + rows[:, None] * DIM + dims[None, :],
            mask=here[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += values * weight[:, None]
        total += split_total * weight
    return acc, running_max, total


@triton.jit
def _store_output(
    out,
    scales,
    values,  # float32 [HEADS, 512], final
    token,
    heads,
    num_heads,
    scale_word_stride,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    MODE: tl.constexpr,
):
    """Round and store one block of heads; FP8 stores a scale byte for 32 dims."""
    here = (heads < num_heads)[:, None]
    dims = tl.arange(0, DIM)
    group = heads // HEADS_PER_GROUP
    local = heads - group * HEADS_PER_GROUP
    GROUP_VALUES: tl.constexpr = HEADS_PER_GROUP * DIM
    if INTERLEAVED:
        inside = (dims // 32 * (HEADS_PER_GROUP * 32) + dims % 32)[None, :] + local[:, None] * 32
    else:
        inside = local[:, None] * DIM + dims[None, :]
    offsets = group[:, None] * GROUP_VALUES + inside
    base = out + token.to(tl.int64) * (num_heads * DIM)
    if FP8:
        BLOCKS: tl.constexpr = DIM // DIM_BLOCK
        blocks = tl.reshape(values, [HEADS, BLOCKS, DIM_BLOCK])
        byte = ue8m0_byte(tl.max(tl.abs(blocks), 2))
        codes = quantise_e4m3(blocks * inverse_ue8m0(byte)[:, :, None], HARDWARE_E4M3)
        tl.store(base + offsets, tl.reshape(codes, [HEADS, DIM]), mask=here)
        block = tl.arange(0, BLOCKS)
        if INTERLEAVED:
            number = block[None, :] * HEADS_PER_GROUP + local[:, None]
        else:
            number = local[:, None] * BLOCKS + block[None, :]
        word = group[:, None] * (4 * HEADS_PER_GROUP) + number // 4
        at = (word.to(tl.int64) * scale_word_stride + token) * 4 + number % 4
        bytes_of_words = scales.to(tl.pointer_type(tl.uint8))
        tl.store(bytes_of_words + at, byte.to(tl.uint8), mask=here)
    else:
        tl.store(base + offsets, to_bf16(values, MODE), mask=here)


@triton.jit(
    do_not_specialize=[
        "num_heads", "q_token_stride", "q_head_stride", "num_positions",
        "window_index_stride", "window_width", "window_slots", "window_page_rows",
        "window_page_magic", "window_page_shift", "window_page_stride",
        "extra_index_stride", "extra_width", "extra_slots", "extra_page_rows", "extra_page_magic",
        "extra_page_shift", "extra_page_stride",
        "splits", "stats_offset", "scale_word_stride",
    ],
    do_not_specialize_on_alignment=[
        "positions", "rope", "sink", "window_indices", "window_lengths", "extra_indices",
        "extra_lengths", "arrivals", "scales", "lse", "max_logits",
    ],
)  # fmt: skip
def attend_kernel(
    q,  # bf16 [T, H, 512]
    positions,  # int32 or int64 [T]
    rope,  # float32 [num_positions, 64]
    sink,  # float32 [H]
    window_pages,  # uint8, first page
    window_indices,  # int32 [T, window_width]
    window_lengths,  # int32 [T]
    extra_pages,  # uint8, first page of the compressed set
    extra_indices,  # int32 [T, extra_width]
    extra_lengths,  # int32 [T]
    partial,  # float32: [T, splits, H, 512], then at stats_offset [T, splits, H, 2]
    arrivals,  # int32 [T, ceil(H / 16)], zero before and after
    out,  # bf16 or uint8 [T, H * 512]
    scales,  # int32 [T, G, words], strides (1, words * A, A), little endian
    lse,  # float32 [T, H]
    max_logits,  # float32 [T, H]
    scale_log2,  # softmax scale * log2(e)
    num_heads: tl.int32,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    num_positions: tl.int32,
    window_index_stride: tl.int64,
    window_width: tl.int32,
    window_slots: tl.int32,
    window_page_rows: tl.int32,
    window_page_magic: tl.int64,
    window_page_shift: tl.int32,
    window_page_stride: tl.int64,  # in units of 16 bytes
    extra_index_stride: tl.int64,
    extra_width: tl.int32,
    extra_slots: tl.int32,
    extra_page_rows: tl.int32,
    extra_page_magic: tl.int64,
    extra_page_shift: tl.int32,
    extra_page_stride: tl.int64,  # in units of 16 bytes
    splits: tl.int32,
    stats_offset: tl.int64,
    scale_word_stride: tl.int64,
    WINDOW_RECORD: tl.constexpr,  # RecordFormat
    EXTRA_RECORD: tl.constexpr,  # RecordFormat, None without a compressed set
    WINDOW_LENGTHS: tl.constexpr,
    EXTRA_LENGTHS: tl.constexpr,
    ROTATE_QUERY: tl.constexpr,
    UNROTATE_OUTPUT: tl.constexpr,
    SINK: tl.constexpr,
    QUERY_INTERLEAVED: tl.constexpr,
    QUERY_ALIGNED: tl.constexpr,  # every query head begins at a multiple of 16 bytes
    QUERY_THROUGH_OUT: tl.constexpr,
    OUT_INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    LSE: tl.constexpr,
    MAX_LOGITS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    KEYS: tl.constexpr,  # keys of a tile
    AHEAD: tl.constexpr,  # rows are loaded one tile ahead, into registers
    HARDWARE_E4M3: tl.constexpr,  # the GPU rounds to e4m3 itself (compute capability 8.9)
    MODE: tl.constexpr,
):
    program = tl.program_id(0)
    head_blocks = tl.cdiv(num_heads, HEADS)
    if SPLIT:
        split = program % splits
        program = program // splits
    head_block = program % head_blocks
    token = program // head_blocks
    heads = head_block * HEADS + tl.arange(0, HEADS)
    here = heads < num_heads

    window_count = window_width
    if WINDOW_LENGTHS:
        window_count = tl.minimum(window_width, tl.load(window_lengths + token))
    window_tiles = tl.cdiv(tl.maximum(window_count, 0), KEYS)
    tiles = window_tiles
    extra_count = extra_width
    if EXTRA_RECORD is not None:
        if EXTRA_LENGTHS:
            extra_count = tl.minimum(extra_width, tl.load(extra_lengths + token))
        tiles += tl.cdiv(tl.maximum(extra_count, 0), KEYS)
    first = tiles * 0
    last = tiles
    if SPLIT:
        active = tl.maximum(tl.minimum(splits, tiles), 1)
        if split >= active:
            return
        first = tiles * split // active
        last = tiles * (split + 1) // active

    SPREAD: tl.constexpr = (
        HEADS == 16 and KEYS == 64 and AHEAD and WINDOW_RECORD.tail_dims == 0
        and (EXTRA_RECORD is None or EXTRA_RECORD.tail_dims == 0)
    )  # fmt: skip
    if not SPREAD:
        query = _load_query(
            q, out, token, heads, num_heads, q_token_stride, q_head_stride, positions, rope,
            num_positions, HEADS, ROTATE_QUERY, QUERY_THROUGH_OUT, QUERY_INTERLEAVED,
            256 if FP8 else 512, QUERY_ALIGNED, MODE,
        )  # fmt: skip
        running_max = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
    window_set = (
        window_pages, window_indices + token * window_index_stride, window_count, window_slots,
        window_page_rows, window_page_magic, window_page_shift, window_page_stride,
    )  # fmt: skip
    extra_set = (
        extra_pages, extra_indices + token * extra_index_stride, extra_count, extra_slots,
        extra_page_rows, extra_page_magic, extra_page_shift, extra_page_stride,
    )  # fmt: skip
    if SPREAD:
        acc, running_max, total = attend_spread(
            q, positions, rope, token, head_block * HEADS, num_heads, q_token_stride, q_head_stride,
            num_positions, first, last, window_tiles, window_set, extra_set, scale_log2,
            WINDOW_RECORD, EXTRA_RECORD, ROTATE_QUERY, QUERY_INTERLEAVED, QUERY_ALIGNED, MODE,
        )  # fmt: skip
    else:
        MERGED: tl.constexpr = EXTRA_RECORD is not None and WINDOW_RECORD == EXTRA_RECORD
        window_last = last if MERGED else tl.minimum(last, window_tiles)
        acc, running_max, total = _attend_tiles(
            tl.minimum(first, window_last), window_last, window_tiles, query, acc, running_max, total,
            window_set, extra_set, scale_log2, WINDOW_RECORD, KEYS, MERGED, AHEAD, MODE,
        )  # fmt: skip
        if EXTRA_RECORD is not None and not MERGED:
            acc, running_max, total = _attend_tiles(
                tl.maximum(first, window_tiles) - window_tiles,
                tl.maximum(last, window_tiles) - window_tiles,
                0, query, acc, running_max, total,
                extra_set, window_set, scale_log2, EXTRA_RECORD, KEYS, False, AHEAD, MODE,
            )  # fmt: skip
    if SPLIT:
        if active > 1:
            row = token.to(tl.int64) * splits * num_heads
            at = row + split * num_heads + heads
            dims = tl.arange(0, DIM)
            tl.store(partial + at[:, None] * DIM + dims[None, :], acc, mask=here[:, None])
            stats = partial + stats_offset
            tl.store(stats + at * 2, running_max, mask=here)
            tl.store(stats + at * 2 + 1, total, mask=here)
            tl.debug_barrier()
            counter = arrivals + token * tl.cdiv(num_heads, PARTIAL_HEADS)
            counter += head_block * HEADS // PARTIAL_HEADS
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived != active - 1:
                return
            tl.debug_barrier()
            tl.store(counter, 0)
            acc, running_max, total = _merge_splits(
                partial + row * DIM, stats + row * 2, active, heads, num_heads, HEADS
            )

    safe = finite(running_max)
    weight = total
    if SINK:
        weight += tl.exp2(tl.load(sink + heads, mask=here, other=0.0) * LOG2E - safe)
    empty = total == 0.0
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, weight))
    values = acc * inverse[:, None]
    if UNROTATE_OUTPUT:
        values = _unrotate(values, positions, rope, token, num_positions, HEADS)
    _store_output(
        out, scales, values, token, heads, num_heads, scale_word_stride,
        HEADS_PER_GROUP, HEADS, OUT_INTERLEAVED, FP8, HARDWARE_E4M3, MODE,
    )  # fmt: skip
    at = token.to(tl.int64) * num_heads + heads
    if LSE:
        natural = tl.where(empty, float("inf"), (safe + tl.log2(tl.where(empty, 1.0, total))) * LN2)
        tl.store(lse + at, natural, mask=here)
    if MAX_LOGITS:
        tl.store(max_logits + at, running_max * LN2, mask=here)
