"""Number formats in Triton, by integer operations: no fp8 or fp4 type of the compiler is needed.

Every helper works on tensors of any shape. The bit rules are those of section 5.1 and 5.2 of the
format notes (docs/formats.md): e4m3 without infinities, e2m1, ue8m0 scales by exponent bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
SCALE_FLOOR = tl.constexpr(1e-4)  # amax below it is taken as it, so a zero block gets byte 105
INVERSE_E4M3_MAX = tl.constexpr(1.0 / 448.0)
INVERSE_E2M1_MAX = tl.constexpr(1.0 / 6.0)
SMALLEST_E4M3 = tl.constexpr(2.0**-9)
F32_MAX = tl.constexpr(3.4028234663852886e38)

# A word of four e4m3 codes and a bf16 scale, twice in a word -> four bf16 values. A byte moves to the
# top of a 16-bit lane, its exponent and mantissa slide down into the bf16 fields (worth
# value * 2**-120, subnormals included), 2**120 puts the bias right, the scale follows: all exact.
_WIDEN_E4M3 = tl.constexpr("""
{
.reg .b32 lo, hi, slo, shi, up, zero;
mov.b32 up, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 lo, $4, 0, 0x1404;
prmt.b32 hi, $4, 0, 0x3424;
and.b32 slo, lo, zero;
and.b32 shi, hi, zero;
shr.u32 lo, lo, 4;
shr.u32 hi, hi, 4;
lop3.b32 lo, lo, 0x07F007F0, slo, 0xEA;
lop3.b32 hi, hi, 0x07F007F0, shi, 0xEA;
fma.rn.bf16x2 lo, lo, up, zero;
fma.rn.bf16x2 hi, hi, up, zero;
fma.rn.bf16x2 lo, lo, $5, zero;
fma.rn.bf16x2 hi, hi, $5, zero;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi;
}""")

# The same in the order of `pairs_e4m3`: bytes 1 and 3 are at the top of their lanes as they come.
_PAIRS_E4M3 = tl.constexpr("""
{
.reg .b32 even, odd, seven, sodd, up, zero;
mov.b32 up, 0x7B807B80;
mov.b32 zero, 0x80008000;
and.b32 sodd, $4, zero;
shr.u32 odd, $4, 4;
lop3.b32 odd, odd, 0x07F007F0, sodd, 0xEA;
shl.b32 seven, $4, 8;
and.b32 seven, seven, zero;
shl.b32 even, $4, 4;
lop3.b32 even, even, 0x07F007F0, seven, 0xEA;
fma.rn.bf16x2 even, even, up, zero;
fma.rn.bf16x2 odd, odd, up, zero;
fma.rn.bf16x2 even, even, $5, zero;
fma.rn.bf16x2 odd, odd, $5, zero;
mov.b32 {$0, $2}, even;
mov.b32 {$1, $3}, odd;
}""")

# A word of eight e2m1 codes and a bf16 scale, twice in a word -> eight bf16 values. The magnitude bits
# slide into the bf16 fields (worth value * 2**-126), the sign goes to the top of the lane.
_WIDEN_E2M1 = tl.constexpr("""
{
.reg .b32 a, b, m0, m1, m2, m3, s, up, zero;
mov.b32 up, 0x7E807E80;
mov.b32 zero, 0x80008000;
prmt.b32 a, $8, 0, 0x1404;
prmt.b32 b, $8, 0, 0x3424;
shr.u32 m0, a, 2;
shl.b32 s, a, 4;
and.b32 s, s, zero;
lop3.b32 m0, m0, 0x01C001C0, s, 0xEA;
shr.u32 m1, a, 6;
and.b32 s, a, zero;
lop3.b32 m1, m1, 0x01C001C0, s, 0xEA;
shr.u32 m2, b, 2;
shl.b32 s, b, 4;
and.b32 s, s, zero;
lop3.b32 m2, m2, 0x01C001C0, s, 0xEA;
shr.u32 m3, b, 6;
and.b32 s, b, zero;
lop3.b32 m3, m3, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 m0, m0, up, zero;
fma.rn.bf16x2 m1, m1, up, zero;
fma.rn.bf16x2 m2, m2, up, zero;
fma.rn.bf16x2 m3, m3, up, zero;
fma.rn.bf16x2 m0, m0, $9, zero;
fma.rn.bf16x2 m1, m1, $9, zero;
fma.rn.bf16x2 m2, m2, $9, zero;
fma.rn.bf16x2 m3, m3, $9, zero;
mov.b32 {$0, $2}, m0;
mov.b32 {$1, $3}, m1;
mov.b32 {$4, $6}, m2;
mov.b32 {$5, $7}, m3;
}""")

# Four float32 -> four e4m3 bytes by the GPU's own conversion: nearest, ties to even, saturating.
_CONVERT_E4M3 = tl.constexpr("""
{
.reg .b16 lo, hi;
cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
mov.b32 $0, {lo, hi};
}""")


@triton.jit
def quotient(value, magic, shift):
    """int32 `value // divisor`, value >= 0, without a division; see `kernels.division`."""
    doubled = (value << 1).to(tl.uint32, bitcast=True)
    high = tl.umulhi(doubled, magic.to(tl.uint32)) >> shift.to(tl.uint32)
    return high.to(tl.int32, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 -> bf16, to nearest, ties to even, by integers (Triton's interpreter casts wrongly)."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bf16(x, MODE: tl.constexpr):
    """float32 -> bf16, to nearest, ties to even."""
    if MODE != "interpreted":
        return x.to(tl.bfloat16)
    return round_bf16(x)


@triton.jit
def from_bf16(x):
    """bf16 -> float32, exact."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, MODE: tl.constexpr):
    """bf16 [M, K] @ bf16 [K, N] -> float32 [M, N]."""
    if MODE == "interpreted":
        return tl.dot(from_bf16(a), from_bf16(b))
    return tl.dot(a, b)


