"""Decode steps padded for replay: the same outputs and lists, checked against the dense computation."""

from __future__ import annotations

import torch

from sparse_mla.cli.checking import check_requests
from sparse_mla.config.model import ModelConfig
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest


def small_model() -> ModelConfig:
    """A window-only layer, a ratio-2 source, the candidate source and a consumer."""
    return ModelConfig.deepseek_v41_flash().replace(
        hidden_size=128, num_attention_heads=8, o_groups=2, q_lora_rank=64, o_lora_rank=32,
        sliding_window=32, num_hidden_layers=4, compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3), candidate_source_layer_id=2,
        candidate_topk_blocks=6, candidate_block_size=4, index_n_heads=4, index_topk=12,
        num_nextn_predict_layers=0, max_position_embeddings=4096,
    )  # fmt: skip


def test_padded_decode_steps_change_nothing() -> None:
    trace = [TraceRequest(*length, 0.0, 2) for length in ((40, 6), (11, 9), (23, 2))]
    results = []
    for graphs in (False, True):
        options = EngineOptions(layer_ids=(0, 1, 2, 3), graphs=graphs, prefix_reuse=False)
        engine = Engine(small_model(), trace, options)
        recorder = engine.keep(range(3))
        report = engine.run()
        assert report.generated_tokens == 17
        results.append([recorder.output(index) for index in range(3)])
        assert all(check.passed for check in check_requests(engine, recorder, range(3), print))
    assert engine.graphs is not None
    assert engine.graphs.sizes == (1, 2, 4)
    engine.release()
    assert engine.graphs.sizes == ()
    for plain, padded in zip(*results, strict=True):
        assert torch.equal(plain, padded)
