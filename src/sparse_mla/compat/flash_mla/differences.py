"""What is not the same as in FlashMLA, one row for each; docs/flash_mla.md shows it."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """One thing, there and here."""

    what: str
    flash_mla: str
    here: str


DIFFERENCES = (
    Difference(
        "device",
        "SM90 and SM100 in parts; fused on SM100 only",
        "every NVIDIA GPU from SM80 on, and a CPU",
    ),
    Difference(
        "query heads",
        "64 or 128 (prefill on SM90 also 8, 16, 32)",
        "1 to 128, nothing is padded",
    ),
    Difference("list width (top-k)", "multiple of 64 or 128; fused: of 4 or 8", "any, 0 included"),
    Difference(
        "invalid index in decode",
        "exactly -1; any other one is read out of bounds",
        "any negative; past the cache: none on a GPU, an `IndexRangeError` on a CPU",
    ),
    Difference(
        "lanes past `topk_length`",
        "a NaN row named there may reach the output",
        "never looked at",
    ),
    Difference(
        "records",
        "528 bytes, 288 as extra cache (newest release); 584 in vLLM's copy",
        "584, 528 and 288, as main and as extra cache, in any combination",
    ),
    Difference(
        "layout of 528- and 288-byte rows",
        "fixed by the build",
        "`kv_layout`: setting of the module, or argument of a call",
    ),
    Difference(
        "page stride",
        "multiple of the row (584: of 576) bytes; one mapped range",
        "multiple of 16 bytes; only named rows are read",
    ),
    Difference(
        "rows of 656 bytes, heads of 576 (DeepSeek-V3.2)",
        "older releases",
        "refused: `UnsupportedError`",
    ),
    Difference(
        "dense attention (`indices=None`, `flash_attn_varlen_*`)",
        "some releases",
        "refused: `UnsupportedError`",
    ),
    Difference(
        "errors",
        "`AssertionError`, `RuntimeError`",
        "`ArgumentError` and its kinds (a `ValueError`), `PlanMismatchError` (a `RuntimeError`), "
        "`UnsupportedError` (a `NotImplementedError`)",
    ),
    Difference(
        "`FlashMLASchedMeta`",
        "holds the plan of the first call, stale if lengths change",
        "the same reuse checks; its two tensors stay None, so other lengths are fine",
    ),
    Difference(
        "`is_fp8_kvcache`",
        "default False in older releases, True in the newest",
        "default True",
    ),
    Difference(
        "`out` of `flash_mla_with_kvcache`",
        "vLLM's copy only",
        "by keyword (the newest release has `enable_batch_invariant` at that position)",
    ),
    Difference(
        "`enable_batch_invariant`", "not on SM90, not with 288-byte rows", "on every device"
    ),
    Difference("`n_wv_group`", "groups of 8 heads", "any number that divides the heads"),
    Difference(
        "`enable_q_norm`",
        "in the kernel",
        "in the `torch` backend alone (V4.1 passes False): slow on a GPU",
    ),
    Difference(
        "`kv` of both prefill calls (plain bf16 rows)",
        "tuned",
        "in the `torch` backend alone: slow on a GPU. Pass the paged caches to "
        "`fused_norm_rope_attn_rope_cast.decode` or `flash_mla_with_kvcache` instead, "
        "for any number of tokens: nothing needs to be gathered",
    ),
    Difference(
        "scales given to `permute_wv_proj`",
        "one for 32 columns (older builds: any)",
        "one for 32, 64 or 128",
    ),
    Difference(
        "accuracy against its tests' bounds (decode: abs 1e-3 or rel 2.01/128)",
        "within them",
        "within them on a CPU and with the Hopper kernel; the portable kernel rounds probabilities to "
        "bf16: up to 3 of 1000 values, sums that nearly cancel, lie outside (worst seen 0.011)",
    ),
    Difference(
        "more keywords",
        "-",
        "`backend=`, `kv_layout=`, `out=`; fused: `out_fp8=`, `out_sf=`",
    ),
)
"""In the order of the page."""
