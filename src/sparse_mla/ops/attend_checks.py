"""Checks of the attention ops. All of them come before the first store."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import ATTEND_RECORDS
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DeviceError,
    IndexRangeError,
    PlanMismatchError,
    ShapeError,
    StrideError,
)
from sparse_mla.kernels.contract import HEAD_DIM, MAX_HEADS, ROPE_DIM, AttendCall, KeySet, Layout
from sparse_mla.ops.attend_options import AttendBuffers, AttendOptions

_FLOAT = (torch.float32,)
_BF16 = (torch.bfloat16,)
_INT32 = (torch.int32,)
_INTEGERS = (torch.int32, torch.int64)
_BYTES = (torch.uint8, torch.float8_e4m3fn)


def check_call(call: AttendCall) -> None:
    """Raise the typed error of the first argument that no kernel could read."""
    check_tensor("q", call.q, shape=("T", "H", HEAD_DIM), dtypes=_BF16)
    tokens, heads, device = call.num_tokens, call.num_heads, call.q.device
    if not 1 <= heads <= MAX_HEADS:
        raise ShapeError("q", f"{heads} heads", f"1 to {MAX_HEADS} heads", "shard the heads")
    check_choice("query_layout", call.query_layout, tuple(Layout))
    interleaved = call.query_layout is Layout.CHUNK_INTERLEAVED
    if interleaved and heads > 1 and call.q.stride(1) != HEAD_DIM:
        raise StrideError(
            "q",
            f"head stride {call.q.stride(1)}",
            f"{HEAD_DIM} in the chunk-interleaved layout",
            "call .contiguous()",
        )
    if isinstance(call.scale, bool) or not isinstance(call.scale, (int, float)):
        raise ArgumentError("scale", type(call.scale).__name__, "a float")
    if not (math.isfinite(call.scale) and call.scale > 0):
        raise ArgumentError("scale", call.scale, "a finite positive number")
    _check_keys("window", call.window, tokens, device)
    if call.compressed is not None:
        _check_keys("compressed", call.compressed, tokens, device)
    if call.sink is not None:
        check_tensor("sink", call.sink, shape=(heads,), dtypes=_FLOAT, device=device)
    if call.rotate_query or call.unrotate_output:
        _check_rotation(call.positions, call.rope, tokens, device)
    if call.plan is not None:
        _check_plan(call)


def check_options(call: AttendCall, options: AttendOptions, heads_per_group: int) -> None:
    """Raise unless the options name something that exists and fits the heads."""
    check_choice("output", options.output, ("fp8", "bf16"))
    check_choice("output_layout", options.output_layout, tuple(Layout))
    eps = options.query_norm_eps
    if eps is not None and not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps >= 0):
        raise ArgumentError("query_norm_eps", eps, "None, or a finite number that is not negative")
    heads = call.num_heads
    if heads_per_group < 1 or heads % heads_per_group:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ArgumentError(
            "heads_per_group", heads_per_group, f"a divisor of {heads} heads: {divisors}"
        )


def check_buffers(
    call: AttendCall, options: AttendOptions, buffers: AttendBuffers, heads_per_group: int
) -> None:
    """Raise unless every given buffer has the shape, dtype, device and strides that kernels write."""
    tokens, heads, device = call.num_tokens, call.num_heads, call.q.device
    groups, words = heads // heads_per_group, 4 * heads_per_group
    data, scales = buffers.data, buffers.scales
    fp8 = options.output == "fp8"
    if data is not None:
        shape = (tokens, groups, heads_per_group * HEAD_DIM) if fp8 else (tokens, heads, HEAD_DIM)
        dtypes = _BYTES if fp8 else _BF16
        check_tensor("buffers.data", data, shape=shape, dtypes=dtypes, device=device)
        _check_contiguous("buffers.data", data)
    if scales is not None:
        if not fp8:
            raise ArgumentError("buffers.scales", "a tensor", "None for a bf16 output")
        shape = (tokens, groups, words)
        check_tensor("buffers.scales", scales, shape=shape, dtypes=_INT32, device=device,
                     last_dim_contiguous=False)  # fmt: skip
        aligned = scales.stride(2)
        wanted = (1, words * aligned, aligned)
        sized = [n for n, size in enumerate(scales.shape) if size > 1]
        if aligned % 4 or aligned < tokens or any(scales.stride(n) != wanted[n] for n in sized):
            raise StrideError(
                "buffers.scales",
                f"strides {scales.stride()}",
                f"(1, {words} * A, A) with A >= {tokens} and a multiple of 4",
                "allocate it with kernels.contract.allocate_scales",
            )
    for name, rows in (("lse", buffers.lse), ("max_logits", buffers.max_logits)):
        if rows is not None:
            name = f"buffers.{name}"
            check_tensor(name, rows, shape=(tokens, heads), dtypes=_FLOAT, device=device)
            _check_contiguous(name, rows)


def _check_keys(name: str, keys: KeySet, tokens: int, device: torch.device) -> None:
    _check_type(name, keys, KeySet)
    _check_type(f"{name}.cache", keys.cache, PagedCache)
    cache, indices, lengths = keys.cache, keys.indices, keys.lengths
    if cache.record not in ATTEND_RECORDS:
        names = ", ".join(record.name for record in ATTEND_RECORDS)
        raise CacheFormatError(f"{name}.cache", f"record {cache.record.name!r}", names)
    if cache.device != device:
        raise DeviceError(
            f"{name}.cache", f"device {cache.device}", f"device {device}", "move it beside q"
        )
    width = cache.page_rows * cache.record.row_bytes
    if cache.pages.dim() != 2 or cache.page_rows < 1 or cache.pages.shape[1] != width:
        raise ShapeError(
            f"{name}.cache",
            f"pages of shape {list(cache.pages.shape)}",
            f"[num_pages, {width}] for {cache.page_rows} rows of {cache.record.name!r}",
            "build it with PagedCache.from_view",
        )
    cache.check_strides(f"{name}.cache")
    if cache.num_slots > 2**31 - 1:
        raise ShapeError(
            f"{name}.cache", f"{cache.num_slots} slots", "at most 2**31 - 1", "slots are int32"
        )
    shape = (tokens, "K")
    check_tensor(f"{name}.indices", indices, shape=shape, dtypes=_INT32, device=device)
    if lengths is not None:
        check_tensor(f"{name}.lengths", lengths, shape=(tokens,), dtypes=_INT32, device=device)
    if device.type == "cpu" and indices.numel():
        _check_values(name, keys)


def _check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise ArgumentError(name, type(value).__name__, f"a {wanted.__name__}")


def _check_values(name: str, keys: KeySet) -> None:
    """Lengths inside the list, counted indices inside the cache (host tensors only)."""
    indices, lengths, slots = keys.indices, keys.lengths, keys.cache.num_slots
    highest = int(indices.max())
    if lengths is not None:
        longest = int(lengths.max())
        if longest > keys.width:
            raise IndexRangeError(f"{name}.lengths", longest, f"at most the {keys.width} lanes")
        if highest >= slots:
            lane = torch.arange(keys.width)
            counted = torch.where(lane < lengths[:, None], indices, -1)
            highest = int(counted.max())
    if highest >= slots:
        raise IndexRangeError(
            f"{name}.indices", highest, f"below the cache's {slots} slots, or negative for none"
        )


def _check_rotation(
    positions: Tensor | None, rope: Tensor | None, tokens: int, device: torch.device
) -> None:
    if positions is None:
        raise ArgumentError("positions", None, f"int32 or int64 [{tokens}]", "rotations need them")
    if rope is None:
        raise ArgumentError("rope", None, "float32 [max_positions, 64]", "rotations need the table")
    check_tensor("positions", positions, shape=(tokens,), dtypes=_INTEGERS, device=device)
    shape = ("max_positions", ROPE_DIM)
    check_tensor("rope", rope, shape=shape, dtypes=_FLOAT, device=device)
    if rope.shape[0] == 0:
        raise ShapeError("rope", "0 positions", "at least 1")
    _check_contiguous("rope", rope)


def _check_plan(call: AttendCall) -> None:
    assert call.plan is not None
    compressed = 0 if call.compressed is None else call.compressed.width
    call.plan.check(call.num_tokens, call.num_heads, call.window.width, compressed, call.q.device)
    if call.batch_invariant and not call.plan.batch_invariant:
        raise PlanMismatchError(
            "plan: built without batch_invariant, called with it; allowed: a batch-invariant plan; "
            "build one with batch_invariant=True"
        )


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise StrideError(name, f"strides {tensor.stride()}", "a contiguous tensor")
