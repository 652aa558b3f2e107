"""Few heads: the part of the attention kernel in which a tile of 64 keys is spread over eight warps.

A warp scores half of the keys over a quarter of the dims: short chains of products, added up in one
exchange. What a thread loads and widens already is its operand of that product; only the second product
reads keys from shared memory. Tensors here are made of these axes, named with their sizes:

    key = 32 h2 + 16 g2 + 8 i2 + k8                     h: half of the warps, k: lane / 4
    dim = 128 d4 + 64 c2 + 16 j4 + 4 v4 + 2 b2 + o2     d: quarter of the warps, j: lane % 4

g, i, c, v, b and o count a thread's own values; a register holds two along b, as `pairs_e4m3` makes them.
The order of keys and dims inside an operand is free. It is chosen so that no value has to move between
registers, that shared memory is written without bank conflicts, and that the 32 dims of an output scale lie
in the first bits of lane and warp: Triton 3.6 reduces wrongly over others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.numbers import (
    decode_e4m3,
    decode_ue8m0,
    materialise,
    pairs_e2m1,
    pairs_e4m3,
    product,
    product_add,
    to_bf16,
)
from sparse_mla.kernels.triton.rows import row_offsets

HEADS = tl.constexpr(16)
KEYS = tl.constexpr(64)
DIM = tl.constexpr(512)
ROPE_PAIRS = tl.constexpr(32)


@triton.jit
def finite(maximum):
    """The maximum, 0 where there is no key yet: differences of -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def tile_of(tile, boundary, first_set, second_set, MERGED: tl.constexpr):
    """The set that a tile belongs to and the tile's number in it; a set is the tuple of its scalars."""
    if not MERGED:
        return first_set, tile
    pages, indices, count, num_slots, page_rows, magic, shift, page_stride = first_set
    pages2, indices2, count2, num_slots2, page_rows2, magic2, shift2, page_stride2 = second_set
    inside = tile < boundary
    chosen = (
        tl.where(inside, pages, pages2),
        tl.where(inside, indices, indices2),
        tl.where(inside, count, count2),
        tl.where(inside, num_slots, num_slots2),
        tl.where(inside, page_rows, page_rows2),
        tl.where(inside, magic, magic2),
        tl.where(inside, shift, shift2),
        tl.where(inside, page_stride, page_stride2),
    )
    return chosen, tl.where(inside, tile, tile - boundary)


@triton.jit
def _lanes(tile, keys, last, boundary, first_set, second_set, MERGED: tl.constexpr):
    """int32 of the shape of `keys`: what the list holds at these keys of a tile, -1 past its end and from
    tile `last` on. Not looked at yet, so that the loads stay in flight.
    """
    chosen, local = tile_of(tile, boundary, first_set, second_set, MERGED)
    limit = tl.where(tile < last, chosen[2] - local * KEYS, 0)
    return tl.load(chosen[1] + local * KEYS + keys, mask=keys < limit, other=-1)


