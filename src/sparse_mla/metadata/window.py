"""Metadata of the sliding-window caches: which slots each row of a step attends.

Rows are flattened: decode, speculative, prefill and padding rows all have one list, so no kernel needs to
know which is which. The split into decodes and prefills is kept for engines that plan with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, DeviceError, ShapeError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.extent import Extent, clear
from sparse_mla.metadata.rules import TORCH_RULES, MetadataRules, Rows, WindowSpans

WINDOW = "window"
_WIDTH_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """How many leading requests are decodes: at most `1 + num_spec_tokens` query tokens each."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int  # padding rows included, if there is a prefill part


@dataclass(frozen=True, slots=True)
class SparseSWAMetadata:
    """Window rows of one step. Tensors are views of the builder's buffers, at fixed addresses."""

    indices: Tensor  # int32 [T, width] slots, oldest first, -1 past the length
    lengths: Tensor  # int32 [T], 0 for padding rows
    slot_mapping: Tensor  # int64 [T], where each row's key is stored, -1 = nowhere
    is_valid_token: Tensor  # bool [T]
    token_to_req_indices: Tensor  # int32 [T], 0 for padding rows
    token_positions: Tensor  # int32 [T], by the request's lengths
    block_table: Tensor  # int32 [R, max_pages]
    seq_lens: Tensor  # int32 [R]
    query_start_loc: Tensor  # int32 [R + 1]
    query_start_loc_cpu: Tensor
    replay_start: Tensor  # int32 [R]
    page_rows: int
    width: int
    split: DecodeSplit
    max_decode_query_len: int

    @property
    def rows(self) -> Rows:
        """What other builders of the step need to know of each row."""
        return Rows(self.token_to_req_indices, self.token_positions, self.is_valid_token)

    @property
    def decode_swa_indices(self) -> Tensor:
        """int32 [num_decode_tokens, 1, width], under vLLM's name."""
        return self.indices[: self.split.num_decode_tokens, None]

    @property
    def decode_swa_lens(self) -> Tensor:
        """int32 [num_decode_tokens], under vLLM's name."""
        return self.lengths[: self.split.num_decode_tokens]

    @property
    def decode_swa_width(self) -> int:
        """Lanes of a row, under vLLM's name."""
        return self.width

    @property
    def prefill_swa_indices(self) -> Tensor:
        """int32 [num_prefill_tokens, 1, width], under vLLM's name."""
        return self.indices[self.split.num_decode_tokens :, None]

    @property
    def prefill_swa_lens(self) -> Tensor:
        """int32 [num_prefill_tokens], under vLLM's name."""
        return self.lengths[self.split.num_decode_tokens :]


def split_decodes(query_lens: list[int], num_tokens: int, num_spec_tokens: int = 0) -> DecodeSplit:
    """Split requests, decodes first, at the first one with more than `1 + num_spec_tokens` tokens.

    Padding rows belong to the last part: `num_tokens` counts them. If the first request is a prefill all
    are; without a prefill all rows are decode rows.
    """
    threshold = 1 + num_spec_tokens
    decodes = next(
        (number for number, count in enumerate(query_lens) if count > threshold), len(query_lens)
    )
    if decodes == len(query_lens):
        return DecodeSplit(decodes, 0, num_tokens, 0)
    tokens = sum(query_lens[:decodes])
    return DecodeSplit(decodes, len(query_lens) - decodes, tokens, num_tokens - tokens)


