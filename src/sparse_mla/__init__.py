"""DeepSeek-V4.1 sparse MLA attention: paged quantised caches, step metadata, attention in one launch.

The names below are loaded on first use, so importing the package touches no GPU and no kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_mla import nn
    from sparse_mla.cache.paged import PagedCache
    from sparse_mla.cache.pool import CachePool
    from sparse_mla.config.model import ModelConfig
    from sparse_mla.config.rope import rope_table
    from sparse_mla.config.topology import LayerKind
    from sparse_mla.errors import SparseMLAError
    from sparse_mla.kernels.contract import KeySet
    from sparse_mla.metadata.batch import StepBatch
    from sparse_mla.metadata.builder import build_metadata
    from sparse_mla.ops.attend import (
        AttendOptions,
        QuantizedOutput,
        mega_attention,
        sparse_attention,
    )
    from sparse_mla.ops.merge import merge_lse

__version__ = "0.1.0"

__all__ = [
    "AttendOptions",
    "CachePool",
    "KeySet",
    "LayerKind",
    "ModelConfig",
    "PagedCache",
    "QuantizedOutput",
    "SparseMLAError",
    "StepBatch",
    "build_metadata",
    "mega_attention",
    "merge_lse",
    "nn",
    "rope_table",
    "sparse_attention",
]

_HOMES = {
    "AttendOptions": "sparse_mla.ops.attend",
    "CachePool": "sparse_mla.cache.pool",
    "KeySet": "sparse_mla.kernels.contract",
    "LayerKind": "sparse_mla.config.topology",
    "ModelConfig": "sparse_mla.config.model",
    "PagedCache": "sparse_mla.cache.paged",
    "QuantizedOutput": "sparse_mla.ops.attend",
    "SparseMLAError": "sparse_mla.errors",
    "StepBatch": "sparse_mla.metadata.batch",
    "build_metadata": "sparse_mla.metadata.builder",
    "mega_attention": "sparse_mla.ops.attend",
    "merge_lse": "sparse_mla.ops.merge",
    "rope_table": "sparse_mla.config.rope",
    "sparse_attention": "sparse_mla.ops.attend",
}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("sparse_mla.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'sparse_mla' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
