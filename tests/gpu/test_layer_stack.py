"""The whole attention layer on a GPU: beside the CPU, against the dense computation, and as a graph."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.kv_dtype import resolve_kv_cache_dtype
from sparse_mla.cli.checking import check_requests
from sparse_mla.config.model import ModelConfig
from sparse_mla.engine.run import Engine, EngineOptions
from sparse_mla.engine.trace import TraceRequest
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.nn.graph import StepGraph, stating_longest
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepState
from sparse_mla.nn.weights import random_layer
from sparse_mla.testing.dense import DenseStack
from sparse_mla.testing.serve import Part, Served, StackServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = (0, 1, 2, 3, 4, 5)
FORMATS = [("fp8_ds_mla", "auto"), ("nvfp4_ds_mla", "auto"), ("fp8_ds_mla_v4", "mxfp4")]
TENSOR_CORE_SLACK = 1.5
"""The dense tolerance knows the roundings of the CPU path; a GPU also rounds probabilities to bf16."""


def shrunken() -> ModelConfig:
    """Layers like 0, 2, 3, 20, 21 and 24 of the model; lists of 16 entries."""
    return ModelConfig.deepseek_v41_flash().replace(
        hidden_size=256, num_attention_heads=16, o_groups=2, q_lora_rank=128, o_lora_rank=64,
        sliding_window=32, num_hidden_layers=6, compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 5), candidate_source_layer_id=3,
        candidate_topk_blocks=8, candidate_block_size=4, index_n_heads=32, index_topk=16,
        num_nextn_predict_layers=0, max_position_embeddings=8192,
    )  # fmt: skip


@functools.cache
def weights_of(cfg: ModelConfig, layer_id: int) -> dict[str, Tensor]:
    """Random weights, made once."""
    return random_layer(cfg, layer_id)


def server_on(
    device: str,
    name: str = "fp8_ds_mla",
    index: str = "auto",
    *,
    cfg: ModelConfig | None = None,
    layer_ids: tuple[int, ...] = LAYERS,
    max_tokens: int = 256,
    capacity_tokens: int = 1024,
) -> StackServer:
    cfg = cfg or shrunken()
    stack = AttentionStack(cfg, layer_ids, device=device)
    for layer in stack.attention_layers():
        layer.load_weights(weights_of(cfg, layer.layer_id))
    records = resolve_kv_cache_dtype(name, index_dtype=index)
    return StackServer(stack, records, capacity_tokens=capacity_tokens, max_tokens=max_tokens)


def hidden_rows(rows: int, seed: int = 0, size: int = 256) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "index", "chunk"), [(*FORMATS[0], 200), *((*names, 33) for names in FORMATS)]
)
def test_stack_agrees_with_the_dense_computation(name: str, index: str, chunk: int) -> None:
    server, hidden = server_on("cuda", name, index), hidden_rows(200)
    served = server.serve(hidden, chunk)
    weights = functools.partial(weights_of, server.cfg)
    dense = DenseStack(server.cfg, LAYERS, weights, server.caches.records)
    result = dense.run(hidden, served.selections)
    assert result.faults == []
    error = result.error(served.outputs)
    assert error < TENSOR_CORE_SLACK * result.tolerance, f"{error:.2e}, {result.tolerance:.2e}"


def test_layers_of_the_true_size_agree_with_the_cpu() -> None:
    """Layers 0, 2 and 20 of the model, 40 rows: outputs within a few bf16 roundings."""
    cfg = ModelConfig.deepseek_v41_flash()
    outputs = []
    for device in ("cuda", "cpu"):
        server = server_on(device, cfg=cfg, layer_ids=(0, 2, 20), max_tokens=64)
        hidden = hidden_rows(40, size=cfg.hidden_size)
        outputs.append(server.serve(hidden, 40).outputs)
    for layers in outputs:
        assert bool(layers.isfinite().all())
    error = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
    assert error < 2.0**-6, f"relative error {error:.2e}"


def fill_equally(servers: list[StackServer], layer_ids: tuple[int, ...]) -> None:
    """The same 16384 different rows, again and again, in every cache of both servers."""
    generator = torch.Generator().manual_seed(7)
    cpu = servers[-1].caches
    for layer_id in layer_ids:
        found = [cpu.window_cache(layer_id)]
        mine = [[server.caches.window_cache(layer_id) for server in servers]]
        if servers[-1].stack.cfg.compress_ratios[layer_id]:
            found += [cpu.compressed_cache(layer_id), cpu.index_cache(layer_id)]
            mine += [
                [server.caches.compressed_cache(layer_id) for server in servers],
                [server.caches.index_cache(layer_id) for server in servers],
            ]
        for cache, caches in zip(found, mine, strict=True):
            rows = torch.randn(16384, cache.record.dim, generator=generator).to(torch.bfloat16)
            data, scales = encode_rows(cache.record, rows)
            pick = torch.arange(cache.num_slots) % 16384
            cache.write_rows(torch.arange(cache.num_slots), data[pick], scales[pick])
            for other in caches:
                other.pages.copy_(cache.pages)


@pytest.mark.parametrize(("name", "index"), FORMATS[:2])
def test_decode_rows_at_128k_tokens_agree_with_the_cpu(name: str, index: str) -> None:
    """Ratios 2 and 1 and a consumer behind 2048 candidate blocks; a request of 300 tokens beside."""
    context, layer_ids = 131072, (1, 3, 5)
    cfg = shrunken().replace(
        index_topk=512,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        max_position_embeddings=1 << 18,
    )
    options = {"cfg": cfg, "layer_ids": layer_ids, "capacity_tokens": context + 512}
    servers = [server_on(device, name, index, **options) for device in ("cuda", "cpu")]
    fill_equally(servers, layer_ids)
    chosen: dict[int, list[Tensor]] = {}  # by layer, every buffer of lists
    shares: dict[int, float] = {}

    def keep(layer_id: int, step: StepState) -> None:
        chosen[layer_id] = [lists.cpu() for lists in lists_of(step)]

    def compare_and_take(layer_id: int, step: StepState) -> None:
        """How much of the GPU's list the CPU chose too; attention then reads the GPU's lists here too."""
        got, wanted = chosen[layer_id][0][0], step.buffers.topk[0]
        assert int((got >= 0).sum()) == 512
        shares[layer_id] = float(torch.isin(got, wanted).float().mean())
        for lists, taken in zip(lists_of(step), chosen[layer_id], strict=True):
            lists.copy_(taken)

    outputs = []
    for server, watch in zip(servers, (keep, compare_and_take), strict=True):
        for layer in server.stack.attention_layers():
            layer.on_selection = watch
        requests = [server.request(context), server.request(300)]
        parts = [
            Part(request, request.length - 1, hidden_rows(1, seed=request.length))
            for request in requests
        ]
        outputs.append(server.step(parts).cpu())
    # an input half a bf16 rounding away moves 3 % of the first list and 8 % of the last one
    assert min(shares.values()) > 0.9, shares
    error = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
    assert error < 2.0**-6, f"relative error {error:.2e}"


def lists_of(step: StepState) -> tuple[Tensor, ...]:
    """The lists that an index source publishes."""
    buffers = step.buffers
    return buffers.topk, buffers.slots, buffers.lengths, buffers.candidates


def test_fp8_output_of_the_layer() -> None:
    server = server_on("cuda", layer_ids=(1,))
    layer = server.stack.attention_layers()[0]
    x = hidden_rows(40).to(torch.bfloat16).cuda()
    request = server.request(40)
    server.parts = []
    exact = layer(x, server.state([Part(request, 0, x)]))
    layer.output = "fp8"
    cast = layer(x, server.state([Part(request, 0, x)]))
    error = float((cast - exact).float().norm() / exact.float().norm())
    assert 1e-3 < error < 2.0**-4, f"relative error {error:.2e}"


def test_a_step_does_not_wait_for_the_device() -> None:
    server = server_on("cuda")
    request = server.request(120)
    hidden = hidden_rows(120)
    server.step([Part(request, 0, hidden[:100])])
    for layer in server.stack.attention_layers():
        layer.on_selection = None
    for start, count in ((100, 1), (101, 19)):
        state = server.state([Part(request, start, hidden[start : start + count])])
        x = hidden[start : start + count].cuda()
        server.stack(x, state)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = server.stack(x, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(out.isfinite().all())


def decode_state(server: StackServer, parts: list[Part], rows: int, longest: int) -> StepState:
    """A decode step padded to `rows` rows and as many requests."""
    groups, empty = server.caches.groups, rows - len(parts)
    batch = StepBatch.from_requests(
        [1] * len(parts) + [0] * empty,
        [part.start + 1 for part in parts] + [0] * empty,
        {name: [part.request.pages[name] for part in parts] + [[]] * empty for name in groups},
        {name: group.tokens_per_page for name, group in groups.items()},
        pad_to=rows,
        device="cuda",
    )
    metadata = server.builder.build(stating_longest(batch, longest))
    return StepState(server.caches, metadata, server.buffers, server.rope)


@pytest.mark.parametrize(("name", "index"), FORMATS)
def test_a_captured_decode_step_follows_lengths_tables_and_positions(name: str, index: str) -> None:
    """Captured with two short requests, replayed with other requests and contexts: equal to eager."""
    server = server_on("cuda", name, index)
    lengths = (3, 14, 90, 200)
    hidden = [hidden_rows(length + 8, seed=length) for length in lengths]
    requests: list[Served] = [server.request(length + 8) for length in lengths]
    for request, rows, length in zip(requests, hidden, lengths, strict=True):
        server.step([Part(request, 0, rows[:length])])
    for layer in server.stack.attention_layers():
        layer.on_selection = None
    graph: StepGraph | None = None
    done = [0] * 4
    for live in ((0, 1), (2,), (3, 0, 2), (0, 1, 2, 3), (1, 3)):
        parts = []
        for i in live:
            start = lengths[i] + done[i]
            done[i] += 1
            parts.append(Part(requests[i], start, hidden[i][start : start + 1]))
        state = decode_state(server, parts, 4, 512)
        rows = torch.cat([part.hidden for part in parts]).cuda()
        if graph is None:
            graph = StepGraph(server.stack, state, keep_lists=True)
        out = graph.run(rows, state).clone()
        lists = {layer: kept.topk[: len(live)].clone() for layer, kept in graph.lists.items()}
        padded = torch.zeros(4, 256, device="cuda")
        padded[: len(live)] = rows
        eager = server.stack(padded, state)  # the same step again: it writes the same bytes
        assert torch.equal(out, eager[: len(live)])
        assert bool(out.isfinite().all())
        assert sorted(lists) == [1, 3, 5]
        for row, part in enumerate(parts):
            visible = min(part.start + 1, 16)
            assert int((lists[3][row] >= 0).sum()) == visible


def test_the_engine_replays_decode_steps_and_passes_its_check() -> None:
    trace = [TraceRequest(*length, 0.0, 2) for length in ((150, 20), (11, 30), (80, 6), (40, 25))]
    options = EngineOptions(layer_ids=LAYERS, device="cuda", prefix_reuse=False)
    engine = Engine(shrunken(), trace, options)
    recorder = engine.keep(range(4))
    report = engine.run()
    assert report.generated_tokens == 81
    assert engine.graphs is not None
    assert 4 in engine.graphs.sizes
    for check in check_requests(engine, recorder, range(4), lambda rows: None):
        assert check.passed, check.sentence
