"""Rotary tables, one for each layer kind, and the rotation in PyTorch.

Pair i of the 64 rotary dims is dims (2i, 2i+1) of the tail ("GPT-J" order):

    (a, b) -> (a cos - b sin, b cos + a sin)        inverse: sin -> -sin

Tables are always computed on the CPU and then moved: an angle is float32(position) * float32(freq), and
one bit of freq turns the angle at position 1e6 by about 1e-2 rad. Only PyTorch's own float32 power on the
CPU, followed by a float32 reciprocal, gives the bits that the model's other implementations have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.config.model import ModelConfig, YarnScaling
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import DTypeError, ShapeError

ROPE_DIM = 64
_PAIRS = ROPE_DIM // 2


def rope_frequencies(cfg: ModelConfig, kind: LayerKind) -> Tensor:
    """Radians per position of each pair, float32 [32] on the CPU.

    Window-only layers use `rope_theta` alone. Every other layer uses `compress_rope_theta` and YaRN for
    all that it turns, its window keys included.
    """
    plain = kind is LayerKind.WINDOW_ONLY
    base = float(cfg.rope_theta if plain else cfg.compress_rope_theta)
    exponents = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32, device="cpu") / ROPE_DIM
    frequencies = 1.0 / torch.pow(base, exponents)
    if plain or cfg.rope_scaling is None:
        return frequencies
    low, high = yarn_range(cfg.rope_scaling, base)
    pairs = torch.arange(_PAIRS, dtype=torch.float32, device="cpu")
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / float(cfg.rope_scaling.factor) * ramp + frequencies * (1 - ramp)


def yarn_range(scaling: YarnScaling, base: float) -> tuple[int, int]:
    """The pairs between which YaRN blends from the plain to the stretched frequency.

    A pair turns n times in the original context at `dim ln(L / (2 pi n)) / (2 ln base)`; the range goes
    from `beta_fast` turns (rounded down) to `beta_slow` turns (rounded up).
    """
    low = math.floor(_pair_of_turns(scaling, base, scaling.beta_fast))
    high = math.ceil(_pair_of_turns(scaling, base, scaling.beta_slow))
    return max(low, 0), min(high, ROPE_DIM - 1)


def rope_table(
    cfg: ModelConfig,
    kind: LayerKind,
    num_positions: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Cosines and sines of positions 0..n-1, float32 [n, 64]: cos in columns 0..31, sin in 32..63.

    Args:
        cfg: the model.
        kind: which layers; query, window latent, compressed latent, indexer and output use one table.
        num_positions: n; None = `max_position_embeddings` (256 MiB for 1M positions).
        device: where the table goes; its bits are the CPU's.

    Raises:
        ArgumentError: n < 1.
    """
    count = cfg.max_position_embeddings if num_positions is None else num_positions
    check_at_least("num_positions", count, 1)
    positions = torch.arange(count, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rope_frequencies(cfg, kind))
    table = torch.empty(count, ROPE_DIM, dtype=torch.float32, device="cpu")
    table[:, :_PAIRS] = angles.cos()
    table[:, _PAIRS:] = angles.sin()
    return table.to(device)


def apply_rope(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last 64 dims of `x`; the dims before them are copied.

    The maths is float32 (float64 for float64 input) with one rounding to the dtype of `x`. A position
    outside the table, as padding rows have, is clamped to it and never read out of range.

    Args:
        x: floating point [T, ..., D], D >= 64.
        positions: int32 or int64 [T], one for each entry of dim 0.
        table: float32 [n, 64] from `rope_table`.
        inverse: turn back.

    Returns:
        A new tensor like `x`.

    Raises:
        DTypeError, ShapeError, DeviceError: as named.
    """
    if not x.dtype.is_floating_point:
        raise DTypeError("x", f"dtype {x.dtype}", "a floating-point dtype")
    if x.dim() < 2 or x.shape[-1] < ROPE_DIM:
        raise ShapeError("x", f"shape {list(x.shape)}", f"[T, ..., D] with D >= {ROPE_DIM}")
    integers = (torch.int32, torch.int64)
    check_tensor("positions", positions, shape=[x.shape[0]], dtypes=integers, device=x.device,
                 last_dim_contiguous=False)  # fmt: skip
    check_tensor("table", table, shape=["n", ROPE_DIM], dtypes=[torch.float32], device=x.device)
    rows = table[positions.long().clamp(0, table.shape[0] - 1)]
    rows = rows.view(x.shape[0], *[1] * (x.dim() - 2), ROPE_DIM)
    cos, sin = rows[..., :_PAIRS], rows[..., _PAIRS:]
    if inverse:
        sin = -sin
    tail = x[..., -ROPE_DIM:].to(torch.promote_types(x.dtype, torch.float32))
    a, b = tail[..., 0::2], tail[..., 1::2]
    out = x.clone()
    out[..., -ROPE_DIM:] = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return out


def _pair_of_turns(scaling: YarnScaling, base: float, turns: float) -> float:
    context = scaling.original_max_position_embeddings
    return ROPE_DIM * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
