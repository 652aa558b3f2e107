"""Codes of index keys and queries -> operands of Hopper's warpgroup matrix instruction.

The keys of a tile go from global memory to the registers in which the instruction reads them, and are
widened there. That is possible because a product does not care in which order its 128 dims are added, as
long as both sides use the same one: `dim_of` says which dim the instruction's column holds.

MXFP4 keys and queries become f16, which takes fewer instructions than bf16 but holds fewer block scales,
or bf16. Both are exact, and no value but zero is a subnormal of either.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_mla.cache.records import RecordFormat

WARPS = 4
KEYS = 64
"""Keys of a tile: rows of one warpgroup matrix instruction."""
QUERY_LEAST, QUERY_MOST = gl.constexpr(114), gl.constexpr(140)
KEY_LEAST, KEY_MOST = gl.constexpr(115), gl.constexpr(137)
"""MXFP4 scale bytes with which every value but zero is a normal f16; of keys, half of every value."""
FACTOR_STEP = gl.constexpr(0x04000400)
"""A scale byte times it is two f16 whose exponents are the byte."""
FACTOR_LEAST = gl.constexpr((0x20002000 - 115 * 0x04000400) % 2**32)
"""Added to that: for `KEY_LEAST`, twice the f16 that makes half a value of an e4m3 code, 2**(115-127+5)."""

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

# A word of eight e2m1 codes -> two words of four e4m3 codes worth value * 2**-6, exactly: codes 0, 2, 4, 6
# and codes 1, 3, 5, 7. In the low nibbles, adding 24 = 0b11000 to a code's four bits moves the sign from
# bit 3 to bit 5.
_E2M1_AS_E4M3 = gl.constexpr("""
{
.reg .b32 low, high;
and.b32 low, $2, 0x0F0F0F0F;
mad.lo.u32 low, low, 4, 0x60606060;
and.b32 $0, low, 0x9C9C9C9C;
shr.u32 high, $2, 2;
and.b32 high, high, 0x1C1C1C1C;
lop3.b32 $1, $2, 0x80808080, high, 0xEA;
}""")

# A word of four e4m3 codes and an f16 factor, twice in a word -> four f16 products.
_WIDEN_E4M3_TIMES = gl.constexpr("""
{
.reg .b16 lo, hi;
.reg .b32 a, b;
mov.b32 {lo, hi}, $4;
cvt.rn.f16x2.e4m3x2 a, lo;
cvt.rn.f16x2.e4m3x2 b, hi;
mul.f16x2 a, a, $5;
mul.f16x2 b, b, $5;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}""")


@dataclass(frozen=True)
class Layouts:
    """Where the parts of a tile lie, as compile-time constants of the kernel.

    Four threads side by side hold two keys, eight apart.
    """

    words: Any  # int32 [KEYS, words of a row]: 16 bytes of a row in a thread, or twice 16, 64 apart
    pieces: Any  # int32 [KEYS / 2, 4, 4]: 16 bytes of a row of the first key, or of the second
    threads: Any  # [KEYS / 2, 4]: one value of each thread
    blocks: Any  # [KEYS, 4]: in a thread the scale of its part of either key
    product: Any  # float32 [KEYS, HEADS]
    keys: Any  # f16 or bf16 [KEYS, 128], the product's left operand
    queries: Any  # the right operand while it is loaded
    shared: Any  # and where the instruction reads it


@functools.cache
def layouts(record: RecordFormat, heads: int) -> Layouts:
    """The layouts for a record and a number of heads (a power of two, 16 or more)."""
    words = record.data_bytes // 4
    far = [[0, 16]] if words == 32 else []
    rows = [[1, 0], [2, 0], [4, 0]]
    product = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, heads, 16])
    pieces = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[KEYS // 2, 4, 4],
    )
    return Layouts(
        words=gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], *far, [8, 0]],
            lane_bases=[[0, 4], [0, 8], *rows],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[KEYS, words],
        ),
        pieces=pieces,
        threads=gl.SliceLayout(2, pieces),
        blocks=gl.DistributedLinearLayout(
            reg_bases=[[8, 0]],
            lane_bases=[[0, 1], [0, 2], *rows],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[KEYS, 4],
        ),
        product=product,
        keys=gl.DotOperandLayout(operand_index=0, parent=product, k_width=2),
        queries=gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]),
        shared=gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )


@gluon.jit
def dim_of(column, RECORD: gl.constexpr):
    """The dim that a column of the product holds, from the order in which `widen` leaves them."""
    if RECORD.value_bits == 8:
        inside = (column & 65) | ((column & 56) >> 2)
        return inside | ((column & 6) << 3)
    else:  # noqa: RET505 (a branch at compile time)
        inside = ((column & 8) >> 3) | ((column & 1) << 1) | ((column & 16) >> 2)
        return inside | ((column & 96) >> 2) | ((column & 6) << 4)


@gluon.jit
def scale_of(byte):
    """int32 UE8M0 bytes -> float32."""
    return gl.where(byte == 0, 0x00400000, byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def any_of(flags):
    """Whether one of a tensor's flags is set."""
    flags = flags.to(gl.int32)
    return gl.max(gl.reshape(flags, [flags.numel]), 0) > 0


