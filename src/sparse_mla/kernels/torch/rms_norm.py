"""Root-mean-square norm of rows, float32 inside, rounded to bf16 once."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 [..., dim] = v * rsqrt(mean(v**2) + eps) * weight.

    Args:
        rows: bf16 or float32 [..., dim].
        weight: float32 [dim].
        eps: added to the mean square; the model uses 1e-20, so a row of zeros stays zero.
    """
    values = rows.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * inverse * weight).to(torch.bfloat16)
