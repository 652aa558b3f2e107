"""Rows of every record against a scalar codec in plain Python, and the codec's promises."""

import bisect
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.cache.codec import (
    _pair_table,
    _value_table,
    decode_rows,
    encode_e4m3,
    encode_rows,
    gather_rows,
    scale_values,
    scatter_rows,
)
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import (
    INDEX_FP8,
    INDEX_MXFP4,
    MXFP8,
    NVFP4,
    RECORDS,
    V4,
    ScaleFormat,
    ValueFormat,
)
from sparse_mla.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError

ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)

# ------------------------------------------------------------- the second opinion, one value at a time

E4M3 = [(m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)) for e in range(16) for m in range(8)]
E4M3 = E4M3[:127]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def scalar_code(x, grid, sign):
    magnitude = min(abs(x), grid[-1])
    code = bisect.bisect_left(grid, magnitude)
    if grid[code] != magnitude:
        middle = (grid[code - 1] + grid[code]) / 2
        if magnitude < middle or (magnitude == middle and code % 2):
            code -= 1
    return code | (sign if math.copysign(1.0, x) < 0 else 0)


def scalar_exponent(amax, limit):
    exponent = -127
    while limit * 2.0**exponent < amax:
        exponent += 1
    return exponent


def scalar_row(record, row):
    """(data bytes, scale bytes, decoded values) of one row of finite doubles that are float32."""
    e4m3 = record.value_format is ValueFormat.E4M3
    grid, sign, limit = (E4M3, 0x80, 448.0) if e4m3 else (E2M1, 0x8, 6.0)
    codes, scales, values = [], b"", []
    for first in range(0, record.quantised_dims, record.scale_block):
        block = row[first : first + record.scale_block]
        amax = max(abs(x) for x in block)
        if record.scale_format is ScaleFormat.E4M3:
            byte = scalar_code(min(max(amax / 6.0, 2.0**-9), 448.0), E4M3, 0)
            scale, scales = E4M3[byte], scales + bytes([byte])
        else:
            floor = float(np.float32(1e-4)) if e4m3 else 6 * 2.0**-126
            exponent = scalar_exponent(max(amax, floor), limit)
            scale = 2.0**exponent
            if record.scale_format is ScaleFormat.F32:
                scales += struct.pack("<f", scale)
            else:
                scales += bytes([exponent + 127])
        for x in block:
            code = scalar_code(float(np.float32(x) / np.float32(scale)), grid, sign)
            codes.append(code)
            magnitude = grid[code & (sign - 1)] * scale
            values.append(-magnitude if code & sign else magnitude)
    data = (
        bytes(codes)
        if e4m3
        else bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True))
    )
    for x in row[record.quantised_dims :]:
        tail = torch.tensor(x).bfloat16()
        data += struct.pack("<H", int(tail.view(torch.int16)) & 0xFFFF)
        values.append(float(tail))
    return data, scales.ljust(record.scale_bytes, b"\0"), values


