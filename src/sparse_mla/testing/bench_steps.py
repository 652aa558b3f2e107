"""Benchmark cases of whole layers, of a step's metadata, and of steps from end to end."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.backends.problem import DeviceInfo, Problem
from sparse_mla.backends.select import select
from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.pool import CachePool
from sparse_mla.cache.records import RecordFormat
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import LayerKind, layer_topology
from sparse_mla.errors import UnsupportedError
from sparse_mla.metadata.batch import StepBatch
from sparse_mla.metadata.builder import StepMetadata, StepMetadataBuilder
from sparse_mla.metadata.rules import TORCH_RULES, MetadataRules
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepBuffers, StepState, rope_tables
from sparse_mla.testing.bench import attention_flops
from sparse_mla.testing.bench_attend import Launches, Prepared
from sparse_mla.testing.check import CheckCase, Fault, backends_there, first_wrong, run_checks
from sparse_mla.testing.check_attend import quick_attend
from sparse_mla.testing.check_caches import cache_checks

LAYER_IDS = (0, 2, 20)
"""One layer of each kind; 2 and 20 own their compressed caches and run an indexer."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Decoding requests with filled caches, ready to step."""

    cfg: ModelConfig
    caches: CachePool
    builder: StepMetadataBuilder
    batch: StepBatch
    context: int

    @classmethod
    def of(cls, requests: int, context: int, device: torch.device, rules: str) -> Serving:
        """Requests whose step brings their last token; caches hold random rows.

        Raises:
            UnsupportedError: no metadata kernels of that name here.
        """
        cfg = ModelConfig.deepseek_v41_flash()
        blocks = -(-context // 64)
        pages = {"window": requests * -(-context // 32), "c1": requests * blocks,
                 "c2": requests * blocks, "ring": requests + 1}  # fmt: skip
        caches = CachePool.allocate(cfg, pages=pages, device=device, layer_ids=LAYER_IDS)
        for layer_id in LAYER_IDS:
            fill_randomly(caches.window_cache(layer_id))
            if layer_topology(cfg, layer_id).owns_compressed_cache:
                fill_randomly(caches.compressed_cache(layer_id))
                fill_randomly(caches.index_cache(layer_id))
        builder = StepMetadataBuilder(
            cfg, caches, max_tokens=requests, max_requests=requests, max_seq_len=context,
            device=device, rules=metadata_rules(rules, device),
        )  # fmt: skip
        tables = {}
        for name, group in caches.groups.items():
            each = 1 if name == "ring" else -(-context // group.tokens_per_page)
            first = group.first_block
            tables[name] = [
                list(range(first + each * index, first + each * (index + 1)))
                for index in range(requests)
            ]
        batch = StepBatch.from_requests(
            [1] * requests,
            [context] * requests,
            tables,
            {name: group.tokens_per_page for name, group in caches.groups.items()},
            device=device,
        )
        return cls(cfg, caches, builder, batch, context)


@dataclass(frozen=True, slots=True)
class LayerBench:
    """One layer's forward for decoding requests, every projection included."""

    layer_id: int
    tokens: int
    context: int
    window: RecordFormat
    compressed: RecordFormat | None
    suite: str = "layer"
    heads: int = 64
    window_keys: int = 128
    compressed_keys: int = 512
    output: str = "bf16"

    @property
    def op(self) -> str:
        """`layer swaonly`, `layer c1a`, `layer c2a`."""
        cfg = ModelConfig.deepseek_v41_flash()
        return f"layer {layer_topology(cfg, self.layer_id).kind.value}"

    @property
    def label(self) -> str:
        """One line."""
        return f"layer {self.layer_id}, requests {self.tokens}, context {self.context}"

    def prepare(self, backend: str, device: torch.device) -> Prepared:
        """Gate: the quick checks of every op. Then one layer with random weights."""
        chosen = _attention_backend(backend, device)
        fault = _ops_fault(backend, device)
        serving = serving_of(self.tokens, self.context, device)
        layer, buffers, rope = _layer(self.layer_id, self.tokens, self.context, device)
        state = StepState(serving.caches, serving.builder.build(serving.batch), buffers, rope)
        x = torch.randn(self.tokens, serving.cfg.hidden_size, device=device).to(torch.bfloat16)
        flops, moved = self.work(layer)

        def launch() -> Tensor:
            with torch.inference_mode():
                out: Tensor = layer(x, state)
            return out

        if fault is None and not bool(torch.isfinite(launch()).all()):
            fault = Fault("layer output", (), "inf or NaN", "finite numbers")
        return Prepared([launch], flops, moved, chosen, fault, graph=False)

    def work(self, layer: DeepseekV41Attention) -> tuple[int, int]:
        """Operations and bytes: projections once, attention's keys for each row; the indexer's not counted."""
        weights = [parameter for parameter in layer.parameters() if parameter.dim() >= 2]
        flops = sum(2 * self.tokens * parameter.numel() for parameter in weights)
        moved = sum(parameter.numel() * parameter.element_size() for parameter in weights)
        keys, lanes = self.window_keys * self.window.row_bytes, self.window_keys
        if self.compressed is not None and layer.layer.ratio:
            keys += self.compressed_keys * self.compressed.row_bytes
            lanes += self.compressed_keys
        flops += attention_flops(self.tokens, self.heads, lanes)
        return flops, moved + self.tokens * (keys + 4 * layer.cfg.hidden_size)

    def peer_launches(self, device: torch.device) -> Launches | None:
        """The peer has attention alone."""
        del device
        return None


@dataclass(frozen=True, slots=True)
class MetadataBench:
    """All metadata of a step: lists of both ratios, slots, counts, plans."""

    tokens: int
    context: int
    window: RecordFormat
    rules: str = "torch"
    compressed: RecordFormat | None = None
    suite: str = "metadata"
    op: str = "metadata"
    heads: int | None = None
    window_keys: int = 128
    compressed_keys: int | None = None
    output: str = "lists"

    @property
    def label(self) -> str:
        """One line."""
        return f"requests {self.tokens}, context {self.context}"

    def prepare(self, backend: str, device: torch.device) -> Prepared:
        """Gate: the window lists and visible counts against their rule, row by row."""
        if backend not in ("auto", self.rules):
            raise UnsupportedError(f"metadata by {backend}", [f"this case is {self.rules}'s"])
        serving = serving_of(self.tokens, self.context, device, self.rules)
        built = serving.builder.build(serving.batch)
        fault = metadata_fault(serving, built)
        launch = functools.partial(serving.builder.build, serving.batch)
        return Prepared([launch], 0, 0, self.rules, fault, graph=False)

    def peer_launches(self, device: torch.device) -> Launches | None:
        """The peer has no metadata of this kind."""
        del device
        return None


@dataclass(frozen=True, slots=True)
class StepBench:
    """A decode step from end to end: metadata, then one layer of each kind, one after the other."""

    tokens: int
    context: int
    window: RecordFormat
    compressed: RecordFormat
    suite: str = "step"
    op: str = "step of 3 layers"
    heads: int = 64
    window_keys: int = 128
    compressed_keys: int = 512
    output: str = "bf16"

    @property
    def label(self) -> str:
        """One line."""
        return f"requests {self.tokens}, context {self.context}, layers {LAYER_IDS}"

    def prepare(self, backend: str, device: torch.device) -> Prepared:
        """Gate: the quick checks of every op."""
        chosen = _attention_backend(backend, device)
        fault = _ops_fault(backend, device)
        serving = serving_of(self.tokens, self.context, device)
        layers = [_layer(layer_id, self.tokens, self.context, device) for layer_id in LAYER_IDS]
        tables = {kind: table for _, _, rope in layers for kind, table in rope.items()}
        x = torch.randn(self.tokens, serving.cfg.hidden_size, device=device).to(torch.bfloat16)
        parts = LayerBench(2, self.tokens, self.context, self.window, self.compressed)
        flops = moved = 0
        for layer, _, _ in layers:
            work, size = parts.work(layer)
            flops, moved = flops + work, moved + size

        def launch() -> Tensor:
            with torch.inference_mode():
                metadata = serving.builder.build(serving.batch)
                state = StepState(serving.caches, metadata, layers[0][1], tables)
                out = x
                for layer, _, _ in layers:
                    out = layer(out, state)
            return out

        return Prepared([launch], flops, moved, chosen, fault, graph=False)

    def peer_launches(self, device: torch.device) -> Launches | None:
        """The peer has attention alone."""
        del device
        return None


def layer_suite(device: torch.device, quick: bool) -> list[LayerBench]:
    """A layer of each kind."""
    tokens, context = (128, 4096) if device.type == "cuda" else (4, 1024)
    ids = LAYER_IDS[-1:] if quick else LAYER_IDS
    caches = serving_of(tokens, context, device).caches
    cfg = ModelConfig.deepseek_v41_flash()
    cases = []
    for layer_id in ids:
        ratio = layer_topology(cfg, layer_id).ratio
        record = caches.records.compressed if ratio else None
        cases.append(LayerBench(layer_id, tokens, context, caches.records.window, record))
    return cases


def step_suite(device: torch.device, quick: bool) -> list[StepBench]:
    """Decode steps of a few sizes."""
    sizes, context = ((32, 128), 4096) if device.type == "cuda" else ((1, 4), 1024)
    records = serving_of(sizes[-1], context, device).caches.records
    return [
        StepBench(tokens, context, records.window, records.compressed)
        for tokens in (sizes[-1:] if quick else sizes)
    ]


def metadata_suite(device: torch.device, quick: bool) -> list[MetadataBench]:
    """Decode steps of few and many requests."""
    many = 128 if device.type == "cuda" else 4
    context = 4096 if device.type == "cuda" else 1024
    record = serving_of(many, context, device).caches.records.window
    rules = [name for name in ("torch", "triton") if name in backends_there(device)]
    return [
        MetadataBench(tokens, context, record, name)
        for tokens in ((many,) if quick else (1, many))
        for name in rules
    ]


@functools.lru_cache(maxsize=4)
def serving_of(requests: int, context: int, device: torch.device, rules: str = "torch") -> Serving:
    """`Serving.of`, kept for the next case."""
    return Serving.of(requests, context, device, rules)


def metadata_rules(name: str, device: torch.device) -> MetadataRules:
    """The metadata kernels of a backend.

    Raises:
        UnsupportedError: there are none, or they do not run there.
    """
    if name == "torch":
        return TORCH_RULES
    if name == "triton" and "triton" in backends_there(device):
        module = importlib.import_module("sparse_mla.kernels.triton.metadata")
        rules: MetadataRules = module.TRITON_RULES
        return rules
    raise UnsupportedError(f"metadata by {name}", ["allowed: torch, or triton on a GPU"])


def _attention_backend(requested: str, device: torch.device) -> str:
    """What a layer's attention runs on: layers take what `auto` takes.

    Raises:
        UnsupportedError: another backend was asked for.
    """
    chosen = select(Problem(window_record="mxfp8"), DeviceInfo.detect(device)).name
    if requested not in ("auto", chosen):
        raise UnsupportedError(
            f"layers with backend {requested!r}",
            [f"layers take what auto takes, {chosen} here; set SPARSE_MLA_BACKEND to change it"],
        )
    return chosen


def fill_randomly(cache: PagedCache) -> None:
    """Write random rows everywhere: 1024 different ones, again and again."""
    values = torch.randn(1024, cache.record.dim, device=cache.device).to(torch.bfloat16)
    data, scales = encode_rows(cache.record, values)
    for slots in torch.split(torch.arange(cache.num_slots, device=cache.device), 1024):
        cache.write_rows(slots, data[: len(slots)], scales[: len(slots)])


def metadata_fault(serving: Serving, built: StepMetadata) -> Fault | None:
    """The first list entry or count that is not what the rules say for the last token of each request."""
    table = serving.batch.block_tables["window"].cpu().long()
    page = serving.caches.groups["window"].tokens_per_page
    last = serving.context - 1
    seen = torch.arange(max(0, last - 127), last + 1)
    wanted = table[:, seen // page] * page + seen % page
    indices = built.window.indices[:, : len(seen)].cpu()
    fault = first_wrong("window list", indices.sort(-1).values, wanted.sort(-1).values)
    for ratio, part in built.compressed.items():
        counts = part.visible[: len(table)].cpu()
        fault = fault or first_wrong(
            f"visible entries of ratio {ratio}",
            counts,
            torch.full_like(counts, (last + 1) // ratio),
        )
    return fault


@functools.lru_cache(maxsize=4)
def _layer(
    layer_id: int, tokens: int, context: int, device: torch.device
) -> tuple[DeepseekV41Attention, StepBuffers, dict[LayerKind, Tensor]]:
    cfg = ModelConfig.deepseek_v41_flash()
    stack = AttentionStack(cfg, (layer_id,), device=device)
    stack.reset_parameters(0)
    buffers = StepBuffers.allocate(cfg, tokens, device)
    rope = rope_tables(cfg, num_positions=context, layer_ids=(layer_id,), device=device)
    return next(iter(stack.attention_layers())), buffers, rope


@functools.lru_cache(maxsize=8)
def _ops_fault(backend: str, device: torch.device) -> Fault | None:
    """The quick checks, once for all layers."""
    cases: list[CheckCase] = [*quick_attend(), *cache_checks()]
    report = run_checks(cases, device=device, backends=[backend])
    return report.failures[0].fault if report.failures else None
