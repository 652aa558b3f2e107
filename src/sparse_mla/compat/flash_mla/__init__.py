"""FlashMLA's Python API, answered by this library: replace `import flash_mla` and nothing else.

    import sparse_mla.compat.flash_mla as flash_mla

Same names, arguments, shapes, strides and meaning. `DIFFERENCES` holds what is not the same; the page
docs/flash_mla.md is made from it.

`kv_layout` says where the scales of 528- and 288-byte rows lie: "interleaved" (each row's scales behind its
data, FlashMLA since its release of 2026-09-30) or "planar" (a page's scales behind all its data, the builds
before). The two are equally wide, so no tensor tells them apart. Set it once,
`flash_mla.kv_layout = "planar"`, or name it in a call, `kv_layout="planar"`. Rows of 584 bytes are always planar.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sparse_mla.compat.flash_mla import fused_norm_rope_attn_rope_cast
from sparse_mla.compat.flash_mla.differences import DIFFERENCES
from sparse_mla.compat.flash_mla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from sparse_mla.compat.flash_mla.fused_norm_rope_attn_rope_cast import (
    permute_q_b_proj,
    permute_wv_proj,
)
from sparse_mla.errors import UnsupportedError

__all__ = [
    "DIFFERENCES",
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_metadata",
    "kv_layout",
    "permute_q_b_proj",
    "permute_wv_proj",
]

kv_layout = "interleaved"
"""Where the scales of 528- and 288-byte rows lie, for calls that do not say it."""


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: not here.

    Raises:
        UnsupportedError: always.
    """
    _refuse_dense("flash_attn_varlen_func", args, kwargs)


def flash_attn_varlen_qkvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: not here.

    Raises:
        UnsupportedError: always.
    """
    _refuse_dense("flash_attn_varlen_qkvpacked_func", args, kwargs)


def flash_attn_varlen_kvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense attention: not here.

    Raises:
        UnsupportedError: always.
    """
    _refuse_dense("flash_attn_varlen_kvpacked_func", args, kwargs)


def _refuse_dense(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    del args, kwargs
    raise UnsupportedError(
        name, ["dense attention: this library has sparse MLA only; use PyTorch or FlashAttention"]
    )
