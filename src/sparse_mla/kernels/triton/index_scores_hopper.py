"""Index scores on Hopper: the row kernel of `index_scores`, with every layout chosen by hand.

The keys of a tile go from global memory to the registers in which the warpgroup matrix instruction
reads them, and are widened there: no key passes through shared memory and no warp waits for another.
That is possible because a product does not care in which order its 128 dims are added, as long as both
sides use the same one: `_dim_of` says which dim the instruction's column holds.

Written in Gluon, Triton's language with explicit layouts. Same numbers, same scores in the same order
as `index_scores`, heads added in another grouping.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from sparse_mla.cache.records import RecordFormat

ABSENT = gl.constexpr(-(2**31))
WARPS = 4
KEYS = 64
"""Keys of a tile: rows of one warpgroup matrix instruction."""

# A word of four e4m3 codes -> four f16 values by the GPU's own conversion, exact; NaN codes stay NaN.
_WIDEN_E4M3 = gl.constexpr("""
{
.reg .b16 lo, hi;
.reg .b32 a, b;
mov.b32 {lo, hi}, $4;
cvt.rn.f16x2.e4m3x2 a, lo;
cvt.rn.f16x2.e4m3x2 b, hi;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}""")

# A word of eight e2m1 codes and a bf16 scale, twice in a word -> four registers of two bf16 values:
# codes 0 and 4, 1 and 5, 2 and 6, 3 and 7. Magnitude bits in the bf16 fields are worth value * 2**-126.
_WIDEN_E2M1 = gl.constexpr("""
{
.reg .b32 m0, m1, m2, m3, s, up, zero;
mov.b32 up, 0x7E807E80;
mov.b32 zero, 0x80008000;
shl.b32 m0, $8, 6;
shl.b32 s, $8, 12;
and.b32 m0, m0, 0x01C001C0;
lop3.b32 m0, s, 0x80008000, m0, 0xEA;
shl.b32 m1, $8, 2;
shl.b32 s, $8, 8;
and.b32 m1, m1, 0x01C001C0;
lop3.b32 m1, s, 0x80008000, m1, 0xEA;
shr.u32 m2, $8, 2;
shl.b32 s, $8, 4;
and.b32 m2, m2, 0x01C001C0;
lop3.b32 m2, s, 0x80008000, m2, 0xEA;
shr.u32 m3, $8, 6;
and.b32 m3, m3, 0x01C001C0;
lop3.b32 m3, $8, 0x80008000, m3, 0xEA;
fma.rn.bf16x2 m0, m0, up, zero;
fma.rn.bf16x2 m1, m1, up, zero;
fma.rn.bf16x2 m2, m2, up, zero;
fma.rn.bf16x2 m3, m3, up, zero;
fma.rn.bf16x2 m0, m0, $9, zero;
fma.rn.bf16x2 m1, m1, $9, zero;
fma.rn.bf16x2 m2, m2, $9, zero;
fma.rn.bf16x2 m3, m3, $9, zero;
mov.b32 {$0, $1}, m0;
mov.b32 {$2, $3}, m1;
mov.b32 {$4, $5}, m2;
mov.b32 {$6, $7}, m3;
}""")


@dataclass(frozen=True)
class Layouts:
    """Where the parts of a tile lie, as compile-time constants of the kernel."""

    words: Any  # int32 [KEYS, words of a row]: 16 bytes of a row in a thread, four threads side by side
    product: Any  # float32 [KEYS, HEADS]
    keys: Any  # f16 or bf16 [KEYS, 128], the product's left operand
    queries: Any  # the right operand while it is loaded
    shared: Any  # and where the instruction reads it


@functools.cache
def layouts(record: RecordFormat, heads: int) -> Layouts:
    """The layouts for a record and a number of heads (a power of two, 16 or more)."""
    words = record.data_bytes // 4
    far = [[0, 16]] if words == 32 else []
    product = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, heads, 16])
    return Layouts(
        words=gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], *far, [8, 0]],
            lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[KEYS, words],
        ),
        product=product,
        keys=gl.DotOperandLayout(operand_index=0, parent=product, k_width=2),
        queries=gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]),
        shared=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )


@gluon.jit
def _quotient(value, magic, shift):
    """int32 `value // divisor`, value >= 0; see `kernels.division`."""
    doubled = (value << 1).to(gl.uint32, bitcast=True)
    return (gl.umulhi(doubled, magic.to(gl.uint32)) >> shift.to(gl.uint32)).to(
        gl.int32, bitcast=True
    )


@gluon.jit
def _dim_of(column, RECORD: gl.constexpr):
    """The dim that a column of the product holds, from the order in which `_widen` leaves them."""
    if RECORD.value_bits == 8:
        inside = (column & 65) | ((column & 56) >> 2)
        return inside | ((column & 6) << 3)
    else:  # noqa: RET505 (a branch at compile time)
        inside = ((column & 24) >> 3) | ((column & 1) << 2)
        return inside | ((column & 96) >> 2) | ((column & 6) << 4)


@gluon.jit
def _load_queries(codes, scales, pair, here, RECORD: tl.constexpr, LAYOUT: gl.constexpr):
    """f16 (FP8) or bf16 (MXFP4) [HEADS, 128], columns as in the product; zero for absent heads."""
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    dim = _dim_of(column, RECORD)[None, :]
    if RECORD.value_bits == 8:
        byte = gl.load(codes + pair[:, None] * RECORD.data_bytes + dim, mask=here[:, None], other=0)
        return byte.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    else:  # noqa: RET505 (a branch at compile time)
        at = codes + pair[:, None] * RECORD.data_bytes + dim // 2
        nibble = gl.load(at, mask=here[:, None], other=0).to(gl.uint32) >> ((dim & 1) * 4).to(
            gl.uint32
        )
        block = scales + pair[:, None] * RECORD.scale_bytes + dim // RECORD.scale_block
        exponent = gl.load(block, mask=here[:, None], other=0).to(gl.uint32)
        scale = gl.where(exponent == 0, 0x00400000, exponent << 23).to(gl.float32, bitcast=True)
        magnitude = ((nibble & 7) << 22).to(gl.float32, bitcast=True) * 8.507059173023462e37
        signed = (magnitude.to(gl.uint32, bitcast=True) | ((nibble & 8) << 28)).to(
            gl.float32, bitcast=True
        )
        return (signed * scale).to(gl.bfloat16)


@gluon.jit
def _widen(words, factors, RECORD: tl.constexpr, LAYOUTS: gl.constexpr):
    """int32 [KEYS, words of a row], int32 [KEYS] -> the product's left operand [KEYS, 128]."""
    KEYS: gl.constexpr = words.shape[0]
    OPERAND: gl.constexpr = LAYOUTS.keys
    if RECORD.value_bits == 8:
        x0, x1, x2, x3 = gl.inline_asm_elementwise(
            _WIDEN_E4M3,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
        values = gl.join(gl.join(x0, x2), gl.join(x1, x3))
        bits = gl.reshape(values, [KEYS, 2, 2, 2, 2, 2, 2, 2])
        ordered = gl.permute(bits, [0, 1, 4, 5, 6, 2, 3, 7])
    else:
        word = gl.arange(0, words.shape[1], layout=gl.SliceLayout(0, words.type.layout))
        shift = ((word // 4) * 8).to(gl.uint32)
        byte = (factors.to(gl.uint32, bitcast=True)[:, None] >> shift[None, :]) & 255
        scale = gl.where(byte == 0, 0x00400040, byte * 0x00800080).to(gl.int32, bitcast=True)
        x0, x1, x2, x3, x4, x5, x6, x7 = gl.inline_asm_elementwise(
            _WIDEN_E2M1,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, scale],
            dtype=(
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
        even = gl.join(gl.join(x0, x4), gl.join(x2, x6))
        odd = gl.join(gl.join(x1, x5), gl.join(x3, x7))
        bits = gl.reshape(gl.join(even, odd), [KEYS, 2, 2, 2, 2, 2, 2, 2])
        ordered = gl.permute(bits, [0, 3, 4, 5, 6, 1, 2, 7])
    return gl.convert_layout(gl.reshape(ordered, [KEYS, 128]), OPERAND, assert_trivial=True)


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
    here = column < end * KEYS
    position = column
    if FILTER:
        entry = _quotient(column, block_magic, block_shift)
        block = gl.load(chosen + entry, mask=here & (entry < num_candidates), other=-1)
        here = block >= 0
        position = gl.where(here, block, 0) * block_size + (column - entry * block_size)
    here = here & (position < seen)
    position = gl.where(here, position, 0)
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
    LAYOUT: tl.constexpr,
):
    """(int32 words [KEYS, words of a row], int32 scale words [KEYS], whether the key exists)."""
    found = (page >= 0) & (page < num_pages)
    base = gl.where(found, page, 0).to(gl.int64) * (page_stride * UNIT)
    data = base + row * RECORD.data_bytes
    scale_at = base + page_rows * RECORD.data_bytes + row * RECORD.scale_bytes
    as_words = gl.pointer_type(gl.int32)
    word = gl.arange(0, RECORD.data_bytes // 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = (pages + data).to(as_words)
    words = gl.load(rows[:, None] + word, mask=found[:, None], other=0)
    return words, gl.load((pages + scale_at).to(as_words), mask=found, other=0), found


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
    """One row, some tiles of its keys; pages are looked up two tiles ahead and rows loaded one ahead."""
    parts = (num_tiles + tiles_per_program - 1) // tiles_per_program
    local = gl.program_id(0) // parts
    begin = (gl.program_id(0) - local * parts) * tiles_per_program
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
    if begin < end:
        WORDS: gl.constexpr = LAYOUTS.words
        PRODUCT: gl.constexpr = LAYOUTS.product
        QUERIES: gl.constexpr = LAYOUTS.queries
        SHARED: gl.constexpr = LAYOUTS.shared
        LANES: gl.constexpr = gl.SliceLayout(1, WORDS)
        OWN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
        ELEMENT: gl.constexpr = gl.float16 if RECORD.value_bits == 8 else gl.bfloat16
        table_row = table + request.to(gl.int64) * table_stride
        chosen = candidates + row * candidates_stride
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERIES))
        queries = _load_queries(
            codes, scales, row * num_heads + head, head < num_heads, RECORD, QUERIES
        )
        shared = gl.allocate_shared_memory(ELEMENT, [HEADS, 128], SHARED, queries)
        hopper.fence_async_shared()
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
        weight = gl.load(weights + row * num_heads + head, mask=head < num_heads, other=0.0)
        place, inside = _place(
            begin, end, chosen, num_candidates, block_size, block_magic, block_shift, seen, table_row,
            table_columns, page_rows, page_magic, page_shift, KEYS, FILTER, LANES,
        )  # fmt: skip
        words, factors, found = _load_keys(
            pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT, WORDS
        )
        place, inside = _place(
            begin + 1, end, chosen, num_candidates, block_size, block_magic, block_shift, seen,
            table_row, table_columns, page_rows, page_magic, page_shift, KEYS, FILTER, LANES,
        )  # fmt: skip
        column = gl.arange(0, KEYS, layout=OWN)
        to_scores = scores + local.to(gl.int64) * scores_stride
        to_maxima = maxima + local.to(gl.int64) * maxima_stride
        for tile in range(begin, end):
            next_words, next_factors, next_found = _load_keys(
                pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT,
                WORDS,
            )  # fmt: skip
            place, inside = _place(
                tile + 2, end, chosen, num_candidates, block_size, block_magic, block_shift, seen,
                table_row, table_columns, page_rows, page_magic, page_shift, KEYS, FILTER, LANES,
            )  # fmt: skip
            keys = _widen(words, factors, RECORD, LAYOUTS)
            dots = hopper.warpgroup_mma(
                keys, shared.permute((1, 0)),
                gl.zeros([KEYS, HEADS], gl.float32, PRODUCT), use_acc=False,
            )  # fmt: skip
            total = gl.sum(gl.maximum(dots, 0.0) * weight[None, :], 1)
            if RECORD.value_bits == 8:
                scale = gl.convert_layout(factors, OWN, assert_trivial=True)
                total = total * scale.to(gl.float32, bitcast=True)
            bits = gl.where(total == 0.0, 0.0, total).to(gl.int32, bitcast=True)
            bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            bits = gl.where(total != total, 0x7FFFFFFF, bits)
            bits = gl.where(gl.convert_layout(found, OWN, assert_trivial=True), bits, ABSENT)
            gl.store(to_scores + (tile * KEYS + column), bits)
            best = gl.max(gl.reshape(bits, [KEYS // GROUP, GROUP]), 1)
            group = gl.arange(0, KEYS // GROUP, layout=best.type.layout)
            gl.store(to_maxima + (tile * (KEYS // GROUP) + group), best)
            words, factors, found = next_words, next_factors, next_found
