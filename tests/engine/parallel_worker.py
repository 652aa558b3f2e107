"""A request list through the engine on some ranks, beside one rank: a module for tests, and their worker.

`parallel_worker.py FOLDER DEVICE RANKS HEADS GROUPS` is one process of such a run; `torchrun` starts as many as
there are ranks. Each writes FOLDER/RANKS.RANK.pt.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.cli.checking import check_requests
from sparse_mla.config.model import ModelConfig
from sparse_mla.engine.launch import device_of_rank, joined
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.nn.graph import StepGraph, stating_longest
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepState
from sparse_mla.settings import Launch
from sparse_mla.testing.serve import Part, StackServer

LAYERS = (0, 1, 2, 3, 4, 5)
"""Window only; a ratio-2 source and its reader; the candidate source, its reader, and a consumer."""
LENGTHS = ((70, 6), (11, 9), (45, 4), (100, 3))
CHUNK = 48
SECONDS = 240
TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Which model on how many ranks."""

    device: str
    ranks: int
    heads: int
    groups: int

    def config(self, topk: int) -> ModelConfig:
        """Layers like 0, 2, 3, 20, 21 and 24 of the model."""
        return ModelConfig.deepseek_v41_flash().replace(
            hidden_size=256, num_attention_heads=self.heads, o_groups=self.groups, q_lora_rank=128,
            o_lora_rank=64, sliding_window=32, num_hidden_layers=6,
            compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 3),
            index_source_layer_ids=(1, 3, 5), candidate_source_layer_id=3,
            candidate_topk_blocks=topk // 2, candidate_block_size=4, index_n_heads=32,
            index_topk=topk, num_nextn_predict_layers=0, max_position_embeddings=4096,
        )  # fmt: skip