@triton.jit
def product_add(a, b, acc, MODE: tl.constexpr):
    """acc + bf16 [M, K] @ bf16 [K, N], float32."""
    if MODE == "interpreted":
        return acc + tl.dot(from_bf16(a), from_bf16(b))
    return tl.dot(a, b, acc)


@triton.jit
def decode_ue8m0(byte):
    """uint8 b -> float32 2**(b - 127); b = 0 is the subnormal 2**-127, b = 255 is infinity."""
    wide = byte.to(tl.uint32)
    return tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(byte):
    """uint8 or uint32 code -> float32, exact; 0x7F and 0xFF are NaN."""
    wide = byte.to(tl.uint32)
    magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    magnitude = tl.where((wide & 0x7F) == 0x7F, float("nan"), magnitude)
    bits = magnitude.to(tl.uint32, bitcast=True) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """uint8 or uint32 code 0..15 -> float32, exact."""
    wide = code.to(tl.uint32)
    magnitude = ((wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    bits = magnitude.to(tl.uint32, bitcast=True) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """float32 -> uint8 code: clamped to +-448, to nearest, ties to even, sign of zero kept, every NaN 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    clamped = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
    # below 2**-6 a code is a multiple of 2**-9: adding 2**14 leaves just those bits, rounded to even
    shifted = clamped.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(clamped < 0x3C800000, small, normal)
    code |= (bits >> 24) & 0x80
    return tl.where(nan, 0x7F, code).to(tl.uint8)


@triton.jit
def quantise_e4m3(x, HARDWARE: tl.constexpr):
    """`encode_e4m3` of a product, by the GPU's own conversion where it has one (same bits).

    The conversion may keep the sign of a NaN; float32 arithmetic of a GPU only makes positive ones.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _CONVERT_E4M3, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    return encode_e4m3(x)


@triton.jit
def e2m1_of_quotient(magnitude, scale, MODE: tl.constexpr):
    """int32 code 0..7 of |x| / scale, for int32 bits of |x| of bf16 precision and e4m3 scales.

    Such a quotient is a rounding boundary of e2m1 or away from it by more than 2**-13 of itself, so it
    only has to be exact where it is a boundary. One step of Newton's method gives that; of infinity it makes
    a positive NaN, whose bits saturate like those of infinity. Of a NaN the code means nothing.
    Times 2**-126 the quotient's bits count as those of e2m1 do, values below 1 included.
    """
    x = magnitude.to(tl.float32, bitcast=True)
    if MODE == "interpreted":
        quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        guess = x * inverse
        quotient = tl.fma(tl.fma(-guess, scale, x), inverse, guess)
    bits = (quotient * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    bits = tl.minimum(bits, 0x01C00000)  # 6.0
    return (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22


@triton.jit
def encode_e2m1(x):
    """float32 -> uint8 code 0..15: clamped to +-6, to nearest, ties to even, sign of zero kept."""
    bits = x.to(tl.uint32, bitcast=True)
    clamped = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6.0
    normal = ((clamped + 0x1FFFFF + ((clamped >> 22) & 1)) >> 22) - 252  # 252 = (127 - 1) << 1
    # below 1 a code is a multiple of 0.5: adding 2**22 leaves just that bit, rounded to even
    shifted = clamped.to(tl.float32, bitcast=True) + 4194304.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x4A800000
    code = tl.where(clamped < 0x3F800000, small, normal)
    return (code | ((bits >> 28) & 0x8)).to(tl.uint8)


@triton.jit
def ue8m0_byte(amax):
    """float32 amax -> uint32 byte of ceil(log2(max(amax, 1e-4) / 448)), by exponent bits.

    An infinite amax counts as the largest float32 (byte 247).
    """
    ratio = tl.minimum(tl.maximum(amax, SCALE_FLOOR), F32_MAX) * INVERSE_E4M3_MAX
    bits = ratio.to(tl.uint32, bitcast=True)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0).to(tl.uint32)


@triton.jit
def inverse_ue8m0(byte):
    """uint32 byte b -> float32 2**(127 - b), b in 1..254."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _interleave4(x0, x1, x2, x3):
    """[...] four times -> [..., 2, 2] in the order x0, x1, x2, x3."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3))


@triton.jit
def _four_e4m3(words, scale, TO_PAIRS: tl.constexpr, MODE: tl.constexpr):
    """The four bf16 values of int32 words of four codes, float32 scales of their shape."""
    if MODE == "ptx":
        return tl.inline_asm_elementwise(
            _PAIRS_E4M3 if TO_PAIRS else _WIDEN_E4M3,
            "=h,=h,=h,=h,r,r",
            [words, _twice(scale)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    wide = words.to(tl.uint32, bitcast=True)
    return (
        round_bf16(decode_e4m3(wide & 255) * scale),
        round_bf16(decode_e4m3((wide >> 8) & 255) * scale),
        round_bf16(decode_e4m3((wide >> 16) & 255) * scale),
        round_bf16(decode_e4m3(wide >> 24) * scale),
    )


@triton.jit
def widen_e4m3(words, scale, MODE: tl.constexpr):
    """int32 words of four codes, float32 scales of their shape -> bf16 [..., 2, 2].

    Exact where bf16 can hold the product. NaN codes (no finite row holds one) read as +-480 in PTX.
    """
    x0, x1, x2, x3 = _four_e4m3(words, scale, False, MODE)
    return _interleave4(x0, x1, x2, x3)


@triton.jit
def pairs_e4m3(words, scale, MODE: tl.constexpr):
    """`widen_e4m3` with the last two axes exchanged: a register holds values 0 and 2, or 1 and 3."""
    x0, x1, x2, x3 = _four_e4m3(words, scale, True, MODE)
    return _interleave4(x0, x2, x1, x3)


@triton.jit
def _eight_e2m1(words, scale, MODE: tl.constexpr):
    """The eight bf16 values of int32 words of eight codes, float32 scales of their shape."""
    if MODE == "ptx":
        return tl.inline_asm_elementwise(
            _WIDEN_E2M1,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, _twice(scale)],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    wide = words.to(tl.uint32, bitcast=True)
    return (
        round_bf16(decode_e2m1(wide & 15) * scale),
        round_bf16(decode_e2m1((wide >> 4) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 8) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 12) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 16) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 20) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 24) & 15) * scale),
        round_bf16(decode_e2m1((wide >> 28) & 15) * scale),
    )


