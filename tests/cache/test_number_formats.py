"""e4m3, e2m1 and ue8m0 against exhaustive tables, torch's own type and exact arithmetic."""

import bisect
import itertools
import math

import pytest
import torch

from sparse_mla.cache.codec import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    ue8m0_byte,
    unpack_nibbles,
)
from sparse_mla.kernels.torch.attend import encode_quickly

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MXFP4_FLOOR = 6 * 2.0**-126


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def nearest_even(magnitude: float, grid: list[float]) -> int:
    """The code whose value is nearest; ties go to the even code. Doubles hold every midpoint exactly."""
    magnitude = min(magnitude, grid[-1])
    above = bisect.bisect_left(grid, magnitude)
    if grid[above] == magnitude:
        return above
    middle = (grid[above - 1] + grid[above]) / 2
    if magnitude == middle:
        return above if above % 2 == 0 else above - 1
    return above if magnitude > middle else above - 1


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_all_256_e4m3_codes_decode_as_torch_does():
    wanted = ALL_BYTES.view(torch.float8_e4m3fn).float()
    got = decode_e4m3(ALL_BYTES)
    nan = wanted.isnan()
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(got.isnan(), nan)
    assert same_bits(got[~nan], wanted[~nan])


def test_every_bf16_value_encodes_as_torch_casts_after_the_clamp():
    wanted = EVERY_BF16.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    wanted[EVERY_BF16.isnan()] = 0x7F  # torch keeps the sign
    assert torch.equal(encode_e4m3(EVERY_BF16), wanted)
    assert torch.equal(encode_quickly(EVERY_BF16.clone()), wanted)


def test_float32_bits_at_random_encode_as_torch_casts_after_the_clamp():
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    wanted[x.isnan()] = 0x7F
    assert torch.equal(encode_e4m3(x), wanted)
    assert torch.equal(encode_quickly(x), wanted)


@pytest.mark.parametrize(
    ("encode", "grid", "sign"),
    [
        (encode_e4m3, decode_e4m3(ALL_BYTES[:127]).tolist(), 0x80),
        (encode_e2m1, E2M1_VALUES, 0x8),
    ],
    ids=["e4m3", "e2m1"],
)
def test_midpoints_and_their_float32_neighbours_round_to_nearest_even(encode, grid, sign):
    middles = f32(*[(low + high) / 2 for low, high in itertools.pairwise(grid)])
    up, down = f32(math.inf), f32(-math.inf)
    points = torch.cat((middles, middles.nextafter(up), middles.nextafter(down), f32(*grid)))
    wanted = [nearest_even(x, grid) for x in points.tolist()]
    assert encode(points).tolist() == wanted
    assert encode(-points).tolist() == [code | sign for code in wanted]


def test_every_bf16_value_encodes_to_the_nearest_e2m1_code():
    numbers = EVERY_BF16[~EVERY_BF16.isnan()]
    wanted = [
        nearest_even(abs(x), E2M1_VALUES) | (8 if math.copysign(1, x) < 0 else 0)
        for x in numbers.tolist()
    ]
    assert encode_e2m1(numbers).tolist() == wanted


def test_worked_numbers_of_the_formats():
    assert encode_e4m3(f32(448, 1, 0.4375, 2**-6, 2**-9, 1000, math.inf)).tolist() == [
        0x7E, 0x38, 0x2E, 0x08, 0x01, 0x7E, 0x7E,
    ]  # fmt: skip
    assert encode_e4m3(f32(math.nan, -math.nan, -math.inf)).tolist() == [0x7F, 0x7F, 0xFE]
    ties = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert decode_e2m1(encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert encode_e2m1(f32(6.5, 1e30, math.inf, -math.inf)).tolist() == [7, 7, 7, 15]


def test_the_sign_survives_a_result_of_zero():
    tiny = f32(-0.0, -1e-5, -1e-40, 0.0, 1e-5)
    assert encode_e4m3(tiny).tolist() == [0x80, 0x80, 0x80, 0, 0]
    assert encode_e2m1(f32(-0.0, -0.1, -1e-40, 0.0, 0.1)).tolist() == [8, 8, 8, 0, 0]
    assert decode_e4m3(ALL_BYTES[128:129]).signbit().item()
    assert decode_e2m1(ALL_BYTES[8:9]).signbit().item()


def test_e2m1_codes_decode_to_the_sixteen_values():
    got = decode_e2m1(ALL_BYTES[:16])
    assert got.tolist() == E2M1_VALUES + [-value for value in E2M1_VALUES]
    assert torch.equal(encode_e2m1(got), ALL_BYTES[:16])


def test_nibbles_keep_the_even_element_low():
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert torch.equal(pack_nibbles(unpack_nibbles(ALL_BYTES)), ALL_BYTES)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 105), (1e-4, 105), (0.875, 118), (0.8751, 119), (1.0, 119), (3.5, 120), (448.0, 127),
        (448.5, 128), (1e-38, 105), (3.0e38, 247), (3.4028234663852886e38, 247), (math.inf, 247),
        (math.nan, 255), (448.0 * 2**100, 227), (448.0 * 2**-20, 107),
    ],
)  # fmt: skip
def test_ue8m0_bytes_of_e4m3_blocks(amax, byte):
    assert ue8m0_byte(f32(amax)).item() == byte