@gluon.jit
def load_queries(
    codes, scales, pair, here, RECORD: tl.constexpr, EXACT: tl.constexpr, LAYOUT: gl.constexpr
):
    """([HEADS, 128] with columns as in the product, zero for absent heads; whether f16 is too narrow).

    bf16 for MXFP4 if `EXACT`, else f16.
    """
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    dim = dim_of(column, RECORD)[None, :]
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
        values = signed * scale_of(byte)
        if EXACT:
            return values.to(gl.bfloat16), False
        else:  # noqa: RET505
            return values.to(gl.float16), any_of((byte < QUERY_LEAST) | (byte > QUERY_MOST))


@gluon.jit
def both_keys(first, second):
    """A row of each thread's first key [KEYS / 2, n], and of its second -> [KEYS, n]."""
    COUNT: gl.constexpr = first.shape[0]
    WIDTH: gl.constexpr = first.shape[1]
    pair = gl.reshape(gl.join(first, second), [COUNT // 8, 8, WIDTH, 2])
    return gl.reshape(gl.permute(pair, [0, 3, 1, 2]), [2 * COUNT, WIDTH])


@gluon.jit
def _widen_e4m3_times(words, factors):
    """Words of four e4m3 codes, f16 factors twice in a word -> four f16 tensors of their shape."""
    return gl.inline_asm_elementwise(
        _WIDEN_E4M3_TIMES,
        "=h,=h,=h,=h,r,r",
        [words, factors],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_e4m3(words, RECORD: tl.constexpr):
    """int32 [KEYS, words of a row] -> words of e4m3 codes, in some order; what `widen` takes."""
    if RECORD.value_bits == 8:
        return words
    else:  # noqa: RET505 (a branch at compile time)
        words = gl.reshape(words, [words.shape[0], 4, words.shape[1] // 4])
        low, high = gl.inline_asm_elementwise(
            _E2M1_AS_E4M3,
            "=&r,=r,r",
            [words],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        return gl.join(low, high)


@gluon.jit
def _times(x, scale):
    """f16 codes times float32 scales -> bf16, exact."""
    return (x.to(gl.float32) * scale).to(gl.bfloat16)


@gluon.jit
def as_factors(blocks):
    """uint32 MXFP4 scale bytes -> f16 that make half a value of an e4m3 code, twice in a word."""
    return blocks * FACTOR_STEP + FACTOR_LEAST


@gluon.jit
def widen(words, factors, EXACT: tl.constexpr, RECORD: tl.constexpr, LAYOUTS: gl.constexpr):
    """What `as_e4m3` made, and `as_factors` if not `EXACT`, else scale bytes -> left operand [KEYS, 128].

    f16 for FP8, whose scales are not looked at; for MXFP4 bf16 if `EXACT`, else f16 of half the value.
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
        low, high = gl.split(words)
        LAYOUT: gl.constexpr = gl.SliceLayout(2, low.type.layout)
        factors = gl.convert_layout(factors, LAYOUT, assert_trivial=True)[:, :, None]
        once = factors
        if EXACT:
            once = 0x54005400  # 2**6: the codes
        x0, x1, x4, x5 = _widen_e4m3_times(low, once)
        x2, x3, x6, x7 = _widen_e4m3_times(high, once)
        if EXACT:
            scale = scale_of(factors.to(gl.int32, bitcast=True))
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