def dspark_width(window: int, num_spec_tokens: int) -> int:
    """Lanes of a draft block's row: window and block, rounded up to 64."""
    return -(-(window + num_spec_tokens) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


class SparseSWAMetadataBuilder:
    """Builds window metadata into buffers that never move."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        max_tokens: int,
        max_requests: int,
        page_rows: int = 32,
        num_spec_tokens: int = 0,
        device: torch.device | str = "cpu",
        rules: MetadataRules = TORCH_RULES,
    ) -> None:
        """Allocate the buffers.

        Args:
            cfg: the model, for its window.
            max_tokens: most rows of a step, padding included.
            max_requests: most requests of a step.
            page_rows: tokens of a window page.
            num_spec_tokens: draft tokens of a step; above 0 rows of non-causal blocks get room.
            device: of the buffers.
            rules: who computes; PyTorch by default.
        """
        check_at_least("max_tokens", max_tokens, 1)
        check_at_least("max_requests", max_requests, 1)
        check_at_least("page_rows", page_rows, 1)
        check_at_least("num_spec_tokens", num_spec_tokens, 0)
        self.window = cfg.sliding_window
        self.page_rows = page_rows
        self.num_spec_tokens = num_spec_tokens
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self._rules = rules
        widest = max(
            self.window, dspark_width(self.window, num_spec_tokens) if num_spec_tokens else 0
        )

        def filled(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self._indices = filled(-1, max_tokens, widest)
        self._lengths = filled(0, max_tokens)
        self._requests = filled(0, max_tokens)
        self._positions = filled(0, max_tokens)
        self._is_valid = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        self._no_replay = filled(0, max_requests)
        self._extent = Extent(device)

    def build(self, batch: StepBatch) -> SparseSWAMetadata:
        """Window metadata of a step.

        In the buffers, rows past the step have length 0, are no tokens and belong to request 0; their
        indices are whatever an earlier step left.

        Raises:
            ShapeError, ArgumentError, DeviceError: as `check`; no buffer is touched.
        """
        self.check(batch)
        tokens, requests = batch.num_tokens, batch.num_requests
        width = self.window if batch.causal else dspark_width(self.window, self.num_spec_tokens)
        rows = Rows(self._requests[:tokens], self._positions[:tokens], self._is_valid[:tokens])
        indices, lengths = self._indices[:tokens, :width], self._lengths[:tokens]
        slots, table = batch.slot_mappings[WINDOW], batch.block_tables[WINDOW]
        replay = self._no_replay[:requests] if batch.replay_start is None else batch.replay_start
        clear(
            self._extent.stale(tokens),
            (self._lengths, 0), (self._is_valid, 0), (self._requests, 0), (self._positions, 0),
        )  # fmt: skip
        self._rules.fill_rows(rows, batch.query_start_loc, batch.seq_lens, slots)
        spans = WindowSpans(
            window=self.window,
            page_rows=self.page_rows,
            replay_start=replay,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            causal=batch.causal,
        )
        self._rules.fill_window(indices, lengths, rows, table, spans)
        offsets = batch.query_start_loc_cpu.tolist()
        query_lens = [end - begin for begin, end in itertools.pairwise(offsets)]
        return SparseSWAMetadata(
            indices=indices,
            lengths=lengths,
            slot_mapping=slots,
            is_valid_token=rows.is_valid,
            token_to_req_indices=rows.requests,
            token_positions=rows.positions,
            block_table=table,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            replay_start=replay,
            page_rows=self.page_rows,
            width=width,
            split=split_decodes(query_lens, tokens, self.num_spec_tokens),
            max_decode_query_len=min(batch.max_query_len, 1 + self.num_spec_tokens),
        )

    def check(self, batch: StepBatch) -> None:
        """Raise unless the builder can build this step.

        Raises:
            ShapeError: more rows or requests than there is room for, or a non-causal block that is longer
                than a row of lanes holds beside the window.
            ArgumentError: a non-causal step, but the builder was made without draft tokens; or a batch
                without the window group.
            DeviceError: a batch on another device than the buffers.
        """
        check_room(batch, self.max_tokens, self.max_requests)
        for name, groups in (
            ("batch.slot_mappings", batch.slot_mappings),
            ("batch.block_tables", batch.block_tables),
        ):
            if WINDOW not in groups:
                raise ArgumentError(name, sorted(groups), f"one of group {WINDOW!r} among them")
        if batch.device != self._lengths.device:
            raise DeviceError("batch", f"device {batch.device}", f"device {self._lengths.device}")
        self.check_block(batch)

    def check_block(self, batch: StepBatch) -> None:
        """The part of `check` that concerns non-causal steps."""
        if batch.causal:
            return
        if not self.num_spec_tokens:
            raise ArgumentError(
                "batch.causal", False, "True for a builder with num_spec_tokens=0",
                "non-causal rows are a DSpark block's; pass its num_spec_tokens to the builder",
            )  # fmt: skip
        longest = dspark_width(self.window, self.num_spec_tokens) - self.window
        if batch.max_query_len > longest:
            raise ShapeError(
                "batch.max_query_len", batch.max_query_len,
                f"at most {longest} for a non-causal step, whose rows list the window and the block",
                f"the builder was made with num_spec_tokens={self.num_spec_tokens}",
            )  # fmt: skip


def check_room(batch: StepBatch, max_tokens: int, max_requests: int) -> None:
    """Raise `ShapeError` if the step has more rows or requests than there is room for."""
    for name, got, room in (
        ("batch tokens", batch.num_tokens, max_tokens),
        ("batch requests", batch.num_requests, max_requests),
    ):
        if got > room:
            raise ShapeError(name, got, f"at most {room}", "make the builder larger")
