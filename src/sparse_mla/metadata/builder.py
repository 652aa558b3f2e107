"""All metadata of a step: window, compressed, ring and one plan per layer kind, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.cache.pool import CachePool
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import LayerKind, kinds_present
from sparse_mla.errors import ArgumentError, ShapeError
from sparse_mla.metadata.batch import RING, StepBatch
from sparse_mla.metadata.compressed import SparseMLAMetadata, SparseMLAMetadataBuilder
from sparse_mla.metadata.extent import Extent, clear
from sparse_mla.metadata.plan import PlanScratch, TileSchedulerPlan, build_plan
from sparse_mla.metadata.ring import RingMetadata, ring_metadata
from sparse_mla.metadata.rules import TORCH_RULES, MetadataRules
from sparse_mla.metadata.window import (
    WINDOW,
    SparseSWAMetadata,
    SparseSWAMetadataBuilder,
    check_room,
)


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What every layer of a step reads."""

    batch: StepBatch  # the step at the builder's own addresses
    window: SparseSWAMetadata
    compressed: Mapping[int, SparseMLAMetadata]  # by ratio
    ring: RingMetadata | None  # None: no layer keeps compressor state
    plan: Mapping[LayerKind, TileSchedulerPlan]


class StepMetadataBuilder:
    """Builds the metadata of a pool's layers, step after step, without allocating what a step returns."""

    def __init__(
        self,
        cfg: ModelConfig,
        caches: CachePool,
        *,
        max_tokens: int,
        max_requests: int,
        max_seq_len: int | None = None,
        num_heads: int | None = None,
        num_spec_tokens: int = 0,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        rules: MetadataRules = TORCH_RULES,
    ) -> None:
        """Allocate every buffer.

        Args:
            cfg: the model.
            caches: the pool, for its groups and the layers in it.
            max_tokens: most rows of a step, padding included.
            max_requests: most requests of a step.
            max_seq_len: longest request, which sizes the block tables; None = the model's limit.
            num_heads: local query heads; None = all.
            num_spec_tokens: draft tokens of a step.
            batch_invariant: plans whose rows never depend on each other.
            device: of the buffers; None = the pool's.
            rules: who computes; PyTorch by default.
        """
        self.cfg = cfg
        self.device = torch.device(caches.device if device is None else device)
        self.num_heads = cfg.num_attention_heads if num_heads is None else num_heads
        self.batch_invariant = batch_invariant
        self.max_seq_len = cfg.max_position_embeddings if max_seq_len is None else max_seq_len
        check_at_least("max_seq_len", self.max_seq_len, 1)
        groups = caches.groups
        layer_ids = [member.layer_id for member in groups[WINDOW].members]
        self._kinds = kinds_present(cfg, layer_ids)
        self._window = SparseSWAMetadataBuilder(
            cfg,
            max_tokens=max_tokens,
            max_requests=max_requests,
            page_rows=groups[WINDOW].page_rows,
            num_spec_tokens=num_spec_tokens,
            device=self.device,
            rules=rules,
        )
        self._compressed = {
            group.ratio: SparseMLAMetadataBuilder(
                cfg,
                group.ratio,
                max_tokens=max_tokens,
                page_rows=group.page_rows,
                device=self.device,
                rules=rules,
            )
            for group in groups.values()
            if group.ratio
        }
        widths = {
            name: 1 if name == RING else -(-self.max_seq_len // group.tokens_per_page)
            for name, group in groups.items()
        }
        self._inputs = _Inputs(widths, max_tokens, max_requests, self.device)
        self.scratch = PlanScratch(self.num_heads, _num_sms(self.device), self.device)

    def build(self, batch: StepBatch) -> StepMetadata:
        """Metadata of one step. What an earlier step returned is overwritten.

        Past the step's own rows every slot is -1, every length and visible count 0; past its requests
        stand requests without tokens. So a graph that was captured for more rows or requests finds
        padding there. Copies from another device do not wait for it.

        Raises:
            ShapeError: more rows, requests or pages than there is room for, or a non-causal block longer
                than a row of lanes holds beside the window; no buffer is touched.
            ArgumentError: cache groups that differ from the pool's, or a non-causal step without room
                for draft tokens; no buffer is touched.
        """
        self._inputs.check(batch)
        self._window.check_block(batch)
        step = self._inputs.adopt(batch)
        window = self._window.build(step)
        return StepMetadata(
            batch=step,
            window=window,
            compressed={
                ratio: builder.build(step, window) for ratio, builder in self._compressed.items()
            },
            ring=ring_metadata(step, window) if RING in step.slot_mappings else None,
            plan={kind: self._plan(kind, step, window) for kind in self._kinds},
        )

    def _plan(
        self, kind: LayerKind, step: StepBatch, window: SparseSWAMetadata
    ) -> TileSchedulerPlan:
        return build_plan(
            kind,
            tokens=step.num_tokens,
            num_heads=self.num_heads,
            window_keys=window.width,
            compressed_keys=self.cfg.index_topk if kind.ratio else 0,
            scratch=self.scratch,
            batch_invariant=self.batch_invariant,
        )


def build_metadata(cfg: ModelConfig, batch: StepBatch, caches: CachePool) -> StepMetadata:
    """Metadata of a single step, with buffers of its own.

    A server keeps one `StepMetadataBuilder` instead, so that addresses stay and nothing is allocated.

    Raises:
        ShapeError, ArgumentError: as `StepMetadataBuilder.build`.
    """
    spec_tokens = 0 if batch.causal else max(batch.max_query_len, 1)
    builder = StepMetadataBuilder(
        cfg,
        caches,
        max_tokens=max(batch.num_tokens, 1),
        max_requests=max(batch.num_requests, 1),
        max_seq_len=max(batch.max_seq_len, 1),
        num_spec_tokens=spec_tokens,
    )
    return builder.build(batch)


class _Inputs:
    """A step's own tensors at addresses that never move."""

    def __init__(
        self, widths: Mapping[str, int], max_tokens: int, max_requests: int, device: torch.device
    ) -> None:
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self.tables = {
            name: torch.full((max_requests, width), -1, dtype=torch.int32, device=device)
            for name, width in widths.items()
        }
        self.slots = {
            name: torch.full((max_tokens,), -1, dtype=torch.int64, device=device) for name in widths
        }
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.query_start_loc = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.replay_start = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._tokens, self._requests = Extent(device), Extent(device)
        self._columns = {name: Extent(device) for name in widths}

    def adopt(self, batch: StepBatch) -> StepBatch:
        """Copy a checked step in, and put what an earlier, longer step left past it back to padding."""
        tokens, requests = batch.num_tokens, batch.num_requests
        self._clear(batch)
        for name, table in batch.block_tables.items():
            own = self.tables[name][:requests]
            columns = min(table.shape[1], own.shape[1])
            own[:, :columns].copy_(table[:, :columns], non_blocking=True)
            self.slots[name][:tokens].copy_(batch.slot_mappings[name], non_blocking=True)
        replay = self.replay_start[:requests]
        if batch.replay_start is None:
            replay.zero_()
        else:
            replay.copy_(batch.replay_start, non_blocking=True)
        return replace(
            batch,
            query_start_loc=_copy(self.query_start_loc[: requests + 1], batch.query_start_loc),
            seq_lens=_copy(self.seq_lens[:requests], batch.seq_lens),
            positions=_copy(self.positions[:tokens], batch.positions),
            block_tables={name: self.tables[name][:requests] for name in batch.block_tables},
            slot_mappings={name: self.slots[name][:tokens] for name in batch.slot_mappings},
            replay_start=replay,
        )

    def _clear(self, batch: StepBatch) -> None:
        requests = batch.num_requests
        stale = self._tokens.stale(batch.num_tokens)
        clear(stale, (self.positions, 0), *((slots, -1) for slots in self.slots.values()))
        clear(
            self._requests.stale(requests),
            (self.seq_lens, 0),
            (self.replay_start, 0),
            *((table, -1) for table in self.tables.values()),
        )
        # The sums go on to the last request, at this step's total: no request past the step has tokens.
        self.query_start_loc[requests + 1 :].fill_(batch.query_start_loc_cpu.tolist()[-1])
        for name, table in batch.block_tables.items():
            columns = self._columns[name].stale(min(table.shape[1], self.tables[name].shape[1]))
            if columns.start < columns.stop:
                self.tables[name][:requests, columns].fill_(-1)

    def check(self, batch: StepBatch) -> None:
        """Raise unless the step has this pool's groups and fits."""
        for what, groups in (
            ("block_tables", batch.block_tables),
            ("slot_mappings", batch.slot_mappings),
        ):
            if set(groups) != set(self.tables):
                raise ArgumentError(
                    f"batch.{what}", sorted(groups), f"the pool's groups {sorted(self.tables)}"
                )
        check_room(batch, self.max_tokens, self.max_requests)
        for name, table in batch.block_tables.items():
            room = self.tables[name].shape[1]
            if table.shape[1] > room and name != RING:
                raise ShapeError(
                    f"batch.block_tables[{name!r}]", f"{table.shape[1]} pages a request",
                    f"at most {room}", "raise max_seq_len of the builder",
                )  # fmt: skip


def _copy(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source, non_blocking=True)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
