"""Score index keys and keep the best positions of each row, on any GPU that Triton knows.

Scores are float32 sums made by tensor cores, so two keys whose exact scores differ by less than a
rounding of the sum (about 2**-22 of `sum_h |weight_h| |q_h| |k|`) may be ordered either way; the choice
among the float32 scores is exact, ties go to the lower position. Scores of a row do not depend on the
other rows, except that steps of many rows a request run another kernel, whose sum over heads may be
grouped differently. Rows that hold NaN codes get lists within range, of unspecified entries.

Scratch: rows are processed in chunks whose scores and lists fit into `SCORE_SCRATCH_BYTES`, from the
longest context that the caller allows, never from data. Nothing waits for the device, and which kernels
are launched follows from the call's shapes and its `max_visible`: a call can be captured into a graph
that is replayed with other counts up to `max_visible`, other tables and other requests. Chunks of at most
`FEW_ROWS` rows select by a kernel of their own, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sparse_mla.kernels.division import magic_division
from sparse_mla.kernels.index_contract import IndexTopkCall, IndexTopkOut
from sparse_mla.kernels.triton.index_scores import row_scores_kernel, shared_scores_kernel
from sparse_mla.kernels.triton.index_select import (
    block_maxima_kernel,
    select_blocks_kernel,
    select_positions_kernel,
)
from sparse_mla.kernels.triton.index_select_parts import HEADER, MAX_PARTS, select_parts_kernel
from sparse_mla.kernels.triton.launch import (
    DeviceFacts,
    compile_mode,
    device_facts,
    gluon_available,
)

SCORE_SCRATCH_BYTES = 128 << 20
"""What the scores of a chunk of rows may take; one row takes 4.2 MB at 2**20 keys."""
KEYS = 128
"""Keys of a tile."""
GROUP = 16
"""Keys whose best score is kept beside the scores. The select kernel then looks at keys / 16 maxima and at
16 * topk scores: at 128K keys, 8192 of each, one pass of `SELECT_LANES`."""
SHARED_LANES = 128
"""(row, head) pairs of one product in the kernel that shares keys among rows."""
SHARED_PARTS = 4
"""Products that one loaded tile of keys is used for."""
ROWS_TO_SHARE = 4
"""Rows a request, on average, from which sharing a tile of keys pays."""
MAX_TILES, PROGRAMS_PER_SM = 8, 8
"""A program of the other kernel takes as many tiles of its row as leave each multiprocessor this many
programs, and no more than `MAX_TILES`."""
HOPPER_MAX_TILES, HOPPER_PROGRAMS_PER_SM, HOPPER_REGISTERS = 32, 5, 96
"""The same of the kernel with Hopper's layouts, whose tiles are half as large. With so few registers five
programs share a multiprocessor. H200, 128 rows of 128K FP8 keys, selection included: 605 us; without the
cap (107 registers, 4 programs) 644, at most 16 tiles 608, 64 tiles 616. That was before programs looked up
the pages of their tiles at once, which they do for 32 at most (`LOOKED_UP`)."""
SELECT_LANES = 8192
SELECT_WARPS = 16
MAXIMA_BLOCKS = 256
FEW_ROWS = 16
"""Rows of a chunk up to which several programs select for a row: 8 for each of 16. Fewer would have to
look at so much each that one program, which looks at the best groups alone, is as fast (counted)."""
PART_KEYS = 2048
"""Keys that a program of these looks at together, and the fewest that are worth a program."""
PART_LANES, PART_FOLD = 8192, 4
"""Groups loaded at once, and how many are folded to a value that the passes of a program look at."""
PART_WARPS, PART_REGISTERS = 8, 128
"""Of such a program, so that two fit on a multiprocessor; nothing spills."""
FEW_LISTED, MANY_LISTED = 1024, 2048
"""Listed columns that the last program chooses among where they lie, and those it holds in registers once
gaps are closed. Twice as many of the latter would take 160 registers."""


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What a chunk of rows is scored into; the next chunk overwrites it."""

    scores: Tensor  # int32 [rows, columns] in integer order
    maxima: Tensor  # int32 [rows, columns / GROUP]
    lists: Tensor  # int32 [rows, topk] chosen groups, or what the parts of each row list
    parts: int  # programs that select for a row; 0: one, by another kernel
    blocks: Tensor | None  # int32 [rows, blocks], if candidates are published


