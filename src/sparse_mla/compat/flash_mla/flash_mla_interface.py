"""Paged decode and prefill of FlashMLA: `flash_mla_with_kvcache` and `flash_mla_sparse_fwd`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_mla._checks import check_tensor
from sparse_mla.compat.flash_mla._arguments import (
    check_equal,
    check_pair,
    check_query,
    key_set,
    paged_cache,
    plain_rows,
)
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import ArgumentError, PlanMismatchError, ShapeError, UnsupportedError
from sparse_mla.kernels.contract import HEAD_DIM, KeySet
from sparse_mla.metadata.plan import PlanScratch, TileSchedulerPlan, build_plan
from sparse_mla.ops.attend import AttendBuffers, AttendOptions, sparse_attention


@dataclass
class FlashMLASchedMeta:
    """What the first call with this object looked like; later calls must look the same.

    FlashMLA keeps a split plan in the two tensors. Kernels here plan each launch from its sizes alone, so
    they stay None and the object may be reused with other lengths.
    """

    @dataclass
    class Config:
        """The sizes and switches of a call."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def check(self, config: Config) -> None:
        """Raise `PlanMismatchError` that names each field in which a call differs from the first one."""
        if not self.have_initialized or self.config is None:
            return
        first, now = asdict(self.config), asdict(config)
        wrong = [f"{name}: got {now[name]}, first {first[name]}" for name in now
                 if now[name] != first[name]]  # fmt: skip
        if wrong:
            raise PlanMismatchError(
                f"tile_scheduler_metadata: {'; '.join(wrong)}; call get_mla_metadata() for a new one"
            )

    def record(self, config: Config) -> None:
        """Remember the first call."""
        self.config, self.have_initialized = config, True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A new scheduler object, and None. Arguments are accepted and ignored, as FlashMLA does."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,  # bf16 [b, s_q, h_q, 512], rotated
    k_cache: Tensor,  # bytes [pages, page_rows, 1, 528, 584 or 288]
    block_table: Tensor | None,  # noqa: ARG001  # ignored
    cache_seqlens: Tensor | None,  # noqa: ARG001  # ignored
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = True,
    indices: Tensor | None = None,  # int32 [b, s_q, topk]
    attn_sink: Tensor | None = None,  # float32 [h_q]
    extra_k_cache: Tensor | None = None,  # bytes [pages2, page_rows2, 1, 528, 584 or 288]
    extra_indices_in_kvcache: Tensor | None = None,  # int32 [b, s_q, topk2]
    topk_length: Tensor | None = None,  # int32 [b]
    extra_topk_length: Tensor | None = None,  # int32 [b]
    enable_batch_invariant: bool = False,
    *,
    out: Tensor | None = None,  # bf16 [b, s_q, h_q, 512] contiguous
    kv_layout: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend the listed rows of one or two paged caches, one softmax over both.

    Args:
        q: queries; any strides.
        k_cache: uint8, int8 or float8_e4m3fn; pages may lie any distance apart.
        block_table: ignored: indices are slots `page * page_rows + row`.
        cache_seqlens: ignored.
        head_dim_v: 512.
        tile_scheduler_metadata: from `get_mla_metadata()`; reuse it for calls of the same sizes.
        num_splits: None.
        softmax_scale: of the logits; None = 512**-0.5.
        causal: False.
        is_fp8_kvcache: True.
        indices: slots; any negative one is none.
        attn_sink: multiplies the output by `1 / (1 + exp(sink - lse))`; +inf gives 0, -inf changes nothing.
        extra_k_cache: the second cache, with `extra_indices_in_kvcache`.
        extra_indices_in_kvcache: slots in it.
        topk_length: lanes that count, for each batch item.
        extra_topk_length: the same for the second cache.
        enable_batch_invariant: a row's bits do not depend on the other rows.
        out: where to write the output; None = a new tensor.
        kv_layout: "interleaved" or "planar"; None = the module's setting.
        backend: a backend by name; "auto" chooses.

    Returns:
        (out bf16 [b, s_q, h_q, 512], lse float32 [b, h_q, s_q]: natural log, without the sink); without
        a valid key out is 0 and lse +inf.

    Raises:
        UnsupportedError: dense attention, DeepSeek-V3.2's sizes, or no backend for this device.
        PlanMismatchError: the scheduler object belongs to a call of other sizes.
        ArgumentError and its kinds: an argument that does not fit. Nothing is written then.
    """
    if indices is None:
        raise UnsupportedError(
            "flash_mla_with_kvcache without `indices`",
            ["dense attention: this library has sparse attention only; pass `indices`"],
        )
    _check_modes(tile_scheduler_metadata, num_splits, head_dim_v, causal, is_fp8_kvcache)
    check_query(q, ("b", "s_q", "h_q"))
    batch, s_q, heads, _ = q.shape
    check_pair(extra_k_cache, extra_indices_in_kvcache,
               ("extra_k_cache", "extra_indices_in_kvcache"))  # fmt: skip
    window = _paged_keys("", k_cache, indices, topk_length, (batch, s_q), kv_layout)
    extra = None
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        extra = _paged_keys(
            "extra_", extra_k_cache, extra_indices_in_kvcache, extra_topk_length, (batch, s_q),
            kv_layout,
        )  # fmt: skip
    config = _config(q, window, extra, enable_batch_invariant)
    tile_scheduler_metadata.check(config)
    result = sparse_attention(
        q.reshape(batch * s_q, heads, HEAD_DIM),
        window=window,
        compressed=extra,
        scale=HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale,
        sink=attn_sink,
        plan=_invariant_plan(config, batch * s_q, q) if enable_batch_invariant else None,
        options=AttendOptions(
            return_lse=True, backend=backend, batch_invariant=enable_batch_invariant
        ),
        buffers=AttendBuffers(data=_flat_output(out, q)),
    )
    tile_scheduler_metadata.record(config)
    assert result.lse is not None
    lse = result.lse.view(batch, s_q, heads).transpose(1, 2).contiguous()
    return result.bf16.view(batch, s_q, heads, HEAD_DIM), lse


def flash_mla_sparse_fwd(
    q: Tensor,  # bf16 [s_q, h_q, 512], rotated
    kv: Tensor,  # bf16 [s_kv, 1, 512], rotated
    indices: Tensor,  # int32 [s_q, 1, topk]
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,  # float32 [h_q]
    topk_length: Tensor | None = None,  # int32 [s_q]
    out: Tensor | None = None,  # bf16 [s_q, h_q, 512] contiguous
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend the listed rows of a plain bf16 tensor.

    Args:
        q: queries; any strides.
        kv: gathered rows; 16-byte aligned.
        indices: rows of `kv`; a negative one, or one at or past s_kv, is none.
        sm_scale: of the logits.
        d_v: 512.
        attn_sink: as in `flash_mla_with_kvcache`.
        topk_length: lanes that count, for each query.
        out: where to write the output; None = a new tensor.
        backend: a backend by name; "auto" chooses.

    Returns:
        (out bf16 [s_q, h_q, 512], max_logits float32 [s_q, h_q], lse float32 [s_q, h_q]); natural log,
        without the sink. Without a valid key: 0, -inf, +inf.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    check_query(q, ("s_q", "h_q"))
    check_equal("d_v", d_v, HEAD_DIM)
    check_tensor("indices", indices, shape=(q.shape[0], 1, "topk"), dtypes=(torch.int32,))
    cache = plain_rows("kv", kv)
    result = sparse_attention(
        q,
        window=key_set("indices", cache, indices, topk_length, beyond_is_none=True),
        scale=sm_scale,
        sink=attn_sink,
        options=AttendOptions(return_lse=True, return_max_logits=True, backend=backend),
        buffers=AttendBuffers(data=out),
    )
    assert result.max_logits is not None
    assert result.lse is not None
    return result.bf16, result.max_logits, result.lse


def _check_modes(
    schedule: FlashMLASchedMeta, num_splits: None, head_dim_v: int, causal: bool, fp8: bool
) -> None:
    if not isinstance(schedule, FlashMLASchedMeta):
        raise ArgumentError(
            "tile_scheduler_metadata",
            type(schedule).__name__,
            "a FlashMLASchedMeta",
            "get_mla_metadata() returns one",
        )
    check_equal("num_splits", num_splits, None, "the scheduler object has everything")
    check_equal("head_dim_v", head_dim_v, HEAD_DIM)
    check_equal("causal", causal, False, "sparse attention attends what `indices` lists")
    check_equal("is_fp8_kvcache", fp8, True, "sparse attention reads quantised caches")


def _config(
    q: Tensor, window: KeySet, extra: KeySet | None, batch_invariant: bool
) -> FlashMLASchedMeta.Config:
    return FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=window.cache.page_rows,
        h_k=1,
        causal=False,
        is_fp8_kvcache=True,
        topk=window.width,
        extra_page_block_size=None if extra is None else extra.cache.page_rows,
        extra_topk=None if extra is None else extra.width,
        enable_batch_invariant=batch_invariant,
    )


def _paged_keys(
    prefix: str,
    view: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    rows: tuple[int, int],
    layout: str | None,
) -> KeySet:
    """The key set of b * s_q tokens; lengths of batch items repeat for each of their tokens."""
    batch, s_q = rows
    names = (f"{prefix}k_cache", f"{prefix}indices" + "_in_kvcache" * bool(prefix))
    cache = paged_cache(names[0], view, layout)
    check_tensor(names[1], indices, shape=(batch, s_q, "topk"), dtypes=(torch.int32,))
    if lengths is not None:
        check_tensor(f"{prefix}topk_length", lengths, shape=(batch,), dtypes=(torch.int32,))
        lengths = lengths[:, None].expand(batch, s_q).contiguous().view(-1)
    return key_set(names[1], cache, indices, lengths)


def _flat_output(out: Tensor | None, q: Tensor) -> Tensor | None:
    if out is None:
        return None
    check_tensor("out", out, shape=tuple(q.shape), dtypes=(torch.bfloat16,), device=q.device)
    if not out.is_contiguous():
        raise ShapeError("out", f"strides {out.stride()}", "a contiguous tensor")
    return out.view(-1, q.shape[2], HEAD_DIM)


def _invariant_plan(config: FlashMLASchedMeta.Config, tokens: int, q: Tensor) -> TileSchedulerPlan:
    """A plan that never splits a row; it needs no scratch."""
    return build_plan(
        LayerKind.WINDOW_ONLY,
        tokens=tokens,
        num_heads=config.h_q,
        window_keys=config.topk or 0,
        compressed_keys=config.extra_topk or 0,
        scratch=PlanScratch(config.h_q, 0, q.device),
        batch_invariant=True,
    )
