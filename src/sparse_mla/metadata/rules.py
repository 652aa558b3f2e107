"""The arithmetic of a step's metadata, in PyTorch. Every function fills buffers that the caller owns.

No function waits for the device or has a shape that depends on data. `MetadataRules` bundles them, so
that a GPU can put kernels in their place without a change to any builder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rules know of each row of a step."""

    requests: Tensor  # int32 [T], request of the row; 0 for padding rows
    positions: Tensor  # int32 [T], position by the request's lengths; garbage for padding rows
    is_valid: Tensor  # bool [T], whether the row is a token (its window slot is not negative)


class MetadataRules(Protocol):
    """The five computations of a step; see the functions of this module for what each fills."""

    def fill_rows(
        self, out: Rows, query_start_loc: Tensor, seq_lens: Tensor, window_slots: Tensor
    ) -> None:
        """See `fill_rows`."""

    def fill_window(
        self, indices: Tensor, lengths: Tensor, rows: Rows, table: Tensor, spans: WindowSpans
    ) -> None:
        """See `fill_window`."""

    def fill_compressed_slots(
        self,
        slots: Tensor,
        rows: Rows,
        table: Tensor,
        token_slots: Tensor,
        ratio: int,
        page_rows: int,
    ) -> None:
        """See `fill_compressed_slots`."""

    def fill_visible(self, visible: Tensor, rows: Rows, ratio: int) -> None:
        """See `fill_visible`."""

    def fill_topk_slots(self, slots: Tensor, lengths: Tensor, topk: TopkRows) -> None:
        """See `fill_topk_slots`."""


@dataclass(frozen=True, slots=True)
class WindowSpans:
    """Which positions a row's window covers."""

    window: int  # tokens, the query itself included
    page_rows: int
    replay_start: Tensor  # int32 [R], no window key below it
    query_start_loc: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]
    causal: bool  # False: all rows of a request see the window before the block, and the block


@dataclass(frozen=True, slots=True)
class TopkRows:
    """Lists of request-local compressed positions and what is needed to find their slots."""

    positions: Tensor  # int32 [T, K], negative = none
    table: Tensor  # int32 [R, max_pages], -1 = no page
    requests: Tensor  # int32 [T]
    page_rows: int
    is_valid: Tensor  # bool [T]
    visible: Tensor | None = None  # int32 [T], entries that exist for the row; None = not checked


def fill_rows(out: Rows, query_start_loc: Tensor, seq_lens: Tensor, window_slots: Tensor) -> None:
    """Request, position and validity of every row.

    A row's request is found among the cumulative counts; requests without tokens are skipped, rows at or
    past the last token go to request 0.
    """
    num_rows, num_requests = out.requests.shape[0], seq_lens.shape[0]
    torch.ge(window_slots, 0, out=out.is_valid)
    if not num_requests:
        out.requests.zero_()
        out.positions.zero_()
        return
    row = torch.arange(num_rows, dtype=torch.int32, device=seq_lens.device)
    found = torch.searchsorted(query_start_loc[1:].contiguous(), row, right=True, out_int32=True)
    out.requests.copy_(torch.where(found < num_requests, found, 0))
    request = out.requests.long()
    end = query_start_loc[1:][request]
    out.positions.copy_(seq_lens[request] - end + row)


def fill_window(
    indices: Tensor,  # int32 [T, width]
    lengths: Tensor,  # int32 [T]
    rows: Rows,
    table: Tensor,  # int32 [R, max_pages]
    spans: WindowSpans,
) -> None:
    """Window slots of every row, oldest first, -1 past the length.

    Causal: positions `max(p - window + 1, 0, replay_start) .. p`. Not causal: positions
    `max(prefix - window, 0) .. seq_len - 1` for every row of the request, where prefix is the number of
    its tokens before the step. Rows that are no token have length 0.
    """
    width = indices.shape[1]
    if not table.numel():
        indices.fill_(-1)
        lengths.zero_()
        return
    request = rows.requests.long()
    if spans.causal:
        end = rows.positions + 1
        start = torch.maximum(end - spans.window, spans.replay_start[request])
    else:
        counts = spans.query_start_loc[1:] - spans.query_start_loc[:-1]
        end = spans.seq_lens[request]
        start = end - counts[request] - spans.window
    start = start.clamp_min(0)
    count = torch.where(rows.is_valid, (end - start).clamp(0, width), 0)
    lane = torch.arange(width, dtype=torch.int32, device=indices.device)
    position = start[:, None] + lane
    slots = _slots(table, request, position, spans.page_rows)
    indices.copy_(torch.where(lane < count[:, None], slots, -1))
    lengths.copy_(count)