def row_bytes(columns: int, lists: int, blocks: int) -> int:
    """Scratch of one row: its scores, the best of each group, its lists, the best of blocks."""
    return 4 * (columns + columns // GROUP + lists + blocks)


def parts_of(rows: int, columns: int) -> int:
    """How many programs select for a row of a chunk; 0 if one does, by the kernel for many rows."""
    if rows > FEW_ROWS:
        return 0
    most: int = MAX_PARTS.value // rows
    return max(1, min(most, -(-columns // PART_KEYS)))


def lists_width(topk: int, parts: int) -> int:
    """Entries of a row's lists: the chosen groups, or a header and the best columns of every part."""
    header: int = HEADER.value
    return header + 2 * parts * topk if parts else topk


def scratch_bytes(max_visible: int, topk: int, candidate_block_size: int = 8) -> int:
    """Upper bound of what `index_topk` allocates beside its arguments, for any number of rows.

    Only a single row of more than about 30 million keys passes the constant.
    """
    columns = -(-max_visible // KEYS) * KEYS
    widest = lists_width(topk, parts_of(1, columns))
    one = row_bytes(columns, widest, -(-max_visible // candidate_block_size))
    return max(SCORE_SCRATCH_BYTES, one)


def index_topk(call: IndexTopkCall, out: IndexTopkOut) -> None:
    """Fill the lists of every row; the rule is that of `IndexTopkCall` and `IndexTopkOut`.

    A row that sees at most `topk` keys takes all of them and publishes no candidates (-1). A key on a
    page that the request does not have is never chosen.
    """
    tokens = call.queries.num_tokens
    if tokens == 0:
        return
    limit = min(call.max_visible, call.block_table.shape[1] * call.keys.page_rows)
    if not call.keys.num_slots:
        limit = 0
    if limit <= call.topk:
        columns = 0
    elif call.candidates is not None:
        columns = call.candidates.shape[1] * call.candidate_block_size
    else:
        columns = limit
    columns = -(-columns // KEYS) * KEYS
    blocks = 0 if out.candidates is None or not columns else -(-limit // call.candidate_block_size)
    rows = max(1, min(tokens, SCORE_SCRATCH_BYTES // row_bytes(columns, call.topk, blocks)))
    parts = parts_of(rows, columns)
    lists = lists_width(call.topk, parts)
    rows = max(1, min(rows, SCORE_SCRATCH_BYTES // row_bytes(columns, lists, blocks)))
    scratch = _allocate(rows, columns, lists, blocks, parts, out)
    requests = _requests(call)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if columns:
            _score(call, requests, scratch, first, count, limit)
        _select(call, out, scratch, first, count, limit)


def _allocate(
    rows: int, columns: int, lists: int, blocks: int, parts: int, out: IndexTopkOut
) -> _Scratch:
    def empty(width: int) -> Tensor:
        return torch.empty(rows, width, dtype=torch.int32, device=out.positions.device)

    wanted = None if out.candidates is None else empty(blocks)
    return _Scratch(empty(columns), empty(columns // GROUP), empty(lists), parts, wanted)


def _requests(call: IndexTopkCall) -> Tensor:
    """int32 [T], the request of each row."""
    if call.request_ids is not None:
        return call.request_ids
    offsets = call.query_start_loc.long()
    counts = offsets[1:] - offsets[:-1]
    requests = torch.zeros(call.queries.num_tokens, dtype=torch.int32)
    ids = torch.arange(counts.shape[0], dtype=torch.int32)
    requests[: int(offsets[-1])] = torch.repeat_interleave(ids, counts)
    return requests.to(call.visible.device, non_blocking=True)


def _score(
    call: IndexTopkCall, requests: Tensor, scratch: _Scratch, first: int, count: int, limit: int
) -> None:
    queries, cache, candidates = call.queries, call.keys, call.candidates
    facts = device_facts(call.visible.device)
    heads = max(16, triton.next_power_of_2(queries.num_heads))
    tiles = scratch.scores.shape[1] // KEYS
    num_requests = call.query_start_loc.shape[0] - 1
    shared = candidates is None and queries.num_tokens >= ROWS_TO_SHARE * num_requests
    unit = 16 if cache.page_stride_bytes % 16 == 0 and cache.pages.data_ptr() % 16 == 0 else 4
    arguments = (
        scratch.scores,
        scratch.maxima,
        scratch.lists,
        queries.codes,
        queries.codes if queries.scales is None else queries.scales,
        queries.weights,
        cache.pages,
        call.block_table,
        requests,
        call.visible,
        first,
        tiles,
        queries.num_heads,
        call.topk,
        limit,
        call.block_table.shape[1],
        cache.num_pages,
        cache.page_rows,
        cache.page_stride_bytes // unit,
        scratch.scores.stride(0),
        scratch.maxima.stride(0),
        scratch.lists.stride(0),
        call.block_table.stride(0),
    )
    mode = compile_mode(row_scores_kernel)
    if shared:
        share = max(1, SHARED_LANES // heads)
        programs = -(-count // (share * SHARED_PARTS)) * tiles
        shared_scores_kernel[(programs,)](
            *arguments, count, RECORD=cache.record, UNIT=unit, HEADS=heads, KEYS=KEYS, GROUP=GROUP,
            ROWS=share, PARTS=SHARED_PARTS, MODE=mode, num_warps=8,
        )  # fmt: skip
        return
    listed = call.visible[:, None] if candidates is None else candidates
    if use_hopper_scores(facts, mode):
        _score_on_hopper(call, arguments, listed, count, heads, unit)
        return
    per_program = max(1, min(MAX_TILES, count * tiles // (PROGRAMS_PER_SM * facts.num_sms)))
    row_scores_kernel[(count * -(-tiles // per_program),)](
        *arguments, per_program, listed, listed.shape[1], call.candidate_block_size,
        listed.stride(0), RECORD=cache.record, UNIT=unit, HEADS=heads, KEYS=KEYS, GROUP=GROUP,
        FILTER=candidates is not None, MODE=mode, num_warps=4,
    )  # fmt: skip


def use_hopper_scores(facts: DeviceFacts, mode: str) -> bool:
    """Whether rows that share no keys are scored by the kernel with Hopper's layouts."""
    return mode == "ptx" and facts.capability[0] == 9 and gluon_available()


def _score_on_hopper(
    call: IndexTopkCall,
    arguments: tuple[Tensor | int, ...],  # as the other kernel takes them
    listed: Tensor,
    count: int,
    heads: int,
    unit: int,
) -> None:
    from sparse_mla.kernels.triton import index_scores_hopper as hopper

    cache, block_size = call.keys, call.candidate_block_size
    head, (tiles, *middle), (page_stride, *strides) = (
        arguments[:11], arguments[11:18], arguments[18:]
    )  # fmt: skip
    tiles = int(tiles) * KEYS // hopper.KEYS
    busy = HOPPER_PROGRAMS_PER_SM * device_facts(call.visible.device).num_sms
    per_program = max(1, min(HOPPER_MAX_TILES, -(-count * tiles // busy)))
    hopper.hopper_scores_kernel[(count * -(-tiles // per_program),)](
        *head, tiles, *middle, *magic_division(cache.page_rows), page_stride, *strides,
        per_program, listed, listed.shape[1], block_size, *magic_division(block_size),
        listed.stride(0), RECORD=cache.record, UNIT=unit, HEADS=heads, KEYS=hopper.KEYS,
        GROUP=GROUP, FILTER=call.candidates is not None,
        LAYOUTS=hopper.layouts(cache.record, heads), num_warps=hopper.WARPS,
        maxnreg=HOPPER_REGISTERS if heads <= 32 else None,
    )  # fmt: skip


def _select(
    call: IndexTopkCall, out: IndexTopkOut, scratch: _Scratch, first: int, count: int, limit: int
) -> None:
    _select_positions(call, out, scratch, first, count, limit)
    block_size, scores = call.candidate_block_size, scratch.scores
    published, best = out.candidates, scratch.blocks
    if published is None or best is None:
        return
    if best.shape[1]:
        parts = -(-best.shape[1] // MAXIMA_BLOCKS)
        block_maxima_kernel[(count * parts,)](
            best, scores, call.visible, first, call.topk, limit, best.shape[1], block_size,
            scores.stride(0), best.stride(0), BLOCKS=MAXIMA_BLOCKS, num_warps=4,
        )  # fmt: skip
    select_blocks_kernel[(count,)](
        published, best, call.visible, first, call.topk, limit, block_size, published.shape[1],
        best.stride(0), published.stride(0), LANES=SELECT_LANES, num_warps=SELECT_WARPS,
    )  # fmt: skip


def _select_positions(
    call: IndexTopkCall, out: IndexTopkOut, scratch: _Scratch, first: int, count: int, limit: int
) -> None:
    candidates, lists, parts = call.candidates, scratch.lists, scratch.parts
    head = (
        out.positions, lists, scratch.scores, scratch.maxima, call.visible,
        call.visible if candidates is None else candidates, first, call.topk, limit,
        0 if candidates is None else candidates.shape[1], call.candidate_block_size,
    )  # fmt: skip
    strides = (
        scratch.scores.stride(0), scratch.maxima.stride(0), lists.stride(0), out.positions.stride(0),
        0 if candidates is None else candidates.stride(0),
    )  # fmt: skip
    if parts:
        select_parts_kernel[(count * parts,)](
            *head, parts, *strides, LANES=PART_LANES, FOLD=PART_FOLD, KEYS=PART_KEYS,
            FEW=FEW_LISTED, MANY=MANY_LISTED, GROUP=GROUP, FILTER=candidates is not None,
            num_warps=PART_WARPS, maxnreg=PART_REGISTERS,
        )  # fmt: skip
        return
    select_positions_kernel[(count,)](
        *head, *strides, LANES=SELECT_LANES, GROUP=GROUP, FILTER=candidates is not None,
        num_warps=SELECT_WARPS,
    )  # fmt: skip