def mixed_rows(dim, n, seed, dtype):
    """Rows with blocks of very different size, zeros of both signs, powers of two and ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator)
    exponents = torch.randint(-16, 14, (n, dim // 16, 1), generator=generator)
    x = (x.view(n, dim // 16, 16) * exponents.float().exp2()).reshape(n, dim)
    kind = torch.randint(0, 12, (n, dim), generator=generator)
    x = torch.where(kind == 0, 0.0, x)
    x = torch.where(kind == 1, -0.0, x)
    x = torch.where(kind == 2, (x * 4).round() / 4, x)
    x[0] = 0.0
    x[1, :32] = 1e-30
    return x.to(dtype)


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_and_values_equal_the_scalar_codec(record, dtype):
    rows = mixed_rows(record.dim, 12, seed=record.row_bytes, dtype=dtype)
    data, scales = encode_rows(record, rows)
    assert data.shape == (12, record.data_bytes)
    assert scales.shape == (12, record.scale_bytes)
    decoded = decode_rows(record, data, scales)
    for i, row in enumerate(rows.float().tolist()):
        wanted_data, wanted_scales, values = scalar_row(record, row)
        assert bytes(scales[i].tolist()) == wanted_scales, f"scales of row {i}"
        assert bytes(data[i].tolist()) == wanted_data, f"data of row {i}"
        assert torch.equal(bits(decoded[i]), bits(torch.tensor(values))), f"values of row {i}"


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0x01), (0.01, 0x01), (1.0, 0x23), (6.0, 0x38), (6.3, 0x38), (100.0, 0x58),
        (2688.0, 0x7E), (5000.0, 0x7E), (0.0117, 0x01), (math.inf, 0x7E),
    ],
)  # fmt: skip
def test_nvfp4_scale_bytes(amax, byte):
    row = torch.zeros(1, 512)
    row[0, 5] = -amax
    data, scales = encode_rows(NVFP4, row)
    assert scales[0].tolist() == [byte] + [0x01] * 31
    assert data[0, 16:].eq(0).all()


def test_nvfp4_worked_values():
    row = torch.zeros(1, 512)
    row[0, 3], row[0, 16], row[0, 32] = 6.3, 5000.0, 0.001
    values = decode_rows(NVFP4, *encode_rows(NVFP4, row))[0]
    assert values[3].item() == 6.0  # scale 1, saturated
    assert values[16].item() == 2688.0  # the largest value of the format
    assert values[32].item() == 2.0**-10  # half the smallest scale


def test_both_ways_to_divide_by_six_give_the_same_nvfp4_scale_for_every_bf16():
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    one, other = (every * (1.0 / 6.0)).clamp(2.0**-9, 448), (every / 6.0).clamp(2.0**-9, 448)
    assert torch.equal(encode_e4m3(one), encode_e4m3(other))


@pytest.mark.parametrize(
    ("record", "byte"), [(MXFP8, 105), (V4, 105), (INDEX_MXFP4, 1)], ids=lambda value: str(value)
)
def test_a_zero_block_has_the_floor_scale_and_zero_codes(record, byte):
    data, scales = encode_rows(record, torch.zeros(2, record.dim))
    assert data.eq(0).all()
    assert scales[:, : record.scales_per_row].eq(byte).all()
    assert scales[:, record.scales_per_row :].eq(0).all()


def test_index_fp8_scales_are_little_endian_float32_powers_of_two():
    rows = torch.zeros(3, 128)
    rows[1, 7], rows[2, 9] = 1.0, -448.5
    _, scales = encode_rows(INDEX_FP8, rows)
    assert [struct.unpack("<f", bytes(row))[0] for row in scales.tolist()] == [
        2.0**-22,
        2.0**-8,
        2.0,
    ]


def test_the_eighth_scale_byte_of_v4_is_zero_and_rotary_dims_are_bf16():
    rows = torch.randn(4, 512)
    data, scales = encode_rows(V4, rows)
    assert scales[:, 7].eq(0).all()
    assert torch.equal(data[:, 448:].view(torch.bfloat16), rows[:, 448:].bfloat16())
    assert torch.equal(decode_rows(V4, data, scales)[:, 448:], rows[:, 448:].bfloat16().float())


# ---------------------------------------------------------------------------- not-a-number and infinity


@ALL
def test_a_nan_stays_in_its_own_block(record):
    rows = mixed_rows(record.dim, 4, seed=2, dtype=torch.float32)
    spoilt, clean = rows.clone(), rows.clone()
    last = record.scales_per_row - 1
    block = slice(last * record.scale_block, record.quantised_dims)
    dim = block.start + 3
    spoilt[2, dim], clean[2, dim] = math.nan, 0.0
    data, scales = encode_rows(record, spoilt)
    clean_data, clean_scales = encode_rows(record, clean)
    values = decode_rows(record, data, scales)
    nan = torch.zeros_like(values, dtype=torch.bool)
    if record.value_format is ValueFormat.E4M3:
        nan[2, dim] = True
        changed = data.ne(clean_data).nonzero().tolist()
        assert changed == [[2, dim]]
        assert data[2, dim] & 0x7F == 0x7F
        assert torch.equal(scales, clean_scales)
    else:
        nan[2, block] = True
        assert data[2, block.start // 2 : block.stop // 2].eq(0).all()
        wanted = {ScaleFormat.E4M3: 0x7F, ScaleFormat.UE8M0: 0xFF}[record.scale_format]
        assert scales.ne(clean_scales).nonzero().tolist() == [[2, last]]
        assert scales[2, last] == wanted
        outside = torch.ones(record.dim, dtype=torch.bool)
        outside[block] = False
        packed = outside[::2]
        assert torch.equal(data[:, packed], clean_data[:, packed])
    assert torch.equal(values.isnan(), nan)
    for dtype in (torch.float32, torch.bfloat16):
        decoded = decode_rows(record, data, scales, dtype)
        wanted = decode_rows(record, clean_data, clean_scales, dtype)
        assert torch.equal(decoded.isnan(), nan)
        assert torch.equal(bits(decoded[~nan]), bits(wanted[~nan]))


@ALL
def test_a_whole_row_of_nan_leaves_the_others(record):
    rows = mixed_rows(record.dim, 5, seed=3, dtype=torch.bfloat16)
    spoilt = rows.clone()
    spoilt[3] = math.nan
    values = decode_rows(record, *encode_rows(record, spoilt))
    wanted = decode_rows(record, *encode_rows(record, rows))
    assert values[3].isnan().all()
    keep = torch.tensor([0, 1, 2, 4])
    assert torch.equal(bits(values[keep]), bits(wanted[keep]))


@ALL
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_an_infinity_saturates_in_its_own_block(record, infinity):
    rows = mixed_rows(record.dim, 3, seed=4, dtype=torch.float32)
    spoilt = rows.clone()
    spoilt[1, 1] = infinity
    data, scales = encode_rows(record, spoilt)
    values = decode_rows(record, data, scales)
    wanted = decode_rows(record, *encode_rows(record, rows))
    assert not values.isnan().any()
    assert values[1, 1].sign() == math.copysign(1, infinity)
    assert values[1, 1].abs() >= (2688.0 if record.scale_format is ScaleFormat.E4M3 else 2.0**127)
    others = torch.ones_like(values, dtype=torch.bool)
    others[1, : record.scale_block] = False
    assert torch.equal(bits(values[others]), bits(wanted[others]))
    assert values[1, 2 : record.scale_block].isfinite().all()


@ALL
def test_values_near_the_end_of_float32_survive(record):
    rows = torch.full((1, record.dim), 2.5e38)
    values = decode_rows(record, *encode_rows(record, rows))
    if record.scale_format is ScaleFormat.E4M3:
        assert values.eq(2688.0).all()
    else:
        assert values.isfinite().all()
        assert (values / rows - 1).abs().max() <= 0.25


# ----------------------------------------------------------------------------------- rows and dtypes


@ALL
def test_a_row_does_not_depend_on_its_neighbours(record):
    rows = mixed_rows(record.dim, 9, seed=5, dtype=torch.float32)
    data, scales = encode_rows(record, rows)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved_data, moved_scales = encode_rows(record, rows[order])
    assert torch.equal(moved_data, data[order])
    assert torch.equal(moved_scales, scales[order])
    for i in range(9):
        alone_data, alone_scales = encode_rows(record, rows[i : i + 1])
        assert torch.equal(alone_data[0], data[i])
        assert torch.equal(alone_scales[0], scales[i])


@ALL
def test_bf16_holds_every_decoded_value_exactly(record):
    rows = mixed_rows(record.dim, 32, seed=6, dtype=torch.float32)
    data, scales = encode_rows(record, rows)
    exact = decode_rows(record, data, scales)
    assert torch.equal(
        bits(decode_rows(record, data, scales, torch.bfloat16)), bits(exact.bfloat16())
    )
    assert torch.equal(exact.bfloat16().float(), exact)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bytes_decode_as_single_codes_do(record, dtype):
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(0, 256, (70, record.data_bytes), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (70, record.scale_bytes), generator=generator, dtype=torch.uint8)
    got = decode_rows(record, data, scales, dtype)
    grid = [*E4M3, math.nan] if record.value_format is ValueFormat.E4M3 else E2M1
    table = torch.tensor(grid + [-value for value in grid])
    codes = data[:, : record.quantised_bytes].long()
    if record.value_format is ValueFormat.E2M1:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    factors = scale_values(record, scales).repeat_interleave(record.scale_block, 1)
    wanted = (table[codes] * factors).to(dtype)
    quantised = got[:, : record.quantised_dims]
    assert torch.equal(quantised.isnan(), wanted.isnan())
    keep = ~wanted.isnan()
    assert torch.equal(bits(quantised[keep]), bits(wanted[keep]))


@ALL
def test_decode_takes_any_byte_offset_and_row_stride(record):
    rows = mixed_rows(record.dim, 5, seed=8, dtype=torch.float32)
    data, scales = encode_rows(record, rows)
    wanted = decode_rows(record, data, scales)
    for count in (1, 5):
        for shift in (0, 1, 2, 3):
            buffer = torch.full((count, record.row_bytes + 5), 0xFF, dtype=torch.uint8)
            middle = shift + record.data_bytes
            buffer[:, shift:middle] = data[:count]
            buffer[:, middle : middle + record.scale_bytes] = scales[:count]
            got = decode_rows(
                record, buffer[:, shift:middle], buffer[:, middle : middle + record.scale_bytes]
            )
            assert torch.equal(bits(got), bits(wanted[:count]))


@ALL
def test_no_rows_give_no_bytes_and_no_values(record):
    data, scales = encode_rows(record, torch.empty(0, record.dim))
    assert data.shape == (0, record.data_bytes)
    assert scales.shape == (0, record.scale_bytes)
    assert decode_rows(record, data, scales, torch.bfloat16).shape == (0, record.dim)


@ALL
def test_encode_reads_strided_rows_and_leaves_them_alone(record):
    wide = torch.randn(6, record.dim + 24)
    rows = wide[::2, 8 : 8 + record.dim]
    kept = wide.clone()
    data, scales = encode_rows(record, rows)
    wanted_data, wanted_scales = encode_rows(record, rows.clone())
    assert torch.equal(data, wanted_data)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(wide, kept)


def test_more_rows_than_are_decoded_at_a_time():
    rows = torch.randn(1500, 128)
    data, scales = encode_rows(INDEX_FP8, rows.repeat(3, 1))
    values = decode_rows(INDEX_FP8, data, scales)
    assert torch.equal(values[:1500], values[3000:])
    assert torch.equal(values[:40], decode_rows(INDEX_FP8, data[:40], scales[:40]))


def test_tables_made_in_inference_mode_serve_outside_it():
    rows = torch.randn(3, 512)
    _value_table.cache_clear()
    _pair_table.cache_clear()
    with torch.inference_mode():
        wanted = decode_rows(NVFP4, *encode_rows(NVFP4, rows))
    assert torch.equal(decode_rows(NVFP4, *encode_rows(NVFP4, rows)), wanted)


# -------------------------------------------------------------------------------------------- errors


def relative_rms(values, rows):
    return float(
        (values - rows).double().square().mean().sqrt() / rows.double().square().mean().sqrt()
    )


@pytest.mark.parametrize(
    ("name", "plain", "ordinary", "outliers"),
    [  # relative RMS errors: rows without outliers; ordinary dims and outlier dims of rows with them
        ("v4", 0.0249, 0.0249, 0.0257),
        ("mxfp8", 0.0266, 0.0266, 0.0257),
        ("mxfp8_planar", 0.0266, 0.0266, 0.0257),
        ("nvfp4", 0.0948, 0.287, 0.0268),  # 4 of 32 blocks hold an outlier and lose the rest
        ("nvfp4_planar", 0.0948, 0.287, 0.0268),
        ("index_fp8", 0.0265, 0.0265, 0.0262),
        ("index_mxfp4", 0.115, 0.440, 0.109),  # 1 of 4 blocks
    ],
)
def test_error_table_with_outlier_channels(name, plain, ordinary, outliers):
    """Normal rows, then the same with 4 of 512 (1 of 128) channels 64 times as large."""
    record = RECORDS[name]
    rows = torch.randn(512, record.dim, generator=torch.Generator().manual_seed(9))
    channels = torch.arange(17, record.quantised_dims, 113)[: record.dim // 128]
    spiky = rows.clone()
    spiky[:, channels] *= 64
    values = decode_rows(record, *encode_rows(record, rows))
    spiky_values = decode_rows(record, *encode_rows(record, spiky))
    rest = torch.ones(record.dim, dtype=torch.bool)
    rest[channels] = False
    got = (
        relative_rms(values, rows),
        relative_rms(spiky_values[:, rest], spiky[:, rest]),
        relative_rms(spiky_values[:, channels], spiky[:, channels]),
    )
    assert got == pytest.approx((plain, ordinary, outliers), rel=0.05)


def step_bound(record, rows, scales):
    """Largest error of each value: half a step of its code, and what saturation may cut off."""
    factors = scale_values(record, scales).repeat_interleave(record.scale_block, 1).double()
    magnitude = rows[:, : record.quantised_dims].abs().double()
    if record.value_format is ValueFormat.E4M3:  # three mantissa bits; steps of 2**-9 near zero
        return torch.maximum(magnitude * 2.0**-4, factors * 2.0**-10)
    bound = torch.maximum(magnitude * 0.25, factors * 0.25)  # one mantissa bit
    return torch.maximum(bound, magnitude - 6 * factors)


@ALL
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 40), bf16=st.booleans())
@settings(max_examples=25, deadline=None)
def test_round_trips_stay_within_half_a_step(record, seed, exponent, bf16):
    dtype = torch.bfloat16 if bf16 else torch.float32
    rows = (mixed_rows(record.dim, 3, seed, torch.float32) * 2.0**exponent).to(dtype)
    data, scales = encode_rows(record, rows)
    values = decode_rows(record, data, scales)
    quantised = slice(0, record.quantised_dims)
    error = (values[:, quantised].double() - rows[:, quantised].double()).abs()
    bound = step_bound(record, rows.float(), scales)
    assert (error <= bound * (1 + 2.0**-20)).all()
    assert torch.equal(values[:, quantised].signbit(), rows[:, quantised].signbit())
    if record.scale_format is not ScaleFormat.E4M3:
        again = decode_rows(record, *encode_rows(record, values))
        assert torch.equal(bits(again), bits(values))


# ------------------------------------------------------------------------------------- rows of a cache


@ALL
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_scatter_then_gather(record, slot_dtype):
    cache = PagedCache.allocate(record, num_pages=5, page_rows=7)
    cache.pages.fill_(0xA5)
    rows = mixed_rows(record.dim, 6, seed=10, dtype=torch.bfloat16)
    slots = torch.tensor([34, 0, -1, 7, -(2**31), 13], dtype=slot_dtype)
    before = cache.pages.clone()
    scatter_rows(cache, slots, rows)
    wanted = decode_rows(record, *encode_rows(record, rows))
    wanted[[2, 4]] = 0.0
    assert torch.equal(bits(gather_rows(cache, slots)), bits(wanted))
    assert torch.equal(bits(gather_rows(cache, slots, torch.bfloat16)), bits(wanted.bfloat16()))
    twice = torch.tensor([7, 7, -1], dtype=slot_dtype)
    assert torch.equal(bits(gather_rows(cache, twice)), bits(wanted[[3, 3, 2]]))
    untouched = torch.ones(35, dtype=torch.bool)
    untouched[[34, 0, 7, 13]] = False
    kept = PagedCache(before, record, 7).read_rows(untouched.nonzero().flatten())
    now = cache.read_rows(untouched.nonzero().flatten())
    assert torch.equal(kept[0], now[0])
    assert torch.equal(kept[1], now[1])


def test_negative_slots_alone_write_nothing_and_read_zeros():
    cache = PagedCache.allocate(NVFP4, num_pages=2, page_rows=2)
    cache.pages.fill_(0xFF)
    slots = torch.tensor([-1, -5])
    scatter_rows(cache, slots, torch.randn(2, 512))
    assert cache.pages.eq(0xFF).all()
    assert gather_rows(cache, slots).eq(0).all()
    assert gather_rows(cache, slots[:0]).shape == (0, 512)
    scatter_rows(cache, slots[:0], torch.randn(0, 512))


def test_a_cache_without_pages_reads_zeros():
    cache = PagedCache.allocate(MXFP8, num_pages=0, page_rows=4)
    assert torch.equal(gather_rows(cache, torch.tensor([-1, -2])), torch.zeros(2, 512))
    scatter_rows(cache, torch.tensor([-1]), torch.randn(1, 512))
    with pytest.raises(IndexRangeError, match=r"slots: got slot 0; allowed: below 0"):
        gather_rows(cache, torch.tensor([0]))


def test_bad_rows_are_refused_before_any_store():
    cache = PagedCache.allocate(MXFP8, num_pages=2, page_rows=3)
    slots = torch.tensor([0, 1])
    with pytest.raises(
        ShapeError, match=r"values: got shape \[2, 511\]; allowed: shape \[n, 512\]"
    ):
        scatter_rows(cache, slots, torch.ones(2, 511))
    with pytest.raises(DTypeError, match="values: got dtype float16; allowed: dtype bfloat16 or"):
        scatter_rows(cache, slots, torch.ones(2, 512).half())
    with pytest.raises(ShapeError, match=r"data: got shape \[3, 512\]; allowed: shape \[2, 512\]"):
        scatter_rows(cache, slots, torch.ones(3, 512))
    with pytest.raises(DTypeError, match="slots: got dtype float32; allowed: dtype int32 or int64"):
        scatter_rows(cache, slots.float(), torch.ones(2, 512))
    with pytest.raises(ShapeError, match=r"slots: got shape \[2, 1\]; allowed: shape \[n\]"):
        gather_rows(cache, slots[:, None])
    with pytest.raises(IndexRangeError, match=r"slot 6; allowed: below 6 \(2 pages of 3 rows\)"):
        scatter_rows(cache, torch.tensor([0, 6]), torch.ones(2, 512))
    with pytest.raises(IndexRangeError, match="slot 2147483647"):
        gather_rows(cache, torch.tensor([2**31 - 1], dtype=torch.int32))
    assert cache.pages.eq(0).all()


def test_bad_bytes_are_refused():
    data, scales = encode_rows(NVFP4, torch.ones(2, 512))
    with pytest.raises(ShapeError, match=r"data: got shape \[2, 256\]; allowed: shape \[n, 512\]"):
        decode_rows(MXFP8, data, scales)
    with pytest.raises(ShapeError, match=r"scales: got shape \[1, 32\]; allowed: shape \[2, 32\]"):
        decode_rows(NVFP4, data, scales[:1])
    with pytest.raises(DTypeError, match="data: got dtype int8; allowed: dtype uint8"):
        decode_rows(NVFP4, data.view(torch.int8), scales)
    with pytest.raises(ArgumentError, match=r"dtype: got torch.float16; allowed: torch.float32"):
        decode_rows(NVFP4, data, scales, torch.float16)
