"""FlashMLA's fused entry points: query norm, RoPE, attention, inverse RoPE and FP8 cast in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.compat.flash_mla._arguments import (
    check_equal,
    check_pair,
    check_query,
    key_set,
    paged_cache,
    plain_rows,
)
from sparse_mla.errors import ArgumentError
from sparse_mla.kernels.contract import HEAD_DIM, OUTPUT_BLOCK, ROPE_DIM, KeySet
from sparse_mla.ops import layouts
from sparse_mla.ops.attend import (
    AttendBuffers,
    AttendOptions,
    AttentionResult,
    Layout,
    mega_attention,
)

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]


def prefill(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,  # int32 [s_q]
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,  # float32 [positions, 64], cos 32 then sin 32
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,  # bf16 [s_q, h_q, 512], not rotated, chunk-interleaved
    kv: Tensor,  # bf16 [s_kv, 1, 512], rotated
    indices: Tensor,  # int32 [s_q, 1, topk]
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,  # float32 [h_q]
    topk_length: Tensor | None = None,  # int32 [s_q]
    *,
    out_fp8: Tensor | None = None,  # e4m3 [s_q, G, group * 512]
    out_sf: Tensor | None = None,  # int32 [s_q, G, group * 4], token-major innermost
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend rows of a plain bf16 tensor, everything fused.

    Args:
        enable_q_norm: multiply each head's logits by `1 / sqrt(mean(q**2) + rms_norm_eps)`.
        rms_norm_eps: of that norm.
        token_positions: of the queries; int64 too.
        is_rope_neox_style: False: pairs are neighbours.
        rope_dim: 64, the last dims.
        cos_sin_cache: rotary table.
        n_wv_group: output groups; divides h_q.
        num_per_channels: 32.
        use_tma_aligned_col_major_sf: True.
        round_sf: True: scales are powers of two.
        use_packed_ue8m0: True: four of them in a word.
        q: as the product with `permute_q_b_proj`'s weight gives it.
        kv: gathered rows.
        indices: rows of `kv`; negative, or at or past s_kv: none.
        sm_scale: of the logits.
        d_v: 512.
        attn_sink: multiplies the output by `1 / (1 + exp(sink - lse))`.
        topk_length: lanes that count, for each query.
        out_fp8: where to write the codes; None = a new tensor. Slices along tokens fit.
        out_sf: where to write the scales, as `out_fp8`.
        backend: a backend by name; "auto" chooses.

    Returns:
        (out_fp8 float8_e4m3fn [s_q, G, group * 512], chunk-interleaved inside a group,
        out_sf int32 [s_q, G, group * 4]: four ue8m0 bytes a word, strides (1, words * A, A) with A = s_q
        rounded up to 4, max_logits float32 [s_q, h_q], lse float32 [s_q, h_q]). Without a valid key: codes
        0, scale bytes 105, -inf, +inf.

    Raises:
        UnsupportedError: DeepSeek-V3.2's sizes, or no backend for this device.
        ArgumentError and its kinds: an argument that does not fit. Nothing is written then.
    """
    _check_switches(
        is_rope_neox_style, rope_dim, num_per_channels,
        (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0), d_v,
    )  # fmt: skip
    check_query(q, ("s_q", "h_q"))
    check_tensor("indices", indices, shape=(q.shape[0], 1, "topk"), dtypes=(torch.int32,))
    cache = plain_rows("kv", kv)
    keys = key_set("indices", cache, indices, topk_length, beyond_is_none=True)
    fused = _Fused(token_positions, cos_sin_cache, sm_scale, attn_sink, n_wv_group,
                   rms_norm_eps if enable_q_norm else None, backend)  # fmt: skip
    result = fused.run(q, keys, None, AttendBuffers(data=out_fp8, scales=out_sf))
    assert result.max_logits is not None
    assert result.lse is not None
    return result.fp8.codes, result.fp8.scales, result.max_logits, result.lse


