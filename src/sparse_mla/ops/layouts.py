"""Orders that fused kernels read and write, as permutations of tensors and of weights.

    query            (h, d) at (d//16)*(16*H) + h*16 + d%16
    output group     (h, d) at ((d//32)*heads_per_group + h)*32 + d%32, h counted inside the group
    output scale     (h, d) byte (d//32)*heads_per_group + h, four to a word, lowest byte first
    F8_128x4         (row, group) of activation scales, see `f8_128x4_offset`

A permutation `perm` of weights follows one convention: new row i is old row perm[i].
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.cache.codec import decode_ue8m0, encode_e4m3, ue8m0_byte
from sparse_mla.config.rope import apply_rope
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.kernels.contract import HEAD_DIM, OUTPUT_BLOCK, allocate_scales
from sparse_mla.kernels.layouts import (
    QUERY_CHUNK,
    dequantize_output,
    interleave_query,
    standard_output,
    standard_query,
)

__all__ = [
    "dequantize_output",
    "f8_128x4_offset",
    "f8_128x4_size",
    "interleave_query",
    "inverse_rope_fp8",
    "output_permutation",
    "pack_f8_128x4",
    "permute_q_b_proj",
    "permute_wv_proj",
    "query_permutation",
    "standard_output",
    "standard_query",
]

STANDALONE_FLOOR = 1e-10
"""Least amax of the stand-alone output cast; the fused one uses 1e-4."""


def query_permutation(num_heads: int, dim: int = HEAD_DIM) -> Tensor:
    """int64 [num_heads * dim]: interleaved place i holds standard place perm[i] = h*dim + d.

    Raises:
        ArgumentError: no heads, or a width that 16 does not divide.
    """
    check_at_least("num_heads", num_heads, 1)
    if dim < QUERY_CHUNK or dim % QUERY_CHUNK:
        raise ArgumentError("dim", dim, f"a multiple of {QUERY_CHUNK}")
    standard = torch.arange(num_heads * dim).view(num_heads, dim // QUERY_CHUNK, QUERY_CHUNK)
    return standard.transpose(0, 1).reshape(-1)


def output_permutation(heads_per_group: int = 8, dim: int = HEAD_DIM) -> Tensor:
    """int64 [heads_per_group * dim]: interleaved place i of a group holds standard place perm[i].

    Raises:
        ArgumentError: no heads, or a width that 32 does not divide.
    """
    check_at_least("heads_per_group", heads_per_group, 1)
    if dim < OUTPUT_BLOCK or dim % OUTPUT_BLOCK:
        raise ArgumentError("dim", dim, f"a multiple of {OUTPUT_BLOCK}")
    standard = torch.arange(heads_per_group * dim)
    blocks = standard.view(heads_per_group, dim // OUTPUT_BLOCK, OUTPUT_BLOCK)
    return blocks.transpose(0, 1).reshape(-1)


def permute_q_b_proj(
    weight: Tensor,  # [num_heads * 512, rank], any one-byte or floating dtype
    scales: Tensor | None,  # int32 [num_heads * 512, words], stride 1 on dim 0; None if unquantised
    num_heads: int,
) -> tuple[Tensor, Tensor | None]:
    """Reorder the rows of `wq_b` so that its product is the chunk-interleaved query.

    Rows and their scales move together, so any scale granularity along the rank is allowed.

    Returns:
        New tensors of the same shapes; the scales keep stride 1 on dim 0.

    Raises:
        ShapeError: the rows are not `num_heads * 512`, or the scales have another number of rows.
    """
    check_at_least("num_heads", num_heads, 1)
    rows = num_heads * HEAD_DIM
    if weight.dim() != 2 or weight.shape[0] != rows:
        raise ShapeError("weight", f"shape {list(weight.shape)}", f"[{rows}, rank]")
    perm = query_permutation(num_heads).to(weight.device)
    moved = _bytes(weight)[perm].view(weight.dtype)
    if scales is None:
        return moved, None
    if scales.dim() != 2 or scales.shape[0] != rows:
        raise ShapeError("scales", f"shape {list(scales.shape)}", f"[{rows}, words]")
    return moved, scales.T[:, perm].contiguous().T


def permute_wv_proj(
    weight: Tensor,  # [G, out, heads_per_group * 512], any one-byte or floating dtype
    scales: Tensor | None,  # int32 [G, out, words], stride 1 on dim 1; None if unquantised
    heads_per_group: int = 8,
) -> tuple[Tensor, Tensor | None]:
    """Reorder the input columns of `wo_a` to the chunk-interleaved output.

    Packed scales come with one ue8m0 byte for 32 columns (words = columns / 128) or coarser, for 64 or
    128; the result always has one for 32, because interleaving tears coarser blocks apart.

    Returns:
        The weight in its shape, the scales as int32 [G, out, columns / 128] with stride 1 on dim 1.

    Raises:
        ShapeError: the columns are not `heads_per_group * 512`, or the scale words fit no granularity.
    """
    check_at_least("heads_per_group", heads_per_group, 1)
    columns = heads_per_group * HEAD_DIM
    if weight.dim() != 3 or weight.shape[2] != columns:
        raise ShapeError("weight", f"shape {list(weight.shape)}", f"[G, out, {columns}]")
    perm = output_permutation(heads_per_group).to(weight.device)
    moved = _bytes(weight)[:, :, perm].view(weight.dtype)
    if scales is None:
        return moved, None
    groups, out, _ = weight.shape
    words = columns // (4 * OUTPUT_BLOCK)
    fits = scales.dim() == 3 and scales.shape[:2] == weight.shape[:2] and scales.shape[2] > 0
    if not fits or scales.shape[2] not in (words, words // 2, words // 4):
        allowed = (
            f"[{groups}, {out}, words], words {words} (32 columns a scale), or a half or quarter"
        )
        raise ShapeError("scales", f"shape {list(scales.shape)}", allowed)
    single = scales.contiguous().view(torch.uint8)  # [G, out, scales]
    single = single.repeat_interleave(words // scales.shape[2], dim=2)
    blocks = perm[::OUTPUT_BLOCK] // OUTPUT_BLOCK  # 32 columns stay together
    packed = single[:, :, blocks].contiguous().view(torch.int32)
    return moved, packed.transpose(1, 2).contiguous().transpose(1, 2)


def f8_128x4_offset(row: int, group: int, num_groups: int) -> int:
    """Byte of the scale of (row, group) in the F8_128x4 order: tiles of 128 rows by 4 groups."""
    tile = row // 128 * -(-num_groups // 4) + group // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


def f8_128x4_size(num_rows: int, num_groups: int) -> int:
    """Bytes of the scales of `num_rows` rows, padding to whole tiles included."""
    return -(-num_rows // 128) * 128 * (-(-num_groups // 4) * 4)


def pack_f8_128x4(scales: Tensor) -> Tensor:
    """uint8 [bytes] in the F8_128x4 order of uint8 scales [rows, groups]; padding bytes are 0.

    Raises:
        ShapeError, DTypeError: not a uint8 matrix.
    """
    check_tensor("scales", scales, shape=("rows", "groups"), dtypes=(torch.uint8,))
    rows, groups = scales.shape
    row_tiles, group_tiles = -(-rows // 128), -(-groups // 4)
    padded = scales.new_zeros(row_tiles * 128, group_tiles * 4)
    padded[:rows, :groups] = scales
    tiles = padded.view(row_tiles, 4, 32, group_tiles, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def inverse_rope_fp8(
    o: Tensor,  # bf16 [T, H, 512]
    positions: Tensor,  # int32 or int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    heads_per_group: int = 8,
    block: int = 32,
) -> tuple[Tensor, Tensor]:
    """Rotate an attention output back and quantise it, as a step of its own.

    The last 64 dims are turned in float32; then each `block` dims of a head share the scale
    2**ceil(log2(max(amax, 1e-10) / 448)). With the fused form the floor is 1e-4 and the order may be
    interleaved; here heads stay in standard order.

    Args:
        o: attention output in standard order.
        positions: the query's positions; clamped to the table.
        rope: cos 32, sin 32.
        heads_per_group: heads of one output group; must divide H.
        block: 32, or 128 for kernels with 128-wide scales.

    Returns:
        (codes uint8 [T, G, heads_per_group * 512] stored group-major,
        scales: block 32: int32 [T, G, words] of four ue8m0 bytes; block 128: float32 [T, G, blocks];
        both token-major innermost, the token axis padded to 4 with zeros)

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: as named.
    """
    check_tensor("o", o, shape=("T", "H", HEAD_DIM), dtypes=(torch.bfloat16,))
    tokens, heads, _ = o.shape
    if heads_per_group < 1 or heads % heads_per_group:
        raise ArgumentError("heads_per_group", heads_per_group, f"a divisor of {heads} heads")
    if block not in (32, 128):
        raise ArgumentError("block", block, "32 or 128")
    groups = heads // heads_per_group
    turned = apply_rope(o.float(), positions, rope, inverse=True)
    words = heads_per_group * HEAD_DIM // block
    blocks = turned.view(tokens, groups, words, block)
    exponents = ue8m0_byte(blocks.abs().amax(dim=-1), floor=STANDALONE_FLOOR)
    factors = decode_ue8m0(exponents)
    codes = encode_e4m3(blocks / factors.unsqueeze(-1)).view(tokens, groups, words * block)
    codes = codes.transpose(0, 1).contiguous().transpose(0, 1)
    if block == 32:
        packed = allocate_scales(tokens, groups, words // 4, o.device)
        packed.copy_(exponents.contiguous().view(torch.int32))
        return codes, packed
    wide = allocate_scales(tokens, groups, words, o.device).view(torch.float32)
    return codes, wide.copy_(factors)


def _bytes(weight: Tensor) -> Tensor:
    """A view that indexing supports: float8 as uint8."""
    return weight.view(torch.uint8) if weight.element_size() == 1 else weight
