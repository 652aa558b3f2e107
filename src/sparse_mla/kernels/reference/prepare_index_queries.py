"""Rotate and quantise indexer queries: one head at a time."""

from __future__ import annotations

import torch

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.records import ScaleFormat
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    PrepareIndexQueriesCall,
    index_weight_scale,
)
from sparse_mla.kernels.reference.write_index_keys import rotate_row


def prepare_index_queries(call: PrepareIndexQueriesCall) -> IndexQueries:
    """Quantised queries and their head weights; see `IndexQueries`."""
    tokens, heads, dim = call.queries.shape
    record = call.record
    folds = record.scale_format is ScaleFormat.F32
    codes = torch.empty(tokens, heads, record.data_bytes, dtype=torch.uint8)
    scales = torch.empty(tokens, heads, record.scale_bytes, dtype=torch.uint8)
    weights = call.weights.float()
    for token in range(tokens):
        for head in range(heads):
            rotated = rotate_row(call.queries[token, head], int(call.positions[token]), call.rope)
            data, scale = encode_rows(record, rotated[None])
            codes[token, head], scales[token, head] = data[0], scale[0]
            if folds:
                weights[token, head] *= float(scale.contiguous().view(torch.float32))
            weights[token, head] *= index_weight_scale(heads, dim)
    return IndexQueries(record, codes, None if folds else scales, weights)
