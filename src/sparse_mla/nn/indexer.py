"""The lightning indexer of a layer: index keys on KV sources, position lists on index sources."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_mla.cache.paged import PagedCache
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import LayerTopology
from sparse_mla.kernels.index_contract import (
    IndexTopkCall,
    IndexTopkOut,
    PrepareIndexQueriesCall,
    WriteIndexKeysCall,
)
from sparse_mla.metadata.compressed import SparseMLAMetadata
from sparse_mla.metadata.rules import TopkRows
from sparse_mla.nn.projections import Linear, RMSNorm
from sparse_mla.nn.step import StepState
from sparse_mla.ops.bodies import metadata_rules
from sparse_mla.ops.index import index_topk, prepare_index_queries, write_index_keys


class IndexKeys(nn.Module):
    """`wk` and `k_norm`: from a latent before rotation to a stored index key."""

    def __init__(self, cfg: ModelConfig, ratio: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.ratio = ratio
        self.wk = Linear(cfg.head_dim, cfg.index_head_dim, device=device)
        self.k_norm = RMSNorm(cfg.index_head_dim, cfg.rms_norm_eps, device=device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take `indexer.wk` and `indexer.k_norm` from a layer's tensors."""
        self.wk.weight.data.copy_(tensors["indexer.wk"])
        self.k_norm.weight.data.copy_(tensors["indexer.k_norm"])

    def forward(
        self, latent: Tensor, positions: Tensor, rope: Tensor, cache: PagedCache, slots: Tensor
    ) -> None:
        """Store the keys of rows with a slot; latent bf16 [T, 512], slots int64 [T]."""
        write_index_keys(
            WriteIndexKeysCall(
                keys=self.wk(latent),
                norm_weight=self.k_norm.weight,
                eps=self.k_norm.eps,
                positions=positions,
                ratio=self.ratio,
                rope=rope,
                cache=cache,
                slots=slots,
            )
        )


class Indexer(nn.Module):
    """`wq_b` and `weights_proj`: score the KV source's index keys and publish the chosen positions."""

    def __init__(
        self, cfg: ModelConfig, layer: LayerTopology, *, device: torch.device | str
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads = cfg.index_n_heads
        self.head_dim = cfg.index_head_dim
        self.topk = cfg.index_topk
        self.block_size = cfg.candidate_block_size
        self.wq_b = Linear(cfg.q_lora_rank, self.heads * self.head_dim, device=device)
        self.weights_proj = Linear(cfg.hidden_size, self.heads, device=device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take `indexer.wq_b` and `indexer.weights_proj` from a layer's tensors."""
        self.wq_b.weight.data.copy_(tensors["indexer.wq_b"])
        self.weights_proj.weight.data.copy_(tensors["indexer.weights_proj"])

    def forward(self, x: Tensor, qr: Tensor, step: StepState) -> None:
        """Fill the step's lists (and candidates, on their source) for this layer and its consumers.

        x bf16 [T, hidden]; qr bf16 [T, q_lora_rank], the normed query bottleneck.
        """
        metadata = step.metadata.compressed[self.layer.ratio]
        tokens = step.num_tokens
        topk = step.buffers.topk[:tokens]
        if not metadata.is_short:
            self._select(x, qr, step, metadata, topk)
        else:
            lane = torch.arange(self.topk, dtype=torch.int32, device=topk.device)
            topk.copy_(torch.where(lane < metadata.visible[:, None], lane, -1))
            if self.layer.publishes_candidates:
                step.buffers.candidates[:tokens] = -1
        rows = TopkRows(
            topk,
            metadata.block_table,
            metadata.req_id_per_token,
            metadata.page_rows,
            metadata.is_valid_token,
            metadata.visible,
        )
        rules = metadata_rules(topk.device)
        rules.fill_topk_slots(step.buffers.slots[:tokens], step.buffers.lengths[:tokens], rows)

    def _select(
        self, x: Tensor, qr: Tensor, step: StepState, metadata: SparseMLAMetadata, topk: Tensor
    ) -> None:
        tokens = step.num_tokens
        keys = step.caches.index_cache(self.layer.layer_id)
        queries = prepare_index_queries(
            PrepareIndexQueriesCall(
                queries=self.wq_b(qr).view(tokens, self.heads, self.head_dim),
                weights=self.weights_proj(x),
                positions=step.positions,
                rope=step.rope[self.layer.kind],
                record=keys.record,
            )
        )
        candidates = step.buffers.candidates[:tokens]
        call = IndexTopkCall(
            queries=queries,
            keys=keys,
            block_table=metadata.block_table,
            visible=metadata.visible,
            query_start_loc=step.metadata.batch.query_start_loc_cpu,
            max_visible=metadata.max_visible,
            topk=self.topk,
            candidate_block_size=self.block_size,
            candidates=candidates if self.layer.consumes_candidates else None,
            request_ids=metadata.req_id_per_token,
        )
        publishes = self.layer.publishes_candidates
        index_topk(call, IndexTopkOut(topk, candidates if publishes else None))
