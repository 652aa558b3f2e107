"""A shrunken model with every kind of layer, at the true head size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.kv_dtype import RecordSet, resolve_kv_cache_dtype
from sparse_mla.config.model import ModelConfig
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.weights import random_layer
from sparse_mla.testing.dense import DenseStack
from sparse_mla.testing.serve import StackServer

BACKBONE = (0, 1, 2, 3, 4, 5, 6)
DRAFT = 7


def shrunken(**fields: object) -> ModelConfig:
    """Layers like 0, 2, 3, 20, 21, 24 and 28 of the model, and a draft layer; lists of 12 entries."""
    sizes: dict[str, object] = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "o_groups": 2,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "sliding_window": 32,
        "num_hidden_layers": 7,
        "compress_ratios": (0, 2, 2, 1, 1, 1, 1, 0),
        "kv_source_layer_ids": (1, 3),
        "index_source_layer_ids": (1, 3, 5, 6),
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 4,
        "index_n_heads": 4,
        "index_topk": 12,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096,
    }
    return ModelConfig.deepseek_v41_flash().replace(**{**sizes, **fields})


@functools.cache
def weights_of(cfg: ModelConfig, layer_id: int) -> dict[str, Tensor]:
    """Random weights, made once."""
    return random_layer(cfg, layer_id)


class Lab:
    """Builds servers and dense computations of one shrunken model."""

    shrunken = staticmethod(shrunken)

    def hidden(self, rows: int = 150, seed: int = 0, cfg: ModelConfig | None = None) -> Tensor:
        size = (cfg or shrunken()).hidden_size
        return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))

    def records(self, name: str, index: str = "auto") -> RecordSet:
        return resolve_kv_cache_dtype(name, index_dtype=index)

    def server(
        self,
        records: RecordSet | None = None,
        *,
        cfg: ModelConfig | None = None,
        layer_ids: tuple[int, ...] = BACKBONE,
        capacity_tokens: int = 1024,
        max_tokens: int = 256,
        num_spec_tokens: int = 0,
        seed: int = 0,
    ) -> StackServer:
        cfg = cfg or shrunken()
        stack = AttentionStack(cfg, layer_ids)
        for layer in stack.attention_layers():
            layer.load_weights(weights_of(cfg, layer.layer_id))
        return StackServer(
            stack,
            records or self.records("nvfp4_ds_mla"),
            capacity_tokens=capacity_tokens,
            max_tokens=max_tokens,
            num_spec_tokens=num_spec_tokens,
            seed=seed,
        )

    def dense(self, server: StackServer) -> DenseStack:
        cfg = server.cfg
        weights: Callable[[int], dict[str, Tensor]] = functools.partial(weights_of, cfg)
        return DenseStack(cfg, server.stack.layer_ids, weights, server.caches.records)


@pytest.fixture
def lab() -> Lab:
    return Lab()
