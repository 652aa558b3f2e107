"""Request lists: how many tokens each request brings and how many it asks for.

Two CSV forms, told apart by the header:

    TIMESTAMP,ContextTokens,GeneratedTokens      arrival time, prompt tokens, generated tokens
    prompt_tokens,output_tokens                  the same without times (arrival in file order)

The whole file is checked before anything runs, so a bad line 9,000 stops a run of 8 requests too.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sparse_mla.errors import TraceError

TIMED_HEADER = ("timestamp", "contexttokens", "generatedtokens")
PLAIN_HEADERS = (
    ("prompt_tokens", "output_tokens"),
    ("prompt", "output"),
    ("contexttokens", "generatedtokens"),
)
DEFAULT_TRACE = "requests.csv"
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a request list."""

    prompt_tokens: int  # >= 1
    generated_tokens: int  # >= 1; the first one comes out of the prompt's last row
    arrival_s: float  # seconds after the first request, 0 without timestamps
    line: int  # line of the file, the header is line 1

    @property
    def rows(self) -> int:
        """Rows that pass through the layers: the last generated token is never fed back."""
        return self.prompt_tokens + self.generated_tokens - 1


def read_trace(
    path: str | Path, *, limit: int | None = None, max_rows: int = MAX_TOKENS
) -> list[TraceRequest]:
    """Read a request list, in order of arrival.

    Args:
        path: CSV file in UTF-8.
        limit: keep the first `limit` requests (all lines are checked all the same); None = all.
        max_rows: longest context that the model takes; a kept request beyond it is an error.

    Raises:
        TraceError: file, line and reason. Line 0 means the file as a whole.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TraceError(str(file), 0, error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TraceError(str(file), line, "not UTF-8 text") from error
    return parse_trace(text, str(file), limit=limit, max_rows=max_rows)


def default_trace(*, limit: int | None = None, max_rows: int = MAX_TOKENS) -> list[TraceRequest]:
    """The request list inside this package (written by `engine/make_requests.py`)."""
    text = resources.files("sparse_mla.engine").joinpath(DEFAULT_TRACE).read_text(encoding="utf-8")
    return parse_trace(text, DEFAULT_TRACE, limit=limit, max_rows=max_rows)


def parse_trace(
    text: str, name: str, *, limit: int | None = None, max_rows: int = MAX_TOKENS
) -> list[TraceRequest]:
    """`read_trace` of a text; `name` is what errors call the file."""
    rows = _rows(text, name)
    empty: list[str] = []
    line, header = next(rows, (1, empty))
    names = tuple(cell.strip().lower() for cell in header)
    if names != TIMED_HEADER and names not in PLAIN_HEADERS:
        raise TraceError(
            name,
            line,
            f"unknown header {','.join(header)!r}; wanted TIMESTAMP,ContextTokens,GeneratedTokens "
            "or prompt_tokens,output_tokens",
        )
    timed = names == TIMED_HEADER
    seen = []
    for line, cells in rows:
        if len(cells) != len(names):
            raise TraceError(name, line, f"{len(cells)} columns, wanted {len(names)}")
        when = _seconds(cells[0], name, line) if timed else 0.0
        prompt = _count(cells[-2], header[-2], name, line)
        generated = _count(cells[-1], header[-1], name, line)
        seen.append((when, TraceRequest(prompt, generated, 0.0, line)))
    if not seen:
        raise TraceError(name, line, "no request below the header")
    seen.sort(key=lambda item: item[0])  # stable: equal times keep the order of the file
    first = seen[0][0]
    kept = [
        TraceRequest(request.prompt_tokens, request.generated_tokens, when - first, request.line)
        for when, request in seen[:limit]
    ]
    for request in kept:
        if request.rows > max_rows:
            raise TraceError(
                name, request.line, f"{request.rows} tokens, but the model takes {max_rows}"
            )
    return kept


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every line that is not blank."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise TraceError(name, max(reader.line_num, 1), f"not CSV: {error}") from error


def _count(cell: str, column: str, name: str, line: int) -> int:
    text = cell.strip()
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= MAX_TOKENS:
        raise TraceError(
            name, line, f"{column.strip()} is {text!r}, wanted a whole number of tokens, 1 or more"
        )
    return int(text)


def _seconds(cell: str, name: str, line: int) -> float:
    """Seconds of a timestamp such as `2023-11-16 18:17:03.9799600` (any number of decimals)."""
    text = cell.strip()
    whole, _, fraction = text.partition(".")
    try:
        moment = datetime.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
        decimals = float(f"0.{fraction}") if fraction.isdigit() or not fraction else float("nan")
    except ValueError:
        decimals = float("nan")
    if decimals != decimals or not text.isascii():
        raise TraceError(
            name, line, f"TIMESTAMP is {text!r}, wanted such as 2023-11-16 18:17:03.97996"
        )
    return (moment - datetime.datetime(1970, 1, 1)).total_seconds() + decimals