@triton.jit
def widen_e2m1(words, scale, MODE: tl.constexpr):
    """int32 words of eight codes, float32 scales of their shape -> bf16 [..., 2, 2, 2], exact."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight_e2m1(words, scale, MODE)
    return tl.join(_interleave4(x0, x2, x4, x6), _interleave4(x1, x3, x5, x7))


@triton.jit
def pairs_e2m1(words, scale, MODE: tl.constexpr):
    """`widen_e2m1` with the last two axes exchanged, as `pairs_e4m3`."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight_e2m1(words, scale, MODE)
    return tl.join(_interleave4(x0, x1, x4, x5), _interleave4(x2, x3, x6, x7))


@triton.jit
def _twice(scale):
    """float32 that bf16 holds exactly -> int32 with the bf16 in both halves."""
    bits = scale.to(tl.uint32, bitcast=True)
    return ((bits >> 16) | (bits & 0xFFFF0000)).to(tl.int32, bitcast=True)


@triton.jit
def materialise(values, MODE: tl.constexpr):
    """The same bf16 values, with a fence that the compiler moves no layout change across.

    Without it the compiler widens in the layout of a matrix operand, once per product and byte by
    byte, instead of once on the way into shared memory; and a query that was put together from parts
    makes it choose an operand layout that `ldmatrix` cannot load.
    """
    if MODE == "ptx":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [values],
            dtype=values.dtype,
            is_pure=False,
            pack=32 // values.dtype.primitive_bitwidth,
        )
    return values