def fill_compressed_slots(
    slots: Tensor,  # int64 [T]
    rows: Rows,
    table: Tensor,  # int32 [R, max_pages]
    token_slots: Tensor,  # int64 [T] of the same group, -1 = padding or replayed
    ratio: int,
    page_rows: int,
) -> None:
    """Slot of the entry that each row closes, -1 for every other row.

    Token p closes entry `p // ratio` if `(p + 1) % ratio == 0`; a token without a slot closes none. At
    ratio 1 every token closes the entry in its own slot.
    """
    if ratio == 1:
        slots.copy_(token_slots)
        return
    if not table.numel():
        slots.fill_(-1)
        return
    position = rows.positions.clamp_min(0)
    entry = torch.div(position, ratio, rounding_mode="floor")
    found = _slots(table, rows.requests.long(), entry[:, None], page_rows)[:, 0]
    closes = rows.is_valid & ((position + 1) % ratio == 0) & (token_slots >= 0)
    slots.copy_(torch.where(closes, found, -1))


def fill_visible(visible: Tensor, rows: Rows, ratio: int) -> None:
    """Entries that each row may see, int32 [T]: `(p + 1) // ratio`, 0 for rows that are no token."""
    count = torch.div((rows.positions + 1).clamp_min(0), ratio, rounding_mode="floor")
    visible.copy_(torch.where(rows.is_valid, count, 0))


def fill_topk_slots(
    slots: Tensor,  # int32 [T, K]
    lengths: Tensor,  # int32 [T]
    topk: TopkRows,
) -> None:
    """Cache slots of request-local positions, lane by lane, and the lengths of the lists.

    A position that is negative, past the table, past the row's visible entries, or on a page that the
    request does not have gives -1 and reads nothing out of range; so does every position of a row whose
    request is not in the table. The length is the index of the last valid lane plus one (valid entries
    form a prefix unless a page is missing), 0 for rows that are no token.
    """
    width = topk.positions.shape[1]
    if not topk.table.numel() or not width:
        slots.fill_(-1)
        lengths.zero_()
        return
    found = _slots(topk.table, topk.requests.long(), topk.positions, topk.page_rows)
    if topk.visible is not None:
        found = torch.where(topk.positions < topk.visible[:, None], found, -1)
    slots.copy_(found)
    lane = torch.arange(1, width + 1, dtype=torch.int32, device=slots.device)
    last = torch.where(found >= 0, lane, 0).amax(dim=1)
    lengths.copy_(torch.where(topk.is_valid, last, 0))


def _slots(table: Tensor, request: Tensor, position: Tensor, page_rows: int) -> Tensor:
    """int64 slots of positions [T, n] in the tables of requests [T]; -1 where there is none."""
    requests, columns = table.shape
    page = torch.div(position, page_rows, rounding_mode="floor").long()
    known = (request >= 0) & (request < requests)
    inside = known[:, None] & (position >= 0) & (page < columns)
    row = request.clamp(0, requests - 1)[:, None]
    block = table[row, page.clamp(0, columns - 1)].long()
    slot = block * page_rows + (position - page * page_rows)
    return torch.where(inside & (block >= 0), slot, -1)


class TorchRules:
    """The rules of this module."""

    fill_rows = staticmethod(fill_rows)
    fill_window = staticmethod(fill_window)
    fill_compressed_slots = staticmethod(fill_compressed_slots)
    fill_visible = staticmethod(fill_visible)
    fill_topk_slots = staticmethod(fill_topk_slots)


TORCH_RULES: MetadataRules = TorchRules()
