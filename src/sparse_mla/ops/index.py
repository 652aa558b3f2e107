"""The lightning indexer: store index keys, quantise queries, choose positions."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_choice, check_tensor
from sparse_mla.backends.select import DeviceInfo, Problem, load_kernel, select
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_RECORDS, RecordFormat
from sparse_mla.errors import ArgumentError, CacheFormatError, DeviceError, IndexRangeError
from sparse_mla.kernels.contract import ROPE_DIM
from sparse_mla.kernels.index_contract import (
    IndexQueries,
    IndexTopkCall,
    IndexTopkOut,
    PrepareIndexQueriesCall,
    WriteIndexKeysCall,
)

_INTEGERS = (torch.int32, torch.int64)
_FLOAT = (torch.float32,)
_BF16 = (torch.bfloat16,)


def write_index_keys(call: WriteIndexKeysCall, *, backend: str = "auto") -> None:
    """Norm, rotate at the group's first position, quantise and store the keys of closed groups.

    Args:
        call: what to store; rows with a negative slot are skipped, whatever they hold.
        backend: "auto" or a body's name.

    Raises:
        ArgumentError and its kinds: before anything is stored.
        UnsupportedError: the named backend cannot run it.
    """
    device = call.keys.device
    dim = call.cache.record.dim
    _check_cache(call.cache, device)
    check_choice("ratio", call.ratio, (1, 2))
    check_tensor("keys", call.keys, shape=("T", dim), dtypes=_BF16)
    tokens = call.keys.shape[0]
    check_tensor("norm_weight", call.norm_weight, shape=(dim,), dtypes=_FLOAT, device=device)
    _check_rotation(call.positions, call.rope, tokens, device)
    check_tensor("slots", call.slots, shape=(tokens,), dtypes=_INTEGERS, device=device)
    if device.type == "cpu" and tokens:
        _check_below("slots", call.slots, call.cache.num_slots)
    problem = Problem("write_index_keys", tokens, 1, index_record=call.cache.record.name)
    choice = select(problem, DeviceInfo.detect(device), backend)
    load_kernel(choice.name, problem.op)(call)


def prepare_index_queries(call: PrepareIndexQueriesCall, *, backend: str = "auto") -> IndexQueries:
    """Rotate and quantise queries; fold FP8 scales and the constant factor into the head weights.

    Args:
        call: projected queries and weights.
        backend: "auto" or a body's name.

    Raises:
        ArgumentError and its kinds.
        UnsupportedError: the named backend cannot run it.
    """
    device = call.queries.device
    _check_record(call.record)
    check_tensor("queries", call.queries, shape=("T", "heads", call.record.dim), dtypes=_BF16)
    tokens, heads = call.queries.shape[:2]
    check_tensor("weights", call.weights, shape=(tokens, heads), dtypes=_BF16, device=device)
    _check_rotation(call.positions, call.rope, tokens, device)
    problem = Problem("prepare_index_queries", tokens, heads, index_record=call.record.name)
    choice = select(problem, DeviceInfo.detect(device), backend)
    queries: IndexQueries = load_kernel(choice.name, problem.op)(call)
    return queries


def index_topk(call: IndexTopkCall, out: IndexTopkOut, *, backend: str = "auto") -> None:
    """Fill each row's list of chosen compressed positions, and its candidate blocks if asked.

    A row that sees at most `topk` keys takes them all and publishes no candidates. Otherwise the
    best float32 scores win; equal scores go to the lower position; -inf (invisible, or outside the
    row's candidate blocks) is never chosen. Lists ascend and end in -1. Candidates are the blocks
    with the best score inside, the newest visible block always among them. Scratch is bounded, see
    `scratch_bytes` of `kernels.torch.index_topk` and `kernels.triton.index_topk`. A CPU sums scores
    exactly; a GPU in float32, so keys within a rounding of each other may be ordered either way.

    Args:
        call: queries, keys and counts.
        out: int32 lists, written whole; `out.candidates` must not alias `call.candidates`.
        backend: "auto" or a body's name.

    Raises:
        ArgumentError and its kinds: before anything is written.
        UnsupportedError: the named backend cannot run it.
    """
    queries, device = call.queries, call.queries.codes.device
    tokens, heads = queries.num_tokens, queries.num_heads
    ints = (torch.int32,)
    if queries.record is not call.keys.record:
        raise CacheFormatError(
            "queries",
            f"record {queries.record.name!r}",
            f"the keys' record {call.keys.record.name!r}",
            "prepare the queries for the cache that they score",
        )
    _check_cache(call.keys, device)
    check_at_least("topk", call.topk, 1)
    check_at_least("candidate_block_size", call.candidate_block_size, 1)
    shape = (tokens, heads, call.keys.record.data_bytes)
    check_tensor("queries.codes", queries.codes, shape=shape, dtypes=(torch.uint8,))
    check_tensor(
        "queries.weights", queries.weights, shape=(tokens, heads), dtypes=_FLOAT, device=device
    )
    check_tensor("visible", call.visible, shape=(tokens,), dtypes=ints, device=device)
    if call.request_ids is not None:
        check_tensor("request_ids", call.request_ids, shape=(tokens,), dtypes=ints, device=device)
    check_tensor("positions", out.positions, shape=(tokens, call.topk), dtypes=ints, device=device)
    for name, lists in (("call.candidates", call.candidates), ("out.candidates", out.candidates)):
        if lists is not None:
            check_tensor(name, lists, shape=(tokens, "C"), dtypes=ints, device=device)
    _check_requests(call, tokens, device)
    problem = Problem("index_topk", tokens, heads, index_record=call.keys.record.name)
    choice = select(problem, DeviceInfo.detect(device), backend)
    load_kernel(choice.name, problem.op)(call, out)


def _check_requests(call: IndexTopkCall, tokens: int, device: torch.device) -> None:
    offsets, ints = call.query_start_loc, (torch.int32,)
    host = torch.device("cpu")
    check_tensor("query_start_loc", offsets, shape=("R + 1",), dtypes=ints, device=host)
    requests = offsets.shape[0] - 1
    check_tensor("block_table", call.block_table, shape=("R", "pages"), dtypes=ints, device=device)
    if call.block_table.shape[0] < requests or int(offsets[-1]) > tokens:
        raise ArgumentError(
            "query_start_loc",
            f"{requests} requests and {int(offsets[-1])} rows",
            f"at most {call.block_table.shape[0]} requests and {tokens} rows",
        )
    if device.type == "cpu" and tokens:
        reach = call.block_table.shape[1] * call.keys.page_rows
        _check_below("visible", call.visible, reach + 1)


def _check_record(record: RecordFormat, name: str = "record") -> None:
    if record not in INDEX_RECORDS:
        allowed = " or ".join(known.name for known in INDEX_RECORDS)
        raise CacheFormatError(name, repr(record.name), allowed)


def _check_cache(cache: PagedCache, device: torch.device) -> None:
    _check_record(cache.record, "index cache")
    if cache.device != device:
        raise DeviceError("index cache", f"device {cache.device}", f"device {device}")


def _check_rotation(positions: Tensor, rope: Tensor, tokens: int, device: torch.device) -> None:
    check_tensor("positions", positions, shape=(tokens,), dtypes=_INTEGERS, device=device)
    shape = ("max_positions", ROPE_DIM)
    check_tensor("rope", rope, shape=shape, dtypes=_FLOAT, device=device)


def _check_below(name: str, values: Tensor, limit: int) -> None:
    highest = int(values.max())
    if highest >= limit:
        raise IndexRangeError(name, highest, f"below {limit}")
