"""Orders of values, scales and weights: the worked numbers, and that the maps agree with the kernels."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.cache.codec import decode_e4m3, decode_ue8m0
from sparse_mla.config.rope import apply_rope
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.kernels.contract import AttendOut, Layout, allocate_scales
from sparse_mla.kernels.layouts import (
    dequantize_output,
    interleave_query,
    standard_query,
    store_output,
)
from sparse_mla.ops.layouts import (
    f8_128x4_offset,
    f8_128x4_size,
    inverse_rope_fp8,
    output_permutation,
    pack_f8_128x4,
    permute_q_b_proj,
    permute_wv_proj,
    query_permutation,
    standard_output,
)
from sparse_mla.testing.inputs import plain_rope_table


@pytest.mark.parametrize(
    ("head", "dim", "place"),
    [(0, 0, 0), (0, 15, 15), (1, 0, 16), (0, 16, 1024), (5, 448, 28752), (63, 511, 32767)],
)
def test_query_order(head: int, dim: int, place: int):
    q = torch.zeros(1, 64, 512)
    q[0, head, dim] = 1
    moved = interleave_query(q)
    assert moved.view(-1).nonzero().item() == place
    assert torch.equal(standard_query(moved, Layout.CHUNK_INTERLEAVED), q)
    assert query_permutation(64)[place] == head * 512 + dim


@pytest.mark.parametrize(
    ("head", "dim", "place"),
    [(0, 0, 0), (1, 0, 32), (0, 32, 256), (7, 511, 4095), (3, 450, 3682)],
)
def test_output_order(head: int, dim: int, place: int):
    assert output_permutation(8)[place] == head * 512 + dim
    values = torch.zeros(1, 16, 512)
    values[0, 8 + head, dim] = 448.0
    out = _fp8_out(1, 16, Layout.CHUNK_INTERLEAVED)
    store_output(out, 0, values)
    assert out.data.view(-1).nonzero().item() == 4096 + place
    assert torch.equal(dequantize_output(out.data, out.scales, 8, Layout.CHUNK_INTERLEAVED), values)


@pytest.mark.parametrize(
    ("head", "dim", "word", "byte"),
    [(0, 0, 0, 0), (3, 0, 0, 3), (4, 0, 1, 0), (0, 32, 2, 0), (7, 511, 31, 3)],
)
def test_scale_order(head: int, dim: int, word: int, byte: int):
    values = torch.zeros(1, 8, 512)
    values[0, head, dim] = 448.0  # scale byte 127 instead of the floor's 105
    out = _fp8_out(1, 8, Layout.CHUNK_INTERLEAVED)
    store_output(out, 0, values)
    packed = out.scales.contiguous().view(torch.uint8).view(32, 4)
    assert packed[word, byte] == 127
    assert int((packed == 105).sum()) == 127


def test_standard_scale_order_is_head_major():
    values = torch.zeros(1, 8, 512)
    values[0, 5, 96] = 448.0
    out = _fp8_out(1, 8, Layout.STANDARD)
    store_output(out, 0, values)
    packed = out.scales.contiguous().view(torch.uint8).view(-1)
    assert packed[5 * 16 + 3] == 127
    assert out.data.view(-1)[5 * 512 + 96] == 0x7E


def test_scale_strides_for_five_tokens():
    scales = allocate_scales(5, 8, 32, torch.device("cpu"))
    assert scales.shape == (5, 8, 32)
    assert scales.stride() == (1, 256, 8)
    assert scales.untyped_storage().nbytes() == 2048 * 4


def _fp8_out(tokens: int, heads: int, layout: Layout) -> AttendOut:
    data = torch.zeros(tokens, heads // 8, 4096, dtype=torch.uint8)
    scales = allocate_scales(tokens, heads // 8, 32, torch.device("cpu"))
    return AttendOut(data, scales, None, None, 8, layout)


@pytest.mark.parametrize(
    ("row", "group", "offset"),
    [(0, 0, 0), (1, 0, 16), (32, 0, 4), (0, 4, 512), (127, 39, 5119), (128, 0, 5120)],
)
def test_f8_128x4_offsets(row: int, group: int, offset: int):
    assert f8_128x4_offset(row, group, 40) == offset
    scales = torch.zeros(130, 40, dtype=torch.uint8)
    scales[row, group] = 9
    packed = pack_f8_128x4(scales)
    assert packed.nonzero().view(-1).tolist() == [offset]
    assert len(packed) == f8_128x4_size(130, 40) == 2 * 5120


def test_f8_128x4_pads_with_zeros():
    packed = pack_f8_128x4(torch.full((3, 5), 7, dtype=torch.uint8))
    assert len(packed) == f8_128x4_size(3, 5) == 1024
    assert int((packed == 7).sum()) == 15
    for row in range(3):
        for group in range(5):
            assert packed[f8_128x4_offset(row, group, 5)] == 7
    assert f8_128x4_size(1, 40) == 5120


@pytest.mark.parametrize("words", [1, 3])
def test_permuted_q_b_proj_writes_the_interleaved_query(words: int):
    heads, rank = 3, 16
    weight = torch.randn(heads * 512, rank)
    scales = torch.randint(0, 2**31 - 1, (words, heads * 512), dtype=torch.int32).T
    moved, moved_scales = permute_q_b_proj(weight, scales, heads)
    x = torch.randn(2, rank, dtype=torch.float64)
    plain = (x @ weight.double().T).view(2, heads, 512)
    permuted = (x @ moved.double().T).view(2, heads, 512)
    assert torch.equal(permuted, interleave_query(plain))
    assert moved_scales.shape == scales.shape
    assert moved_scales.stride(0) == 1
    perm = query_permutation(heads)
    assert torch.equal(moved_scales, scales[perm])
    codes = torch.randint(0, 127, weight.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    only, none = permute_q_b_proj(codes, None, heads)
    assert none is None
    assert only.dtype == torch.float8_e4m3fn
    assert torch.equal(only.view(torch.uint8), codes.view(torch.uint8)[perm])


@pytest.mark.parametrize("granularity", [32, 64, 128])
def test_permuted_wv_proj_reads_the_interleaved_output(granularity: int):
    """Dequantised weight times standard output = dequantised permuted weight times interleaved output."""
    groups, out, per_group = 2, 6, 8
    columns = per_group * 512
    codes = torch.randint(0, 120, (groups, out, columns), dtype=torch.uint8)
    single = torch.randint(
        120, 134, (groups, columns // granularity, out), dtype=torch.uint8
    ).transpose(1, 2)
    packed = single.contiguous().view(torch.int32).transpose(1, 2).contiguous().transpose(1, 2)
    moved, moved_scales = permute_wv_proj(codes, packed, per_group)
    assert moved_scales.shape == (groups, out, columns // 128)
    assert moved_scales.stride(1) == 1
    values = decode_e4m3(codes) * decode_ue8m0(single).repeat_interleave(granularity, dim=2)
    fine = moved_scales.contiguous().view(torch.uint8)
    moved_values = decode_e4m3(moved) * decode_ue8m0(fine).repeat_interleave(32, dim=2)
    assert torch.equal(moved_values, values[:, :, output_permutation(per_group)])
    o = torch.randn(1, groups * per_group, 512).bfloat16()
    interleaved = AttendOut(
        torch.empty_like(o), None, None, None, per_group, Layout.CHUNK_INTERLEAVED
    )
    store_output(interleaved, 0, o.float())
    want = torch.einsum("gc,grc->gr", o.view(groups, columns).double(), values.double())
    other = interleaved.data.view(groups, columns).double()
    got = torch.einsum("gc,grc->gr", other, moved_values.double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-9)
    assert torch.equal(standard_output(interleaved.data, per_group, Layout.CHUNK_INTERLEAVED), o)


def test_permutes_refuse_what_does_not_fit():
    with pytest.raises(ShapeError, match=r"weight: got shape \[512, 8\]; allowed: \[1024, rank\]"):
        permute_q_b_proj(torch.zeros(512, 8), None, 2)
    with pytest.raises(ShapeError, match=r"scales: got shape \[512, 1\]"):
        permute_q_b_proj(torch.zeros(1024, 8), torch.zeros(512, 1, dtype=torch.int32), 2)
    with pytest.raises(ShapeError, match=r"weight: got shape \[1, 4, 512\]"):
        permute_wv_proj(torch.zeros(1, 4, 512), None, 8)
    with pytest.raises(ShapeError, match="scales: got shape"):
        permute_wv_proj(torch.zeros(1, 4, 4096), torch.zeros(1, 4, 5, dtype=torch.int32), 8)
    with pytest.raises(ArgumentError, match="num_heads: got 0"):
        query_permutation(0)
    with pytest.raises(ArgumentError, match="dim: got 100; allowed: a multiple of 32"):
        output_permutation(8, 100)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_standalone_inverse_rope(block: int, tokens: int):
    o = torch.randn(tokens, 16, 512).bfloat16()
    if tokens:
        o[0, 3] = 0.0
    positions = torch.arange(tokens) * 37
    rope = plain_rope_table(256)
    codes, scales = inverse_rope_fp8(o, positions, rope, 8, block)
    assert codes.shape == (tokens, 2, 4096)
    turned = apply_rope(o.float(), positions, rope, inverse=True).view(
        tokens, 2, 4096 // block, block
    )
    if block == 32:
        assert scales.shape == (tokens, 2, 32)
        factors = decode_ue8m0(scales.contiguous().view(torch.uint8))
    else:
        assert scales.shape == (tokens, 2, 32)
        factors = scales.contiguous()
    if tokens:
        aligned = -(-tokens // 4) * 4
        assert scales.stride() == (1, 32 * aligned, aligned)
        padding = torch.as_strided(scales, (aligned - tokens,), (1,), tokens)
        assert int(padding.count_nonzero()) == 0
    blocks = codes.reshape(tokens, 2, 4096 // block, block)
    factors = factors.reshape(tokens, 2, 4096 // block, 1)
    amax = turned.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10)
    assert torch.equal(factors, 2.0 ** torch.ceil(torch.log2(amax.double() / 448)).float())
    error = (decode_e4m3(blocks) * factors - turned).abs()
    assert bool((error <= torch.maximum(turned.abs() * 2**-4, factors * 2**-10)).all())


def test_standalone_floor_is_smaller_than_the_fused_one():
    o = torch.full((1, 8, 512), 1e-6).bfloat16()
    rope = plain_rope_table(4)
    codes, _ = inverse_rope_fp8(o, torch.zeros(1, dtype=torch.int64), rope)
    assert int((codes == 0).sum()) == 0
    fused = _fp8_out(1, 8, Layout.STANDARD)
    store_output(fused, 0, o.float())
    assert int(fused.scales.contiguous().view(torch.uint8).max()) == 105
    assert int(decode_e4m3(fused.data).max() == decode_e4m3(fused.data).min()) == 1
    with pytest.raises(ArgumentError, match="block: got 64; allowed: 32 or 128"):
        inverse_rope_fp8(o, torch.zeros(1, dtype=torch.int64), rope, 8, 64)
    with pytest.raises(ArgumentError, match="heads_per_group: got 3; allowed: a divisor of 8"):
        inverse_rope_fp8(o, torch.zeros(1, dtype=torch.int64), rope, 3)
