"""The FP8 attention output back to bf16 in Triton, in its own order, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla.kernels.triton.numbers import decode_ue8m0, widen_e4m3

BLOCK = tl.constexpr(32)  # values of one scale
BLOCKS_OF_PROGRAM = 64


@triton.jit(
    do_not_specialize=["num_blocks", "groups", "token_stride", "group_stride", "word_stride"],
    do_not_specialize_on_alignment=["scales"],
)
def widen_output_kernel(
    out,  # bf16 [T, G, num_blocks * 32] contiguous
    codes,  # uint8, the same shape, contiguous
    scales,  # int32 [T, G, num_blocks / 4], four ue8m0 bytes a word
    num_blocks: tl.int32,  # scales of a (token, group)
    groups: tl.int32,
    token_stride: tl.int64,
    group_stride: tl.int64,
    word_stride: tl.int64,
    BLOCKS: tl.constexpr,
):
    parts = tl.cdiv(num_blocks, BLOCKS)
    row = tl.program_id(0) // parts
    block = (tl.program_id(0) - row * parts) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < num_blocks
    token = row // groups
    group = row - token * groups
    words = scales + token.to(tl.int64) * token_stride + group * group_stride
    word = tl.load(words + (block // 4) * word_stride, mask=here, other=0)
    exponent = (word.to(tl.uint32, bitcast=True) >> ((block % 4) * 8).to(tl.uint32)) & 255
    first = (row.to(tl.int64) * num_blocks + block) * BLOCK
    lane = tl.arange(0, BLOCK // 4)
    at = (codes + first).to(tl.pointer_type(tl.int32))[:, None] + lane[None, :]
    packed = tl.load(at, mask=here[:, None], other=0)
    scale, packed = tl.broadcast(decode_ue8m0(exponent)[:, None], packed)
    values = tl.reshape(widen_e4m3(packed, scale, "generic"), [BLOCKS, BLOCK])
    tl.store(out + first[:, None] + tl.arange(0, BLOCK)[None, :], values, mask=here[:, None])


def widen_output(data: Tensor, scales: Tensor) -> Tensor:
    """bf16 [T, G, values] of e4m3 codes uint8 [T, G, values] and scales int32 [T, G, values / 128]."""
    data = data.contiguous()
    out = torch.empty(data.shape, dtype=torch.bfloat16, device=data.device)
    tokens, groups, values = data.shape
    blocks = values // 32
    if out.numel():
        widen_output_kernel[(tokens * groups * -(-blocks // BLOCKS_OF_PROGRAM),)](
            out,
            data,
            scales,
            blocks,
            groups,
            *scales.stride(),
            BLOCKS=BLOCKS_OF_PROGRAM,
            num_warps=4,
        )
    return out
