"""Orders of query and output values, and the packed scale words of the FP8 output.

Everything here is a permutation of a token's values; `ops/layouts.py` offers the same maps for weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_e4m3, decode_ue8m0, encode_e4m3, ue8m0_byte
from sparse_mla.kernels.contract import HEAD_DIM, OUTPUT_BLOCK, AttendOut, Layout

QUERY_CHUNK = 16
"""Consecutive dims of one head that stay together in the chunk-interleaved query."""
OUTPUT_BLOCKS = HEAD_DIM // OUTPUT_BLOCK
"""Scales of one head."""


def interleave_query(q: Tensor) -> Tensor:
    """Chunk-interleaved copy [T, H, 512] of a query in standard order, any dtype."""
    tokens, heads, dim = q.shape
    chunks = q.reshape(tokens, heads, dim // QUERY_CHUNK, QUERY_CHUNK)
    return chunks.transpose(1, 2).reshape(tokens, heads, dim)


def standard_query(q: Tensor, layout: Layout) -> Tensor:
    """The query [T, H, 512] in standard order: `q` itself, or a copy of the interleaved one."""
    if layout is Layout.STANDARD:
        return q
    tokens, heads, dim = q.shape
    chunks = q.reshape(tokens, dim // QUERY_CHUNK, heads, QUERY_CHUNK)
    return chunks.transpose(1, 2).reshape(tokens, heads, dim)


def store_output(
    out: AttendOut,
    first: int,
    values: Tensor,
    encode: Callable[[Tensor], Tensor] = encode_e4m3,
) -> None:
    """Write rows `first ..` of the output: cast to bf16 or quantise, in the output's layout.

    Args:
        out: the output; `data` and, when FP8, `scales` are written.
        first: token of the first row.
        values: float32 [n, H, 512] contiguous, standard order, already rotated back.
        encode: float32 to e4m3 codes; a kernel folder may have a quicker one with the same bits.
    """
    tokens, heads, _ = values.shape
    groups = heads // out.heads_per_group
    blocks = values.view(tokens, groups, out.heads_per_group, OUTPUT_BLOCKS, OUTPUT_BLOCK)
    rows = slice(first, first + tokens)
    if out.scales is None:
        if out.layout is Layout.CHUNK_INTERLEAVED:
            blocks = blocks.transpose(2, 3)
        out.data[rows] = blocks.reshape(tokens, heads, HEAD_DIM).to(torch.bfloat16)
        return
    amax = blocks.abs().amax(dim=-1)  # [n, G, hpg, 16]
    exponents = ue8m0_byte(amax)
    codes = encode(blocks / decode_ue8m0(exponents).unsqueeze(-1))
    if out.layout is Layout.CHUNK_INTERLEAVED:
        codes, exponents = codes.transpose(2, 3), exponents.transpose(2, 3)
    out.data[rows] = codes.reshape(tokens, groups, out.heads_per_group * HEAD_DIM)
    packed = exponents.reshape(tokens, groups, out.heads_per_group * OUTPUT_BLOCKS)
    out.scales[rows] = packed.contiguous().view(torch.int32)


def dequantize_output(
    data: Tensor,  # uint8 [T, G, heads_per_group * 512]
    scales: Tensor,  # int32 [T, G, 4 * heads_per_group]
    heads_per_group: int,
    layout: Layout,
) -> Tensor:
    """float32 [T, H, 512] in standard order: code * 2**(byte - 127)."""
    tokens, groups, _ = data.shape
    exponents = scales.contiguous().view(torch.uint8)  # [T, G, 16 * hpg]
    if layout is Layout.CHUNK_INTERLEAVED:
        shape = (tokens, groups, OUTPUT_BLOCKS, heads_per_group)
        codes = data.reshape(*shape, OUTPUT_BLOCK).transpose(2, 3)
        exponents = exponents.view(shape).transpose(2, 3)
    else:
        shape = (tokens, groups, heads_per_group, OUTPUT_BLOCKS)
        codes = data.reshape(*shape, OUTPUT_BLOCK)
        exponents = exponents.view(shape)
    values = decode_e4m3(codes) * decode_ue8m0(exponents).unsqueeze(-1)
    return values.reshape(tokens, groups * heads_per_group, HEAD_DIM)


def standard_output(data: Tensor, heads_per_group: int, layout: Layout) -> Tensor:
    """bf16 output [T, H, 512] in standard order: `data` itself, or a copy of the interleaved one."""
    if layout is Layout.STANDARD:
        return data
    tokens, heads, _ = data.shape
    groups = heads // heads_per_group
    blocks = data.reshape(tokens, groups, OUTPUT_BLOCKS, heads_per_group, OUTPUT_BLOCK)
    return blocks.transpose(2, 3).reshape(tokens, heads, HEAD_DIM)
