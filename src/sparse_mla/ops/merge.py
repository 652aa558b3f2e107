"""Combine attention over disjoint shards of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_mla._checks import check_tensor
from sparse_mla.errors import ArgumentError


def merge_lse(
    outs: Sequence[Tensor],  # each bf16 or float32 [T, H, D]
    lses: Sequence[Tensor],  # each float32 [T, H]
    sink: Tensor | None = None,  # float32 [H]
) -> tuple[Tensor, Tensor]:
    """The attention over all keys from the attention over each shard.

        lse = ln sum_i exp(lse_i)        o = sum_i exp(lse_i - lse) o_i

    Natural logarithms. A shard without a key (lse +inf, as attention returns it, or -inf) has weight 0
    and its output is not looked at; a row without any key gives output 0 and lse +inf. Shards must have
    been computed without a sink; pass it here, once: o *= 1 / (1 + exp(sink - lse)).

    Returns:
        (float32 [T, H, D], float32 [T, H]); the lse stays without the sink. The order of the shards
        matters only to rounding.

    Raises:
        ArgumentError: no shard, or unequal numbers of outputs and lses.
        ShapeError, DTypeError, DeviceError: tensors that do not fit each other.
    """
    if not outs or len(outs) != len(lses):
        raise ArgumentError(
            "outs", f"{len(outs)} outputs and {len(lses)} lses", "as many lses, at least one"
        )
    shape, device = outs[0].shape, outs[0].device
    floats = (torch.float32,)
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        name = f"outs[{number}]"
        sizes = ("T", "H", "D") if number == 0 else tuple(shape)
        check_tensor(name, out, shape=sizes, dtypes=(torch.bfloat16, *floats), device=device,
                     last_dim_contiguous=False)  # fmt: skip
        check_tensor(f"lses[{number}]", lse, shape=tuple(shape[:2]), dtypes=floats, device=device,
                     last_dim_contiguous=False)  # fmt: skip
    if sink is not None:
        check_tensor("sink", sink, shape=(shape[1],), dtypes=floats, device=device)
    stacked = torch.stack(tuple(lses))  # [S, T, H]
    stacked = torch.where(stacked == torch.inf, -torch.inf, stacked)
    top = stacked.amax(dim=0)
    keyless = top == -torch.inf
    base = top.masked_fill(keyless, 0.0)
    weights = torch.exp(stacked - base)
    total = weights.sum(dim=0)
    merged = torch.zeros(shape, dtype=torch.float32, device=device)
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / total).masked_fill(weight == 0, 0.0).unsqueeze(-1)
        merged += torch.where(share == 0, 0.0, share * out)
    lse = (base + total.log()).masked_fill(keyless, torch.inf)
    if sink is not None:
        factor = 1.0 / (1.0 + torch.exp(sink - lse))
        merged *= factor.masked_fill(keyless, 0.0).unsqueeze(-1)
    return merged, lse
