"""Metadata of the compressed caches of one ratio: what each row stores and how much it may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_choice, check_tensor
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.extent import Extent, clear
from sparse_mla.metadata.rules import TORCH_RULES, MetadataRules, Rows, TopkRows, fill_topk_slots
from sparse_mla.metadata.window import SparseSWAMetadata


@dataclass(frozen=True, slots=True)
class SparseMLAMetadata:
    """Compressed rows of one step and ratio. Tensors are views at fixed addresses."""

    ratio: int
    slot_mapping: Tensor  # int64 [T], slot of the entry that the row closes, -1 = none
    visible: Tensor  # int32 [T], entries that the row may see, 0 for padding rows
    req_id_per_token: Tensor  # int32 [T]
    is_valid_token: Tensor  # bool [T]
    block_table: Tensor  # int32 [R, max_pages]
    query_start_loc: Tensor  # int32 [R + 1]
    page_rows: int  # entries of a page
    topk_tokens: int
    max_visible: int  # no row sees more
    max_query_len: int
    max_seq_len: int
    num_reqs: int
    num_actual_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens that a page covers."""
        return self.page_rows * self.ratio

    @property
    def is_short(self) -> bool:
        """Whether every row sees at most `topk_tokens` entries, so that no score can matter.

        It follows the batch's `max_seq_len`, a host number: a step that is captured into a graph must
        state the longest length that the graph will be replayed with.
        """
        return self.max_visible <= self.topk_tokens


class SparseMLAMetadataBuilder:
    """Builds the metadata of one ratio into buffers that never move."""

    def __init__(
        self,
        cfg: ModelConfig,
        ratio: int,
        *,
        max_tokens: int,
        page_rows: int,
        device: torch.device | str = "cpu",
        rules: MetadataRules = TORCH_RULES,
    ) -> None:
        """Allocate the buffers.

        Args:
            cfg: the model, for its list width.
            ratio: 1 or 2.
            max_tokens: most rows of a step, padding included.
            page_rows: entries of a page of this ratio's caches.
            device: of the buffers.
            rules: who computes; PyTorch by default.
        """
        check_choice("ratio", ratio, (1, 2))
        check_at_least("max_tokens", max_tokens, 1)
        check_at_least("page_rows", page_rows, 1)
        self.ratio, self.page_rows, self.topk = ratio, page_rows, cfg.index_topk
        self.max_tokens = max_tokens
        self._rules = rules
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._visible = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._extent = Extent(device)

    @property
    def group(self) -> str:
        """The cache group, "c1" or "c2"."""
        return f"c{self.ratio}"

    def build(self, batch: StepBatch, window: SparseSWAMetadata) -> SparseMLAMetadata:
        """Metadata of a step; `window` is the same step's window metadata.

        In the buffers, rows past the step have slot -1 and see nothing.

        Raises:
            ShapeError: more rows than the builder has room for, or window metadata of another number of
                rows; no buffer is touched.
            ArgumentError: the batch lacks the group; no buffer is touched.
        """
        tokens = batch.num_tokens
        self._check(batch, window)
        clear(self._extent.stale(tokens), (self._slots, -1), (self._visible, 0))
        rows: Rows = window.rows
        slots, visible = self._slots[:tokens], self._visible[:tokens]
        table, token_slots = batch.block_tables[self.group], batch.slot_mappings[self.group]
        self._rules.fill_compressed_slots(
            slots, rows, table, token_slots, self.ratio, self.page_rows
        )
        self._rules.fill_visible(visible, rows, self.ratio)
        return SparseMLAMetadata(
            ratio=self.ratio,
            slot_mapping=slots,
            visible=visible,
            req_id_per_token=rows.requests,
            is_valid_token=rows.is_valid,
            block_table=table,
            query_start_loc=batch.query_start_loc,
            page_rows=self.page_rows,
            topk_tokens=self.topk,
            max_visible=batch.max_seq_len // self.ratio,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_reqs=batch.num_requests,
            num_actual_tokens=batch.num_actual_tokens,
        )

    def _check(self, batch: StepBatch, window: SparseSWAMetadata) -> None:
        tokens = batch.num_tokens
        if tokens > self.max_tokens:
            raise ShapeError(
                "batch tokens", tokens, f"at most {self.max_tokens}", "make the builder larger"
            )
        if window.lengths.shape[0] != tokens:
            raise ShapeError(
                "window", f"{window.lengths.shape[0]} rows", f"the {tokens} rows of the batch",
                "build both from one step",
            )  # fmt: skip
        for name, groups in (
            ("batch.block_tables", batch.block_tables),
            ("batch.slot_mappings", batch.slot_mappings),
        ):
            if self.group not in groups:
                raise ArgumentError(name, sorted(groups), f"one of group {self.group!r} among them")


def topk_to_slots(
    topk: Tensor,  # int32 [T, K] request-local positions, negative = none
    block_table: Tensor,  # int32 [R, max_pages], -1 = no page
    req_ids: Tensor,  # int32 [T]
    page_rows: int,
    is_valid: Tensor,  # bool [T]
    visible: Tensor | None = None,  # int32 [T]
) -> tuple[Tensor, Tensor]:
    """Cache slots int32 [T, K] and lengths int32 [T] of lists of compressed positions.

    A position that is negative, past the table, past `visible` (if given), or on a page that the request
    does not have gives -1, and so does a whole row whose request is not in the table. Lanes keep their
    places. A row's length is its last valid lane plus one, which is the number of valid lanes where they
    form a prefix; rows that are no token have length 0. The table is only read.

    Raises:
        ShapeError, DTypeError, DeviceError, StrideError, ArgumentError: arguments that do not fit.
    """
    int32, device = (torch.int32,), topk.device
    check_tensor("topk", topk, shape=("T", "K"), dtypes=int32)
    shape = ("R", "max_pages")
    check_tensor("block_table", block_table, shape=shape, dtypes=int32, device=device)
    tokens = topk.shape[0]
    check_tensor("req_ids", req_ids, shape=(tokens,), dtypes=int32, device=device)
    check_tensor("is_valid", is_valid, shape=(tokens,), dtypes=(torch.bool,), device=device)
    if visible is not None:
        check_tensor("visible", visible, shape=(tokens,), dtypes=int32, device=device)
    check_at_least("page_rows", page_rows, 1)
    slots = torch.empty_like(topk)
    lengths = torch.empty(topk.shape[0], dtype=torch.int32, device=topk.device)
    rows = TopkRows(topk, block_table, req_ids, page_rows, is_valid, visible)
    fill_topk_slots(slots, lengths, rows)
    return slots, lengths
