"""The metadata rules once more, one token and one lane at a time, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One request of a step."""

    query: int
    seq: int
    tables: dict[str, list[int]]
    replay: int = 0


def slot(table: list[int], index: int, rows: int) -> int:
    """Slot of an entry, -1 without a page."""
    page = table[index // rows] if index // rows < len(table) else -1
    return page * rows + index % rows if page >= 0 else -1


def tokens(requests: list[Request], pad_to: int) -> list[tuple[Request, int] | None]:
    """(request, position) of every row, None for padding."""
    rows: list[tuple[Request, int] | None] = [
        (request, request.seq - request.query + t)
        for request in requests
        for t in range(request.query)
    ]
    return rows + [None] * (pad_to - len(rows))


def window_row(
    request: Request, position: int, window: int, width: int, rows: int, causal: bool
) -> list[int]:
    """Slots of a row's window, padded with -1."""
    if causal:
        span = range(max(position - window + 1, 0, request.replay), position + 1)
    else:
        span = range(max(request.seq - request.query - window, 0), request.seq)
    lanes = [slot(request.tables["window"], p, rows) for p in span]
    return lanes + [-1] * (width - len(lanes))


def compressed_slot(request: Request, position: int, ratio: int, rows: int, replay: int) -> int:
    """Slot of the entry that a token closes."""
    replayed = request.replay > 0 and request.replay <= position < request.replay + replay
    if (position + 1) % ratio or replayed:
        return -1
    return slot(request.tables[f"c{ratio}"], position // ratio, rows)
