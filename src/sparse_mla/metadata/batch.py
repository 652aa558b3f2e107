"""What one step computes: the packed rows of its requests, where they stand and where they are stored.

A step packs R requests. Request i brings `q_i` query tokens and has `seq_len_i` tokens after the step, so
packed token t of it stands at position `seq_len_i - q_i + (t - query_start_loc[i])`. Rows past the last
token are padding: their slots are -1 and their positions mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.errors import ArgumentError, IndexRangeError, ShapeError

PREFIX_CACHED_GROUPS = ("c1", "c2")
"""Cache groups whose pages a prefix hit reuses; replayed tokens do not write them."""
RING = "ring"
REPLAY_TOKENS = 128
"""Tokens recomputed before the end of a prefix hit, to refill the window caches."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step. Build it with `from_requests`, or from an engine's own tensors."""

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
                `replay_start .. replay_start + replay_tokens - 1` are being replayed (spec of bounded
                replay): their slots in prefix-cached groups are -1.
            replay_tokens: length of a replay.
            causal: False for a DSpark block.
            device: of the tensors.

        Raises:
            ShapeError: lists of different lengths, or a table too short for its request.
            ArgumentError: a negative length, a sequence shorter than its query, groups that differ.
            IndexRangeError: a query token without a page.
        """
        starts = [0] * len(query_lens) if replay_start is None else list(replay_start)
        _check_lengths(query_lens, seq_lens, starts, block_tables, page_tokens)
        check_at_least("replay_tokens", replay_tokens, 0)
        total = sum(query_lens)
        rows = total if pad_to is None else pad_to
        if rows < total:
            raise ShapeError("pad_to", rows, f"at least the {total} query tokens")
        positions = torch.zeros(rows, dtype=torch.int64)
        offsets = [0]
        for count, length in zip(query_lens, seq_lens, strict=True):
            offsets.append(offsets[-1] + count)
            positions[offsets[-2] : offsets[-1]] = torch.arange(length - count, length)
        slots = {name: torch.full((rows,), -1, dtype=torch.int64) for name in block_tables}
        for name, tables in block_tables.items():
            for request, table in enumerate(tables):
                begin, end = offsets[request], offsets[request + 1]
                replayed = None
                if name in PREFIX_CACHED_GROUPS and starts[request] > 0:
                    replayed = range(starts[request], starts[request] + replay_tokens)
                slots[name][begin:end] = _slots(
                    name, request, table, positions[begin:end], page_tokens[name], replayed
                )
        start_loc = torch.tensor(offsets, dtype=torch.int32)
        return cls(
            query_start_loc=start_loc.to(device),
            query_start_loc_cpu=start_loc,
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            positions=positions.to(device),
            block_tables={name: _table(rows_, device) for name, rows_ in block_tables.items()},
            slot_mappings={name: some.to(device) for name, some in slots.items()},
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            num_actual_tokens=total,
            replay_start=None
            if replay_start is None
            else torch.tensor(starts, dtype=torch.int32, device=device),
            causal=causal,
        )


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
        check_at_least(f"query_lens[{request}]", query, 0)
        if length < query:
            raise ArgumentError(
                f"seq_lens[{request}]", length, f"at least its {query} query tokens",
                "seq_lens counts the tokens after the step",
            )  # fmt: skip
        check_at_least(f"replay_start[{request}]", starts[request], 0)


def _slots(
    name: str,
    request: int,
    table: Sequence[int],
    positions: Tensor,
    page_tokens: int,
    replayed: range | None,
) -> Tensor:
    """int64 slots of a request's query tokens in one group."""
    argument = f"block_tables[{name!r}][{request}]"
    if not len(positions):
        return positions
    pages = torch.tensor(list(table), dtype=torch.int64)
    if name == RING:
        if len(table) != 1:
            raise ShapeError(argument, f"{len(table)} blocks", "one block of a request")
        block = int(pages[0])
        slots = block * page_tokens + positions % page_tokens
        return slots if block > 0 else torch.full_like(positions, -1)
    index = positions // page_tokens
    if int(index[-1]) >= len(table):
        raise ShapeError(
            argument, f"{len(table)} pages of {page_tokens} tokens",
            f"at least {int(index[-1]) + 1} for {int(positions[-1]) + 1} tokens",
            "allocate pages before the step",
        )  # fmt: skip
    page = pages[index]
    written = torch.ones_like(page, dtype=torch.bool)
    if replayed is not None:
        written = (positions < replayed.start) | (positions >= replayed.stop)
    if bool((written & (page < 0)).any()):
        first = int(positions[written & (page < 0)][0])
        raise IndexRangeError(
            argument, f"no page for position {first}", "a page for every query token",
            "allocate pages before the step",
        )  # fmt: skip
    return torch.where(written, page * page_tokens + positions % page_tokens, -1)


def _table(tables: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """int32 [R, widest], -1 past a request's own pages."""
    width = max((len(table) for table in tables), default=0)
    padded = [[*table, *[-1] * (width - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.int32).view(len(tables), width).to(device)
