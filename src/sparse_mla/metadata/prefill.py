"""Arithmetic for engines that plan prefills in chunks, and of bounded window replay.

Our attention reads paged rows, so nothing here is needed to run it; an engine that gathers rows into a
workspace first, or that replays windows after a prefix hit, plans with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_mla._checks import check_at_least
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ShapeError
from sparse_mla.metadata.batch import REPLAY_TOKENS

_WORKSPACE_REQUESTS = 4


def gather_length(seq_len: int, query_len: int, window: int, replay_start: int = 0) -> int:
    """Window rows that a prefill reads: its own and up to `window - 1` before them."""
    prefix = seq_len - query_len
    return query_len + min(max(prefix - replay_start, 0), window - 1)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Requests `first .. end - 1` that share a workspace of `end - first` times `rows` rows."""

    first: int
    end: int
    compressed_rows: int  # most compressed entries of a request
    rows: int  # those, and most window rows of a request


def plan_prefill_chunks(
    cfg: ModelConfig,
    ratio: int,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    max_model_len: int,
    max_batched_tokens: int,
    workspace_requests: int = _WORKSPACE_REQUESTS,
) -> list[PrefillChunk]:
    """Cut consecutive prefills into chunks whose padded rows fit a workspace.

    The workspace has `workspace_requests * (ceil(max_model_len / ratio) + window + max_batched_tokens)`
    rows (no compressed part for ratio 0). A chunk has at least one request.

    Raises:
        ShapeError: the two lists differ in length.
    """
    if len(seq_lens) != len(query_lens):
        raise ShapeError("query_lens", f"{len(query_lens)} entries", f"{len(seq_lens)}")
    check_at_least("max_model_len", max_model_len, 1)
    compressed_max = -(-max_model_len // ratio) if ratio else 0
    area = workspace_requests * (compressed_max + cfg.sliding_window + max_batched_tokens)
    compressed = [length // ratio if ratio else 0 for length in seq_lens]
    gathers = [
        gather_length(length, query, cfg.sliding_window)
        for length, query in zip(seq_lens, query_lens, strict=True)
    ]
    chunks: list[PrefillChunk] = []
    first = 0
    while first < len(seq_lens):
        entries, rows, end = compressed[first], gathers[first], first + 1
        while end < len(seq_lens):
            wider = max(entries, compressed[end]), max(rows, gathers[end])
            if (end - first + 1) * sum(wider) > area:
                break
            (entries, rows), end = wider, end + 1
        chunks.append(PrefillChunk(first, end, entries, entries + rows))
        first = end
    return chunks


@dataclass(frozen=True, slots=True)
class WorkspaceRow:
    """Where one query's keys lie in the gathered workspace of its chunk."""

    indices: list[int]  # compressed entries, then window rows, oldest first; -1 = no entry
    positions: list[int]  # token positions of the window rows, the last part of `indices`


def workspace_row(
    chunk: PrefillChunk,
    topk: Sequence[int],
    *,
    request: int,
    position: int,
    seq_len: int,
    query_len: int,
    ratio: int,
    window: int,
    replay_start: int = 0,
) -> WorkspaceRow:
    """List of a prefill query over a workspace of gathered rows.

    Request b of the chunk (counted from its first) owns `chunk.rows` rows: its compressed entries, then
    from `chunk.compressed_rows` on the window rows of its last `gather_length` positions. The list is as
    long as it counts: `min((position + 1) // ratio, len(topk))` entries, holes included, and the window.

    Args:
        chunk: the query's chunk.
        topk: request-local compressed positions of the query, negative = none.
        request: of the query, an index into the step's prefills.
        position: of the query.
        seq_len: tokens of the request after the step.
        query_len: its query tokens.
        ratio: of the layer, 0 for window only.
        window: tokens, the query itself included.
        replay_start: first position with window KV.
    """
    base = (request - chunk.first) * chunk.rows
    visible = min((position + 1) // ratio, len(topk)) if ratio else 0
    entries = [
        base + entry if 0 <= entry < chunk.compressed_rows else -1
        for entry in topk[: max(visible, 0)]
    ]
    gathered = seq_len - gather_length(seq_len, query_len, window, replay_start)
    first = max(position - window + 1, 0, gathered)
    positions = list(range(first, position + 1))
    shift = base + chunk.compressed_rows - gathered
    return WorkspaceRow(entries + [shift + at for at in positions], positions)


def replay_start(hit_tokens: int, replay_tokens: int = REPLAY_TOKENS) -> int:
    """First position to recompute after a prefix hit, so that the window caches are filled again."""
    check_at_least("hit_tokens", hit_tokens, 0)
    return hit_tokens - min(replay_tokens, hit_tokens)


def trimmed_window_bound(seq_len: int, start: int, window: int) -> int:
    """Lowest window position of layers above the last KV source when prefill rows were trimmed.

    Those layers run only on a request's last `window` rows, so they hold no key below
    `max(replay_start, seq_len - window)`.
    """
    return max(start, seq_len - window)
