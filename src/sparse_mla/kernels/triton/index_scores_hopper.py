"""Index scores on Hopper: the row kernel of `index_scores`, with every layout chosen by hand.

No key passes through shared memory (see `index_widen_hopper`) and no warp waits for another. MXFP4 keys
are multiplied as f16 first. A program that meets a scale or weight for which f16 is too narrow scores its
tiles once more, as bf16. Both give the same bits.

Where a tile never crosses a page, every lane of a warp looks one page up for one of the program's tiles,
once. If all are there, the tiles that the row sees whole take a loop without masks and divisions, in
which a tile's place is one lane's number. All other tiles, pages of any size and candidates take a loop
that looks up a page for every key.

Written in Gluon, Triton's language with explicit layouts. Same numbers, same scores in the same order
as `index_scores`, heads added in another grouping.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from sparse_mla.kernels.triton.index_lanes_hopper import (
    apply_in_place,
    everywhere,
    from_lane,
    is_upper,
    lane_number,
    own_of,
    quad_sum,
    thread_numbers,
    warp_max,
)
from sparse_mla.kernels.triton.index_widen_hopper import (
    KEY_LEAST,
    KEY_MOST,
    KEYS,
    WARPS,
    any_of,
    as_e4m3,
    as_factors,
    both_keys,
    layouts,
    load_queries,
    widen,
)

__all__ = ["KEYS", "WARPS", "hopper_scores_kernel", "layouts"]

ABSENT = gl.constexpr(-(2**31))
WEIGHT_MOST = gl.constexpr(2.0**80)
"""With weights below it no score made of such values is infinite or NaN."""
LOOKED_UP = gl.constexpr(32)
"""Most tiles of a program whose pages are looked up at once: lanes of a warp."""
ABSENT_SCALE = gl.constexpr(0x7F)
"""Of an MXFP4 key that is not there: f16 holds it, so that no program scores again for it."""


@gluon.jit
def _quotient(value, magic, shift):
    """int32 `value // divisor`, value >= 0; see `kernels.division`."""
    doubled = (value << 1).to(gl.uint32, bitcast=True)
    return (gl.umulhi(doubled, magic.to(gl.uint32)) >> shift.to(gl.uint32)).to(
        gl.int32, bitcast=True
    )


@gluon.jit
def _anew(program):
    """The same number, from which the compiler works out everything again instead of keeping it."""
    return apply_in_place(program, "mov.b32 $0, $1;")


@gluon.jit
def _no_later(tile):
    """A fence within the warp, so that the assembler puts off none of the loads before it.

    It would, to save registers, and the next tile would then come late.
    """
    apply_in_place(tile, "bar.warp.sync 0xffffffff; mov.b32 $0, $1;")


@gluon.jit
def _ordered(total, EXACT: tl.constexpr):
    """float32 scores -> int32 in their order; no NaN comes in unless `EXACT`."""
    if EXACT:
        bits = gl.where(total == 0.0, 0.0, total).to(gl.int32, bitcast=True)
        bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return gl.where(total != total, 0x7FFFFFFF, bits)
    else:  # noqa: RET505 (a branch at compile time)
        bits = (total + 0.0).to(gl.int32, bitcast=True)  # -0.0 becomes 0.0
        return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@gluon.jit
def _totals(keys, shared, weight, lane, EXACT: tl.constexpr, LAYOUTS: gl.constexpr):
    """float32 [KEYS / 2, 4]: each thread's own key, summed over heads."""
    KEYS: gl.constexpr = keys.shape[0]
    HEADS: gl.constexpr = shared.shape[0]
    PRODUCT: gl.constexpr = LAYOUTS.product
    dots = hopper.warpgroup_mma(
        keys, shared.permute((1, 0)), gl.zeros([KEYS, HEADS], gl.float32, PRODUCT), use_acc=False
    )
    if EXACT:
        positive = gl.maximum(dots, 0.0)
    else:  # of the halves; a maximum would take a slot of the busier pipe
        positive = dots + gl.abs(dots)
    parts = gl.reshape(positive * weight[None, :], [KEYS // 16, 2, 8, HEADS // 8, 4, 2])
    parts = gl.permute(parts, [0, 2, 4, 1, 3, 5])
    parts = gl.sum(gl.reshape(parts, [KEYS // 2, 4, 2, HEADS // 4]), 3)
    first, second = gl.split(parts)
    first = gl.convert_layout(first, LAYOUTS.threads, assert_trivial=True)
    second = gl.convert_layout(second, LAYOUTS.threads, assert_trivial=True)
    upper = is_upper(lane)
    return quad_sum(gl.where(upper, second, first), gl.where(upper, first, second))


@gluon.jit
def _score(
    keys,
    factors,  # of FP8: float32 as int32
    found,  # whether the keys exist
    shared,
    weight,
    lane,
    to_scores,
    to_maxima,
    tile,  # counted from that which the pointers are of
    one,  # see `_on`
    EXACT: tl.constexpr,
    RECORD: tl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """Score a tile of keys; store the scores, and the best of each warp's keys, which are a group."""
    KEYS: gl.constexpr = keys.shape[0]
    total = _totals(keys, shared, weight, lane, EXACT, LAYOUTS)
    if RECORD.value_bits == 8:
        total = total * factors.to(gl.float32, bitcast=True)
    bits = gl.where(found, _ordered(total, EXACT), ABSENT)
    gl.store(_on(to_scores, tile, one * (4 * KEYS)), bits)
    gl.store(_on(to_maxima, tile, one * (KEYS // 4)), warp_max(bits), mask=lane == 0)


@gluon.jit
def _above(most, blocks):
    """uint32 [KEYS, 4]: the larger of `most` and scale bytes less `KEY_LEAST`; negative ones wrap."""
    return gl.maximum(most, blocks - KEY_LEAST)


@gluon.jit
def _place(
    tile,
    end,  # tile at which to stop
    chosen,
    num_candidates,
    block_size,
    block_magic,
    block_shift,
    seen,
    table_row,
    table_columns,
    page_rows,
    page_magic,
    page_shift,
    KEYS: tl.constexpr,
    FILTER: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """(page or -1, row in it), int32 [KEYS], of a tile's columns; the page comes from a load."""
    column = tile * KEYS + gl.arange(0, KEYS, layout=LAYOUT)
    if FILTER:
        entry = _quotient(column, block_magic, block_shift)
        here = (column < end * KEYS) & (entry < num_candidates)
        block = gl.load(chosen + entry, mask=here, other=-1)
        position = gl.where(block >= 0, block, 0) * block_size + (column - entry * block_size)
        here = (block >= 0) & (position < seen)
        position = gl.where(here, position, 0)
    else:
        position = column
        here = column < gl.minimum(seen, end * KEYS)
    page = _quotient(position, page_magic, page_shift)
    found = gl.load(table_row + page, mask=here & (page < table_columns), other=-1)
    return found, position - page * page_rows


@gluon.jit
def _load_keys(
    pages,
    page,
    row,
    num_pages,
    page_rows,
    page_stride,
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """(int32 words [KEYS, words of a row], scales, whether the key exists); no key has zeros and 1.

    Scales: float32 [KEYS] as int32 for FP8, bytes as uint32 [KEYS, 4] for MXFP4.
    """
    page = page.to(gl.uint32, bitcast=True)
    row = row.to(gl.uint32, bitcast=True)
    found = page < num_pages.to(gl.uint32)  # -1 is the largest; what is not found is not loaded
    base = page.to(gl.uint64) * (page_stride * UNIT).to(gl.uint64)
    data = base + row * RECORD.data_bytes
    scale_at = base + (page_rows * RECORD.data_bytes).to(gl.uint32) + row * RECORD.scale_bytes
    as_words = gl.pointer_type(gl.int32)
    word = gl.arange(0, RECORD.data_bytes // 4, layout=gl.SliceLayout(0, LAYOUTS.words))[None, :]
    rows = (pages + data).to(as_words)
    words = gl.load(rows[:, None] + word, mask=found[:, None], other=0)
    if RECORD.value_bits == 8:
        return words, gl.load((pages + scale_at).to(as_words), mask=found, other=0), found
    else:  # noqa: RET505 (a branch at compile time)
        LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUTS.blocks)
        block = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUTS.blocks))[None, :]
        at = gl.convert_layout(pages + scale_at, LAYOUT, assert_trivial=True)[:, None] + block
        here = gl.convert_layout(found, LAYOUT, assert_trivial=True)[:, None]
        return words, gl.load(at, mask=here, other=ABSENT_SCALE).to(gl.uint32), found


@gluon.jit
def _byte(value):
    """uint8 -> uint32, where it is loaded."""
    return gl.inline_asm_elementwise(
        "cvt.u32.u16 $0, $1;", "=r,h", [value.to(gl.uint16)], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _on(pointers, count, size):
    """Pointers `count * size` bytes on, both uint32.

    One instruction, if the compiler knows no value of `size`; two of the busier pipe for a power of two.
    """
    on = gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [count, size], dtype=gl.int64, is_pure=True, pack=1
    )
    return (pointers.to(gl.int64) + on).to(pointers.dtype)


@gluon.jit
def _load_words(
    data,  # uint8 pointers [KEYS / 2, 4] to a thread's first bytes of a tile that begins the cache
    before,  # what lies before this tile, in units
    one,  # see `_on`
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """int32 words [KEYS, words of a row] of a tile that lies in one page."""
    PIECES: gl.constexpr = LAYOUTS.pieces
    HALF: gl.constexpr = PIECES.shape[0]
    SECOND: gl.constexpr = 8 * RECORD.data_bytes // 4
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, PIECES)))[None, None, :]
    at = gl.multiple_of(_on(data, before, one * UNIT).to(gl.pointer_type(gl.int32)), [UNIT, UNIT])
    at = at[:, :, None] + word
    first = gl.reshape(gl.load(at), [HALF, 16])
    second = gl.reshape(gl.load(at + SECOND), [HALF, 16])
    if RECORD.value_bits == 8:
        far = gl.reshape(gl.load(at + 16), [HALF, 16])
        first = gl.reshape(gl.permute(gl.join(first, far), [0, 2, 1]), [HALF, 32])
        far = gl.reshape(gl.load(at + SECOND + 16), [HALF, 16])
        second = gl.reshape(gl.permute(gl.join(second, far), [0, 2, 1]), [HALF, 32])
    return gl.convert_layout(both_keys(first, second), LAYOUTS.words, assert_trivial=True)


@gluon.jit
def _load_scales(
    scale,  # uint8 pointers [KEYS / 2, 4] to a thread's scale of a tile that begins the cache
    before,
    one,
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """The scales of such a tile: float32 [KEYS / 2, 4] as int32, bytes as uint32 [KEYS, 4] for MXFP4."""
    at = _on(scale, before, one * UNIT)
    if RECORD.value_bits == 8:
        return gl.load(at.to(gl.pointer_type(gl.int32)))
    else:  # noqa: RET505 (a branch at compile time)
        first, second = _byte(gl.load(at)), _byte(gl.load(at + 8 * RECORD.scale_bytes))
        return gl.convert_layout(both_keys(first, second), LAYOUTS.blocks, assert_trivial=True)


@gluon.jit
def _load_tile(
    data, scale, to_data, to_scale, tile, one, RECORD: tl.constexpr, UNIT: tl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Words and scales of a tile, counted from the program's first, whose place a lane knows."""
    words = _load_words(data, from_lane(to_data, tile), one, RECORD, UNIT, LAYOUTS)
    return words, _load_scales(scale, from_lane(to_scale, tile), one, RECORD, UNIT, LAYOUTS)


@gluon.jit
def _score_and_load(
    words, factors, most, first, data, scale, to_data, to_scale, shared, weight, lane, to_scores,
    to_maxima, one, TILE: tl.constexpr, RECORD: tl.constexpr, UNIT: tl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Score tile `first` + TILE of MXFP4 as f16 -> words and scales two tiles on, `most` of this one too."""
    keys = widen(as_e4m3(words, RECORD), as_factors(factors), False, RECORD, LAYOUTS)
    most = _above(most, factors)
    words, factors = _load_tile(
        data, scale, to_data, to_scale, first + (TILE + 2), one, RECORD, UNIT, LAYOUTS
    )
    _no_later(first)
    _score(
        keys, factors, True, shared, weight, lane, to_scores, to_maxima, first + TILE, one, False,
        RECORD, LAYOUTS,
    )  # fmt: skip
    return words, factors, most


_SIZES = [
    "first_row", "num_tiles", "num_heads", "topk", "limit", "table_columns", "num_pages",
    "page_rows", "page_magic", "page_shift", "page_stride", "scores_stride", "maxima_stride",
    "lists_stride", "table_stride", "tiles_per_program", "num_candidates", "block_size",
    "block_magic", "block_shift", "candidates_stride",
]  # fmt: skip
_SMALL = ["weights", "scales", "table", "requests", "visible", "candidates"]


@gluon.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SMALL)
def hopper_scores_kernel(
    scores,  # int32 [num_rows, columns], row 0 = row first_row of the step
    maxima,  # int32 [num_rows, groups]
    lists,  # int32 [num_rows, width], whose first column becomes 0
    codes,  # uint8 [T, heads, data_bytes]
    scales,  # uint8 [T, heads, 4]
    weights,  # float32 [T, heads]
    pages,  # uint8
    table,  # int32 [R, table_columns]
    requests,  # int32 [T]
    visible,  # int32 [T]
    first_row: tl.int64,
    num_tiles: tl.int32,
    num_heads: tl.int32,
    topk: tl.int32,
    limit: tl.int32,  # no row sees more
    table_columns: tl.int32,
    num_pages: tl.int32,
    page_rows: tl.int32,
    page_magic: tl.int64,
    page_shift: tl.int32,
    page_stride: tl.int64,
    scores_stride: tl.int64,
    maxima_stride: tl.int64,
    lists_stride: tl.int64,
    table_stride: tl.int64,
    tiles_per_program: tl.int32,
    candidates,  # int32 [T, num_candidates]
    num_candidates: tl.int32,
    block_size: tl.int32,
    block_magic: tl.int64,
    block_shift: tl.int32,
    candidates_stride: tl.int64,
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    FILTER: tl.constexpr,  # score the keys of the row's candidate blocks only, in list order
    LAYOUTS: tl.constexpr,  # Layouts
):
    """One row, some tiles of its keys."""
    gl.static_assert(GROUP == 16)  # keys of a warp
    FP8: gl.constexpr = RECORD.value_bits == 8
    LANES: gl.constexpr = gl.SliceLayout(1, LAYOUTS.words)
    QUERIES: gl.constexpr = LAYOUTS.queries
    again = True
    for ATTEMPT in gl.static_range(0, 1 if FP8 else 2):
        if again:
            again = False
            EXACT: gl.constexpr = FP8 or ATTEMPT == 1  # whatever the scales and weights
            program = _anew(gl.program_id(0))
            parts = (num_tiles + tiles_per_program - 1) // tiles_per_program
            local = program // parts
            begin = (program - local * parts) * tiles_per_program
            row = first_row + local
            seen = gl.minimum(gl.load(visible + row), limit)
            request = gl.load(requests + row)
            if begin == 0:
                gl.store(lists + local.to(gl.int64) * lists_stride, 0)
            count = seen
            if FILTER:
                count = num_candidates * block_size
            count = gl.where(seen > topk, count, 0)
            end = gl.minimum(begin + tiles_per_program, (count + KEYS - 1) // KEYS)
            table_row = table + request.to(gl.int64) * table_stride
            chosen = candidates + row * candidates_stride
            if begin < end:
                whole = begin  # tile at which those that the row sees whole end
                if not FILTER and (FP8 or not EXACT):
                    whole = gl.minimum(end, seen // KEYS)
                    page_units = page_rows.to(gl.int64) * (RECORD.data_bytes // UNIT)
                    simple = (begin < whole) & (tiles_per_program <= LOOKED_UP)
                    simple = simple & (page_rows % KEYS == 0)
                    simple = simple & (num_pages * page_stride + page_units < 2**32)
                    own_tile = lane_number()
                    column = gl.minimum(begin + own_tile, end - 1) * KEYS
                    entry = _quotient(column, page_magic, page_shift)
                    before = (column - entry * page_rows).to(gl.uint32)
                    page = gl.load(
                        table_row + entry, mask=simple & (entry < table_columns), other=-1
                    )
                    page = page.to(gl.uint32, bitcast=True)
                ELEMENT: gl.constexpr = gl.bfloat16 if EXACT and not FP8 else gl.float16
                head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERIES))
                queries, narrow = load_queries(
                    codes, scales, row * num_heads + head, head < num_heads, RECORD, EXACT, QUERIES
                )
                shared = gl.allocate_shared_memory(ELEMENT, [HEADS, 128], LAYOUTS.shared, queries)
                hopper.fence_async_shared()
                tl.debug_barrier()  # here, or the compiler puts one into the loops
                head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, LAYOUTS.product))
                weight = gl.load(weights + row * num_heads + head, mask=head < num_heads, other=0.0)
                lane, warp = thread_numbers(LAYOUTS)
                first_key = warp * 16 + lane // 4
                own_key = first_key + (lane & 2) * 4
                groups = begin * (KEYS // GROUP) + warp
                to_scores = scores + local.to(gl.int64) * scores_stride + begin * KEYS + own_key
                to_maxima = maxima + local.to(gl.int64) * maxima_stride + groups
                most = gl.full([KEYS, 4], 0, gl.uint32, LAYOUTS.blocks)
                done = begin
                if not FILTER and (FP8 or not EXACT):
                    if everywhere((page < num_pages.to(gl.uint32)).to(gl.int32)) != 0:
                        done = whole  # scored in this branch
                        one = gl.minimum(page_rows, 1)
                        data = pages + (first_key * RECORD.data_bytes + (lane & 3) * 16)
                        scale = pages + page_rows.to(gl.int64) * RECORD.data_bytes
                        if FP8:
                            scale = scale + own_key * 4
                        else:
                            scale = scale + (first_key * 4 + (lane & 3))
                        to_data = page * page_stride.to(gl.uint32)
                        to_scale = to_data + before * RECORD.scale_bytes // UNIT
                        to_data = to_data + before * (RECORD.data_bytes // UNIT)
                        words, factors = _load_tile(
                            data, scale, to_data, to_scale, 0, one, RECORD, UNIT, LAYOUTS
                        )
                        if not FP8:
                            words1, factors1 = _load_tile(
                                data, scale, to_data, to_scale, 1, one, RECORD, UNIT, LAYOUTS
                            )
                        # Past the whole tiles the program's last one is loaded, as lanes count modulo
                        # 32: it is cached already, or cut, and then the other loop wants it next.
                        LOADED: gl.constexpr = 1 if FP8 else 2
                        to_data = gl.where(own_tile < LOADED, from_lane(to_data, 31), to_data)
                        to_scale = gl.where(own_tile < LOADED, from_lane(to_scale, 31), to_scale)
                        # A load follows the last use of the registers that it fills, so that nothing
                        # is moved.
                        if FP8:
                            for tile in range(whole - begin):
                                keys = widen(words, factors, EXACT, RECORD, LAYOUTS)
                                words = _load_words(
                                    data, from_lane(to_data, tile + 1), one, RECORD, UNIT, LAYOUTS
                                )
                                _no_later(tile)
                                _score(
                                    keys, factors, True, shared, weight, lane, to_scores, to_maxima,
                                    tile, one, EXACT, RECORD, LAYOUTS,
                                )  # fmt: skip
                                factors = _load_scales(
                                    scale, from_lane(to_scale, tile + 1), one, RECORD, UNIT, LAYOUTS
                                )  # fmt: skip
                        else:
                            # Half the bytes: two tiles are under way. Two a round, or both would
                            # share a scoreboard, and to wait for one would be to wait for the other.
                            done = begin + (whole - begin) // 2 * 2
                            for tile in range(0, done - begin, 2):
                                words, factors, most = _score_and_load(
                                    words, factors, most, tile, data, scale, to_data, to_scale,
                                    shared, weight, lane, to_scores, to_maxima, one, 0, RECORD,
                                    UNIT, LAYOUTS,
                                )  # fmt: skip
                                words1, factors1, most = _score_and_load(
                                    words1, factors1, most, tile, data, scale, to_data, to_scale,
                                    shared, weight, lane, to_scores, to_maxima, one, 1, RECORD,
                                    UNIT, LAYOUTS,
                                )  # fmt: skip
                if done < end:
                    place, inside = _place(
                        done, end, chosen, num_candidates, block_size, block_magic, block_shift,
                        seen, table_row, table_columns, page_rows, page_magic, page_shift, KEYS,
                        FILTER, LANES,
                    )  # fmt: skip
                    words, factors, found = _load_keys(
                        pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT,
                        LAYOUTS,
                    )  # fmt: skip
                    place, inside = _place(
                        done + 1, end, chosen, num_candidates, block_size, block_magic, block_shift,
                        seen, table_row, table_columns, page_rows, page_magic, page_shift, KEYS,
                        FILTER, LANES,
                    )  # fmt: skip
                    for tile in range(done, end):
                        next_words, next_factors, next_found = _load_keys(
                            pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT,
                            LAYOUTS,
                        )  # fmt: skip
                        _no_later(tile)
                        place, inside = _place(
                            tile + 2, end, chosen, num_candidates, block_size, block_magic,
                            block_shift, seen, table_row, table_columns, page_rows, page_magic,
                            page_shift, KEYS, FILTER, LANES,
                        )  # fmt: skip
                        _no_later(tile)
                        exists = own_of(found, lane, LAYOUTS)
                        times = factors
                        if FP8:
                            own_factors = own_of(factors, lane, LAYOUTS)
                        else:
                            own_factors = factors
                            if not EXACT:
                                times = as_factors(factors)
                                most = _above(most, factors)
                        keys = widen(as_e4m3(words, RECORD), times, EXACT, RECORD, LAYOUTS)
                        _score(
                            keys, own_factors, exists, shared, weight, lane, to_scores, to_maxima,
                            tile - begin, 1, EXACT, RECORD, LAYOUTS,
                        )  # fmt: skip
                        words, factors, found = next_words, next_factors, next_found
                if not EXACT:
                    again = narrow | any_of(most > KEY_MOST - KEY_LEAST)
                    again = again | any_of(gl.where(gl.abs(weight) < WEIGHT_MOST, 0, 1))
