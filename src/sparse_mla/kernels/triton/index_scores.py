"""Index scores in Triton: score_j = sum_h weight_h * relu(<q_h, k_j>), stored so that integers order them.

A program makes tiles of `KEYS` scores with one matrix product each. FP8 codes are widened to f16 by
shifting their bits (value * 2**-8, subnormals included); both scales, powers of two, and the missing
2**16 are multiplied in at the end: all exact. MXFP4 values are widened to bf16 with their block scales,
exactly. Products are summed in float32 by the tensor cores, heads in float32 in a fixed order.

Each score is stored as an int32 whose order is that of the floats: 0.0 and -0.0 are equal, NaN is the
largest, and `ABSENT`, below -inf, marks keys that the row does not see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_mla.kernels.triton.numbers import (
    decode_ue8m0,
    from_bf16,
    materialise,
    widen_e2m1,
)

INDEX_DIM = tl.constexpr(128)
ABSENT = tl.constexpr(-(2**31))

# A word of four e4m3 codes -> four f16 values * 2**-8, in the order of bytes 0, 2, 1, 3: both operands
# of a product are permuted alike, and so no value has to change its half of a register.
_WIDEN_F16 = tl.constexpr("""
{
.reg .b32 a, b, m, n;
shl.b32 a, $4, 8;
shr.u32 m, a, 1;
shr.u32 n, $4, 1;
and.b32 m, m, 0x3F803F80;
and.b32 n, n, 0x3F803F80;
lop3.b32 a, a, 0x80008000, m, 0xEA;
lop3.b32 b, $4, 0x80008000, n, 0xEA;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}""")


@triton.jit
def _f16(byte):
    """uint32 e4m3 codes -> f16 values * 2**-8."""
    bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _fence(values, MODE: tl.constexpr):
    """The same f16 values behind a fence, see `numbers.materialise`."""
    if MODE == "ptx":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float16, is_pure=False, pack=2
        )
    return values


@triton.jit
def _widen(words, scales, RECORD: tl.constexpr, MODE: tl.constexpr):
    """int32 [N, words of a row], scale words int32 [N] -> f16 (FP8) or bf16 (MXFP4) [N, 128]."""
    N: tl.constexpr = words.shape[0]
    if RECORD.value_bits == 8:
        if MODE == "ptx":
            x0, x1, x2, x3 = tl.inline_asm_elementwise(
                _WIDEN_F16,
                "=h,=h,=h,=h,r",
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
        else:
            wide = words.to(tl.uint32, bitcast=True)
            x0, x1 = _f16(wide & 255), _f16((wide >> 16) & 255)
            x2, x3 = _f16((wide >> 8) & 255), _f16(wide >> 24)
        values = tl.join(tl.join(x0, x2), tl.join(x1, x3))
        return _fence(tl.reshape(values, [N, INDEX_DIM]), MODE)
    else:  # noqa: RET505 (a branch at compile time)
        shift = tl.arange(0, 4) * 8
        byte = (scales.to(tl.uint32, bitcast=True)[:, None] >> shift[None, :].to(tl.uint32)) & 255
        scale = decode_ue8m0(byte)
        blocks = tl.reshape(words, [N, 4, 4])
        scale, blocks = tl.broadcast(scale[:, :, None], blocks)
        return materialise(tl.reshape(widen_e2m1(blocks, scale, MODE), [N, INDEX_DIM]), MODE)


@triton.jit
def _product(keys, queries, RECORD: tl.constexpr, MODE: tl.constexpr):
    """[N, 128] x [M, 128] -> float32 [N, M]."""
    if MODE == "interpreted":
        if RECORD.value_bits == 8:
            return tl.dot(keys.to(tl.float32), tl.trans(queries.to(tl.float32)))
        return tl.dot(from_bf16(keys), tl.trans(from_bf16(queries)))
    return tl.dot(keys, tl.trans(queries))


@triton.jit
def load_keys(
    pages,  # uint8 pointer to the first page
    slots,  # int32 [N], negative = none
    page_rows,
    page_stride,  # int64, units of UNIT bytes between pages (so that alignment is visible)
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
):
    """(int32 words [N, words of a row], int32 scale words [N]), zero where there is no key."""
    valid = slots >= 0
    safe = tl.where(valid, slots, 0)
    page = (safe.to(tl.uint32, bitcast=True) // page_rows.to(tl.uint32)).to(tl.int32, bitcast=True)
    row = safe - page * page_rows
    base = page.to(tl.int64) * (page_stride * UNIT)
    data = base + row * RECORD.data_bytes
    scale_at = base + page_rows * RECORD.data_bytes + row * RECORD.scale_bytes
    as_words = tl.pointer_type(tl.int32)
    word = tl.arange(0, RECORD.data_bytes // 4)[None, :]
    words = tl.load((pages + data[:, None]).to(as_words) + word, mask=valid[:, None], other=0)
    return words, tl.load((pages + scale_at).to(as_words), mask=valid, other=0)


@triton.jit
def load_queries(
    codes,  # uint8 [T, heads, data_bytes] contiguous
    scales,  # uint8 [T, heads, 4] contiguous, MXFP4 only
    weights,  # float32 [T, heads] contiguous
    token,  # int64 [N], row of each lane
    head,  # int32 [N]
    here,  # int1 [N]
    num_heads,
    RECORD: tl.constexpr,
    MODE: tl.constexpr,
):
    """(values [N, 128], weights float32 [N]) of (token, head) lanes, zero where there is none."""
    pair = token * num_heads + head
    word = tl.arange(0, RECORD.data_bytes // 4)[None, :]
    at = (codes + pair[:, None] * RECORD.data_bytes).to(tl.pointer_type(tl.int32)) + word
    words = tl.load(at, mask=here[:, None], other=0)
    if RECORD.value_bits == 8:
        factors = pair.to(tl.int32)  # not looked at
    else:
        factors = tl.load((scales + pair * 4).to(tl.pointer_type(tl.int32)), mask=here, other=0)
    values = _widen(words, factors, RECORD, MODE)
    return values, tl.load(weights + pair, mask=here, other=0.0)


@triton.jit
def tile_scores(
    words,
    key_scales,
    queries,  # [ROWS * HEADS, 128]
    weights,  # float32 [ROWS * HEADS]
    ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    MODE: tl.constexpr,
):
    """float32 [N, ROWS]: the scores of N keys for some rows."""
    N: tl.constexpr = words.shape[0]
    HEADS: tl.constexpr = queries.shape[0] // ROWS
    dots = _product(_widen(words, key_scales, RECORD, MODE), queries, RECORD, MODE)
    parts = tl.maximum(dots, 0.0) * weights[None, :]
    total = tl.sum(tl.reshape(parts, [N, ROWS, HEADS]), 2)
    if RECORD.value_bits == 8:
        total = total * (key_scales.to(tl.float32, bitcast=True) * 65536.0)[:, None]
    return total


@triton.jit
def store_scores(
    scores,  # int32 [rows, columns]
    maxima,  # int32 [rows, groups]
    total,  # float32 [KEYS, ROWS]
    seen,  # int1 [KEYS, ROWS]
    rows,  # int64 [ROWS] of the two tensors
    writes,  # int1 [ROWS]
    tile,
    scores_stride,
    maxima_stride,
    GROUP: tl.constexpr,
):
    """Store a tile in integer order, and the best of each `GROUP` keys."""
    KEYS: tl.constexpr = total.shape[0]
    ROWS: tl.constexpr = total.shape[1]
    bits = tl.where(total == 0.0, 0.0, total).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(total != total, 0x7FFFFFFF, bits)
    bits = tl.where(seen, bits, ABSENT)
    column = tile * KEYS + tl.arange(0, KEYS)
    at = scores + rows[None, :] * scores_stride + column[:, None]
    kept = writes[None, :] & (column >= 0)[:, None]
    tl.store(at, bits, mask=kept)
    best = tl.max(tl.reshape(bits, [KEYS // GROUP, GROUP, ROWS]), 1)
    group = tile * (KEYS // GROUP) + tl.arange(0, KEYS // GROUP)
    kept = writes[None, :] & (group >= 0)[:, None]
    tl.store(maxima + rows[None, :] * maxima_stride + group[:, None], best, mask=kept)


@triton.jit
def _slots_of(position, here, table_row, columns, page_rows, num_pages):
    """int32 slots of a request's positions, -1 where there is no page."""
    page = position // page_rows
    here = here & (page < columns)
    block = tl.load(table_row + page, mask=here, other=-1)
    found = here & (block >= 0) & (block < num_pages)
    return tl.where(found, block * page_rows + (position - page * page_rows), -1)