def decode(
    enable_q_norm: bool,
    rms_norm_eps: float,
    token_positions: Tensor,  # int32 [s_q]
    is_rope_neox_style: bool,
    rope_dim: int,
    cos_sin_cache: Tensor,  # float32 [positions, 64], cos 32 then sin 32
    n_wv_group: int,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    q: Tensor,  # bf16 [s_q, h_q, 512], not rotated, chunk-interleaved
    k_cache: Tensor,  # bytes [pages, page_rows, 1, 528, 584 or 288]
    indices_in_kvcache: Tensor,  # int32 [s_q, topk]
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,  # float32 [h_q]
    topk_length: Tensor | None = None,  # int32 [s_q]
    extra_k_cache: Tensor | None = None,  # bytes [pages2, page_rows2, 1, 528, 584 or 288]
    extra_indices_in_kvcache: Tensor | None = None,  # int32 [s_q, topk2]
    extra_topk_length: Tensor | None = None,  # int32 [s_q]
    *,
    out_fp8: Tensor | None = None,  # e4m3 [s_q, G, group * 512]
    out_sf: Tensor | None = None,  # int32 [s_q, G, group * 4], token-major innermost
    kv_layout: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend one or two paged caches, everything fused. Lengths are per query here.

    Arguments that `prefill` has too are as there.

    Args:
        enable_q_norm: see `prefill`.
        rms_norm_eps: see `prefill`.
        token_positions: see `prefill`.
        is_rope_neox_style: see `prefill`.
        rope_dim: see `prefill`.
        cos_sin_cache: see `prefill`.
        n_wv_group: see `prefill`.
        num_per_channels: see `prefill`.
        use_tma_aligned_col_major_sf: see `prefill`.
        round_sf: see `prefill`.
        use_packed_ue8m0: see `prefill`.
        q: see `prefill`.
        k_cache: uint8, int8 or float8_e4m3fn; pages may lie any distance apart.
        indices_in_kvcache: slots `page * page_rows + row`; any negative one is none.
        sm_scale: see `prefill`.
        d_v: see `prefill`.
        attn_sink: see `prefill`.
        topk_length: see `prefill`.
        extra_k_cache: the second cache, with `extra_indices_in_kvcache`.
        extra_indices_in_kvcache: slots in it.
        extra_topk_length: lanes of it that count.
        out_fp8: see `prefill`.
        out_sf: see `prefill`.
        kv_layout: "interleaved" or "planar"; None = the module's setting.
        backend: see `prefill`.

    Returns:
        (out_fp8, out_sf, lse) as in `prefill`.

    Raises:
        As `prefill`.
    """
    _check_switches(
        is_rope_neox_style, rope_dim, num_per_channels,
        (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0), d_v,
    )  # fmt: skip
    check_query(q, ("s_q", "h_q"))
    check_pair(extra_k_cache, extra_indices_in_kvcache,
               ("extra_k_cache", "extra_indices_in_kvcache"))  # fmt: skip
    cache = paged_cache("k_cache", k_cache, kv_layout)
    check_tensor("indices_in_kvcache", indices_in_kvcache, shape=(q.shape[0], "topk"),
                 dtypes=(torch.int32,))  # fmt: skip
    keys = key_set("indices_in_kvcache", cache, indices_in_kvcache, topk_length)
    extra = None
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        second = paged_cache("extra_k_cache", extra_k_cache, kv_layout)
        extra = key_set(
            "extra_indices_in_kvcache", second, extra_indices_in_kvcache, extra_topk_length
        )
    fused = _Fused(token_positions, cos_sin_cache, sm_scale, attn_sink, n_wv_group,
                   rms_norm_eps if enable_q_norm else None, backend, max_logits=False)  # fmt: skip
    result = fused.run(q, keys, extra, AttendBuffers(data=out_fp8, scales=out_sf))
    assert result.lse is not None
    return result.fp8.codes, result.fp8.scales, result.lse


def permute_q_b_proj(
    weight_and_sf: tuple[Tensor, Tensor],  # e4m3 [h_q * d_q, rank], int32 [h_q * d_q, words]
    h_q: int,
    d_q: int,
) -> tuple[Tensor, Tensor]:
    """Reorder the rows of `wq_b` and of its scales so that its product is the query that kernels read.

    Args:
        weight_and_sf: the weight, and its packed scales with stride 1 on dim 0.
        h_q: query heads.
        d_q: 512.

    Returns:
        New tensors of the same shapes; the scales keep stride 1 on dim 0.

    Raises:
        ArgumentError, ShapeError: as named.
    """
    check_equal("d_q", d_q, HEAD_DIM)
    weight, scales = layouts.permute_q_b_proj(weight_and_sf[0], weight_and_sf[1], h_q)
    assert scales is not None
    return weight, scales


def permute_wv_proj(
    weight_and_sf: tuple[Tensor, Tensor],  # e4m3 [G, out, group * d_o], int32 [G, out, words]
    wv_group_size: int,
    d_o: int,
) -> tuple[Tensor, Tensor]:
    """Reorder the input columns of `wo_a` and their scales to the output that kernels write.

    Args:
        weight_and_sf: the weight, and its packed scales with stride 1 on dim 1, one for 32 columns (or
            64, or 128).
        wv_group_size: heads of a group.
        d_o: 512.

    Returns:
        The weight in its shape; the scales with one for 32 columns and stride 1 on dim 1.

    Raises:
        ArgumentError, ShapeError: as named.
    """
    check_equal("d_o", d_o, HEAD_DIM)
    weight, scales = layouts.permute_wv_proj(weight_and_sf[0], weight_and_sf[1], wv_group_size)
    assert scales is not None
    return weight, scales


@dataclass(frozen=True, slots=True)
class _Fused:
    """What both entry points pass on."""

    positions: Tensor
    rope: Tensor
    scale: float
    sink: Tensor | None
    num_groups: int
    query_norm_eps: float | None
    backend: str
    max_logits: bool = True

    def run(
        self, q: Tensor, window: KeySet, extra: KeySet | None, buffers: AttendBuffers
    ) -> AttentionResult:
        """The fused op in FlashMLA's layouts."""
        heads = q.shape[1]
        check_at_least("n_wv_group", self.num_groups, 1)
        if heads % self.num_groups:
            raise ArgumentError("n_wv_group", self.num_groups, f"a divisor of {heads} heads")
        options = AttendOptions(
            output="fp8",
            query_layout=Layout.CHUNK_INTERLEAVED,
            output_layout=Layout.CHUNK_INTERLEAVED,
            return_lse=True,
            return_max_logits=self.max_logits,
            heads_per_group=heads // self.num_groups,
            backend=self.backend,
            query_norm_eps=self.query_norm_eps,
        )
        return mega_attention(
            q,
            window=window,
            compressed=extra,
            positions=self.positions,
            rope=self.rope,
            scale=self.scale,
            sink=self.sink,
            options=options,
            buffers=buffers,
        )


def _check_switches(
    neox: bool, rope_dim: int, channels: int, scale_flags: tuple[bool, bool, bool], d_v: int
) -> None:
    """Raise unless every switch has the value that the kernels are written for."""
    check_equal("is_rope_neox_style", neox, False, "rotary pairs are neighbours in this model")
    check_equal("rope_dim", rope_dim, ROPE_DIM)
    check_equal("num_per_channels", channels, OUTPUT_BLOCK)
    names = ("use_tma_aligned_col_major_sf", "round_sf", "use_packed_ue8m0")
    for name, flag in zip(names, scale_flags, strict=True):
        check_equal(name, flag, True, "scales are packed ue8m0 bytes, token-major innermost")
    check_equal("d_v", d_v, HEAD_DIM)
