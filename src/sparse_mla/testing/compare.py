"""Comparison of an attention result with the oracle, with tolerances that are derived.

Notation: u = unit roundoff of a format = half the distance from 1 to the next number: 2**-8 for bf16
(8 significant bits), 2**-24 for float32. With weights p_k and values v_k the oracle also returns the
magnitude A = sum p_k |v_k| / denominator, because rounding a weight by a factor (1 + e), |e| <= u, moves
the output by at most u * A, however much the sum itself cancels. Every bound below is a sum of such terms:

    logits      float32 dot product of 512 terms: dz <= DOT_ULPS * 2**-24 * Z, Z = scale * sum |q_d k_d|
                rotated query: a float32 rotation that rounds differently (fused multiply-add) can flip
                the bf16 rounding of a component by one step (2**-7 of it): FLIPS_OF_LOGIT * Z
    weights     dz moves a weight by the factor exp(dz); rounding to bf16 (tensor cores) by u; f16 weights
                are off by half a subnormal step w besides, which moves the output by w * sum |v_k| at most
    output      A (2 dz + u) + w sum |v_k| + the rounding of the output format
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_mla.kernels.contract import OUTPUT_BLOCK, AttendCall, AttendOut
from sparse_mla.kernels.layouts import (
    OUTPUT_BLOCKS,
    dequantize_output,
    standard_output,
    store_output,
)
from sparse_mla.kernels.reference.attend import Attended, attend_exact

DOT_ULPS = 8
FLIPS_OF_LOGIT = 2.0**-12
"""Share of the logit magnitude that flipped query components may move: one bf16 step (2**-7) of
components that hold a 32nd of the sum."""


FREE_CODES = 8
"""Codes that may differ in any problem, however small: equal keys put several values on one tie."""
CODE_DEVIATIONS = 4
"""Standard deviations, of a Poisson count, by which codes may differ beyond the expected number."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a body may round on its way."""

    weight_roundoff: float  # relative rounding of a probability before the value product
    rotation_flips: bool  # float32 rotation may round differently from the oracle's
    max_code_share: float  # expected share of FP8 codes that differ from the oracle's, at most
    weight_step: float = (
        0.0  # absolute error of a weight, the largest being 1: what f16 cannot hold
    )


FLOAT32_BODY = Precision(weight_roundoff=2.0**-20, rotation_flips=False, max_code_share=1e-3)
"""float32 everywhere: torch on a CPU. A code differs only when a value lies within 1e-6 of a tie."""
TENSOR_CORE_BODY = Precision(weight_roundoff=2.0**-8, rotation_flips=True, max_code_share=0.06)
"""Probabilities rounded to bf16. The expected share of other codes, for keys of mean zero:

A rounded weight errs by e = uniform(+-2**-8) / m, m in [1, 2) its mantissa, log-uniform, so its rms is
2**-8 * sqrt(1/3 * 3 / (8 ln 2)) = 0.425 * 2**-8. An output sum p_k v_k then errs by sum p_k e_k v_k, which
is that share, 1.66e-3, of the output's own standard deviation s, however many keys there are: both grow
as |p|. The step of e4m3 at a normal value x is 2**(floor(log2 |x|) - 3), and an error d changes the code
with probability min(1, |d| / step). Over |x| = s * 2**j .. s * 2**(j+1) that is 0.003 at j = 0, 0.006 at
-1, 0.008 in each of -2 .. -6, 0.005 at -7 and less below (small values have small steps, the probability
of a binade halves with its step): 0.060 in all. The largest weight, 1, is exact, which takes 5 to 20 %
off; an FMA in the rotation flips one query component in 2**15 or so, which is nothing beside it.
"""


HOPPER_BODY = replace(TENSOR_CORE_BODY, weight_step=2.0**-35)
"""Weights are f16, at least 2**10 times as large as beside a largest weight of 1: half of 2**-24, by 2**10."""


