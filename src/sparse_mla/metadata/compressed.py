"""Metadata of the compressed caches of one ratio: what each row stores and how much it may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_choice
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.metadata.batch import StepBatch
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
        """Whether every row sees at most `topk_tokens` entries, so that no score can matter."""
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

    @property
    def group(self) -> str:
        """The cache group, "c1" or "c2"."""
        return f"c{self.ratio}"

    def build(self, batch: StepBatch, window: SparseSWAMetadata) -> SparseMLAMetadata:
        """Metadata of a step; `window` is the same step's window metadata.

        Raises:
            ShapeError: more rows than the builder has room for; no buffer is touched.
            ArgumentError: the batch lacks the group.
        """
        tokens = batch.num_tokens
        if tokens > self.max_tokens:
            raise ShapeError(
                "batch tokens", tokens, f"at most {self.max_tokens}", "make the builder larger"
            )
        if self.group not in batch.block_tables:
            raise ArgumentError(
                "batch.block_tables", sorted(batch.block_tables), f"a table of group {self.group!r}"
            )
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
    does not have gives -1. Rows that are no token have length 0.
    """
    slots = torch.empty_like(topk)
    lengths = torch.empty(topk.shape[0], dtype=torch.int32, device=topk.device)
    rows = TopkRows(topk, block_table, req_ids, page_rows, is_valid, visible)
    fill_topk_slots(slots, lengths, rows)
    return slots, lengths
