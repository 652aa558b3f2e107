"""Attention, one token after the other in float64: the oracle.

Reads the same quantised bytes as every other body. The query is rotated in float32 and rounded to bf16
(that is part of the contract); everything after it is float64 until the output is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_rows
from sparse_mla.kernels.contract import HEAD_DIM, ROPE_DIM, AttendCall, AttendOut, KeySet
from sparse_mla.kernels.layouts import standard_query, store_output


@dataclass(frozen=True, slots=True)
class Attended:
    """The exact result, and the sizes that rounding errors scale with."""

    output: Tensor  # float64 [T, H, 512], rotated back if the call says so
    magnitude: Tensor  # float64 [T, H, 512], the same sum with every |value| instead of value
    lse: Tensor  # float64 [T, H]
    max_logits: Tensor  # float64 [T, H]
    logit_magnitude: Tensor  # float64 [T, H], largest scale * sum_d |q_d key_d| of a row
    value_sum: Tensor  # float64 [T, 1, 512], |value| summed over the keys, unweighted


def attend(call: AttendCall, out: AttendOut) -> None:
    """Fill `out` from the exact result."""
    result = attend_exact(call)
    store_output(out, 0, result.output.float() + 0.0)  # -0 becomes +0
    if out.lse is not None:
        out.lse.copy_(result.lse)
    if out.max_logits is not None:
        out.max_logits.copy_(result.max_logits)


def attend_exact(call: AttendCall) -> Attended:
    """Attention in float64. A row without a valid key: output 0, lse +inf, max -inf."""
    tokens, heads = call.num_tokens, call.num_heads
    device = call.q.device
    query = rotated_query(call).double()  # [T, H, 512]
    wide = {"dtype": torch.float64, "device": device}
    output = torch.zeros(tokens, heads, HEAD_DIM, **wide)  # type: ignore[call-overload]
    magnitude = torch.zeros_like(output)
    lse = torch.full((tokens, heads), torch.inf, **wide)  # type: ignore[call-overload]
    max_logits = torch.full_like(lse, -torch.inf)
    logit_magnitude = torch.zeros_like(lse)
    value_sum = torch.zeros_like(output[:, :1])
    for token in range(tokens):
        keys = keys_of(call, token)  # float64 [n, 512]
        if keys.shape[0] == 0:
            continue
        scale = _logit_scale(call, token)
        logits = scale * (query[token] @ keys.T)  # [H, n]
        top = logits.max(dim=1).values
        weights = torch.exp(logits - top[:, None])
        total = weights.sum(dim=1)
        denominator = total
        if call.sink is not None:
            denominator = total + torch.exp(call.sink.double() - top)
        output[token] = (weights @ keys) / denominator[:, None]
        magnitude[token] = (weights @ keys.abs()) / denominator[:, None]
        lse[token] = top + torch.log(total)
        max_logits[token] = top
        sizes = scale * (query[token].abs() @ keys.abs().T)
        logit_magnitude[token] = sizes.max(dim=1).values
        value_sum[token] = keys.abs().sum(dim=0)
    if call.unrotate_output:
        cos, sin = angles(call, torch.float64)
        output = turn(output, cos, -sin)
        magnitude = turn(magnitude, cos.abs(), sin.abs(), sign=1.0)
        value_sum = turn(value_sum, cos.abs(), sin.abs(), sign=1.0)
    return Attended(output, magnitude, lse, max_logits, logit_magnitude, value_sum)


def _logit_scale(call: AttendCall, token: int) -> float | Tensor:
    """What multiplies a token's dot products: a number, or float64 [H, 1]."""
    if call.query_scale is None:
        return call.scale
    return call.scale * call.query_scale[token].double()[:, None]


def rotated_query(call: AttendCall) -> Tensor:
    """bf16 [T, H, 512] in standard order, rotated if the call says so."""
    q = standard_query(call.q, call.query_layout)
    if not call.rotate_query:
        return q
    cos, sin = angles(call, torch.float32)
    return turn(q.float(), cos, sin).to(torch.bfloat16)


def keys_of(call: AttendCall, token: int) -> Tensor:
    """float64 [n, 512]: the valid keys of a token, window first, in list order."""
    sets = [call.window] if call.compressed is None else [call.window, call.compressed]
    return torch.cat([_keys_of_set(keys, token) for keys in sets])


def _keys_of_set(keys: KeySet, token: int) -> Tensor:
    row = keys.indices[token].long()
    if keys.lengths is not None:
        row = row[: max(int(keys.lengths[token]), 0)]
    slots = row[(row >= 0) & (row < keys.cache.num_slots)]
    data, scales = keys.cache.read_rows(slots)
    return decode_rows(keys.cache.record, data, scales).double()


def angles(call: AttendCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, 32] of the tokens' positions; positions outside the table are clamped."""
    assert call.positions is not None
    assert call.rope is not None
    rows = call.rope[call.positions.long().clamp(0, call.rope.shape[0] - 1)].to(dtype)
    half = ROPE_DIM // 2
    return rows[:, None, :half], rows[:, None, half:]


def turn(values: Tensor, cos: Tensor, sin: Tensor, sign: float = -1.0) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the last 64 dims: (a, b) -> (a cos + sign b sin, b cos + a sin)."""
    tail = values[..., -ROPE_DIM:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    pairs = torch.stack((even * cos + sign * (odd * sin), odd * cos + even * sin), dim=-1)
    return torch.cat((values[..., :-ROPE_DIM], pairs.flatten(-2)), dim=-1)
