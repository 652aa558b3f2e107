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


def list_slots(
    table: list[int], positions: list[int], visible: int, rows: int
) -> tuple[list[int], int]:
    """Slots of a list of compressed positions, and its length if the row is a token."""
    slots = [slot(table, p, rows) if 0 <= p < visible else -1 for p in positions]
    return slots, max((lane + 1 for lane, one in enumerate(slots) if one >= 0), default=0)


def ring_slot(request: Request, position: int, capacity: int) -> int:
    """Ring row of a token, -1 in the null block."""
    block = request.tables["ring"][0]
    return block * capacity + position % capacity if block else -1


def split(query_lens: list[int], num_rows: int, threshold: int) -> tuple[int, int, int, int]:
    """(decodes, prefills, decode rows, prefill rows), the way the rule is worded."""
    if max(query_lens, default=0) <= threshold:
        return len(query_lens), 0, num_rows, 0
    decodes = 0
    while query_lens[decodes] <= threshold:
        decodes += 1
    rows = sum(query_lens[:decodes])
    return decodes, len(query_lens) - decodes, rows, num_rows - rows
