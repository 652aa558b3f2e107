"""A stack of layers with every Triton kernel at once, in the interpreter: what a GPU runs, wired alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparse_mla.backends.select import BackendChoice
from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.config.model import ModelConfig
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.ops import attend, bodies, compress, index, write
from sparse_mla.testing import serve as serving
from sparse_mla.testing.serve import Part, StackServer

pytest.importorskip("triton")

from sparse_mla.kernels.triton import index_topk

LAYERS = (0, 1, 2, 3)
ROWS, CHUNKS = 12, (9, 1, 2)


def small_model() -> ModelConfig:
    """A window-only layer, a ratio-2 source, the candidate source and a consumer; lists of 4."""
    return ModelConfig.deepseek_v41_flash().replace(
        hidden_size=64, num_attention_heads=4, o_groups=2, q_lora_rank=32, o_lora_rank=16,
        sliding_window=8, num_hidden_layers=4, compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3), candidate_source_layer_id=2,
        candidate_topk_blocks=3, candidate_block_size=4, index_n_heads=8, index_topk=4,
        num_nextn_predict_layers=0, max_position_embeddings=4096,
    )  # fmt: skip


def use_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send every op to its Triton kernel; return the list of ops that were called."""
    called: list[str] = []

    def choose(problem, device, requested="auto") -> BackendChoice:
        called.append(problem.op)
        return BackendChoice("triton", "told to")

    for module in (attend, compress, index, write):
        monkeypatch.setattr(module, "select", choose)
    monkeypatch.setattr(bodies, "runs_triton", lambda device: True)
    monkeypatch.setattr(index_topk, "SELECT_LANES", 64)
    return called


def serve(
    prepare: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    stack = AttentionStack(small_model(), LAYERS)
    stack.reset_parameters(1)
    prepare()
    server = StackServer(
        stack, resolve_kv_cache_dtype("fp8_ds_mla"), capacity_tokens=64, max_tokens=32
    )
    hidden = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0))
    request, start = server.request(ROWS), 0
    for count in CHUNKS:
        server.step([Part(request, start, hidden[start : start + count])])
        start += count
    return request.outputs, {i: kept.positions for i, kept in request.selections.items()}


def test_all_kernels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, wanted_lists = serve()
    called = use_triton(monkeypatch)
    assert serving.metadata_rules("cpu").__class__.__name__ == "TritonRules"
    got, lists = serve()
    assert set(called) == {
        "attend", "write_window", "write_compressed", "compress", "write_index_keys",
        "prepare_index_queries", "index_topk",
    }  # fmt: skip
    agreed = torch.ones(ROWS, dtype=torch.bool)
    for layer_id, chosen in lists.items():
        assert torch.equal((chosen >= 0).sum(1), (wanted_lists[layer_id] >= 0).sum(1))
        agreed &= (chosen == wanted_lists[layer_id]).all(1)
    # Rows whose lists differ at the cut, after roundings of earlier layers, differ by what they chose.
    assert int(agreed.sum()) >= ROWS // 2
    error = float((got - wanted)[agreed].norm() / wanted[agreed].norm())
    assert error < len(LAYERS) * 2.0**-7, f"relative error {error:.3f}"
