"""Time of a decode step on several GPUs beside one, and the share of its all-reduces.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--tokens 1,32,128] [--context 4096] [--write]

A layer of every kind at the model's own sizes (or `--config`), random weights, caches full of random rows, one
row a request at the end of its context. A step is its layers replayed from one CUDA graph, without the step's
metadata. It is timed only after the ranks gave the same bits and lists as each other, and, for requests so short
that every list holds everything, what one GPU gives within the rounding of the sums. With longer
requests roundings also move scores across the cut of a list: the table shows how many. The all-reduces' share is the time that the same step takes less
without them; what they take alone, one after the other, stands beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Result, append_results
from torch import Tensor

from sparse_mla.backends.problem import DeviceInfo, Problem
from sparse_mla.backends.select import select
from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.cli.common import parse_layers
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.engine.launch import device_of_rank, joined
from sparse_mla.errors import ArgumentError
from sparse_mla.nn.graph import StepGraph
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepState
from sparse_mla.nn.weights import layer_prefix, parameter_shapes
from sparse_mla.settings import Launch
from sparse_mla.testing.bench import attention_flops, provenance
from sparse_mla.testing.bench_steps import fill_randomly
from sparse_mla.testing.serve import Part, Served, StackServer

LAYERS = "0,2,3,20,21,24"
"""Window only; a ratio-2 source and its reader; the candidate source, its reader, and a consumer."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one step of `tokens` rows."""

    tokens: int
    one: float  # on one GPU
    ranks: float  # on all ranks
    silent: float  # the same without sums
    sums: float  # the sums alone, all layers' together
    error: float  # relative, of the residual stream beside one GPU where lists hold everything
    differing: dict[
        int, float
    ]  # by index source, the share of its list that one GPU chose otherwise


@dataclass(frozen=True, slots=True)
class Bench:
    """A stack, its caches, and requests of two lengths, as many as the largest step has rows."""

    server: StackServer
    timed: list[Served]  # of the context that is timed
    short: list[Served]  # whose lists hold every position


def random_weights(cfg: ModelConfig, layer_id: int, device: torch.device) -> dict[str, Tensor]:
    """A layer's unsharded tensors, made on the device, the same on every rank."""
    weights = {}
    for name, shape in parameter_shapes(cfg, layer_id).items():
        seed = zlib.crc32(f"{layer_id}/{name}".encode())
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.empty(shape, device=device).uniform_(-1.0, 1.0, generator=generator)
        if len(shape) == 2:
            weights[layer_prefix(cfg, layer_id) + name] = values.mul_((3.0 / shape[1]) ** 0.5)
        else:
            weights[layer_prefix(cfg, layer_id) + name] = values.mul_(0.5).add_(1.0)
    return weights


def make_bench(
    cfg: ModelConfig, options: argparse.Namespace, device: torch.device, ranks: Ranks
) -> Bench:
    """A stack with random weights, caches full of random rows, and the requests."""
    stack = AttentionStack(cfg, parse_layers(options.layers, cfg), device=device, ranks=ranks)
    for layer in stack.attention_layers():
        layer.load_weights(random_weights(cfg, layer.layer_id, device))
    most, short = max(options.tokens), min(cfg.index_topk, options.context)
    server = StackServer(
        stack,
        resolve_kv_cache_dtype(options.kv_cache_dtype),
        capacity_tokens=most * (options.context + short),
        max_tokens=most,
        max_requests=most,
    )
    torch.manual_seed(0)
    for layer in stack.attention_layers():
        fill_randomly(server.caches.window_cache(layer.layer_id))
        if layer.layer.owns_compressed_cache:
            fill_randomly(server.caches.compressed_cache(layer.layer_id))
            fill_randomly(server.caches.index_cache(layer.layer_id))
        layer.on_selection = None
    timed = [make_request(server, options.context) for _ in range(most)]
    return Bench(server, timed, [make_request(server, short) for _ in range(most)])


def make_request(server: StackServer, length: int) -> Served:
    """A request with pages for `length` rows, whose results nobody keeps."""
    pages = {}
    for name, group in server.caches.groups.items():
        count = 1 if name == "ring" else -(-length // group.tokens_per_page)
        pages[name] = [server.free[name].pop() for _ in range(count)]
    return Served(length, pages, torch.empty(0))


def step_of(server: StackServer, requests: list[Served], tokens: int) -> tuple[Tensor, StepState]:
    """float32 [tokens, hidden_size] and the step in which each request computes its last row."""
    size = server.cfg.hidden_size
    hidden = torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens))
    hidden = hidden.to(server.device)
    parts = [
        Part(request, request.length - 1, hidden[row : row + 1])
        for row, request in enumerate(requests[:tokens])
    ]
    return hidden, server.state(parts)


