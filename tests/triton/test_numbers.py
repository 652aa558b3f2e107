"""Number formats of the Triton kernels against the codec, bit for bit."""

import pytest
import torch
from torch import Tensor

from sparse_mla.cache import codec

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from sparse_mla.kernels.division import magic_division  # noqa: E402
from sparse_mla.kernels.triton import numbers  # noqa: E402


@triton.jit
def apply_kernel(x, out, COUNT: tl.constexpr, WHICH: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = tl.load(x + at)
    if WHICH == "decode_e4m3":
        result = numbers.decode_e4m3(value)
    elif WHICH == "decode_ue8m0":
        result = numbers.decode_ue8m0(value)
    elif WHICH == "decode_e2m1":
        result = numbers.decode_e2m1(value)
    elif WHICH == "encode_e4m3":
        result = numbers.encode_e4m3(value)
    elif WHICH == "encode_e2m1":
        result = numbers.encode_e2m1(value)
    elif WHICH == "ue8m0_byte":
        result = numbers.ue8m0_byte(value).to(tl.uint8)
    else:
        result = numbers.round_bf16(value)
    tl.store(out + at, result)


def apply(which: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    apply_kernel[(1,)](x, out, x.numel(), which)
    return out


@triton.jit
def e2m1_kernel(magnitudes, scale, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    divisor = tl.load(scale + at * 0)
    code = numbers.e2m1_of_quotient(tl.load(magnitudes + at), divisor, "interpreted")
    tl.store(out + at, code.to(tl.uint8))


def floats(count: int = 65536) -> Tensor:
    """Normal values over 26 binades, and the values that formats trip over."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(-12, 14, (count,), generator=generator).float()
    values = torch.randn(count, generator=generator) * torch.exp2(exponent)
    special = [0.0, -0.0, 448.0, 464.0, 1e38, -1e-40, 2.0**-10, 3 * 2.0**-10, 6.0, 0.25, 0.75, 5.0]
    values[: len(special)] = torch.tensor(special)
    return values


CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("which", ["decode_e4m3", "decode_ue8m0", "decode_e2m1"])
def test_every_code_decodes_as_in_the_codec(which: str) -> None:
    codes = CODES[:16] if which == "decode_e2m1" else CODES
    wanted = getattr(codec, which)(codes)
    got = apply(which, codes, torch.float32)
    assert torch.equal(got.nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("which", ["encode_e4m3", "encode_e2m1"])
def test_values_encode_as_in_the_codec(which: str) -> None:
    x = floats()
    assert torch.equal(apply(which, x, torch.uint8), getattr(codec, which)(x))


def test_every_bf16_number_by_every_scale_rounds_to_e2m1_as_in_the_codec() -> None:
    count = 1 << 15
    magnitudes = torch.arange(count, dtype=torch.int32).clamp(max=0x7F80) << 16  # to infinity
    numbers_of_bf16 = magnitudes.view(torch.float32)
    for scale in codec.decode_e4m3(CODES[1:0x7F]):
        got = torch.empty(count, dtype=torch.uint8)
        e2m1_kernel[(1,)](magnitudes, scale.reshape(1), got, count)
        assert torch.equal(got, codec.encode_e2m1(numbers_of_bf16 / scale))


def test_every_nan_is_one_code_and_infinities_saturate() -> None:
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    nans = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat((nans, torch.tensor([torch.inf, -torch.inf])))
    got = apply("encode_e4m3", x, torch.uint8)
    assert got.tolist() == [0x7F] * 6 + [0x7E, 0xFE]
    assert torch.equal(got, codec.encode_e4m3(x))


def test_scale_bytes_equal_the_codec() -> None:
    amax = floats().abs()
    amax[:8] = torch.tensor([0.0, 1e-4, 0.875, 0.8751, 1.0, 3.5, 448.0, torch.inf])
    got = apply("ue8m0_byte", amax, torch.uint8)
    assert got[:8].tolist() == [105, 105, 118, 119, 119, 120, 127, 247]
    assert torch.equal(got, codec.ue8m0_byte(amax))


def test_bf16_is_rounded_to_even() -> None:
    x = floats()
    assert torch.equal(apply("round_bf16", x, torch.bfloat16), x.to(torch.bfloat16))


@triton.jit
def quotient_kernel(values, out, magic: tl.int64, shift: tl.int32, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, numbers.quotient(tl.load(values + at), magic, shift))


@pytest.mark.parametrize(
    "divisor", [1, 2, 3, 7, 24, 64, 65, 576, 1 << 20, (1 << 30) + 1, 2**31 - 1]
)
def test_division_without_a_division(divisor: int) -> None:
    magic, shift = magic_division(divisor)
    generator = torch.Generator().manual_seed(divisor)
    values = torch.randint(2**31, (4096,), generator=generator)
    near = torch.arange(1, 1025) * divisor  # multiples and what lies just below them
    values[:1024], values[1024:2048] = near.clamp_max(2**31 - 1), (near - 1).clamp_max(2**31 - 1)
    values[2048:2051] = torch.tensor([0, 2**31 - 1, 2**31 - 2])
    out = torch.empty(4096, dtype=torch.int32)
    quotient_kernel[(1,)](values.int(), out, magic, shift, 4096)
    assert torch.equal(out.long(), values // divisor)
    assert magic <= 2**32 - 1
