"""What the entry points share: which record a tensor holds, key lists, and the refusals."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import (
    BF16,
    MXFP8,
    MXFP8_PLANAR,
    NVFP4,
    NVFP4_PLANAR,
    V4,
    RecordFormat,
)
from sparse_mla.errors import ArgumentError, CacheFormatError, ShapeError, UnsupportedError
from sparse_mla.kernels.contract import HEAD_DIM, ROPE_DIM, KeySet

RECORDS_OF_LAYOUT: dict[str, tuple[RecordFormat, ...]] = {
    "interleaved": (V4, MXFP8, NVFP4),
    "planar": (V4, MXFP8_PLANAR, NVFP4_PLANAR),
}
"""The records that a cache of each layout may hold; their widths differ."""
V32_HEAD_DIM, V32_ROW_BYTES = HEAD_DIM + ROPE_DIM, 656
"""DeepSeek-V3.2's sizes, here to be refused by name."""
_INT32 = (torch.int32,)


def paged_cache(name: str, view: Tensor, layout: str | None) -> PagedCache:
    """The cache in a tensor [pages, page_rows, 1, row_bytes] of bytes.

    Raises:
        UnsupportedError: rows of DeepSeek-V3.2.
        CacheFormatError, ShapeError, DTypeError, StrideError: no cache of this library.
    """
    if layout is None:
        layout = importlib.import_module("sparse_mla.compat.flash_mla").kv_layout
    check_choice("kv_layout", layout, tuple(RECORDS_OF_LAYOUT))
    width = view.shape[-1] if view.dim() else 0
    if width == V32_ROW_BYTES:
        raise UnsupportedError(
            f"{name} with rows of {width} bytes",
            ["record: got DeepSeek-V3.2's (head width 576); allowed: DeepSeek-V4.1's and V4's"],
        )
    records = {record.row_bytes: record for record in RECORDS_OF_LAYOUT[layout]}
    if width not in records:
        known = ", ".join(f"{bytes_} ({record.name})" for bytes_, record in records.items())
        raise CacheFormatError(name, f"a last dimension of {width} bytes", known)
    return PagedCache.from_view(view, records[width], name)


def plain_rows(name: str, kv: Tensor) -> PagedCache:
    """Gathered rows, bf16 [s_kv, 1, 512], as a cache with one row a page.

    Raises:
        ShapeError, DTypeError, StrideError: another tensor.
    """
    if kv.dim() == 3 and kv.shape[1] > 1:
        raise ShapeError(name, f"{kv.shape[1]} key heads", "1: one latent serves all query heads")
    check_tensor(name, kv, shape=("s_kv", 1, HEAD_DIM), dtypes=(torch.bfloat16,))
    pages = kv.squeeze(1).view(torch.uint8)
    cache = PagedCache(pages, BF16, page_rows=1)
    cache.check_strides(name)
    return cache


def key_set(
    name: str,
    cache: PagedCache,
    indices: Tensor,  # int32 [..., K]
    lengths: Tensor | None,  # int32 [T]
    *,
    beyond_is_none: bool = False,
) -> KeySet:
    """The rows of each token. With `beyond_is_none` an index past the cache means none on a CPU too."""
    lanes = indices.reshape(-1, indices.shape[-1])
    if beyond_is_none and lanes.device.type == "cpu":
        lanes = torch.where(lanes < cache.num_slots, lanes, -1)
    check_tensor(name, lanes, shape=("T", "K"), dtypes=_INT32)
    return KeySet(cache, lanes, lengths)


def check_query(q: Tensor, sizes: tuple[str, ...]) -> None:
    """Raise unless q is bf16 [*sizes, 512]; the width of DeepSeek-V3.2 gets a sentence of its own."""
    if q.dim() == len(sizes) + 1 and q.shape[-1] == V32_HEAD_DIM:
        raise UnsupportedError(
            f"q of width {V32_HEAD_DIM}",
            ["head width: got DeepSeek-V3.2's; allowed: 512 (DeepSeek-V4.1 and V4)"],
        )
    check_tensor("q", q, shape=(*sizes, HEAD_DIM), dtypes=(torch.bfloat16,))


def check_equal(name: str, got: object, wanted: object, why: str = "") -> None:
    """Raise `ArgumentError` unless the argument has the only value that there is."""
    if got != wanted:
        raise ArgumentError(name, repr(got), repr(wanted), why)


def check_pair(cache: object, indices: object, names: tuple[str, str]) -> None:
    """Raise unless both or neither of two arguments are given."""
    if (cache is None) != (indices is None):
        missing, given = names if cache is None else names[::-1]
        raise ArgumentError(missing, None, f"a tensor beside {given}", "give both or neither")