def compute(
    server: StackServer, requests: list[Served], tokens: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """One replayed step: its outputs, and each index source's list."""
    hidden, state = step_of(server, requests, tokens)
    graph = StepGraph(server.stack, state, keep_lists=True)
    out = graph.run(hidden, state).cpu()
    lists = {layer_id: kept.topk.cpu() for layer_id, kept in graph.lists.items()}
    graph.release()
    return out, lists


def check(one: Bench, several: Bench, ranks: Ranks, tokens: int) -> tuple[float, dict[int, float]]:
    """Relative error of the short requests' step, and the shares of the timed lists chosen differently.

    Raises:
        RuntimeError: ranks differ from each other, or from one GPU by more than roundings.
    """
    found = hashlib.sha256()
    wanted, _ = compute(one.server, one.short, tokens)
    got, _ = compute(several.server, several.short, tokens)
    _, expected = compute(one.server, one.timed, tokens)
    out, lists = compute(several.server, several.timed, tokens)
    for tensor in (got.view(torch.int32), out.view(torch.int32), *lists.values()):
        found.update(str(tensor.tolist()).encode())
    if not ranks.agree(found.digest()):
        raise RuntimeError(f"{tokens} tokens: ranks differ in outputs or lists")
    # Each rank rounds its shares of z and y to bf16 in every layer, and so does their sum.
    error = float((got - wanted).norm() / wanted.norm())
    if not error < len(several.server.stack.layer_ids) * 2.0**-8 * 2**0.5:
        raise RuntimeError(f"{tokens} tokens: relative error {error:.2e} beside one GPU")
    differing = {}
    for layer_id, chosen in lists.items():
        same = (chosen[:, :, None] == expected[layer_id][:, None, :]).any(-1)
        differing[layer_id] = 1.0 - float(same.double().mean())
    return error, differing


def time_step(server: StackServer, requests: list[Served], tokens: int) -> float:
    """Microseconds of a replayed step."""
    hidden, state = step_of(server, requests, tokens)
    graph = StepGraph(server.stack, state)
    micro = time_repeats(lambda: graph.run(hidden, state), server.device)
    graph.release()
    return micro


def time_sums(server: StackServer, ranks: Ranks, tokens: int) -> float:
    """Microseconds of as many sums of [tokens, hidden_size] bf16 as there are layers, and nothing else."""
    shares = [
        torch.zeros(tokens, server.cfg.hidden_size, dtype=torch.bfloat16, device=server.device)
        for _ in server.stack.layer_ids
    ]

    def add() -> None:
        for share in shares:
            ranks.add(share)

    if server.device.type == "cpu":
        return time_repeats(add, server.device)
    add()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        add()
    micro = time_repeats(graph.replay, server.device)
    graph.reset()
    return micro


def time_repeats(run: Callable[[], object], device: torch.device) -> float:
    """Median, over blocks, of the mean of back-to-back runs, so that ranks wait for each other once a block."""
    on_gpu = device.type == "cuda"
    blocks, repeats = (9, 20) if on_gpu else (3, 2)
    for _ in range(3):
        run()
    times = []
    for _ in range(blocks):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / repeats)
        else:
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times.append((time.perf_counter() - start) * 1e6 / repeats)
    return statistics.median(times)


def measure(one: Bench, several: Bench, ranks: Ranks, tokens: int) -> Times:
    """Check, then time; every rank does the same.

    Raises:
        RuntimeError: a check failed.
    """
    error, differing = check(one, several, ranks, tokens)
    server = several.server
    alone = time_step(one.server, one.timed, tokens)
    together = time_step(server, several.timed, tokens)
    sums = time_sums(server, ranks, tokens)
    layers = server.stack.attention_layers()
    for layer in layers:
        layer.ranks = None
    silent = time_step(server, several.timed, tokens)
    for layer in layers:
        layer.ranks = ranks
    return Times(tokens, alone, together, silent, sums, error, differing)


