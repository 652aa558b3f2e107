"""Hidden states that stand in for a model's embeddings: a fixed function of (stream, position).

A stream is whatever shares its content: a request, or the common prefix of a family of requests.
Integer arithmetic only, so a row has the same bits in every batch, on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def hidden_states(streams: Tensor, positions: Tensor, hidden_size: int, seed: int = 0) -> Tensor:
    """Rows of nearly normal values, mean 0 and variance 1.

    Args:
        streams: int64 [T], what each row's content belongs to.
        positions: int64 [T], the row's place in its content.
        hidden_size: values of a row.
        seed: another seed gives other content.

    Returns:
        float32 [T, hidden_size]. A value is the sum of four independent 16-bit uniform numbers (a
        counter-based hash, splitmix64), centred and scaled; its largest size is 3.47.
    """
    base = _mix(torch.full_like(streams, seed) * _GOLDEN + streams)
    row = _mix(base + positions * _GOLDEN)
    column = torch.arange(1, hidden_size + 1, dtype=torch.int64, device=streams.device)
    bits = _mix(row[:, None] + column * _GOLDEN)
    total = (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + _shift(bits, 48)
    spread = 65536.0 / math.sqrt(3.0)  # standard deviation of a sum of four: 2**16 * sqrt(4 / 12)
    return (total - 2 * 0xFFFF).to(torch.float32) * (1.0 / spread)


def _mix(value: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (products wrap; shifts are made logical by a mask)."""
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, count: int) -> Tensor:
    return (value >> count) & ((1 << (64 - count)) - 1)
