"""What a caller may choose of an attention call, and the outputs that a caller may own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparse_mla.kernels.contract import Layout


@dataclass(frozen=True, slots=True)
class AttendBuffers:
    """Outputs that the caller owns, so that their addresses stay (CUDA graphs). None = allocate."""

    data: Tensor | None = (
        None  # bf16 [T, H, 512], or uint8/e4m3 [T, G, heads_per_group*512], contiguous
    )
    scales: Tensor | None = (
        None  # int32 [T, G, 4*heads_per_group], see `kernels.contract.AttendOut`
    )
    lse: Tensor | None = None  # float32 [T, H]
    max_logits: Tensor | None = None  # float32 [T, H]


@dataclass(frozen=True, slots=True)
class AttendOptions:
    """What attention returns and how it runs."""

    output: str | None = None  # "fp8" or "bf16"; None = the op's own: mega fp8, sparse bf16
    query_layout: Layout = Layout.STANDARD
    output_layout: Layout = Layout.STANDARD
    return_lse: bool = False
    return_max_logits: bool = False
    heads_per_group: int | None = None  # heads of an output group; None = gcd(H, 8)
    rotate_query: bool = True  # mega attention only: False if q is rotated already
    unrotate_output: bool = True  # mega attention only
    backend: str = "auto"
    batch_invariant: bool = False  # a row's bits do not depend on the other rows
    query_norm_eps: float | None = None
    """Multiply a head's logits by 1 / sqrt(mean(q**2) + eps), q before any rotation; None = do not."""
