"""KV memory of a DeepSeek-V4.1 server, from the records. No vLLM needed."""

from __future__ import annotations

from dataclasses import replace

from sparse_mla.cache.kv_dtype import RecordSet, bytes_per_token
from sparse_mla.cache.records import V4
from sparse_mla.config.model import ModelConfig
from sparse_mla.integrations.vllm.names import MEGA, SPARSE
from sparse_mla.integrations.vllm.refusals import kv_dtypes
from sparse_mla.integrations.vllm.steps import engine_records

CONTEXT_TOKENS = 131072


def memory_table(cfg: ModelConfig | None = None) -> str:
    """A Markdown table: what a token and a request cost, over all layers, draft layers included."""
    cfg = cfg or ModelConfig.deepseek_v41_flash()
    mxfp8 = engine_records("fp8_ds_mla")
    rows: list[tuple[str, str, RecordSet]] = [
        ("vLLM's own on Hopper", "`fp8_ds_mla`", replace(mxfp8, window=V4, compressed=V4)),
        (f"`{SPARSE}`", "`fp8_ds_mla` (auto)", mxfp8),
        (f"`{MEGA}`", "`fp8_ds_mla`", mxfp8),
        (f"`{MEGA}`", "`nvfp4_ds_mla` (auto)", engine_records("nvfp4_ds_mla")),
    ]
    assert "nvfp4_ds_mla" in kv_dtypes(MEGA)
    assert "nvfp4_ds_mla" not in kv_dtypes(SPARSE)
    columns = (
        "backend",
        "KV cache dtype",
        "window, compressed, index row",
        "a token, all layers",
        f"a request of {CONTEXT_TOKENS:,} tokens",
        "of vLLM's own",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    base = bytes_per_token(cfg, rows[0][2]).of_request(CONTEXT_TOKENS)
    for backend, dtype, records in rows:
        cost = bytes_per_token(cfg, records)
        request = cost.of_request(CONTEXT_TOKENS)
        widths = (records.window, records.compressed, records.index)
        row = " + ".join(str(record.row_bytes) for record in widths)
        lines.append(
            f"| {backend} | {dtype} | {row} B | {cost.global_per_token:,.0f} B | "
            f"{request / 2**20:.1f} MiB | {request / base:.0%} |"
        )
    return "\n".join(lines)
