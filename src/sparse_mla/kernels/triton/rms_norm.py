"""Root-mean-square norm of rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla.kernels.triton.index_records import norm_rows
from sparse_mla.kernels.triton.launch import compile_mode
from sparse_mla.kernels.triton.numbers import from_bf16, to_bf16


@triton.jit(
    do_not_specialize=["dim", "row_stride", "eps"], do_not_specialize_on_alignment=["weight"]
)
def norm_kernel(
    out,  # bf16 [T, dim] contiguous
    rows,  # bf16 or float32 [T, dim]
    weight,  # float32 [dim]
    row_stride: tl.int64,
    dim: tl.int32,
    eps: tl.float32,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    here = lane < dim
    values = tl.load(rows + row * row_stride + lane, mask=here, other=0.0)
    if rows.dtype.element_ty == tl.bfloat16:
        values = from_bf16(values)
    gain = tl.load(weight + lane, mask=here, other=0.0)
    normed = norm_rows(values[None, :], gain, eps, dim, MODE)
    at = out + row * dim + lane
    tl.store(at[None, :], to_bf16(normed, MODE), mask=here[None, :])


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16 [T, dim]: `kernels.torch.rms_norm` for rows bf16 or float32 [T, dim] of any row stride."""
    tokens, dim = rows.shape
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=rows.device)
    if tokens:
        norm_kernel[(tokens,)](
            out,
            rows,
            weight,
            rows.stride(0),
            dim,
            eps,
            BLOCK=triton.next_power_of_2(dim),
            MODE=compile_mode(norm_kernel),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