def results_of(case: Case, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one rank got, and what each of the case's ranks got."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", TRITON_INTERPRET="0")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started = []
    for ranks in (1, case.ranks):
        launcher = [*TORCHRUN, str(ranks)]
        words = (folder, case.device, ranks, case.heads, case.groups)
        started.append(
            subprocess.Popen(
                [sys.executable, *launcher, __file__, *map(str, words)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in started:
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said[-6000:]
    one = torch.load(folder / "1.0.pt")
    return one, [torch.load(folder / f"{case.ranks}.{i}.pt") for i in range(case.ranks)]


def compare(case: Case, one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    """Assert that the ranks got what one rank got, and all of them the same."""
    share = case.heads // case.ranks
    for rank, result in enumerate(several):
        assert result["rank"] == rank
        for name in ("sinks", "heads"):
            assert len(set(one["owned"][name][0])) == case.heads
            for mine, all_heads in zip(result["owned"][name], one["owned"][name], strict=True):
                assert mine == all_heads[rank * share : (rank + 1) * share]
        assert result["replay"] == one["replay"] == [True] * 12
        for name in ("all", "some"):
            got, wanted = result[name], one[name]
            assert got["agreed"]
            assert got["sizes"] == wanted["sizes"] == (1, 4)
            assert got["steps"] == wanted["steps"]
            assert max(rows for rows, _ in got["steps"]) == CHUNK
            assert got["refused"] == []
            assert got["checked"] == (len(LENGTHS) if rank == 0 else 0)
            first = several[0][name]
            for mine, others in zip(got["outputs"], first["outputs"], strict=True):
                assert torch.equal(mine, others)
            for mine, others in zip(got["lists"], first["lists"], strict=True):
                assert all(torch.equal(mine[i], others[i]) for i in (1, 3, 5))
            for mine, others in zip(got["candidates"], first["candidates"], strict=True):
                assert torch.equal(mine, others)
    # Each rank rounds its shares of z and y to bf16 in every layer, and so does their sum.
    for mine, wanted in zip(several[0]["all"]["outputs"], one["all"]["outputs"], strict=True):
        assert bool(wanted.isfinite().all())
        error = float((mine - wanted).norm() / wanted.norm())
        assert error < len(LAYERS) * 2.0**-8 * 2**0.5, f"relative error {error:.2e}"
    for i in (1, 3, 5):
        assert common_part(several[0]["some"]["lists"], one["some"]["lists"], i) > 0.9


def measured(result: dict[str, Any], one: dict[str, Any]) -> str:
    """One line for a log: errors beside one rank, common parts of lists, refused checks."""
    errors = [
        float((mine - wanted).norm() / wanted.norm())
        for mine, wanted in zip(result["all"]["outputs"], one["all"]["outputs"], strict=True)
    ]
    common = [common_part(result["some"]["lists"], one["some"]["lists"], i) for i in (1, 3, 5)]
    return (
        f"rank {result['rank']}: errors {', '.join(f'{error:.2e}' for error in errors)}; lists in common "
        f"{', '.join(f'{part:.4f}' for part in common)}; agreed {result['all']['agreed']} "
        f"{result['some']['agreed']}; replays equal {sum(result['replay'])} of {len(result['replay'])}; "
        f"refused {result['all']['refused'] + result['some']['refused']}"
    )


def common_part(got: list[dict[int, Tensor]], wanted: list[dict[int, Tensor]], layer: int) -> float:
    """Share of list entries, where there was a choice, that both have: roundings move scores near the cut."""
    same = total = 0
    for mine, other in zip(got, wanted, strict=True):
        rows = [row for row in range(len(mine[layer])) if int(mine[layer][row].min()) >= 0]
        for row in rows:
            same += int(torch.isin(mine[layer][row], other[layer][row]).sum())
            total += len(mine[layer][row])
    assert total > 1000
    return same / total


def serve(case: Case, topk: int, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Chunked prefill and padded decode steps: outputs, lists, and the dense check of the first rank."""
    cfg = case.config(topk)
    trace = [TraceRequest(*length, 0.0, line) for line, length in enumerate(LENGTHS, 2)]
    options = EngineOptions(
        layer_ids=LAYERS, kv_cache_dtype="fp8_ds_mla", max_batched_tokens=CHUNK, seed=3,
        prefix_reuse=False, device=str(device), graphs=True,
    )  # fmt: skip
    engine = Engine(cfg, trace, options, ranks)
    recorder = engine.keep(range(len(trace)))
    report = engine.run()
    assert engine.graphs is not None
    sizes = engine.graphs.sizes
    engine.release()
    checked = range(len(trace) if ranks.rank == 0 and ranks.size > 1 else 0)
    checks = check_requests(engine, recorder, checked, lambda rows: None)
    kept = [recorder.lists(request) for request in engine.requests]
    return {
        "outputs": [recorder.output(request.request_id) for request in engine.requests],
        "lists": [{i: lists[i].positions for i in lists} for lists in kept],
        "candidates": [lists[3].candidates for lists in kept],
        "sizes": sizes,
        "steps": [(step.rows, step.decode_rows) for step in report.steps],
        "agreed": ranks.agree(recorder.digest()),
        "refused": [check.sentence for check in checks if not check.passed],
        "checked": len(checks),
    }


def owned(case: Case, ranks: Ranks, device: torch.device) -> dict[str, list[list[float]]]:
    """By layer: this rank's sinks, and the sum of each of its heads' query weights."""
    stack = AttentionStack(case.config(8), LAYERS, device=device, ranks=ranks)
    stack.reset_parameters(3)
    layers = stack.attention_layers()
    queries = [layer.wq_b.weight.cpu().double().view(layer.shard.num_heads, -1) for layer in layers]
    return {
        "sinks": [layer.attn_sink.tolist() for layer in layers],
        "heads": [rows.sum(-1).tolist() for rows in queries],
    }


def replay(case: Case, ranks: Ranks, device: torch.device) -> list[bool]:
    """Whether replayed decode steps, sums included, have the bits of the same steps computed eagerly."""
    stack = AttentionStack(case.config(16), LAYERS, device=device, ranks=ranks)
    stack.reset_parameters(3)
    records = resolve_kv_cache_dtype("nvfp4_ds_mla")
    server = StackServer(stack, records, capacity_tokens=512, max_tokens=64)
    lengths = (3, 20, 60)
    rows = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(1)).to(device)
    requests = [server.request(64) for _ in lengths]
    for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        server.step([Part(request, 0, rows[i, :length].cpu())])
    for layer in stack.attention_layers():
        layer.on_selection = None
    graph: StepGraph | None = None
    equal = []
    done = [0, 0, 0]
    for live in ((0,), (2, 1), (0, 1, 2), (1,)):
        parts = []
        for i in live:
            at = lengths[i] + done[i]
            parts.append(Part(requests[i], at, rows[i, at : at + 1]))
            done[i] += 1
        state = decode_state(server, parts, 4)
        hidden = torch.cat([part.hidden for part in parts])
        graph = graph or StepGraph(stack, state, keep_lists=True)
        out = graph.run(hidden, state).clone()
        lists = graph.lists[5].topk[: len(live)].clone()
        padded = torch.cat([hidden, hidden.new_zeros(4 - len(live), 256)])
        eager: Tensor = stack(padded, state)  # the same step again: it writes the same bytes
        equal.append(torch.equal(out, eager[: len(live)]))
        equal.append(torch.equal(lists, server.buffers.topk[: len(live)]))
        equal.append(ranks.agree(bytes(out.cpu().view(torch.uint8).flatten().tolist())))
    assert graph is not None
    graph.release()
    return equal


def decode_state(server: StackServer, parts: list[Part], rows: int) -> StepState:
    """A decode step padded to `rows` rows and as many requests."""
    groups, empty = server.caches.groups, rows - len(parts)
    batch = StepBatch.from_requests(
        [1] * len(parts) + [0] * empty,
        [part.start + 1 for part in parts] + [0] * empty,
        {name: [part.request.pages[name] for part in parts] + [[]] * empty for name in groups},
        {name: group.tokens_per_page for name, group in groups.items()},
        pad_to=rows,
        device=server.device,
    )
    metadata = server.builder.build(stating_longest(batch, 64))
    return StepState(server.caches, metadata, server.buffers, server.rope)


def main() -> None:
    """Join the ranks, serve, write what this one got."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    case = Case(sys.argv[2], *map(int, sys.argv[3:]))
    launch = Launch.from_environment()
    device = device_of_rank(case.ranks, case.device, launch)
    with joined(case.ranks, device, launch) as ranks, torch.inference_mode():
        result = {
            "rank": ranks.rank,
            "multicast": os.environ.get("NCCL_NVLS_ENABLE"),
            "owned": owned(case, ranks, device),
            "all": serve(case, 128, ranks, device),
            "some": serve(case, 16, ranks, device),
            "replay": replay(case, ranks, device),
        }
    torch.save(result, folder / f"{case.ranks}.{ranks.rank}.pt")


if __name__ == "__main__":
    main()