@triton.jit
def _columns_of(
    tile,
    end,  # tile at which to stop
    candidates_row,
    num_candidates,
    block_size,
    seen,
    KEYS: tl.constexpr,
    FILTER: tl.constexpr,
):
    """(positions int32 [KEYS], whether the row sees them) of a tile's columns."""
    column = tile * KEYS + tl.arange(0, KEYS)
    if FILTER:
        entry = column // block_size
        there = (entry < num_candidates) & (column < end * KEYS)
        block = tl.load(candidates_row + entry, mask=there, other=-1)
        known = (block >= 0) & (block <= (seen - 1) // block_size)
        position = tl.where(known, block, 0) * block_size + (column - entry * block_size)
        return position, known & (position < seen)
    else:  # noqa: RET505 (a branch at compile time)
        return column, column < tl.minimum(seen, end * KEYS)


_SIZES = [
    "first_row", "num_tiles", "num_heads", "topk", "limit", "table_columns", "num_pages",
    "page_rows", "page_stride", "scores_stride", "maxima_stride", "lists_stride", "table_stride",
]  # fmt: skip
_ROW_SIZES = [*_SIZES, "tiles_per_program", "num_candidates", "block_size", "candidates_stride"]
_SMALL = ["weights", "scales", "table", "requests", "visible"]


@triton.jit(do_not_specialize=_ROW_SIZES, do_not_specialize_on_alignment=[*_SMALL, "candidates"])
def row_scores_kernel(
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
    page_stride: tl.int64,
    scores_stride: tl.int64,
    maxima_stride: tl.int64,
    lists_stride: tl.int64,
    table_stride: tl.int64,
    tiles_per_program: tl.int32,
    candidates,  # int32 [T, num_candidates]
    num_candidates: tl.int32,
    block_size: tl.int32,
    candidates_stride: tl.int64,
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    FILTER: tl.constexpr,  # score the keys of the row's candidate blocks only, in list order
    MODE: tl.constexpr,
):
    """One row, some tiles of its keys; the next tile's bytes are in flight while one is multiplied."""
    parts = (num_tiles + tiles_per_program - 1) // tiles_per_program
    local = tl.program_id(0) // parts
    begin = (tl.program_id(0) - local * parts) * tiles_per_program
    row = first_row + local
    seen = tl.minimum(tl.load(visible + row), limit)
    request = tl.load(requests + row)
    if begin == 0:
        tl.store(lists + local * lists_stride, 0)
    count = seen
    if FILTER:
        count = num_candidates * block_size
    count = tl.where(seen > topk, count, 0)
    end = tl.minimum(begin + tiles_per_program, (count + KEYS - 1) // KEYS)
    if begin < end:
        table_row = table + request.to(tl.int64) * table_stride
        chosen = candidates + row * candidates_stride
        head = tl.arange(0, HEADS)
        token = row + tl.zeros([HEADS], tl.int64)
        queries, weight = load_queries(
            codes, scales, weights, token, head, head < num_heads, num_heads, RECORD, MODE
        )
        rows = local + tl.zeros([1], tl.int64)
        position, here = _columns_of(
            begin, end, chosen, num_candidates, block_size, seen, KEYS, FILTER
        )
        slots = _slots_of(position, here, table_row, table_columns, page_rows, num_pages)
        words, factors = load_keys(pages, slots, page_rows, page_stride, RECORD, UNIT)
        for tile in range(begin, end):
            position, here = _columns_of(
                tile + 1, end, chosen, num_candidates, block_size, seen, KEYS, FILTER
            )
            later = _slots_of(position, here, table_row, table_columns, page_rows, num_pages)
            next_words, next_factors = load_keys(pages, later, page_rows, page_stride, RECORD, UNIT)
            total = tile_scores(words, factors, queries, weight, 1, RECORD, MODE)
            store_scores(
                scores, maxima, total, (slots >= 0)[:, None], rows, rows >= 0, tile,
                scores_stride, maxima_stride, GROUP,
            )  # fmt: skip
            slots, words, factors = later, next_words, next_factors


@triton.jit(do_not_specialize=[*_SIZES, "num_rows"], do_not_specialize_on_alignment=_SMALL)
def shared_scores_kernel(
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
    page_stride: tl.int64,
    scores_stride: tl.int64,
    maxima_stride: tl.int64,
    lists_stride: tl.int64,
    table_stride: tl.int64,
    num_rows: tl.int32,
    RECORD: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # rows of one product
    PARTS: tl.constexpr,  # products of a program and tile
    MODE: tl.constexpr,
):
    """`ROWS * PARTS` rows, one tile of keys, loaded once for each request among the rows."""
    block = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) - block * num_tiles
    local = block * (ROWS * PARTS) + tl.arange(0, ROWS * PARTS)
    inside = local < num_rows
    seen = tl.load(visible + (first_row + local), mask=inside, other=0)
    seen = tl.minimum(seen, limit)
    request = tl.load(requests + (first_row + local), mask=inside, other=-1)
    if tile == 0:
        tl.store(lists + local * lists_stride, tl.zeros_like(local), mask=inside)
    pending = tl.where((seen > topk) & (seen > tile * KEYS), request, -1)
    current = tl.max(pending, 0)
    column = tile * KEYS + tl.arange(0, KEYS)
    lane = tl.arange(0, ROWS * HEADS)
    while current >= 0:
        most = tl.max(tl.where(pending == current, seen, 0), 0)
        table_row = table + current.to(tl.int64) * table_stride
        slots = _slots_of(column, column < most, table_row, table_columns, page_rows, num_pages)
        words, factors = load_keys(pages, slots, page_rows, page_stride, RECORD, UNIT)
        for part in range(PARTS):
            rows = block * (ROWS * PARTS) + part * ROWS + tl.arange(0, ROWS)
            sees = tl.load(visible + (first_row + rows), mask=rows < num_rows, other=0)
            sees = tl.minimum(sees, limit)
            whose = tl.load(requests + (first_row + rows), mask=rows < num_rows, other=-1)
            writes = (whose == current) & (sees > topk) & (sees > tile * KEYS)
            if tl.max(writes.to(tl.int32), 0) > 0:
                of_lane = block * (ROWS * PARTS) + part * ROWS + lane // HEADS
                head = lane % HEADS
                queries, weight = load_queries(
                    codes, scales, weights, first_row + of_lane, head,
                    (head < num_heads) & (of_lane < num_rows), num_heads, RECORD, MODE,
                )  # fmt: skip
                total = tile_scores(words, factors, queries, weight, ROWS, RECORD, MODE)
                here = (slots >= 0)[:, None] & (column[:, None] < sees[None, :])
                store_scores(
                    scores, maxima, total, here, rows.to(tl.int64), writes, tile,
                    scores_stride, maxima_stride, GROUP,
                )  # fmt: skip
        pending = tl.where(pending == current, -1, pending)
        current = tl.max(pending, 0)
