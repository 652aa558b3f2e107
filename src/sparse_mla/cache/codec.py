"""The only quantiser: values to record bytes and back, in integer and float32 torch operations.

No float8 type is used, so every device and every torch build gives the same bytes.

Rounding is to nearest, ties to the even code; magnitudes above the largest code saturate; the sign bit
survives a result of zero (negative underflow and -0.0).

Not-a-number and infinity. An infinity saturates like any large value. A NaN is ignored when its block's
scale is chosen; in e4m3 records it becomes code 0x7F whatever its sign and payload, which no arithmetic
keeps on every device, and its neighbours are stored as usual; in bf16 dims it becomes 0x7FC0 likewise;
in e2m1 records, whose codes have no NaN, the whole block decodes to NaN: its scale is NaN (byte 0x7F of an
e4m3 scale, 0xFF of a ue8m0 scale) and its codes are zero. Other blocks and rows never notice.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat, ScaleFormat, ValueFormat

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_SMALLEST = 2.0**-9
"""Smallest e4m3 subnormal, the floor of an NVFP4 scale."""
KV_AMAX_FLOOR = 1e-4
"""Floor of a block's largest magnitude before its ue8m0 scale is chosen (e4m3 records)."""
MXFP4_AMAX_FLOOR = 6.0 * 2.0**-126
"""The same floor of ue8m0-scaled e2m1 records."""
UE8M0_NAN = 255
E4M3_NAN = 0x7F
BF16_NAN = 0x7FC0

_CACHED_VALUES = 1 << 18
"""Values that a CPU decodes at a time: the intermediate words stay in its second-level cache."""
_F32_MAX = 3.4028234663852886e38
_F32_INF_BITS = 0x7F800000
_BITS_OF_448 = 0x43E00000
_BITS_OF_6 = 0x40C00000
_MAGNITUDE_BITS = 0x7FFFFFFF


# ------------------------------------------------------------------------------------- single values


def encode_e4m3(
    x: Tensor,  # float32, any shape
) -> Tensor:
    """e4m3 codes, uint8 of `x`'s shape: nearest even, saturating at 448, every NaN -> 0x7F."""
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE_BITS
    nan = (_F32_INF_BITS - magnitude).bitwise_right_shift_(31)  # -1 for a NaN, else 0
    code = _round_magnitude(magnitude, _BITS_OF_448, mantissa_bits=3, bias=7)  # 0x7E for a NaN
    sign = (bits >> 24).bitwise_and_(0x80)
    code.sub_(nan).bitwise_or_(sign.bitwise_and_(nan.bitwise_not_()))
    return code.to(torch.uint8)


def decode_e4m3(
    codes: Tensor,  # uint8, any shape
) -> Tensor:
    """float32 values of e4m3 codes; 0x7F and 0xFF are NaN."""
    return _lookup(_value_table(ValueFormat.E4M3, codes.device), codes)


def encode_e2m1(
    x: Tensor,  # float32, any shape
) -> Tensor:
    """e2m1 codes 0..15, one in a uint8: nearest even, saturating at 6 (a NaN too: there is no code)."""
    bits = x.view(torch.int32)
    code = _round_magnitude(bits & _MAGNITUDE_BITS, _BITS_OF_6, mantissa_bits=1, bias=1)
    return code.bitwise_or_((bits >> 28).bitwise_and_(0x8)).to(torch.uint8)


def decode_e2m1(
    codes: Tensor,  # uint8 0..15, any shape
) -> Tensor:
    """float32 values of unpacked e2m1 codes."""
    return _lookup(_value_table(ValueFormat.E2M1, codes.device), codes)


def pack_nibbles(
    codes: Tensor,  # uint8 0..15 [..., 2m]
) -> Tensor:
    """uint8 [..., m]: the even element in the low nibble, the odd one in the high nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(
    packed: Tensor,  # uint8 [..., m]
) -> Tensor:
    """uint8 0..15 [..., 2m], the inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def ue8m0_byte(
    amax: Tensor,  # float32, any shape, not negative
    limit: float = E4M3_MAX,
    floor: float = KV_AMAX_FLOOR,
) -> Tensor:
    """Bytes b = ceil(log2(max(amax, floor) / limit)) + 127 of the power-of-two scale, uint8.

    The exponent is read from the bits of `max(amax, floor) * float32(1 / limit)` and raised by one
    unless the fraction is zero, which equals the exact rule for every float32 fraction at the limits
    448 and 6 (DeepSeek's reference does the same). An infinite amax counts as the largest finite
    float32; a NaN gives 255.
    """
    scaled = amax.clamp(min=floor, max=_F32_MAX) * (1.0 / limit)
    bits = scaled.view(torch.int32)
    byte = (bits >> 23) + (bits & 0x7FFFFF).ne(0)
    return torch.where(amax.isnan(), UE8M0_NAN, byte).to(torch.uint8)


