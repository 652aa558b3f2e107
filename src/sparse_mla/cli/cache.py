"""`sparse-mla cache`: what a token costs and how many fit, for each format of the caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from sparse_mla.cache.kv_dtype import (
    KV_CACHE_DTYPES,
    RecordSet,
    bytes_per_token,
    resolve_kv_cache_dtype,
    ring_rows,
)
from sparse_mla.cache.pool import RING, WINDOW, plan_group
from sparse_mla.cli.common import bad_input_exits, console, human_bytes, load_config, parse_bytes
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import cache_groups
from sparse_mla.engine.run import BLOCK_TOKENS, WINDOW_PAGE_TOKENS

Config = Annotated[
    Path | None, typer.Option(help="HF config.json; without it DeepSeek-V4.1-Flash.")
]
Memory = Annotated[str, typer.Option(help="Memory for the caches: 80GiB, 141GB, 16g, ...")]
Requests = Annotated[int, typer.Option(min=1, help="Requests that run at a time.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("cache")
    def _cache(
        config: Config = None,
        memory: Memory = "80GiB",
        requests: Requests = 1,
        as_json: Json = False,
    ) -> None:
        """Show bytes per token and how many tokens fit, for each KV cache dtype."""
        with bad_input_exits():
            sizes = gather(load_config(config), parse_bytes(memory), requests)
        if as_json:
            typer.echo(json.dumps(sizes, indent=2))
        else:
            _print(sizes)


def gather(cfg: ModelConfig, memory_bytes: int, requests: int = 1) -> dict[str, Any]:
    """Everything that the command prints, ready for JSON.

    Args:
        cfg: the model.
        memory_bytes: memory for the caches.
        requests: requests that run at a time and share the memory equally.
    """
    names = {resolve_kv_cache_dtype(name).name for name in KV_CACHE_DTYPES}
    ordered = sorted(names, key=lambda name: -_token_bytes(cfg, name))
    return {
        "memory_bytes": memory_bytes,
        "requests": requests,
        "formats": [_format(cfg, name, memory_bytes, requests) for name in ordered],
    }


def _token_bytes(cfg: ModelConfig, name: str) -> float:
    return bytes_per_token(cfg, resolve_kv_cache_dtype(name)).global_per_token


def _format(cfg: ModelConfig, name: str, memory_bytes: int, requests: int) -> dict[str, Any]:
    records = resolve_kv_cache_dtype(name)
    costs = bytes_per_token(cfg, records)
    token_block, of_request = _allocated(cfg, records)
    left = max(0, memory_bytes - requests * of_request)
    return {
        "kv_cache_dtype": name,
        "window": records.window.name,
        "compressed": records.compressed.name,
        "index": records.index.name,
        "bytes_per_token": costs.global_per_token,
        "bytes_per_request": costs.window_per_request + costs.ring_per_request,
        "allocated_per_token": token_block / BLOCK_TOKENS,
        "allocated_per_request": of_request,
        "tokens_that_fit": left // token_block * BLOCK_TOKENS if token_block else None,
    }


def _allocated(cfg: ModelConfig, records: RecordSet) -> tuple[int, int]:
    """(bytes of `BLOCK_TOKENS` tokens in the global groups, bytes that every request adds).

    A window of any alignment spans one page more than its tokens fill.
    """
    token_block = of_request = 0
    for group in cache_groups(cfg):
        layout = plan_group(
            group,
            records,
            num_blocks=1,
            block_size=BLOCK_TOKENS,
            window_page_rows=WINDOW_PAGE_TOKENS,
            ring_capacity=ring_rows(),
        )
        if group.name == WINDOW:
            pages = -(-(cfg.sliding_window - 1) // WINDOW_PAGE_TOKENS) + 1
            of_request += pages * layout.block_bytes
        elif group.name == RING:
            of_request += layout.block_bytes
        else:
            token_block += layout.block_bytes
    return token_block, of_request


def _print(sizes: dict[str, Any]) -> None:
    title = f"{human_bytes(sizes['memory_bytes'])} for {sizes['requests']} requests at a time"
    table = Table(title=title, title_justify="left")
    table.add_column("KV cache dtype")
    table.add_column("window + compressed + index")
    for name in ("bytes a token", "allocated", "bytes a request", "tokens that fit"):
        table.add_column(name, justify="right")
    for row in sizes["formats"]:
        fit = row["tokens_that_fit"]
        table.add_row(
            row["kv_cache_dtype"],
            f"{row['window']} + {row['compressed']} + {row['index']}",
            f"{row['bytes_per_token']:,g}",
            f"{row['allocated_per_token']:,.1f}",
            f"{row['bytes_per_request']:,}",
            "no limit" if fit is None else f"{fit:,}",
        )
    out = console()
    out.print(table)
    out.print(
        "allocated: bytes a token with the padding of pages. A request adds its windows and rings."
    )
