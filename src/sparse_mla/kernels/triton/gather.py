"""Dequantising gather in Triton: rows of a cache by slot, for tools and tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.kernels.division import magic_division
from sparse_mla.kernels.triton.configs import GATHER_ROWS
from sparse_mla.kernels.triton.rows import load_raw, widen

DIM = tl.constexpr(512)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_slots",
        "page_rows",
        "page_magic",
        "page_shift",
        "page_stride",
    ],
    do_not_specialize_on_alignment=["slots"],
)
def gather_kernel(
    pages,  # uint8, first page
    slots,  # int32 or int64 [num_rows]
    out,  # bf16 [num_rows, 512]
    num_rows: tl.int32,
    num_slots: tl.int32,
    page_rows: tl.int32,
    page_magic: tl.int64,
    page_shift: tl.int32,
    page_stride: tl.int64,  # in units of 16 bytes
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, -1).to(tl.int32)
    words, scales, tail = load_raw(
        pages, slot, page_rows, page_magic, page_shift, page_stride, RECORD
    )
    values = widen(words, scales, tail, RECORD, "generic")
    at = row.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + at, values, mask=(row < num_rows)[:, None])


def gather_rows(cache: PagedCache, slots: Tensor) -> Tensor:
    """bf16 [n, 512] values of rows; rows with a negative slot or one past the cache are zero.

    Args:
        cache: a cache of a 512-wide record.
        slots: int32 or int64 [n].
    """
    out = torch.empty(slots.shape[0], 512, dtype=torch.bfloat16, device=slots.device)
    if out.numel():
        gather_kernel[(-(-slots.shape[0] // GATHER_ROWS),)](
            cache.pages,
            slots,
            out,
            slots.shape[0],
            cache.num_slots,
            cache.page_rows,
            *magic_division(cache.page_rows),
            cache.page_stride_bytes // 16,
            RECORD=cache.record,
            ROWS=GATHER_ROWS,
        )
    return out
