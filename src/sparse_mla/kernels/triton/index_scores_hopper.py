"""Index scores on Hopper: the row kernel of `index_scores`, with every layout chosen by hand.

The keys of a tile go from global memory to the registers in which the warpgroup matrix instruction
reads them, and are widened there: no key passes through shared memory and no warp waits for another.
That is possible because a product does not care in which order its 128 dims are added, as long as both
sides use the same one: `_dim_of` says which dim the instruction's column holds.

MXFP4 keys and queries are multiplied as f16 first, which takes fewer instructions than bf16 but holds
fewer block scales. A program that meets another scale scores its tiles once more, as bf16. Both are
exact, and no value but zero is a subnormal of either, so both give the same bits.

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
QUERY_LEAST, QUERY_MOST = gl.constexpr(114), gl.constexpr(140)
KEY_LEAST, KEY_MOST = gl.constexpr(115), gl.constexpr(137)
"""MXFP4 scale bytes with which every value but zero is a normal f16; of keys, half of every value."""
WEIGHT_MOST = gl.constexpr(2.0**80)
"""With weights below it no score made of such values is infinite or NaN."""
BYTES_1_3 = gl.constexpr(0x01000100)
TWO_LEAST = gl.constexpr(0x20002000)
"""Of `KEY_LEAST`, twice: the f16 that makes half a value of an e4m3 code, 2**(115 - 127 + 5)."""
ABSENT_SCALES = gl.constexpr(0x7F7F7F7F)

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

# A word of eight e2m1 codes and an f16 factor, twice in a word -> four registers of two f16 values:
# codes 0 and 2, 1 and 3, 4 and 6, 5 and 7. As bits of e4m3 a code is worth value * 2**-6, exactly. In
# the low nibbles, adding 24 = 0b11000 to a code's four bits moves the sign from bit 3 to bit 5.
_WIDEN_E2M1 = gl.constexpr("""
{
.reg .b16 l0, l1, h0, h1;
.reg .b32 low, high, m0, m1, m2, m3;
and.b32 low, $8, 0x0F0F0F0F;
mad.lo.u32 low, low, 4, 0x60606060;
and.b32 low, low, 0x9C9C9C9C;
shr.u32 high, $8, 2;
and.b32 high, high, 0x1C1C1C1C;
lop3.b32 high, $8, 0x80808080, high, 0xEA;
mov.b32 {l0, l1}, low;
mov.b32 {h0, h1}, high;
cvt.rn.f16x2.e4m3x2 m0, l0;
cvt.rn.f16x2.e4m3x2 m1, h0;
cvt.rn.f16x2.e4m3x2 m2, l1;
cvt.rn.f16x2.e4m3x2 m3, h1;
mul.f16x2 m0, m0, $9;
mul.f16x2 m1, m1, $9;
mul.f16x2 m2, m2, $9;
mul.f16x2 m3, m3, $9;
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
def _anew(program):
    """The same number, from which the compiler works out everything again instead of keeping it."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _no_later(tile):
    """A fence within the warp, so that the assembler puts off none of the loads before it.

    It would, to save registers, and the next tile would then come late.
    """
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [tile],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _dim_of(column, RECORD: gl.constexpr):
    """The dim that a column of the product holds, from the order in which `_widen` leaves them."""
    if RECORD.value_bits == 8:
        inside = (column & 65) | ((column & 56) >> 2)
        return inside | ((column & 6) << 3)
    else:  # noqa: RET505 (a branch at compile time)
        inside = ((column & 8) >> 3) | ((column & 1) << 1) | ((column & 16) >> 2)
        return inside | ((column & 96) >> 2) | ((column & 6) << 4)


@gluon.jit
def _scale_of(byte):
    """int32 UE8M0 bytes -> float32."""
    return gl.where(byte == 0, 0x00400000, byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _any(flags):
    """Whether one of a tensor's flags is set."""
    flags = flags.to(gl.int32)
    return gl.max(gl.reshape(flags, [flags.numel]), 0) > 0


@gluon.jit
def _load_queries(
    codes, scales, pair, here, RECORD: tl.constexpr, EXACT: tl.constexpr, LAYOUT: gl.constexpr
):
    """([HEADS, 128] with columns as in the product, zero for absent heads; whether f16 is too narrow).

    bf16 for MXFP4 if `EXACT`, else f16.
    """
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    dim = _dim_of(column, RECORD)[None, :]
    if RECORD.value_bits == 8:
        byte = gl.load(codes + pair[:, None] * RECORD.data_bytes + dim, mask=here[:, None], other=0)
        return byte.to(gl.float8e4nv, bitcast=True).to(gl.float16), False
    else:  # noqa: RET505 (a branch at compile time)
        at = codes + pair[:, None] * RECORD.data_bytes + dim // 2
        nibble = gl.load(at, mask=here[:, None], other=0).to(gl.uint32) >> ((dim & 1) * 4).to(
            gl.uint32
        )
        block = scales + pair[:, None] * RECORD.scale_bytes + dim // RECORD.scale_block
        byte = gl.load(block, mask=here[:, None], other=QUERY_LEAST).to(gl.int32)
        magnitude = ((nibble & 7) << 22).to(gl.float32, bitcast=True) * 8.507059173023462e37
        signed = (magnitude.to(gl.uint32, bitcast=True) | ((nibble & 8) << 28)).to(
            gl.float32, bitcast=True
        )
        values = signed * _scale_of(byte)
        if EXACT:
            return values.to(gl.bfloat16), False
        else:  # noqa: RET505
            return values.to(gl.float16), _any((byte < QUERY_LEAST) | (byte > QUERY_MOST))


@gluon.jit
def _scale_bytes(scales, words):
    """int32 [KEYS] scale words -> uint32 like `words`, a word's scale byte in its bytes 1 and 3."""
    COUNT: gl.constexpr = words.shape[1]
    word = gl.arange(0, COUNT, layout=gl.SliceLayout(0, words.type.layout))
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;",
        "=r,r,r",
        [scales[:, None], (word // (COUNT // 4) * 0x1010 + 0x0404)[None, :]],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _above_least(scales, words):
    """uint32 like `words`, in units of `BYTES_1_3`: its scale less `KEY_LEAST`; negative ones wrap."""
    return _scale_bytes(scales, words) - KEY_LEAST * BYTES_1_3


@gluon.jit
def _highest(scales, words):
    """uint32 [KEYS, 4]: `_above_least` of a row's blocks."""
    above = _above_least(scales, words)
    return gl.max(gl.reshape(above, [words.shape[0], 4, words.shape[1] // 4]), 2)


@gluon.jit
def _widen_e2m1(words, factors):
    """int32 words of eight codes, f16 factors twice in a word -> eight f16 tensors of their shape."""
    return gl.inline_asm_elementwise(
        _WIDEN_E2M1,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factors],
        dtype=(
            gl.float16, gl.float16, gl.float16, gl.float16,
            gl.float16, gl.float16, gl.float16, gl.float16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _times(x, scale):
    """f16 codes times float32 scales -> bf16, exact."""
    return (x.to(gl.float32) * scale).to(gl.bfloat16)


@gluon.jit
def _widen(words, scales, EXACT: tl.constexpr, RECORD: tl.constexpr, LAYOUTS: gl.constexpr):
    """int32 [KEYS, words of a row], int32 [KEYS] -> the product's left operand [KEYS, 128].

    f16 for FP8; for MXFP4 bf16 if `EXACT`, else f16 of half the value.
    """
    KEYS: gl.constexpr = words.shape[0]
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
        if EXACT:
            factor = 0x54005400  # 2**6: the codes
        else:
            factor = _above_least(scales, words) * 4 + TWO_LEAST
        x0, x1, x2, x3, x4, x5, x6, x7 = _widen_e2m1(words, factor)
        if EXACT:
            scale = _scale_of((_scale_bytes(scales, words) >> 24).to(gl.int32))
            x0, x1, x2, x3 = (
                _times(x0, scale),
                _times(x1, scale),
                _times(x2, scale),
                _times(x3, scale),
            )
            x4, x5, x6, x7 = (
                _times(x4, scale),
                _times(x5, scale),
                _times(x6, scale),
                _times(x7, scale),
            )
        low = gl.join(gl.join(x0, x4), gl.join(x2, x6))
        high = gl.join(gl.join(x1, x5), gl.join(x3, x7))
        bits = gl.reshape(gl.join(low, high), [KEYS, 2, 2, 2, 2, 2, 2, 2])
        ordered = gl.permute(bits, [0, 3, 4, 5, 6, 1, 2, 7])
    return gl.convert_layout(gl.reshape(ordered, [KEYS, 128]), LAYOUTS.keys, assert_trivial=True)


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
    MISSING: tl.constexpr,  # scale word of no key
    LAYOUT: tl.constexpr,
):
    """(int32 words [KEYS, words of a row], int32 scale words [KEYS], whether the key exists)."""
    page = page.to(gl.uint32, bitcast=True)
    row = row.to(gl.uint32, bitcast=True)
    found = page < num_pages.to(gl.uint32)  # -1 is the largest; what is not found is not loaded
    base = page.to(gl.uint64) * (page_stride * UNIT).to(gl.uint64)
    data = base + row * RECORD.data_bytes
    scale_at = base + (page_rows * RECORD.data_bytes).to(gl.uint32) + row * RECORD.scale_bytes
    as_words = gl.pointer_type(gl.int32)
    word = gl.arange(0, RECORD.data_bytes // 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    rows = (pages + data).to(as_words)
    words = gl.load(rows[:, None] + word, mask=found[:, None], other=0)
    return words, gl.load((pages + scale_at).to(as_words), mask=found, other=MISSING), found


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
    FP8: gl.constexpr = RECORD.value_bits == 8
    MISSING: gl.constexpr = 0 if FP8 else ABSENT_SCALES
    WORDS: gl.constexpr = LAYOUTS.words
    PRODUCT: gl.constexpr = LAYOUTS.product
    QUERIES: gl.constexpr = LAYOUTS.queries
    SHARED: gl.constexpr = LAYOUTS.shared
    LANES: gl.constexpr = gl.SliceLayout(1, WORDS)
    OWN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
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
                ELEMENT: gl.constexpr = gl.bfloat16 if EXACT and not FP8 else gl.float16
                head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERIES))
                queries, narrow = _load_queries(
                    codes, scales, row * num_heads + head, head < num_heads, RECORD, EXACT, QUERIES
                )
                shared = gl.allocate_shared_memory(ELEMENT, [HEADS, 128], SHARED, queries)
                hopper.fence_async_shared()
                tl.debug_barrier()  # here, or the compiler puts one into the loop
                head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
                weight = gl.load(weights + row * num_heads + head, mask=head < num_heads, other=0.0)
                place, inside = _place(
                    begin, end, chosen, num_candidates, block_size, block_magic, block_shift, seen,
                    table_row, table_columns, page_rows, page_magic, page_shift, KEYS, FILTER,
                    LANES,
                )  # fmt: skip
                words, factors, found = _load_keys(
                    pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT, MISSING,
                    WORDS,
                )  # fmt: skip
                place, inside = _place(
                    begin + 1, end, chosen, num_candidates, block_size, block_magic, block_shift,
                    seen, table_row, table_columns, page_rows, page_magic, page_shift, KEYS, FILTER,
                    LANES,
                )  # fmt: skip
                column = gl.arange(0, KEYS, layout=OWN)
                to_scores = scores + local.to(gl.int64) * scores_stride
                to_maxima = maxima + local.to(gl.int64) * maxima_stride
                if not EXACT:
                    most = _highest(factors, words)
                for tile in range(begin, end):
                    next_words, next_factors, next_found = _load_keys(
                        pages, place, inside, num_pages, page_rows, page_stride, RECORD, UNIT,
                        MISSING, WORDS,
                    )  # fmt: skip
                    _no_later(tile)
                    place, inside = _place(
                        tile + 2, end, chosen, num_candidates, block_size, block_magic, block_shift,
                        seen, table_row, table_columns, page_rows, page_magic, page_shift, KEYS,
                        FILTER, LANES,
                    )  # fmt: skip
                    _no_later(tile)
                    keys = _widen(words, factors, EXACT, RECORD, LAYOUTS)
                    dots = hopper.warpgroup_mma(
                        keys, shared.permute((1, 0)),
                        gl.zeros([KEYS, HEADS], gl.float32, PRODUCT), use_acc=False,
                    )  # fmt: skip
                    if EXACT:
                        positive = gl.maximum(dots, 0.0)
                    else:  # of the halves; a maximum would take a slot of the busier pipe
                        positive = dots + gl.abs(dots)
                        most = gl.maximum(most, _highest(factors, words))
                    total = gl.sum(positive * weight[None, :], 1)
                    if FP8:
                        scale = gl.convert_layout(factors, OWN, assert_trivial=True)
                        total = total * scale.to(gl.float32, bitcast=True)
                    bits = _ordered(total, EXACT)
                    bits = gl.where(
                        gl.convert_layout(found, OWN, assert_trivial=True), bits, ABSENT
                    )
                    gl.store(to_scores + tile * KEYS + column, bits)
                    best = gl.max(gl.reshape(bits, [KEYS // GROUP, GROUP]), 1)
                    group = gl.arange(0, KEYS // GROUP, layout=best.type.layout)
                    gl.store(to_maxima + tile * (KEYS // GROUP) + group, best)
                    words, factors, found = next_words, next_factors, next_found
                if not EXACT:
                    again = narrow | _any(most > (KEY_MOST - KEY_LEAST) * BYTES_1_3)
                    again = again | _any(gl.where(gl.abs(weight) < WEIGHT_MOST, 0, 1))
