"""The arithmetic of a step's metadata as kernels, behind the same builders (`rules=TRITON_RULES`).

A step with both ratios takes six launches: rows, window lists, and for each ratio the compressed slots
and the visible counts. Nothing is allocated and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_mla.kernels.triton.configs import LANES, METADATA_ROWS
from sparse_mla.metadata.rules import MetadataRules, Rows, TopkRows, WindowSpans


@triton.jit
def _slot(table, table_stride, num_requests, columns, request, position, page_rows, here):
    """int64 slots of positions in the tables of requests, -1 where there is no table or no page."""
    page = position // page_rows
    request += tl.zeros_like(position)  # one request or one for each position
    known = (request >= 0) & (request < num_requests)
    found = here & known & (position >= 0) & (page < columns)
    at = table + request.to(tl.int64) * table_stride + page
    block = tl.load(at, mask=found, other=-1)
    slot = block.to(tl.int64) * page_rows + (position - page * page_rows)
    return tl.where(found & (block >= 0), slot, -1)


@triton.jit(
    do_not_specialize=["num_rows", "num_requests"],
    do_not_specialize_on_alignment=[
        "requests", "positions", "is_valid", "query_start_loc", "seq_lens", "window_slots",
    ],
)  # fmt: skip
def rows_kernel(
    requests,  # int32 [T]
    positions,  # int32 [T]
    is_valid,  # bool [T] as uint8
    query_start_loc,  # int32 [R + 1]
    seq_lens,  # int32 [R]
    window_slots,  # int32 or int64 [T]
    num_rows: tl.int32,
    num_requests: tl.int32,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    low = tl.zeros([ROWS], tl.int32)  # first request that ends past the row, by bisection
    high = low + num_requests
    size = num_requests
    while size > 0:
        middle = (low + high) // 2
        open_ = low < high
        end = tl.load(query_start_loc + 1 + middle, mask=here & open_, other=0)
        past = end > row
        low = tl.where(open_ & (past == 0), middle + 1, low)
        high = tl.where(open_ & past, middle, high)
        size = size // 2
    request = tl.where(low < num_requests, low, 0)
    there = here & (request < num_requests)
    end = tl.load(query_start_loc + 1 + request, mask=there, other=0)
    length = tl.load(seq_lens + request, mask=there, other=0)
    slot = tl.load(window_slots + row, mask=here, other=-1)
    position = tl.where(there, length - end + row, 0)
    tl.store(requests + row, request, mask=here)
    tl.store(positions + row, position, mask=here)
    tl.store(is_valid + row, (slot >= 0).to(tl.uint8), mask=here)


@triton.jit(
    do_not_specialize=[
        "width", "num_requests", "columns", "page_rows", "window", "indices_stride", "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "indices", "lengths", "requests", "positions", "is_valid", "table", "replay_start",
        "query_start_loc", "seq_lens",
    ],
)  # fmt: skip
def window_kernel(
    indices,  # int32 [T, width]
    lengths,  # int32 [T]
    requests,  # int32 [T]
    positions,  # int32 [T]
    is_valid,  # uint8 [T]
    table,  # int32 [R, columns]
    replay_start,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    seq_lens,  # int32 [R]
    width: tl.int32,
    num_requests: tl.int32,
    columns: tl.int32,
    page_rows: tl.int32,
    window: tl.int32,
    indices_stride: tl.int64,
    table_stride: tl.int64,
    CAUSAL: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    request = tl.load(requests + row)
    if CAUSAL:
        end = tl.load(positions + row) + 1
        start = tl.maximum(end - window, tl.load(replay_start + request))
    else:
        begin = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - begin
        end = tl.load(seq_lens + request)
        start = end - count - window
    start = tl.maximum(start, 0)
    count = tl.minimum(tl.maximum(end - start, 0), width)
    count = tl.where(tl.load(is_valid + row) != 0, count, 0)
    target = indices + row * indices_stride
    for first in range(0, width, LANES):
        lane = first + tl.arange(0, LANES)
        slot = _slot(
            table,
            table_stride,
            num_requests,
            columns,
            request,
            start + lane,
            page_rows,
            lane < count,
        )
        tl.store(target + lane, slot.to(tl.int32), mask=lane < width)
    tl.store(lengths + row, count)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_requests", "columns", "page_rows", "ratio", "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "slots", "requests", "positions", "is_valid", "table", "token_slots",
    ],
)  # fmt: skip
def compressed_slots_kernel(
    slots,  # int64 [T]
    requests,  # int32 [T]
    positions,  # int32 [T]
    is_valid,  # uint8 [T]
    table,  # int32 [R, columns]
    token_slots,  # int64 [T]
    num_rows: tl.int32,
    num_requests: tl.int32,
    columns: tl.int32,
    page_rows: tl.int32,
    ratio: tl.int32,
    table_stride: tl.int64,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    token_slot = tl.load(token_slots + row, mask=here, other=-1).to(tl.int64)
    slot = token_slot
    if ratio > 1:
        position = tl.maximum(tl.load(positions + row, mask=here, other=0), 0)
        request = tl.load(requests + row, mask=here, other=0)
        token = tl.load(is_valid + row, mask=here, other=0) != 0
        closes = token & ((position + 1) % ratio == 0) & (token_slot >= 0)
        slot = _slot(
            table,
            table_stride,
            num_requests,
            columns,
            request,
            position // ratio,
            page_rows,
            closes,
        )
    tl.store(slots + row, slot, mask=here)


@triton.jit(
    do_not_specialize=["num_rows", "ratio"],
    do_not_specialize_on_alignment=["visible", "positions", "is_valid"],
)
def visible_kernel(
    visible,  # int32 [T]
    positions,  # int32 [T]
    is_valid,  # uint8 [T]
    num_rows: tl.int32,
    ratio: tl.int32,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    position = tl.load(positions + row, mask=here, other=0)
    token = tl.load(is_valid + row, mask=here, other=0) != 0
    count = tl.where(token, tl.maximum(position + 1, 0) // ratio, 0)
    tl.store(visible + row, count, mask=here)


@triton.jit(
    do_not_specialize=[
        "width", "num_requests", "columns", "page_rows", "slots_stride", "topk_stride",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "slots", "lengths", "topk", "requests", "is_valid", "visible", "table",
    ],
)  # fmt: skip
def topk_slots_kernel(
    slots,  # int32 [T, width]
    lengths,  # int32 [T]
    topk,  # int32 [T, width]
    requests,  # int32 [T]
    is_valid,  # uint8 [T]
    visible,  # int32 [T]
    table,  # int32 [R, columns]
    width: tl.int32,
    num_requests: tl.int32,
    columns: tl.int32,
    page_rows: tl.int32,
    slots_stride: tl.int64,
    topk_stride: tl.int64,
    table_stride: tl.int64,
    VISIBLE: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    request = tl.load(requests + row)
    last = 0
    for first in range(0, width, LANES):
        lane = first + tl.arange(0, LANES)
        here = lane < width
        position = tl.load(topk + row * topk_stride + lane, mask=here, other=-1)
        if VISIBLE:
            here = here & (position < tl.load(visible + row))
        slot = _slot(table, table_stride, num_requests, columns, request, position, page_rows, here)
        tl.store(slots + row * slots_stride + lane, slot.to(tl.int32), mask=lane < width)
        last = tl.maximum(last, tl.max(tl.where(slot >= 0, lane + 1, 0), 0))
    tl.store(lengths + row, tl.where(tl.load(is_valid + row) != 0, last, 0))


def fill_rows(out: Rows, query_start_loc: Tensor, seq_lens: Tensor, window_slots: Tensor) -> None:
    """`metadata.rules.fill_rows` in one launch."""
    rows = out.requests.shape[0]
    if rows:
        rows_kernel[(-(-rows // METADATA_ROWS),)](
            out.requests, out.positions, _bytes(out.is_valid), query_start_loc, seq_lens,
            window_slots, rows, seq_lens.shape[0], ROWS=METADATA_ROWS,
        )  # fmt: skip


def fill_window(
    indices: Tensor, lengths: Tensor, rows: Rows, table: Tensor, spans: WindowSpans
) -> None:
    """`metadata.rules.fill_window` in one launch."""
    if not table.numel():
        indices.fill_(-1)
        lengths.zero_()
    elif indices.shape[0]:
        window_kernel[(indices.shape[0],)](
            indices, lengths, rows.requests, rows.positions, _bytes(rows.is_valid), table,
            spans.replay_start, spans.query_start_loc, spans.seq_lens, indices.shape[1],
            *table.shape, spans.page_rows, spans.window, indices.stride(0), table.stride(0),
            CAUSAL=spans.causal, LANES=LANES,
        )  # fmt: skip


def fill_compressed_slots(
    slots: Tensor, rows: Rows, table: Tensor, token_slots: Tensor, ratio: int, page_rows: int
) -> None:
    """`metadata.rules.fill_compressed_slots` in one launch."""
    count = slots.shape[0]
    if count:
        compressed_slots_kernel[(-(-count // METADATA_ROWS),)](
            slots, rows.requests, rows.positions, _bytes(rows.is_valid), table, token_slots, count,
            *table.shape, page_rows, ratio, table.stride(0),
            ROWS=METADATA_ROWS,
        )  # fmt: skip


def fill_visible(visible: Tensor, rows: Rows, ratio: int) -> None:
    """`metadata.rules.fill_visible` in one launch."""
    count = visible.shape[0]
    if count:
        visible_kernel[(-(-count // METADATA_ROWS),)](
            visible, rows.positions, _bytes(rows.is_valid), count, ratio, ROWS=METADATA_ROWS
        )


def fill_topk_slots(slots: Tensor, lengths: Tensor, topk: TopkRows) -> None:
    """`metadata.rules.fill_topk_slots` in one launch."""
    if not topk.table.numel() or not topk.positions.shape[1]:
        slots.fill_(-1)
        lengths.zero_()
    elif slots.shape[0]:
        visible = lengths if topk.visible is None else topk.visible
        topk_slots_kernel[(slots.shape[0],)](
            slots, lengths, topk.positions, topk.requests, _bytes(topk.is_valid), visible,
            topk.table, slots.shape[1], *topk.table.shape, topk.page_rows, slots.stride(0),
            topk.positions.stride(0), topk.table.stride(0),
            VISIBLE=topk.visible is not None, LANES=LANES,
        )  # fmt: skip


def _bytes(flags: Tensor) -> Tensor:
    """bool as uint8, the same memory."""
    return flags.view(torch.uint8)


class TritonRules:
    """The rules of this module."""

    fill_rows = staticmethod(fill_rows)
    fill_window = staticmethod(fill_window)
    fill_compressed_slots = staticmethod(fill_compressed_slots)
    fill_visible = staticmethod(fill_visible)
    fill_topk_slots = staticmethod(fill_topk_slots)


TRITON_RULES: MetadataRules = TritonRules()
