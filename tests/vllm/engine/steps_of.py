"""A step on vLLM's caches: block tables of every group, metadata by vLLM's builders, and plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat


@dataclass(frozen=True)
class Step:
    """Rows of a step and where every cache keeps them."""

    requests: list[int]  # of each row
    positions: Tensor  # int64 [T]
    tables: dict[str, list[list[int]]]  # by cache: blocks of each request
    metadata: dict[str, Any]  # what vLLM's forward context carries


def make_step(engine: SimpleNamespace, query_lens: list[int], seq_lens: list[int]) -> Step:
    """Every group has blocks of its own: in vLLM all groups share the same bytes, block by block."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    total = int(starts[-1])
    positions = torch.cat(
        [torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]
    )
    requests = [n for n, count in enumerate(query_lens) for _ in range(count)]
    tables: dict[str, list[list[int]]] = {}
    metadata: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(3)
    order = (torch.randperm(engine.plan.num_blocks - 1, generator=generator) + 1).tolist()
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    for group in engine.plan.kv_cache_groups:
        blocks = -(-max(seq_lens) // 32)
        own = [[order.pop() for _ in range(blocks)] for _ in seq_lens]
        for name in group.layer_names:
            tables[name] = own
            if "indexer" in name:
                continue
            spec = engine.specs[name]
            slots = [
                own[r][int(p) // spec.block_size] * spec.block_size + int(p) % spec.block_size
                for r, p in zip(requests, positions, strict=True)
            ] if "state" not in name else [0] * total  # fmt: skip
            batch = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts.clone(),
                seq_lens=lengths,
                num_reqs=len(seq_lens),
                num_actual_tokens=total,
                max_query_len=max(query_lens),
                max_seq_len=max(seq_lens),
                block_table_tensor=torch.tensor(own, dtype=torch.int32),
                slot_mapping=torch.tensor(slots),
                seq_lens_cpu_upper_bound=lengths.clone(),
                positions=positions,
            )
            cls = engine.layers[name].get_attn_backend().get_builder_cls()
            builder = cls(spec, [name], engine.config, torch.device("cpu"))
            metadata[name] = builder.build(0, batch)
    return Step(requests, positions, tables, metadata)


def slot(table: list[int], entry: int, page_rows: int) -> int:
    """Where a request's row number `entry` is kept."""
    return table[entry // page_rows] * page_rows + entry % page_rows


def fill(view: Tensor, record: RecordFormat, tables: list[list[int]], rows: int, seed: int) -> None:
    """Random rows for the first `rows` entries of every request; nothing else is touched."""
    cache = PagedCache.from_view(view, record)
    generator = torch.Generator().manual_seed(seed)
    for table in tables:
        slots = torch.tensor([slot(table, n, cache.page_rows) for n in range(rows)])
        values = torch.randn(rows, 512, generator=generator).to(torch.bfloat16)
        cache.write_rows(slots, *encode_rows(record, values))


def poison(engine: SimpleNamespace) -> None:
    """NaN bytes everywhere, so that a row nobody wrote shows."""
    for cache in engine.caches.values():
        if cache.dtype == torch.uint8:
            cache.fill_(0xFF)


def key_lists(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """int32 [T, K] and lengths of lists of different lengths."""
    width = max(len(entries) for entries in lists)
    padded = [entries + [-1] * (width - len(entries)) for entries in lists]
    lengths = torch.tensor([len(entries) for entries in lists], dtype=torch.int32)
    return torch.tensor(padded, dtype=torch.int32), lengths
