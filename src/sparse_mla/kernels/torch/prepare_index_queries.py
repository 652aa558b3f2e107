"""Rotate and quantise indexer queries; fold what can be folded into the head weights."""

from __future__ import annotations

import torch

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.records import ScaleFormat
from sparse_mla.config.rope import apply_rope
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    PrepareIndexQueriesCall,
    index_weight_scale,
)


def prepare_index_queries(call: PrepareIndexQueriesCall) -> IndexQueries:
    """Queries rotated in float32, rounded to bf16, then quantised like the keys of `call.record`.

    FP8: weight = w * q_scale * head_dim**-0.5 * num_heads**-0.5 in float32, in that order; the
    scale is a positive power of two, so it commutes with relu. MXFP4: the same without `q_scale`.
    """
    tokens, heads, dim = call.queries.shape
    rotated = apply_rope(call.queries, call.positions, call.rope).to(torch.bfloat16)
    codes, scales = encode_rows(call.record, rotated.reshape(tokens * heads, dim))
    weights = call.weights.float()
    kept = scales.view(tokens, heads, call.record.scale_bytes)
    folds = call.record.scale_format is ScaleFormat.F32
    if folds:
        weights = weights * scales.contiguous().view(torch.float32).view(tokens, heads)
    return IndexQueries(
        record=call.record,
        codes=codes.view(tokens, heads, call.record.data_bytes),
        scales=None if folds else kept,
        weights=weights * index_weight_scale(heads, dim),
    )
