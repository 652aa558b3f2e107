"""Score index keys and keep the best positions: one row and one key at a time.

Roundings that the selection depends on, and the CPU's kernel keeps: a dot product is exact and
rounded to float32 once; `weight * relu(dot)` is a float32 product; heads are added in ascending order
in float32. Kernels on tensor cores sum in float32 and say what that means for near ties.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from sparse_mla.cache.codec import decode_rows
from sparse_mla.kernels.index_contract import IndexTopkCall, IndexTopkOut, host_rows


def index_topk(call: IndexTopkCall, out: IndexTopkOut) -> None:
    """Fill the lists of every row; see `IndexTopkCall`, `IndexTopkOut`."""
    out.positions.fill_(-1)
    if out.candidates is not None:
        out.candidates.fill_(-1)
    for request, (first, last) in enumerate(host_rows(call.query_start_loc)):
        for row in range(first, last):
            visible = int(call.visible[row])
            if visible <= call.topk:
                out.positions[row, :visible] = torch.arange(visible, dtype=torch.int32)
                continue
            scores = [score_one(call, row, request, key) for key in range(visible)]
            if out.candidates is not None:
                blocks = _best_blocks(scores, call.candidate_block_size, out.candidates.shape[1])
                out.candidates[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            if call.candidates is not None:
                kept = {int(block) for block in call.candidates[row] if int(block) >= 0}
                for key in range(visible):
                    if key // call.candidate_block_size not in kept:
                        scores[key] = -math.inf
            chosen = best(scores, call.topk)
            out.positions[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)


def score_one(call: IndexTopkCall, row: int, request: int, key: int) -> float:
    """The float32 score of one key for one row."""
    queries = call.queries
    page, offset = divmod(key, call.keys.page_rows)
    slot = int(call.block_table[request, page]) * call.keys.page_rows + offset
    data, scales = call.keys.read_rows(torch.tensor([slot]))
    key_values = decode_rows(call.keys.record, data, scales, torch.float32).double()[0]
    total = np.float32(0)
    for head in range(queries.num_heads):
        if queries.scales is None:
            scale = torch.ones(1, 1).view(torch.uint8)
        else:
            scale = queries.scales[row, head][None]
        codes = queries.codes[row, head][None]
        values = decode_rows(queries.record, codes, scale, torch.float32).double()[0]
        dot = np.float32(float((values * key_values).sum()))
        weight = np.float32(float(queries.weights[row, head]))
        total = np.float32(total + np.float32(weight * max(dot, np.float32(0))))
    return float(total)


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the `count` best scores, ascending; ties to the lower index, -inf never."""
    finite = [index for index, score in enumerate(scores) if score > -math.inf]
    return sorted(sorted(finite, key=lambda index: (-scores[index], index))[:count])


def _best_blocks(scores: list[float], block: int, count: int) -> list[int]:
    blocks = [max(scores[start : start + block]) for start in range(0, len(scores), block)]
    blocks[-1] = math.inf
    return best(blocks, count)