def results_of(times: Times, server: StackServer, ranks: Ranks) -> list[Result]:
    """Lines for one GPU, for all ranks, and for the share of the sums."""
    cfg, stack, records = server.cfg, server.stack, server.caches.records
    step = f"decode step of {len(stack.layer_ids)} layers"
    sums = times.ranks - times.silent
    message = 2 * times.tokens * cfg.hidden_size * len(stack.layer_ids)
    backend = select(Problem(window_record=records.window.name), DeviceInfo.detect(server.device))
    cases = [
        (step, cfg.num_attention_heads, times.one, None),
        (f"{step}, {ranks.size} GPUs", stack.num_heads, times.ranks, times.one),
        (f"all-reduces of a {step}, {ranks.size} GPUs", None, sums, None),
    ]
    found = []
    for op, heads, micro, peer in cases:
        flops, moved = (0, message) if heads is None else work(server, times.tokens, heads)
        found.append(
            Result(
                **provenance(server.device),
                op=op,
                backend="nccl" if heads is None else backend.name,
                heads=heads,
                tokens=times.tokens,
                window_keys=None if heads is None else cfg.sliding_window,
                compressed_keys=None if heads is None else cfg.index_topk,
                window_record=records.window.name,
                compressed_record=None if heads is None else records.compressed.name,
                output="bf16",
                microseconds=round(micro, 1),
                tflops=round(flops / micro / 1e6, 1) if flops else None,
                gbps=round(moved / micro / 1e3, 1),
                peer=None if peer is None else "one GPU",
                peer_microseconds=None if peer is None else round(peer, 1),
                ratio=None if peer is None else round(round(peer, 1) / round(micro, 1), 3),
            )
        )
    return found


def work(server: StackServer, tokens: int, heads: int) -> tuple[int, int]:
    """Operations and bytes of a step with so many heads: weights once, the attended rows of each token."""
    cfg, records = server.cfg, server.caches.records
    part = heads / cfg.num_attention_heads
    flops = moved = 0
    for layer_id in server.stack.layer_ids:
        shapes = parameter_shapes(cfg, layer_id)
        sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
        shared = sum(sizes[name] for name in ("wq_b", "wo_a", "wo_b"))
        values = int(sum(sizes.values()) - shared + part * shared)
        wide = cfg.index_topk if layer_topology(cfg, layer_id).ratio else 0
        flops += 2 * tokens * values + attention_flops(tokens, heads, cfg.sliding_window + wide)
        rows = cfg.sliding_window * records.window.row_bytes + wide * records.compressed.row_bytes
        moved += 2 * values + tokens * rows
    return flops, moved


def print_table(rows: list[Times], ranks: Ranks) -> None:
    """One line for each number of tokens, times in microseconds."""
    print(
        f"tokens   one GPU  {ranks.size} ranks  speed-up  without sums  share  sums alone    error  lists"
    )
    for row in rows:
        lists = ", ".join(f"{layer}: {share:.1%}" for layer, share in row.differing.items())
        print(
            f"{row.tokens:6} {row.one:9.1f} {row.ranks:8.1f} {row.one / row.ranks:9.2f} "
            f"{row.silent:13.1f} {1 - row.silent / row.ranks:6.1%} {row.sums:11.1f}  {row.error:.1e}  {lists}"
        )


def main() -> None:
    """Measure every number of tokens."""
    parser = argparse.ArgumentParser(description="A decode step on several GPUs beside one.")
    parser.add_argument("--tokens", default="1,32,128")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.tokens = [int(text) for text in options.tokens.split(",")]
    launch = Launch.from_environment()
    if launch is None or launch.size < 2:
        raise ArgumentError("ranks", "1 process", "2 or more", "start with torchrun")
    cfg = (
        ModelConfig.from_json(options.config) if options.config
        else ModelConfig.deepseek_v41_flash()
    )  # fmt: skip
    device = device_of_rank(launch.size, options.device, launch)
    with joined(launch.size, device, launch) as ranks, torch.inference_mode():
        one = make_bench(cfg, options, device, Ranks(0, 1))
        several = make_bench(cfg, options, device, ranks)
        rows = [measure(one, several, ranks, tokens) for tokens in options.tokens]
    if ranks.rank:
        return
    print_table(rows, ranks)
    results = [result for row in rows for result in results_of(row, several.server, ranks)]
    if options.write:
        name = results[0].gpu.lower().replace("nvidia ", "").replace(" ", "-")
        print("appended to", append_results(results, name))
    else:
        for result in results:
            print(result.line())


if __name__ == "__main__":
    main()
