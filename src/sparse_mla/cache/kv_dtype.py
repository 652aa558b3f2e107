"""Names of KV cache formats, the records behind them, and what a token costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, MXFP8, NVFP4, V4, RecordFormat
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.errors import ArgumentError

RING_WIDTH = 1024
"""float32 values of one compressor state row: 512 of the latent, 512 of the gate."""
RING_LEAST_ROWS = 8


@dataclass(frozen=True, slots=True)
class RecordSet:
    """The records of a model's caches."""

    window: RecordFormat
    compressed: RecordFormat
    index: RecordFormat
    name: str  # the resolved KV cache dtype


_PAIRS = {  # name: (window, compressed, index keys); the first is what the model was trained with
    "nvfp4_ds_mla": (MXFP8, NVFP4, INDEX_MXFP4),
    "fp8_ds_mla": (MXFP8, MXFP8, INDEX_FP8),
    "fp8_ds_mla_v4": (V4, V4, INDEX_FP8),
}
_ALIASES = {"fp8": "fp8_ds_mla"}
_INDEX_RECORDS = {"fp8": INDEX_FP8, "mxfp4": INDEX_MXFP4}
KV_CACHE_DTYPES = ("auto", *_ALIASES, *_PAIRS)
"""Every name that `resolve_kv_cache_dtype` accepts."""

_PLAIN = "rows without block scales belong to dense-row backends; V4.1's sparse kernels read packed records"
_REFUSALS = {
    "bfloat16": _PLAIN,
    "bf16": _PLAIN,
    "float16": _PLAIN,
    "fp16": _PLAIN,
    "float32": _PLAIN,
    "fp8_e4m3": f"{_PLAIN}; the packed e4m3 format is called 'fp8_ds_mla'",
    "fp8_e5m2": "every record keeps e4m3 values; two mantissa bits are too few for a latent",
    "fp8_inc": "every record keeps OCP e4m3 values with block scales",
    "int8": "no record keeps integers",
    "nvfp4": "the packed format with e2m1 values is called 'nvfp4_ds_mla'",
    "mxfp4": "MXFP4 is a format of index keys: pass index_dtype='mxfp4'",
}


def resolve_kv_cache_dtype(
    name: str,
    *,
    index_dtype: str = "auto",
    backend: str | None = None,
    supported: Sequence[str] | None = None,
) -> RecordSet:
    """The records that a KV cache dtype stands for.

        nvfp4_ds_mla   window MXFP8, compressed NVFP4, index keys MXFP4 (what the model was trained with)
        fp8_ds_mla     window and compressed MXFP8, index keys FP8; `fp8` is another name of it
        fp8_ds_mla_v4  window and compressed V4, index keys FP8 (what engines keep on Hopper)
        auto           the first of these that the backend reads

    Args:
        name: one of `KV_CACHE_DTYPES`.
        index_dtype: "auto" (the pairs above), "fp8" or "mxfp4".
        backend: how errors call the backend.
        supported: the dtype names that the backend reads; None = all.

    Raises:
        ArgumentError: a name that is unknown, that this library refuses (with the reason), or that the
            backend cannot read.
    """
    readable = [pair for pair in _PAIRS if supported is None or _supports(supported, pair)]
    wanted = _ALIASES.get(name, name)
    if wanted == "auto" and readable:
        wanted = readable[0]
    if wanted not in readable:
        if wanted in _PAIRS or wanted == "auto":
            reader = backend or "the chosen backend"
            remedy = (
                f"{reader} reads {', '.join(supported or ()) or 'none'}; choose another backend"
            )
        else:
            remedy = _REFUSALS.get(name, "choose one of these names")
        allowed = ["auto", *(alias for alias in _ALIASES if _ALIASES[alias] in readable), *readable]
        names = ", ".join(allowed) if readable else "none"
        raise ArgumentError("kv_cache_dtype", repr(name), names, remedy)
    window, compressed, index = _PAIRS[wanted]
    if index_dtype != "auto":
        if index_dtype not in _INDEX_RECORDS:
            raise ArgumentError("index_dtype", repr(index_dtype), "auto, fp8, mxfp4")
        index = _INDEX_RECORDS[index_dtype]
    return RecordSet(window, compressed, index, wanted)


def _supports(supported: Sequence[str], pair: str) -> bool:
    return pair in supported or any(
        alias in supported and target == pair for alias, target in _ALIASES.items()
    )


def ring_rows(num_spec_tokens: int = 0) -> int:
    """Rows of one compressor ring block: `max(8, next power of two >= num_spec_tokens + 2)`.

    Drafts are stored before they are accepted; after a rejection the next chunk starts up to
    `num_spec_tokens + 1` rows back and needs the row before it.
    """
    if num_spec_tokens < 0:
        raise ArgumentError("num_spec_tokens", num_spec_tokens, "an integer >= 0")
    return max(RING_LEAST_ROWS, 1 << (num_spec_tokens + 1).bit_length())


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """What the caches of a model cost, padding of pages not counted."""

    global_per_token: float  # compressed rows and index keys of all KV sources
    window_per_token: int  # one row in every layer's window cache
    window_per_request: int  # `sliding_window` such rows: all that a long request keeps
    ring_per_request: int  # compressor state

    def of_request(self, num_tokens: int) -> float:
        """Bytes of a request of this length."""
        window = min(num_tokens * self.window_per_token, self.window_per_request)
        return num_tokens * self.global_per_token + window + self.ring_per_request


def bytes_per_token(
    cfg: ModelConfig, records: RecordSet, *, num_spec_tokens: int = 0
) -> CacheBytes:
    """Bytes of the records of one token and one request, over all layers of the model.

    A ratio-2 source keeps one row for two tokens, so a token costs half a row there.
    """
    layers = [layer_topology(cfg, layer_id) for layer_id in range(cfg.num_layers)]
    row_bytes = records.compressed.row_bytes + records.index.row_bytes
    window = len(layers) * records.window.row_bytes
    rings = sum(layer.has_gate for layer in layers)
    return CacheBytes(
        global_per_token=sum(
            row_bytes / layer.ratio for layer in layers if layer.owns_compressed_cache
        ),
        window_per_token=window,
        window_per_request=cfg.sliding_window * window,
        ring_per_request=rings * ring_rows(num_spec_tokens) * RING_WIDTH * 4,
    )