@triton.jit
def _row_lanes(tile, G: tl.constexpr, last, boundary, first_set, second_set, MERGED: tl.constexpr):
    """int32 (i2, h2, d1, k8): the lanes of a tile's rows of one g."""
    half = tl.arange(0, 2)[None, :, None, None]
    keys = (
        half * 32 + tl.arange(0, 2)[:, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    )
    return _lanes(tile, keys + 16 * G, last, boundary, first_set, second_set, MERGED)


@triton.jit
def _score_lanes(tile, last, boundary, first_set, second_set, MERGED: tl.constexpr):
    """int32 [1, (h2, i2, k % 2, k / 2)] of both g: the lanes once more, because a load costs less than an
    exchange.
    """
    lane = tl.arange(0, 32)[None, :]
    keys = lane // 16 * 32 + lane // 8 % 2 * 8 + lane % 4 * 2 + lane // 4 % 2
    lanes0 = _lanes(tile, keys, last, boundary, first_set, second_set, MERGED)
    lanes1 = _lanes(tile, keys + 16, last, boundary, first_set, second_set, MERGED)
    return lanes0, lanes1


@triton.jit
def _load_rows(lanes, chosen, RECORD: tl.constexpr):
    """(words, words, scales) of the rows of one g, zero where there is none; nothing of such a row is read.

    words  int32 [(i2, h2, d4, k8), (j4, words of 16 values)], of both c
    scales int32 or int64 [(i2, h2, d4, k8), 1], the scale bytes of a quarter of the dims
    """
    slots = tl.where((lanes >= 0) & (lanes < chosen[3]), lanes, -1)
    slots = tl.reshape(tl.broadcast_to(slots, [2, 2, 4, 8]), [128])[:, None]
    valid = slots >= 0
    data, scale_at = row_offsets(
        tl.where(valid, slots, 0), chosen[4], chosen[5], chosen[6], chosen[7], RECORD
    )
    WORDS: tl.constexpr = 16 * RECORD.value_bits // 32
    quarter = (tl.arange(0, 128) // 8 % 4)[:, None]
    column = tl.arange(0, 4 * WORDS)[None, :]
    # written so, one thread's load does not reach into the words of the next one
    inside = quarter * (8 * WORDS) + (column // WORDS * WORDS + column % WORDS)
    at = (chosen[0] + data).to(tl.pointer_type(tl.int32)) + inside
    words0 = tl.load(at, mask=valid, other=0)
    words1 = tl.load(at + 4 * WORDS, mask=valid, other=0)
    SCALES: tl.constexpr = tl.int32 if RECORD.scale_block == 32 else tl.int64
    at = (chosen[0] + scale_at).to(tl.pointer_type(SCALES)) + quarter
    return words0, words1, tl.load(at, mask=valid, other=0)


@triton.jit
def _widen_rows(rows, RECORD: tl.constexpr, MODE: tl.constexpr):
    """bf16 (i2, h2, d4, k8, j4, v4, c2, o2, b2) of what `_load_rows` returned."""
    words0, words1, scales = rows
    WORDS: tl.constexpr = 16 * RECORD.value_bits // 32
    lane = tl.arange(0, 4)[None, None, None, None, :, None, None]
    chunk = tl.arange(0, 2)[None, None, None, None, None, None, :]
    words = tl.reshape(tl.join(words0, words1), [2, 2, 4, 8, 4, WORDS, 2])
    scales = tl.broadcast_to(scales, [128, 4 * WORDS])
    scales = tl.reshape(tl.join(scales, scales), [2, 2, 4, 8, 4, WORDS, 2])
    byte = (scales >> ((chunk * 4 + lane) * 16 // RECORD.scale_block * 8)) & 255
    if RECORD.value_bits == 8:
        values = pairs_e4m3(words, decode_ue8m0(byte), MODE)
    else:
        values = pairs_e2m1(words, decode_e4m3(byte), MODE)
        values = tl.permute(values, [0, 1, 2, 3, 4, 5, 7, 6, 8, 9])
    return tl.reshape(values, [2, 2, 4, 8, 4, 4, 2, 2, 2])


@triton.jit
def _by_dim(keys):
    """bf16 [(h2, d4), 128 dims, (i2, k8)] of what `_widen_rows` returned."""
    keys = tl.reshape(keys, [2, 2, 4, 8, 4, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(keys, [1, 2, 7, 5, 8, 6, 4, 9, 0, 3]), [8, 128, 16])


@triton.jit
def _by_key(keys):
    """bf16 [(h2, i2, k % 2, k / 2), 512 dims] of what `_widen_rows` returned."""
    keys = tl.reshape(keys, [2, 2, 4, 4, 2, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(keys, [1, 0, 4, 3, 2, 8, 7, 5, 6, 9]), [32, DIM])


@triton.jit
def _natural_dims(acc):
    """[16, 512] with the dims in the order of `_by_key` -> the same in their own order."""
    acc = tl.permute(tl.reshape(acc, [HEADS, 4, 2, 2, 4, 8]), [0, 1, 3, 4, 5, 2])
    return tl.reshape(acc, [HEADS, DIM])


@triton.jit
def _load_query_piece(
    base,
    heads,  # int32 [128, 1]
    quarter,  # int32 [128, 1]
    num_heads,
    head_stride,
    C: tl.constexpr,
    V1: tl.constexpr,  # v / 2
    INTERLEAVED: tl.constexpr,
):
    """bf16 [(heads / 8, h2, d4, heads % 8), (j4, 8 dims)], zero for heads that are not there."""
    column = tl.arange(0, 32)[None, :]
    inside = C * 64 + V1 * 8 + column // 8 * 16 + column % 8
    if INTERLEAVED:
        offsets = heads * 16 + quarter * (128 * num_heads)
        offsets = (offsets + inside // 16 * (16 * num_heads) + inside % 16).to(tl.int64)
    else:
        offsets = heads.to(tl.int64) * head_stride + (quarter * 128 + inside)
    return tl.load(base + offsets, mask=heads < num_heads, other=0.0)


@triton.jit
def _load_angles(rope_row, V1: tl.constexpr):
    """float32 [1, 16] cos and sin of the pairs of dims 448..511 that a piece of the query holds."""
    pair = tl.arange(0, 16)[None, :]
    pair = pair // 4 * 8 + V1 * 4 + pair % 4
    return tl.load(rope_row + pair), tl.load(rope_row + ROPE_PAIRS + pair)


@triton.jit
def _rotate_piece(piece, angles, quarter, MODE: tl.constexpr):
    """The piece with the last quarter rotated."""
    cos, sin = angles
    even, odd = tl.split(tl.reshape(piece, [128, 16, 2]))
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    new_even = to_bf16(even * cos - odd * sin, MODE)
    new_odd = to_bf16(odd * cos + even * sin, MODE)
    return tl.where(quarter == 3, tl.reshape(tl.join(new_even, new_odd), [128, 32]), piece)


@triton.jit
def _by_head(piece00, piece01, piece10, piece11, MODE: tl.constexpr):
    """bf16 [(h2, d4), 16, 128 dims] of the pieces of the query, each named by its c and its v / 2."""
    query = tl.join(tl.join(piece00, piece10), tl.join(piece01, piece11))
    query = materialise(tl.reshape(query, [2, 2, 4, 8, 4, 2, 2, 2, 2, 2]), MODE)
    return tl.reshape(tl.permute(query, [1, 2, 0, 3, 8, 9, 7, 5, 4, 6]), [8, HEADS, 128])


@triton.jit
def _attend_tiles(
    first,
    last,
    boundary,  # tiles of the first set, if both sets are merged into one loop
    query,  # bf16 [8, 16, 128]
    acc,  # float32 [16, 512], dims in the order of `_by_key`
    tops,  # float32 [16, 32], largest logit of each lane in units of log2
    sums,  # float32 [16, 32], sum of each lane
    marks,  # `_score_lanes` of the first tile
    rows0,  # `_load_rows` of the first tile
    rows1,
    lanes0,  # `_row_lanes` of the second tile
    lanes1,
    first_set,  # (pages, indices, count, num_slots, page_rows, its magic and shift, page_stride)
    second_set,
    scale_log2,
    RECORD: tl.constexpr,
    MERGED: tl.constexpr,
    MODE: tl.constexpr,
):
    """Add the key tiles `first .. last - 1` to the running softmax: (acc, tops, sums).

    The rows of g = 1 are widened and multiplied one tile ahead, which is the work that fills the exchanges
    and the waiting of the softmax. Rows are loaded one tile before they are widened, slots one tile
    before that. Maxima and sums stay lane by lane until the end.

    The compiler chooses another operand layout, in which values have to move, if it sees that an operand
    was joined from parts. Fences hide that of the keys, sums of one value that of the weights. Keys are
    stored to shared memory where `_by_key` stands, if no fence comes between it and its product.
    """
    chosen, _ = tile_of(first, boundary, first_set, second_set, MERGED)
    following, _ = tile_of(first + 1, boundary, first_set, second_set, MERGED)
    keys1 = materialise(_widen_rows(rows1, RECORD, MODE), MODE)
    rows1 = _load_rows(lanes1, following, RECORD)
    lanes1 = _row_lanes(first + 2, 1, last, boundary, first_set, second_set, MERGED)
    parts1 = product(query, _by_dim(keys1), MODE)
    running_max = tl.max(tops, 1)
    for tile in tl.range(first, last, num_stages=1):
        valid0 = (marks[0] >= 0) & (marks[0] < chosen[3])
        valid1 = (marks[1] >= 0) & (marks[1] < chosen[3])
        chosen = following
        keys0 = materialise(_widen_rows(rows0, RECORD, MODE), MODE)
        by_key0 = _by_key(keys0)
        by_key1 = _by_key(keys1)
        rows0 = _load_rows(lanes0, chosen, RECORD)
        lanes0 = _row_lanes(tile + 2, 0, last, boundary, first_set, second_set, MERGED)
        parts0 = product(query, _by_dim(keys0), MODE)
        # (h2, d4, head, i2, k8, g2) -> [head, (h2, i2, k % 2, k / 2), g2, d2, d2]
        parts = tl.reshape(tl.join(parts0, parts1), [2, 2, 2, HEADS, 2, 4, 2, 2])
        parts = tl.permute(parts, [3, 0, 4, 6, 5, 7, 1, 2])
        left, right = tl.split(tl.reshape(parts, [HEADS, 32, 2, 2, 2]))
        left, right = tl.split(left + right)
        logits0, logits1 = tl.split((left + right) * scale_log2)
        logits0 = tl.sum(logits0[:, :, None], 2)  # the same values: see above
        logits1 = tl.sum(logits1[:, :, None], 2)
        logits0 = tl.where(valid0, logits0, float("-inf"))
        logits1 = tl.where(valid1, logits1, float("-inf"))
        tops = tl.maximum(tops, tl.maximum(logits0, logits1))
        new_max = tl.max(tops, 1)
        safe = finite(new_max)
        following, _ = tile_of(tile + 2, boundary, first_set, second_set, MERGED)
        keys1 = _widen_rows(rows1, RECORD, MODE)
        rows1 = _load_rows(lanes1, following, RECORD)
        lanes1 = _row_lanes(tile + 3, 1, last, boundary, first_set, second_set, MERGED)
        marks = _score_lanes(tile + 1, last, boundary, first_set, second_set, MERGED)
        weights0 = tl.exp2(logits0 - safe[:, None])
        weights1 = tl.exp2(logits1 - safe[:, None])
        rescale = tl.exp2(running_max - safe)
        sums = sums * rescale[:, None] + (weights0 + weights1)
        weights0 = to_bf16(weights0, MODE)
        weights1 = to_bf16(weights1, MODE)
        acc = product_add(weights0, by_key0, acc * rescale[:, None], MODE)
        acc = product_add(weights1, by_key1, acc, MODE)
        running_max = new_max
        keys1 = materialise(keys1, MODE)
        parts1 = product(query, _by_dim(keys1), MODE)
    return acc, tops, sums


@triton.jit
def attend_spread(
    q,
    positions,
    rope,
    token,
    first_head,
    num_heads,
    token_stride,
    head_stride,
    num_positions,
    first,
    last,
    window_tiles,
    window_set,  # see `_attend_tiles`
    extra_set,
    scale_log2,
    WINDOW_RECORD: tl.constexpr,
    EXTRA_RECORD: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MODE: tl.constexpr,
):
    """(acc [16, 512], max [16], total [16]) of the tiles `first .. last - 1` of a token and 16 of its heads.

    The first rows are asked for before the query is rotated, so that both wait at the same time.
    """
    MERGED: tl.constexpr = EXTRA_RECORD is not None and WINDOW_RECORD == EXTRA_RECORD
    window_last = last if MERGED else tl.minimum(last, window_tiles)
    begin = tl.minimum(first, window_last)
    lanes0 = _row_lanes(begin, 0, window_last, window_tiles, window_set, extra_set, MERGED)
    lanes1 = _row_lanes(begin, 1, window_last, window_tiles, window_set, extra_set, MERGED)
    marks = _score_lanes(begin, window_last, window_tiles, window_set, extra_set, MERGED)
    if ALIGNED:  # the compiler sees that the strides are multiples of 8
        token_stride = token_stride // 8 * 8
        head_stride = head_stride // 8 * 8
    base = q + token * token_stride
    row = tl.arange(0, 128)[:, None]
    heads = first_head + row // 64 * 8 + row % 8
    quarter = row // 8 % 4
    piece00 = _load_query_piece(base, heads, quarter, num_heads, head_stride, 0, 0, INTERLEAVED)
    piece01 = _load_query_piece(base, heads, quarter, num_heads, head_stride, 0, 1, INTERLEAVED)
    piece10 = _load_query_piece(base, heads, quarter, num_heads, head_stride, 1, 0, INTERLEAVED)
    piece11 = _load_query_piece(base, heads, quarter, num_heads, head_stride, 1, 1, INTERLEAVED)
    chosen, _ = tile_of(begin, window_tiles, window_set, extra_set, MERGED)
    rows0 = _load_rows(lanes0, chosen, WINDOW_RECORD)
    rows1 = _load_rows(lanes1, chosen, WINDOW_RECORD)
    lanes0 = _row_lanes(begin + 1, 0, window_last, window_tiles, window_set, extra_set, MERGED)
    lanes1 = _row_lanes(begin + 1, 1, window_last, window_tiles, window_set, extra_set, MERGED)
    if ROTATE:
        position = tl.load(positions + token).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        rope_row = rope + position * (2 * ROPE_PAIRS)
        piece10 = _rotate_piece(piece10, _load_angles(rope_row, 0), quarter, MODE)
        piece11 = _rotate_piece(piece11, _load_angles(rope_row, 1), quarter, MODE)
    query = _by_head(piece00, piece01, piece10, piece11, MODE)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    tops = tl.full([HEADS, 32], float("-inf"), tl.float32)
    sums = tl.zeros([HEADS, 32], tl.float32)
    acc, tops, sums = _attend_tiles(
        begin, window_last, window_tiles, query, acc, tops, sums, marks, rows0, rows1,
        lanes0, lanes1, window_set, extra_set, scale_log2, WINDOW_RECORD, MERGED, MODE,
    )  # fmt: skip
    if EXTRA_RECORD is not None and not MERGED:
        begin = tl.maximum(first, window_tiles) - window_tiles
        end = tl.maximum(last, window_tiles) - window_tiles
        lanes0 = _row_lanes(begin, 0, end, 0, extra_set, window_set, False)
        lanes1 = _row_lanes(begin, 1, end, 0, extra_set, window_set, False)
        marks = _score_lanes(begin, end, 0, extra_set, window_set, False)
        rows0 = _load_rows(lanes0, extra_set, EXTRA_RECORD)
        rows1 = _load_rows(lanes1, extra_set, EXTRA_RECORD)
        lanes0 = _row_lanes(begin + 1, 0, end, 0, extra_set, window_set, False)
        lanes1 = _row_lanes(begin + 1, 1, end, 0, extra_set, window_set, False)
        acc, tops, sums = _attend_tiles(
            begin, end, 0, query, acc, tops, sums,
            marks, rows0, rows1, lanes0, lanes1, extra_set, window_set, scale_log2, EXTRA_RECORD, False, MODE,
        )  # fmt: skip
    return _natural_dims(acc), tl.max(tops, 1), tl.sum(sums, 1)
