"""What one step computes: the packed rows of its requests, where they stand and where they are stored.

A step packs R requests. Request i brings `q_i` query tokens and has `seq_len_i` tokens after the step, so
packed token t of it stands at position `seq_len_i - q_i + (t - query_start_loc[i])`. Rows past the last
token are padding: their slots are -1 and their positions mean nothing.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.errors import ArgumentError, DeviceError, IndexRangeError, ShapeError

PREFIX_CACHED_GROUPS = ("c1", "c2")
"""Cache groups whose pages a prefix hit reuses; replayed tokens do not write them."""
RING = "ring"
REPLAY_TOKENS = 128
"""Tokens recomputed before the end of a prefix hit, to refill the window caches."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step. Build it with `from_requests`, or from an engine's own tensors.

    Raises:
        ShapeError, DTypeError, DeviceError, StrideError: tensors that do not fit each other.
        ArgumentError: host counts that contradict each other.
    """

    query_start_loc: Tensor  # int32 [R + 1], cumulative query tokens
    query_start_loc_cpu: Tensor  # the same on the host
    seq_lens: Tensor  # int32 [R], tokens of each request after the step
    positions: Tensor  # int64 [T], padding rows included
    block_tables: Mapping[str, Tensor]  # by cache group: int32 [R, max_pages], -1 = no page
    slot_mappings: Mapping[str, Tensor]  # by cache group: int64 [T], -1 = do not write
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int  # rows before padding
    replay_start: Tensor | None = None  # int32 [R], first position with window KV; None = 0
    causal: bool = True  # False: a DSpark draft block, whose queries see the whole block

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_counts(self)

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, padding rows included."""
        return self.positions.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are, the host copy apart."""
        return self.positions.device

    @classmethod
    def from_requests(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Mapping[str, Sequence[Sequence[int]]],
        page_tokens: Mapping[str, int],
        *,
        pad_to: int | None = None,
        replay_start: Sequence[int] | None = None,
        replay_tokens: int = REPLAY_TOKENS,
        causal: bool = True,
        device: torch.device | str = "cpu",
    ) -> StepBatch:
        """Describe a step from host lists.

        Args:
            query_lens: query tokens of each request, 0 allowed.
            seq_lens: tokens of each request after the step, at least its query tokens.
            block_tables: by cache group, each request's pages in order; -1 = no page (freed, or never
                had). Every query token needs a page, replayed tokens of prefix-cached groups apart.
                In "ring" a request has one block; block 0 is the null block.
            page_tokens: by cache group, tokens of a page.
            pad_to: rows of the step, at least the query tokens.
            replay_start: first position with window KV of each request, 0 = all. Positions in
                `replayed_positions(replay_start, replay_tokens)` are being replayed: their slots in
                prefix-cached groups are -1.
            replay_tokens: length of a replay.
            causal: False for a DSpark block.
            device: of the tensors.

        Raises:
            ShapeError: lists of different lengths, or a table too short for its request.
            ArgumentError: a length that is no integer, negative or past int32, a sequence shorter than
                its query, a replay that begins inside the step's own tokens, groups that differ.
            IndexRangeError: a query token without a page, or a page id past int32.
        """
        counts = _integers("query_lens", query_lens)
        lengths = _integers("seq_lens", seq_lens)
        starts = [0] * len(counts)
        if replay_start is not None:
            starts = _integers("replay_start", replay_start)
        _check_lengths(counts, lengths, starts, block_tables, page_tokens)
        check_at_least("replay_tokens", replay_tokens, 0)
        total = sum(counts)
        padded = total if pad_to is None else pad_to
        if padded < total:
            raise ShapeError("pad_to", pad_to, f"at least the {total} query tokens")
        rows = _HostRows.of(counts, lengths, starts, padded, replay_tokens)
        tables = {name: _table(name, some) for name, some in block_tables.items()}
        slots = {
            name: _slots(name, table, block_tables[name], rows, page_tokens[name])
            for name, table in tables.items()
        }
        return cls(
            query_start_loc=rows.start_loc.to(device),
            query_start_loc_cpu=rows.start_loc,
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            positions=rows.positions.to(device),
            block_tables={name: table.to(device) for name, table in tables.items()},
            slot_mappings={name: some.to(device) for name, some in slots.items()},
            max_query_len=max(counts, default=0),
            max_seq_len=max(lengths, default=0),
            num_actual_tokens=total,
            replay_start=None
            if replay_start is None
            else torch.tensor(starts, dtype=torch.int32).to(device),
            causal=causal,
        )


def replayed_positions(replay_start: int, replay_tokens: int = REPLAY_TOKENS) -> range:
    """Positions whose window rows are rewritten but whose prefix-cached slots are -1.

    A replay that begins at position 0 is none: everything is computed afresh.
    """
    check_at_least("replay_start", replay_start, 0)
    return range(replay_start, replay_start + (replay_tokens if replay_start else 0))


@dataclass(frozen=True, slots=True)
class _HostRows:
    """The rows of a step on the host, before any cache group is looked at."""

    start_loc: Tensor  # int32 [R + 1]
    requests: Tensor  # int64 [total], request of each query token
    positions: Tensor  # int64 [T], 0 for padding rows
    replayed: Tensor  # bool [total]

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        starts: Sequence[int],
        num_rows: int,
        replay_tokens: int,
    ) -> _HostRows:
        counts = torch.tensor(query_lens, dtype=torch.int64)
        requests = torch.repeat_interleave(torch.arange(len(query_lens)), counts)
        start_loc = torch.zeros(len(query_lens) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=start_loc[1:])
        total = requests.shape[0]
        shift = torch.tensor(seq_lens, dtype=torch.int64) - start_loc[1:]
        positions = torch.zeros(num_rows, dtype=torch.int64)
        own = positions[:total]
        torch.add(torch.arange(total), shift[requests], out=own)
        spans = [replayed_positions(start, replay_tokens) for start in starts]
        first = torch.tensor([span.start for span in spans], dtype=torch.int64)[requests]
        stop = torch.tensor([span.stop for span in spans], dtype=torch.int64)[requests]
        return cls(start_loc.int(), requests, positions, (own >= first) & (own < stop))


def _check_tensors(batch: StepBatch) -> None:
    """Shapes, dtypes and devices; reads no value."""
    device = batch.positions.device
    int32, int64 = (torch.int32,), (torch.int64,)
    check_tensor("positions", batch.positions, shape=("T",), dtypes=int64)
    check_tensor("seq_lens", batch.seq_lens, shape=("R",), dtypes=int32, device=device)
    tokens, requests = batch.num_tokens, batch.num_requests
    for name, tensor, size in (
        ("query_start_loc", batch.query_start_loc, requests + 1),
        ("replay_start", batch.replay_start, requests),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape=(size,), dtypes=int32, device=device)
    check_tensor(
        "query_start_loc_cpu", batch.query_start_loc_cpu, shape=(requests + 1,), dtypes=int32
    )
    if batch.query_start_loc_cpu.device.type != "cpu":
        raise DeviceError(
            "query_start_loc_cpu", f"device {batch.query_start_loc_cpu.device}", "device cpu",
            "a step must not wait for the device; keep the counts on the host",
        )  # fmt: skip
    for group, table in batch.block_tables.items():
        name, shape = f"block_tables[{group!r}]", (requests, "max_pages")
        check_tensor(name, table, shape=shape, dtypes=int32, device=device)
    for group, slots in batch.slot_mappings.items():
        name = f"slot_mappings[{group!r}]"
        check_tensor(name, slots, shape=(tokens,), dtypes=int64, device=device)


def _check_counts(batch: StepBatch) -> None:
    """Host integers against each other."""
    starts = batch.query_start_loc_cpu.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    if starts[0] != 0 or min(counts, default=0) < 0:
        raise ArgumentError("query_start_loc_cpu", _excerpt(starts), "0, then sums that never fall")
    if not starts[-1] <= batch.num_actual_tokens <= batch.num_tokens:
        raise ArgumentError(
            "num_actual_tokens", batch.num_actual_tokens,
            f"at least the {starts[-1]} query tokens, at most the {batch.num_tokens} rows",
        )  # fmt: skip
    check_at_least("max_query_len", batch.max_query_len, max(counts, default=0))
    check_at_least("max_seq_len", batch.max_seq_len, 0)


def _excerpt(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _integers(name: str, values: Sequence[int]) -> list[int]:
    """The values as Python integers in 0 .. 2**31 - 1."""
    whole: list[int] = []
    for number, value in enumerate(values):
        try:
            whole.append(operator.index(value))
        except TypeError:
            raise ArgumentError(f"{name}[{number}]", repr(value), "an integer") from None
        if not 0 <= whole[-1] <= _INT32_MAX:
            raise ArgumentError(f"{name}[{number}]", value, f"an integer in 0..{_INT32_MAX}")
    return whole


def _check_lengths(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Mapping[str, Sequence[Sequence[int]]],
    page_tokens: Mapping[str, int],
) -> None:
    count = len(query_lens)
    for name, values in (("seq_lens", seq_lens), ("replay_start", starts)):
        if len(values) != count:
            raise ShapeError(name, f"{len(values)} entries", f"one for each of {count} requests")
    if set(block_tables) != set(page_tokens):
        raise ArgumentError(
            "page_tokens", sorted(page_tokens), f"the groups of block_tables {sorted(block_tables)}"
        )
    for name, tables in block_tables.items():
        check_at_least(f"page_tokens[{name!r}]", page_tokens[name], 1)
        if len(tables) != count:
            raise ShapeError(
                f"block_tables[{name!r}]", f"{len(tables)} tables", f"{count}, one for each request"
            )
    for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if length < query:
            raise ArgumentError(
                f"seq_lens[{request}]", length, f"at least its {query} query tokens",
                "seq_lens counts the tokens after the step",
            )  # fmt: skip
        if starts[request] > length - query:
            raise ArgumentError(
                f"replay_start[{request}]", starts[request],
                f"at most {length - query}, its tokens before the step",
                "a query below it would not even see itself",
            )  # fmt: skip


def _slots(
    name: str,
    table: Tensor,  # int32 [R, widest]
    pages: Sequence[Sequence[int]],
    rows: _HostRows,
    page_tokens: int,
) -> Tensor:
    """int64 [T], slots of all rows in one group; -1 for padding, replayed and ring-less tokens."""
    total = rows.requests.shape[0]
    slots = torch.full(rows.positions.shape, -1, dtype=torch.int64)
    _check_table_lengths(name, pages, rows, page_tokens)
    if not total:
        return slots
    position = rows.positions[:total]
    index = torch.zeros_like(position) if name == RING else position // page_tokens
    block = table[rows.requests, index].long()
    if name == RING:
        written = block > 0
    else:
        written = torch.ones_like(rows.replayed)
        if name in PREFIX_CACHED_GROUPS:
            written = ~rows.replayed
        missing = written & (block < 0)
        if bool(missing.any()):
            first = int(missing.int().argmax())
            raise IndexRangeError(
                f"block_tables[{name!r}][{int(rows.requests[first])}]",
                f"no page for position {int(position[first])}", "a page for every query token",
                "allocate pages before the step",
            )  # fmt: skip
    slot = block * page_tokens + position % page_tokens
    slots[:total] = torch.where(written, slot, -1)
    return slots


def _check_table_lengths(
    name: str, pages: Sequence[Sequence[int]], rows: _HostRows, page_tokens: int
) -> None:
    """Raise unless each request with query tokens has a page for its last one."""
    ends = rows.start_loc.tolist()
    last = rows.positions.tolist()
    for request, table in enumerate(pages):
        if ends[request] == ends[request + 1]:
            continue
        argument = f"block_tables[{name!r}][{request}]"
        if name == RING:
            if len(table) != 1:
                raise ShapeError(argument, f"{len(table)} blocks", "one block of a request")
            continue
        tokens = last[ends[request + 1] - 1] + 1
        if len(table) * page_tokens < tokens:
            raise ShapeError(
                argument, f"{len(table)} pages of {page_tokens} tokens",
                f"at least {-(-tokens // page_tokens)} for {tokens} tokens",
                "allocate pages before the step",
            )  # fmt: skip


def _table(name: str, tables: Sequence[Sequence[int]]) -> Tensor:
    """int32 [R, widest], -1 past a request's own pages."""
    flat = array("i")
    for request, table in enumerate(tables):
        argument = f"block_tables[{name!r}][{request}]"
        try:
            flat.extend(table)
        except TypeError as error:
            raise ArgumentError(argument, f"({error})", "a sequence of integer page ids") from None
        except OverflowError as error:
            raise IndexRangeError(argument, f"({error})", "page ids that int32 holds") from None
    widths = torch.tensor([len(table) for table in tables], dtype=torch.int64)
    widest = int(widths.max()) if len(tables) else 0
    out = torch.full((len(tables), widest), -1, dtype=torch.int32)
    if len(flat):
        out[torch.arange(widest) < widths[:, None]] = torch.frombuffer(flat, dtype=torch.int32)
    return out
