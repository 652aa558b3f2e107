"""The FP8 attention output back to bf16, in its own order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_e4m3, decode_ue8m0


def widen_output(data: Tensor, scales: Tensor) -> Tensor:
    """bf16 [T, G, values] of e4m3 codes uint8 [T, G, values] and scales int32 [T, G, values / 128].

    A scale counts for 32 values that lie side by side, in both layouts.
    """
    exponents = scales.contiguous().view(torch.uint8)  # [T, G, values / 32]
    blocks = decode_e4m3(data).reshape(*exponents.shape, -1)
    widened = blocks * decode_ue8m0(exponents)[..., None]
    return widened.reshape(data.shape).to(torch.bfloat16)