def decode_ue8m0(
    scales: Tensor,  # uint8, any shape
) -> Tensor:
    """float32 2**(byte - 127), exact from byte 0 (2**-127) to 254; byte 255 overflows to +inf."""
    wide = scales.to(torch.int32)
    # The bits of 2**-127 are a subnormal's: the top bit of the fraction alone.
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)


def _round_magnitude(
    magnitude: Tensor,  # int32 bits of float32 magnitudes; overwritten
    limit_bits: int,
    *,
    mantissa_bits: int,
    bias: int,
) -> Tensor:
    """Codes without sign (int32, in `magnitude`); what is above the limit, NaN included, becomes it.

    Adding 2**(e + 23 - mantissa_bits) to a magnitude of exponent e (of subnormals: the least exponent)
    lets the float32 adder round it, ties to even, to a count of code steps, which then stands in the
    low bits of the sum.
    """
    shift, least = 23 - mantissa_bits, 128 - bias
    magnitude.clamp_(max=limit_bits)
    exponent = (magnitude & _F32_INF_BITS).clamp_(min=least << 23)
    adder = exponent + (shift << 23)
    magnitude.view(torch.float32).add_(adder.view(torch.float32))
    exponent.bitwise_right_shift_(shift)
    return magnitude.sub_(adder).add_(exponent).sub_(least << mantissa_bits)


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@functools.lru_cache(maxsize=32)
def _value_table(values: ValueFormat, device: torch.device) -> Tensor:
    """float32 [256] or [16], the value of each code."""
    if values is ValueFormat.E2M1:
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    else:
        magnitudes = [fraction * E4M3_SMALLEST for fraction in range(8)]
        magnitudes += [(8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(8, E4M3_NAN)]
        magnitudes.append(float("nan"))
    both = magnitudes + [-value for value in magnitudes]
    return torch.tensor(both, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=32)
def _pair_table(values: ValueFormat, device: torch.device) -> Tensor:
    """int64 words of two float32 values: [65536] by two e4m3 bytes, [256] by one byte of two e2m1 codes.

    Looking pairs up is twice as fast as looking values up.
    """
    bits = 8 if values is ValueFormat.E4M3 else 4
    index = torch.arange(1 << (2 * bits), dtype=torch.int32)
    codes = torch.stack((index & ((1 << bits) - 1), index >> bits), dim=1)
    pairs = _lookup(_value_table(values, index.device), codes)
    return pairs.view(torch.int64).view(-1).to(device)


# ---------------------------------------------------------------------------------------------- rows


def encode_rows(
    record: RecordFormat,
    values: Tensor,  # bf16 or float32 [n, dim], already rotated
) -> tuple[Tensor, Tensor]:
    """Quantise rows: (data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]).

    For one block with largest magnitude a:

        ue8m0 scale   s = 2**ceil(log2(max(a, floor) / limit)), floor 1e-4 and limit 448 for e4m3 values,
                      floor 6 * 2**-126 and limit 6 for e2m1 values
        float32 scale the same s as a little-endian float32 (FP8 index keys)
        e4m3 scale    s = e4m3(clamp(a * float32(1/6), 2**-9, 448)); the division a / 6 gives the same
                      byte for every bf16 value
        code          round(x / s), correctly rounded division, saturating

    Dims past `quantised_dims` are rounded to bf16. Padding scale bytes are zero.

    Raises:
        ShapeError, DTypeError: `values` is not bf16 or float32 [n, dim].
    """
    check_tensor("values", values, shape=("n", record.dim), dtypes=(torch.bfloat16, torch.float32))
    n = values.shape[0]
    blocks = values[:, : record.quantised_dims].float().contiguous()
    blocks = blocks.view(n, record.scales_per_row, record.scale_block)
    magnitude = blocks.view(torch.int32) & _MAGNITUDE_BITS
    number = (magnitude - (_F32_INF_BITS + 1)).bitwise_right_shift_(31)  # -1, or 0 for a NaN
    amax = magnitude.bitwise_and_(number).amax(-1).view(torch.float32)  # [n, scales], NaNs ignored
    if record.value_format is ValueFormat.E4M3:
        scales, factors = _block_scales(record, amax)
        data = encode_e4m3(blocks / factors.unsqueeze(-1)).view(n, record.quantised_dims)
    else:
        spoilt = number.amax(-1).eq(0)  # [n, scales]
        scales, factors = _block_scales(record, amax.masked_fill_(spoilt, float("nan")))
        codes = encode_e2m1(blocks / factors.unsqueeze(-1))
        codes.masked_fill_(spoilt.unsqueeze(-1), 0)
        data = pack_nibbles(codes.view(n, record.quantised_dims))
    if record.tail_dims:
        tail = values[:, record.quantised_dims :].to(torch.bfloat16).contiguous()
        bits = tail.view(torch.int16).masked_fill(tail.isnan(), BF16_NAN)
        data = torch.cat((data, bits.view(torch.uint8)), dim=1)
    padding = record.scale_bytes - scales.shape[1]
    return data, torch.nn.functional.pad(scales, (0, padding)) if padding else scales


def _block_scales(record: RecordFormat, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(scale bytes uint8 [n, used bytes], divisors float32 [n, scales]) of the blocks' `amax`."""
    if record.scale_format is ScaleFormat.E4M3:
        codes = encode_e4m3((amax * (1.0 / 6.0)).clamp(E4M3_SMALLEST, E4M3_MAX))
        return codes, decode_e4m3(codes)
    if record.value_format is ValueFormat.E4M3:
        codes = ue8m0_byte(amax)
    else:
        codes = ue8m0_byte(amax, E2M1_MAX, MXFP4_AMAX_FLOOR)
    factors = decode_ue8m0(codes)
    if record.scale_format is ScaleFormat.F32:
        codes = factors.view(-1).view(torch.uint8).view(-1, record.scale_bytes)
    return codes, factors


def decode_rows(
    record: RecordFormat,
    data: Tensor,  # uint8 [n, data_bytes]
    scales: Tensor,  # uint8 [n, scale_bytes]
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of rows, `dtype` [n, dim], bf16 or float32.

    Every value of every record is exact in float32. In bf16 they are exact too, unless the float32
    value is smaller than 2**-126 in magnitude.

    Raises:
        ShapeError, DTypeError: `data` or `scales` do not fit the record.
        ArgumentError: another `dtype`.
    """
    check_tensor("data", data, shape=("n", record.data_bytes), dtypes=(torch.uint8,))
    n = data.shape[0]
    check_tensor(
        "scales", scales, shape=(n, record.scale_bytes), dtypes=(torch.uint8,), device=data.device
    )
    check_choice("dtype", dtype, (torch.float32, torch.bfloat16))
    values = torch.empty(n, record.dim, dtype=dtype, device=data.device)
    rows = _CACHED_VALUES // record.dim if data.device.type == "cpu" else max(n, 1)
    for first in range(0, n, rows):
        some = slice(first, first + rows)
        _decode_block(record, data[some], scales[some], values[some])
    return values


def _decode_block(
    record: RecordFormat,
    data: Tensor,  # uint8 [n, data_bytes]
    scales: Tensor,  # uint8 [n, scale_bytes]
    out: Tensor,  # bf16 or float32 [n, dim]
) -> None:
    rows = data.shape[0]
    codes = data[:, : record.quantised_bytes]
    if record.value_format is ValueFormat.E4M3:
        codes = _reinterpret(codes, torch.uint16)
    index = codes.to(torch.int32).view(-1)
    words = _pair_table(record.value_format, data.device).index_select(0, index)
    blocks = words.view(torch.float32).view(rows, record.scales_per_row, record.scale_block)
    blocks *= scale_values(record, scales).unsqueeze(-1)
    out[:, : record.quantised_dims] = blocks.view(rows, record.quantised_dims)
    if record.tail_dims:
        tail = data[:, record.quantised_bytes :]
        out[:, record.quantised_dims :] = _reinterpret(tail, torch.bfloat16)


def _reinterpret(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of rows, uint8 [n, m * itemsize], as `dtype` [n, m]; copied only if misaligned."""
    if part.storage_offset() % dtype.itemsize or part.stride(0) % dtype.itemsize:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def scale_values(
    record: RecordFormat,
    scales: Tensor,  # uint8 [n, scale_bytes]
) -> Tensor:
    """float32 [n, scales_per_row], the factors of a row's blocks."""
    if record.scale_format is ScaleFormat.F32:
        return _reinterpret(scales, torch.float32)
    used = scales[:, : record.scales_per_row]
    return decode_e4m3(used) if record.scale_format is ScaleFormat.E4M3 else decode_ue8m0(used)


# ------------------------------------------------------------------------------------- rows of a cache


def gather_rows(
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n]
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of the rows at `slots`, `dtype` [n, dim]; a negative slot gives a row of zeros.

    Raises:
        IndexRangeError: a slot at or past the last row (CPU only; on other devices, where looking would
            stall, such a row is zeros too).
    """
    cache.check_slots(slots)
    if cache.num_slots == 0:
        return torch.zeros(slots.shape[0], cache.record.dim, dtype=dtype, device=cache.device)
    data, scales = cache.read_rows(slots.clamp(0, cache.num_slots - 1))
    values = decode_rows(cache.record, data, scales, dtype)
    invalid = (slots < 0) | (slots >= cache.num_slots)
    if cache.device.type == "cpu" and not bool(invalid.any()):
        return values
    return values.masked_fill_(invalid.unsqueeze(-1), 0.0)


def scatter_rows(
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n]
    values: Tensor,  # bf16 or float32 [n, dim], already rotated
) -> None:
    """Quantise rows and store them at `slots`; a negative slot stores nothing.

    Slots must not repeat, negative ones apart: which of the rows stays is not defined.

    Raises:
        ShapeError, DTypeError: as in `encode_rows`; nothing is stored.
        IndexRangeError: a slot at or past the last row (CPU only; other devices skip it).
    """
    data, scales = encode_rows(cache.record, values)
    cache.write_rows(slots, data, scales)