def precision_of(body: str, device: torch.device | None = None) -> Precision:
    """The precision class of a backend ("torch", "reference", "hopper", ...), not of "auto".

    Args:
        body: its name.
        device: where it runs; None = a CPU. On a GPU cuBLAS may use tensor cores for torch too.
    """
    if body == "hopper":
        return HOPPER_BODY
    on_gpu = device is not None and device.type == "cuda"
    return FLOAT32_BODY if body in ("torch", "reference") and not on_gpu else TENSOR_CORE_BODY


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a result is from the oracle; every figure is 'error / bound' unless it says otherwise."""

    output: float  # largest error / bound over all elements
    lse: float
    max_logits: float
    relative_l2: float  # ||error|| / ||oracle||, not a ratio to a bound
    differing_codes: (
        float  # share of FP8 codes that differ; a block with another scale counts as one
    )
    special_values_match: bool  # inf and NaN where the oracle has them, zeros of keyless rows

    @property
    def passed(self) -> bool:
        """Whether every figure is inside its bound."""
        inside = max(self.output, self.lse, self.max_logits) <= 1.0
        return inside and self.special_values_match


def compare_with_oracle(
    call: AttendCall, out: AttendOut, precision: Precision, exact: Attended | None = None
) -> Comparison:
    """Compare what a kernel wrote into `out` with the float64 oracle on the same bytes."""
    exact = attend_exact(call) if exact is None else exact
    got = output_values(out).double()
    bound = output_bound(call, exact, precision, out)
    output = _worst(got, exact.output, bound)
    shift = logit_bound(call, exact, precision)
    special = bool(torch.isfinite(got).all())
    keyless = exact.lse == torch.inf
    special &= bool((got[keyless] == 0).all())
    lse = max_logits = 0.0
    if out.lse is not None:
        lse = _worst(out.lse.double(), exact.lse, shift + 2.0**-22 * (1 + _finite(exact.lse).abs()))
        special &= torch.equal(out.lse.isinf(), exact.lse.isinf())
    if out.max_logits is not None:
        edge = shift + 2.0**-22 * (1 + _finite(exact.max_logits).abs())
        max_logits = _worst(out.max_logits.double(), exact.max_logits, edge)
        special &= torch.equal(out.max_logits.isinf(), exact.max_logits.isinf())
    norm = exact.output.norm().clamp_min(1e-300)
    relative = float((got - exact.output).norm() / norm) if got.numel() else 0.0
    codes = _differing_codes(out, exact)
    special &= codes <= _code_bound(precision, out)
    return Comparison(output, lse, max_logits, relative, codes, special)


def assert_matches_oracle(
    call: AttendCall, out: AttendOut, precision: Precision, exact: Attended | None = None
) -> Comparison:
    """Raise `AssertionError` with every figure unless the comparison passes."""
    result = compare_with_oracle(call, out, precision, exact)
    if not result.passed:
        raise AssertionError(f"attention differs from the oracle: {result}")
    return result


def same_bits(left: AttendOut, right: AttendOut) -> bool:
    """Whether two outputs of one shape and kind hold the same bits, statistics and scales included."""
    return all(torch.equal(a, b) for a, b in zip(_bits(left), _bits(right), strict=True))


def _bits(out: AttendOut) -> list[Tensor]:
    found = [out.data.view(torch.uint8)]
    found += [t.view(torch.int32) for t in (out.lse, out.max_logits) if t is not None]
    return found if out.scales is None else [*found, out.scales]


def output_values(out: AttendOut) -> Tensor:
    """float32 [T, H, 512] in standard order, whatever the output's format and layout."""
    if out.scales is None:
        return standard_output(out.data, out.heads_per_group, out.layout).float()
    return dequantize_output(out.data, out.scales, out.heads_per_group, out.layout)


def logit_bound(call: AttendCall, exact: Attended, precision: Precision) -> Tensor:
    """float64 [T, H]: how far a logit may be off."""
    share = DOT_ULPS * 2.0**-24
    if call.rotate_query and precision.rotation_flips:
        share += FLIPS_OF_LOGIT
    return share * exact.logit_magnitude


def output_bound(call: AttendCall, exact: Attended, precision: Precision, out: AttendOut) -> Tensor:
    """float64 [T, H, 512]: how far an output value may be off, output rounding included.

    The output rounding of bf16 is half a step, 2**-8 of the value at worst; that of e4m3 is 2**-4 of the
    value, or half a subnormal step 2**-10 of the block's scale, which is at most 2 * 2**-8 of the
    largest value of the block (a scale one step larger than the oracle's is allowed at its edge).
    """
    shift = logit_bound(call, exact, precision)[:, :, None]
    before = exact.magnitude * (2 * shift + precision.weight_roundoff)
    before = before + precision.weight_step * exact.value_sum
    before = before + 2.0**-22 * exact.output.abs() + 2.0**-40
    size = exact.output.abs() + before
    if not out.is_fp8:
        return before + 2.0**-8 * size
    tokens, heads, _ = size.shape
    blocks = size.view(tokens, heads, OUTPUT_BLOCKS, OUTPUT_BLOCK)
    amax = blocks.amax(dim=-1, keepdim=True).clamp_min(1e-4)
    scale = 2.0 ** (torch.ceil(torch.log2(amax / 448.0)) + 1)
    step = torch.maximum(blocks * 2.0**-4, scale * 2.0**-10)
    return before + step.view_as(size)


def ulp_bf16(values: Tensor) -> Tensor:
    """float64: distance from |value| to the next bf16 above it (values in the normal range)."""
    exponent = torch.floor(torch.log2(values.double().abs().clamp_min(2.0**-126)))
    return 2.0 ** (exponent - 7)


def _code_bound(precision: Precision, out: AttendOut) -> float:
    """Share of codes that may differ: the expected one and what chance adds to it."""
    count = max(1, out.data.numel())
    expected = precision.max_code_share * count
    return (expected + max(FREE_CODES, CODE_DEVIATIONS * math.sqrt(expected))) / count


def _differing_codes(out: AttendOut, exact: Attended) -> float:
    if out.scales is None or out.data.numel() == 0:
        return 0.0
    wanted = AttendOut(
        data=torch.empty_like(out.data),
        scales=torch.empty_like(out.scales),
        lse=None,
        max_logits=None,
        heads_per_group=out.heads_per_group,
        layout=out.layout,
    )
    store_output(wanted, 0, exact.output.float())
    assert wanted.scales is not None
    both_zero = ((wanted.data | out.data) & 0x7F) == 0  # the sign of zero is free
    differs = (wanted.data != out.data) & ~both_zero
    blocks = differs.view(*differs.shape[:2], -1, OUTPUT_BLOCK).sum(dim=-1)
    same_scale = _scale_bytes(wanted.scales) == _scale_bytes(out.scales)
    return float(torch.where(same_scale, blocks, 1).sum()) / differs.numel()


def _scale_bytes(scales: Tensor) -> Tensor:
    """uint8 [T, G, blocks], in the order of the data's blocks."""
    return scales.contiguous().view(torch.uint8)


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isinf(), torch.zeros_like(values), values)


def _worst(got: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """Largest |got - wanted| / bound; equal infinities count as 0, NaN as inf."""
    if got.numel() == 0:
        return 0.0
    error = (got - wanted).abs()
    error = torch.where(got == wanted, torch.zeros_like(error), error)
    ratio = torch.nan_to_num(error / bound, nan=torch.inf)
    return float(ratio.max())
