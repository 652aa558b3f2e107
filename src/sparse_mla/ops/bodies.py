"""Helpers whose body follows from the device alone: Triton where it runs, PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla.backends.declarations import TRITON
from sparse_mla.backends.select import DeviceInfo, load_kernel
from sparse_mla.metadata.rules import TORCH_RULES, MetadataRules


def runs_triton(device: torch.device | str) -> bool:
    """Whether the portable kernels run there; false for a CPU, the interpreter included."""
    info = DeviceInfo.detect(device)
    return info.kind == "cuda" and not TRITON.device_refusals(info)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 [T, dim] = v * rsqrt(mean(v**2) + eps) * weight, float32 inside, rounded once.

    Args:
        rows: bf16 or float32 [T, dim].
        weight: float32 [dim].
        eps: added to the mean square.
    """
    body = load_kernel("triton" if runs_triton(rows.device) else "torch", "rms_norm")
    normed: Tensor = body(rows, weight, eps)
    return normed


def widen_output(data: Tensor, scales: Tensor) -> Tensor:
    """bf16 [T, G, values] of an FP8 attention output in its own order: code * 2**(byte - 127), exact.

    Args:
        data: uint8 codes [T, G, values].
        scales: int32 [T, G, values / 128], four ue8m0 bytes a word, one byte for 32 values.
    """
    body = load_kernel("triton" if runs_triton(data.device) else "torch", "widen_output")
    widened: Tensor = body(data, scales)
    return widened


def metadata_rules(device: torch.device | str) -> MetadataRules:
    """Who computes a step's metadata there; pass it to `StepMetadataBuilder`."""
    if not runs_triton(device):
        return TORCH_RULES
    from sparse_mla.kernels.triton.metadata import TRITON_RULES

    return TRITON_RULES
