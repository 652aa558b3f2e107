"""One rank of a tensor-parallel group: `parallel_worker.py RANK SIZE FOLDER`. Writes FOLDER/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.config.model import ModelConfig
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.testing.serve import StackServer

LAYERS = (0, 1, 2, 3)
ROWS = 40
CHUNK = 17


def config(topk: int) -> ModelConfig:
    """Window only, a ratio-2 source, a ratio-1 source that publishes candidates, and its consumer."""
    return ModelConfig.deepseek_v41_flash().replace(
        hidden_size=128, num_attention_heads=8, o_groups=2, q_lora_rank=64, o_lora_rank=32,
        sliding_window=16, num_hidden_layers=4, compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3), candidate_source_layer_id=2,
        candidate_topk_blocks=5, candidate_block_size=4, index_n_heads=4, index_topk=topk,
        num_nextn_predict_layers=0, max_position_embeddings=4096,
    )  # fmt: skip


def serve(topk: int, ranks: Ranks | None) -> tuple[AttentionStack, Tensor, list[Tensor]]:
    """Outputs and every list of one request."""
    cfg = config(topk)
    stack = AttentionStack(cfg, LAYERS, ranks=ranks)
    stack.reset_parameters(3)
    server = StackServer(
        stack, resolve_kv_cache_dtype("fp8_ds_mla"), capacity_tokens=64, max_tokens=32
    )
    hidden = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(0))
    served = server.serve(hidden, CHUNK)
    lists = [selection.positions for selection in served.selections.values()]
    return stack, served.outputs, lists


def owned(stack: AttentionStack, ranks: Ranks) -> bool:
    """Whether every layer holds the sinks and query heads of this rank, in order."""
    whole = AttentionStack(stack.cfg, LAYERS)
    whole.reset_parameters(3)
    heads = 8 // ranks.size
    mine = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    rows = slice(mine.start * 512, mine.stop * 512)
    return all(
        torch.equal(a.attn_sink, b.attn_sink[mine])
        and torch.equal(a.wq_b.weight, b.wq_b.weight[rows])
        for a, b in zip(stack.attention_layers(), whole.attention_layers(), strict=True)
    )


def main() -> None:
    """Join the group, serve, write what this rank got."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size
    )
    ranks = Ranks.of_group()
    stack, outputs, _ = serve(64, ranks)
    result = {
        "rank": ranks.rank,
        "owned": owned(stack, ranks),
        "all chosen": outputs,
        "some chosen": serve(12, ranks)[1:],
    }
    dist.destroy_process_group()
    torch.save(result, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
