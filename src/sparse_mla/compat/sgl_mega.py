"""The functions of `sgl_kernel.flash_mla_mega`, for SGLang and for code written against it.

A second face of `compat.flash_mla.fused_norm_rope_attn_rope_cast`: the same op, layouts and results under
SGLang's names and with the arguments that it leaves out fixed (no query norm, 8 heads in an output group,
scales each 32 dims). What differs from `sgl_kernel`:

    query heads            any multiple of 8 up to 128, not 64 and 128 alone
    index lists            any width
    pages                  any number of rows, any distance that keeps rows aligned
    device                 every GPU from SM80 on, and a CPU; not SM100 alone
    records                both generations, by the module setting `kv_format`

`kv_format` says where the scales of 528- and 288-byte rows lie, in SGLang's words: "v41_new" (each row's
scales behind its data) or "v41" (a page's scales behind all its data). The two are equally wide, so no
tensor tells them apart. Rows of 584 bytes are always the second.
"""

from __future__ import annotations

from torch import Tensor

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused
from sparse_mla.errors import ShapeError
from sparse_mla.kernels.contract import HEAD_DIM, MAX_HEADS, OUTPUT_BLOCK, ROPE_DIM
from sparse_mla.ops.layouts import permute_q_b_proj

__all__ = ["flash_mla_mega_decode", "flash_mla_mega_prefill", "permute_mega_q_weight"]

HEADS_PER_GROUP = 8
KV_LAYOUTS = {"v41_new": "interleaved", "v41": "planar"}
"""SGLang's name of a generation of records: ours."""
kv_format = "v41_new"
"""The generation that caches are read as."""


def flash_mla_mega_decode(
    q: Tensor,  # bf16 [T, H, 512], not rotated, chunk-interleaved
    kv: Tensor,  # bytes [pages, page_rows, 1, 528 or 584]
    indices: Tensor,  # int32 [T, K]
    positions: Tensor,  # int32 [T]
    cos_sin_cache: Tensor,  # float32 [max_positions, 64], cos 32 then sin 32
    softmax_scale: float,
    *,
    attn_sink: Tensor | None = None,  # float32 [H]
    topk_length: Tensor | None = None,  # int32 [T]
    extra_kv: Tensor | None = None,  # bytes [pages, page_rows, 1, 528, 288 or 584]
    extra_indices: Tensor | None = None,  # int32 [T, K2]
    extra_topk_length: Tensor | None = None,  # int32 [T]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the query, attend one or two paged caches, rotate the output back, cast it to FP8.

    Args:
        q: as the product with `permute_mega_q_weight`'s weight gives it.
        kv: window cache; uint8, int8 or float8_e4m3fn.
        indices: slots `page * page_rows + row`; any negative one is none.
        positions: of the queries; int64 too.
        cos_sin_cache: rotary table.
        softmax_scale: of the logits.
        attn_sink: multiplies the output by `1 / (1 + exp(sink - lse))`.
        topk_length: lanes that count, for each query.
        extra_kv: the second cache, with `extra_indices`.
        extra_indices: slots in it.
        extra_topk_length: lanes of it that count.

    Returns:
        (out_fp8 float8_e4m3fn [T, H / 8, 4096], chunk-interleaved inside a group of 8 heads,
        out_sf int32 [T, H / 8, 32]: four ue8m0 bytes a word, token-major innermost, padded to 16 bytes,
        lse float32 [T, H], natural log, without the sink; +inf for a query without keys)

    Raises:
        ArgumentError and its kinds: an argument that does not fit. Nothing is computed then.
        UnsupportedError: no backend for this device.
    """
    check_choice("sgl_mega.kv_format", kv_format, tuple(KV_LAYOUTS))
    return fused.decode(
        *_fixed(q, positions, cos_sin_cache),
        q,
        kv,
        indices,
        softmax_scale,
        HEAD_DIM,
        attn_sink,
        topk_length,
        extra_kv,
        extra_indices,
        extra_topk_length,
        kv_layout=KV_LAYOUTS[kv_format],
    )


def flash_mla_mega_prefill(
    q: Tensor,  # bf16 [T, H, 512], not rotated, chunk-interleaved
    kv: Tensor,  # bf16 [rows, 1, 512], rotated
    indices: Tensor,  # int32 [T, 1, K]
    positions: Tensor,  # int32 [T]
    cos_sin_cache: Tensor,  # float32 [max_positions, 64]
    softmax_scale: float,
    *,
    attn_sink: Tensor | None = None,  # float32 [H]
    topk_length: Tensor | None = None,  # int32 [T]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same over rows that were gathered before.

    Arguments that `flash_mla_mega_decode` has too are as there.

    Args:
        q: see `flash_mla_mega_decode`.
        kv: gathered rows.
        indices: rows of `kv`; negative, or at or past its end: none.
        positions: see `flash_mla_mega_decode`.
        cos_sin_cache: see `flash_mla_mega_decode`.
        softmax_scale: see `flash_mla_mega_decode`.
        attn_sink: see `flash_mla_mega_decode`.
        topk_length: see `flash_mla_mega_decode`.

    Returns:
        (out_fp8, out_sf, max_logits float32 [T, H], lse): the largest scaled logit without the sink, -inf
        for a query without keys; the others as in `flash_mla_mega_decode`.

    Raises:
        As `flash_mla_mega_decode`.
    """
    return fused.prefill(
        *_fixed(q, positions, cos_sin_cache),
        q,
        kv,
        indices,
        softmax_scale,
        HEAD_DIM,
        attn_sink,
        topk_length,
    )


def permute_mega_q_weight(weight: Tensor, num_heads: int, head_dim: int = HEAD_DIM) -> Tensor:
    """Reorder the rows of `wq_b` so that its product is the query that mega attention reads.

    Args:
        weight: [num_heads * 512, rank], any one-byte or floating dtype; scales of rows move the same way.
        num_heads: query heads of this rank.
        head_dim: 512.

    Returns:
        A new tensor of the same shape.

    Raises:
        ArgumentError, ShapeError: another head size or number of rows.
    """
    check_choice("head_dim", head_dim, (HEAD_DIM,))
    return permute_q_b_proj(weight, None, num_heads)[0]


def _fixed(
    q: Tensor, positions: Tensor, rope: Tensor
) -> tuple[bool, float, Tensor, bool, int, Tensor, int, int, bool, bool, bool]:
    """The leading arguments of FlashMLA's fused entry points that SGLang does not have."""
    check_tensor("q", q, shape=("T", "H", HEAD_DIM), dtypes=(q.dtype,))
    heads = q.shape[1]
    if not heads or heads % HEADS_PER_GROUP:
        allowed = f"a multiple of {HEADS_PER_GROUP} up to {MAX_HEADS}"
        raise ShapeError("q", f"{heads} heads", allowed, "an output group has 8 heads")
    groups = heads // HEADS_PER_GROUP
    switches = (True, True, True)
    return (False, 0.0, positions, False, ROPE_DIM, rope, groups, OUTPUT_BLOCK, *switches)