@pytest.mark.parametrize(
    ("amax", "byte"), [(0.0, 1), (1.0, 125), (3.0, 126), (6.0, 127), (6.01, 128), (math.inf, 253)]
)
def test_ue8m0_bytes_of_e2m1_blocks(amax, byte):
    assert ue8m0_byte(f32(amax), 6.0, MXFP4_FLOOR).item() == byte


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_the_bit_rule_is_the_exact_logarithm_over_a_whole_binade(limit):
    fraction, exponent = math.frexp(limit)  # limit = fraction * 2**exponent, fraction in [0.5, 1)
    bits = torch.arange(1 << 23, dtype=torch.int32)
    # ceil(log2(m / limit)) of m in [1, 2): m / 2 is above the limit's fraction or not
    border = int(f32(2 * fraction).view(torch.int32)) & 0x7FFFFF
    wanted = torch.where(bits > border, 1, 0) + (127 - exponent + 1)
    got = ue8m0_byte((bits | (127 << 23)).view(torch.float32), limit, 0.0)
    assert torch.equal(got.to(torch.int32), wanted.to(torch.int32))


@pytest.mark.parametrize(("limit", "floor"), [(448.0, 1e-4), (6.0, MXFP4_FLOOR)])
def test_the_bit_rule_is_the_exact_logarithm_in_every_binade(limit, floor):
    mantissas = f32(1, 1 + 2**-23, 1.25, 1.5, 1.5 + 2**-22, 1.75, 1.75 + 2**-22, 2 - 2**-23)
    amax = torch.cat([mantissas * 2.0**k for k in range(-126, 128)])
    every = EVERY_BF16[EVERY_BF16.isfinite() & ~EVERY_BF16.signbit()]
    amax = torch.cat((amax, every))
    wanted = []
    for a in torch.maximum(amax, f32(floor)).tolist():
        exponent = math.frexp(a)[1] - math.frexp(limit)[1] - 1
        while limit * 2.0**exponent < a:  # both sides are exact doubles
            exponent += 1
        wanted.append(exponent + 127)
    assert ue8m0_byte(amax, limit, floor).tolist() == wanted


def test_ue8m0_bytes_decode_to_powers_of_two():
    values = decode_ue8m0(ALL_BYTES).tolist()
    assert values[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255] == math.inf


def test_every_scale_byte_comes_back_from_its_own_power_of_two():
    powers = decode_ue8m0(ALL_BYTES[105:247])
    assert torch.equal(ue8m0_byte(448.0 * powers), ALL_BYTES[105:247])
    assert torch.equal(ue8m0_byte((448.0 * powers).nextafter(f32(math.inf))), ALL_BYTES[106:248])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_shapes_are_kept(shape):
    x = torch.ones(shape)
    assert encode_e4m3(x).shape == encode_e2m1(x).shape == ue8m0_byte(x).shape == x.shape
    codes = encode_e4m3(x)
    assert decode_e4m3(codes).shape == decode_ue8m0(codes).shape == x.shape
    assert torch.equal(decode_e4m3(codes), x)


def test_inputs_are_left_alone():
    x = torch.randn(100)
    kept = x.clone()
    encode_e4m3(x)
    encode_e2m1(x)
    ue8m0_byte(x.abs_())
    assert torch.equal(x, kept.abs())
