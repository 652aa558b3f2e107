"""vLLM's `forward` of our layer against this library's own layer with the same weights: equal bits.

Two steps: prompts, then a token of each, so that windows, compressed rows and the compressor's carried
state of the first are read in the second. Contexts are short enough for vLLM to skip its scorer, which needs a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper
import torch
from steps_of import make_step
from torch import Tensor
from vllm.forward_context import set_forward_context

import sparse_mla as sm
from sparse_mla.metadata.builder import build_metadata
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.step import StepBuffers, StepState, rope_tables

STEPS = [([9, 4], [9, 4]), ([1, 1], [10, 5])]
RATIO_2_ERROR = 0.05
"""vLLM keeps the pooled vector in float32 where the model's reference and this library round it to bf16: a
step of 2**-9 here and there sends a value to the next e2m1 code, whose distance is up to 2**-1 of it."""


def weights_of(layer: Any) -> dict[str, Tensor]:
    """A vLLM layer's parameters under their checkpoint names."""
    names = {"wq_b": layer.wq_b, "wo_a": layer.wo_a, "wo_b": layer.wo_b}
    weights = {name: module.weight for name, module in names.items()}
    wq_a, wkv = layer.fused_wqa_wkv.weight.split([128, 512])
    weights |= {"wq_a": wq_a, "wkv": wkv, "attn_sink": layer.attn_sink}
    weights |= {name: getattr(layer, name).weight for name in ("q_norm", "kv_norm")}
    if layer.compressor is not None:
        parts = layer.compressor.fused_wkv_wgate.weight.split(512)
        weights |= dict(zip(("compressor.wkv", "compressor.wgate"), parts, strict=False))
        weights["compressor.norm"] = layer.compressor.norm.weight
    if layer.indexer is not None:
        for name in ("wq_b", "weights_proj", "wk", "k_norm"):
            weights[f"indexer.{name}"] = getattr(layer.indexer, name).weight
    prefix = f"layers.{layer.layer_id}.attn."
    return {prefix + name: weight.data.clone() for name, weight in weights.items()}


class Ours:
    """The same layers on this library's own caches."""

    def __init__(self, cfg: sm.ModelConfig, layers: list[Any], kv_cache_dtype: str) -> None:
        self.cfg = cfg
        self.layers = []
        for theirs in layers:
            layer = DeepseekV41Attention(cfg, theirs.layer_id)
            layer.load_weights(weights_of(theirs))
            self.layers.append(layer)
        ids = tuple(layer.layer_id for layer in layers)
        self.caches = sm.CachePool.allocate(
            cfg, pages=8, kv_cache_dtype=kv_cache_dtype, layer_ids=ids
        )
        self.buffers = StepBuffers.allocate(cfg, 16)
        self.rope = rope_tables(cfg, num_positions=64, layer_ids=ids)

    def step(
        self, query_lens: list[int], seq_lens: list[int], hidden: list[Tensor]
    ) -> list[Tensor]:
        groups = self.caches.groups
        tables = {name: [[1], [2]] for name in groups}
        page_tokens = {name: group.tokens_per_page for name, group in groups.items()}
        batch = sm.StepBatch.from_requests(query_lens, seq_lens, tables, page_tokens)
        metadata = build_metadata(self.cfg, batch, self.caches)
        state = StepState(self.caches, metadata, self.buffers, self.rope)
        return [layer(x, state) for layer, x in zip(self.layers, hidden, strict=True)]


def their_step(
    engine: SimpleNamespace, query_lens: list[int], seq_lens: list[int], hidden: list[Tensor]
) -> list[Tensor]:
    step = make_step(engine, query_lens, seq_lens)
    for layer in engine.attention:
        if layer.indexer is not None:
            step.metadata[layer.indexer.k_cache.prefix] = SimpleNamespace(
                slot_mapping=step.metadata[layer.prefix].slot_mapping,
                max_seq_len=max(seq_lens),
                num_decode_tokens=sum(query_lens),
                num_prefill_tokens=0,
            )
    with set_forward_context(step.metadata, engine.config):
        return [
            layer.forward(step.positions, x)
            for layer, x in zip(engine.attention, hidden, strict=True)
        ]


def round_products(compressor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratio 1: vLLM multiplies into float32, the reference and this library into bf16."""
    forward = compressor.forward
    monkeypatch.setattr(
        compressor, "forward", lambda rows, positions: forward(rows.bfloat16().float(), positions)
    )


def test_forward_equals_this_librarys_layer(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for cache in engine.caches.values():
        cache.zero_()
    round_products(engine.attention[3].compressor, monkeypatch)
    cfg = sm.ModelConfig.from_hf({"text_config": fake_hopper.TEXT_CONFIG})
    ours = Ours(cfg, engine.attention, engine.name)
    generator = torch.Generator().manual_seed(5)
    for query_lens, seq_lens in STEPS:
        rows = sum(query_lens)
        hidden = [torch.randn(rows, 256, generator=generator).to(torch.bfloat16) for _ in range(5)]
        theirs = their_step(engine, query_lens, seq_lens, hidden)
        for number, (got, wanted) in enumerate(
            zip(theirs, ours.step(query_lens, seq_lens, hidden), strict=True)
        ):
            error = (got.float() - wanted.float()).norm() / wanted.float().norm()
            bound = RATIO_2_ERROR if engine.attention[number].compress_ratio == 2 else 0.0
            assert float(error) <= bound, (seq_lens, number)
