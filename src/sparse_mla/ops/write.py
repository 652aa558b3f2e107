"""Store this step's latents in the paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.backends.select import DeviceInfo, Problem, load_kernel, select
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import KV_RECORDS
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DeviceError,
    IndexRangeError,
    ShapeError,
)
from sparse_mla.kernels.contract import HEAD_DIM, MAX_HEADS, ROPE_DIM
from sparse_mla.kernels.write_contract import WriteCompressedCall, WriteWindowCall

_INTEGERS = (torch.int32, torch.int64)
_BF16 = (torch.bfloat16,)


def write_window(
    latents: Tensor,  # bf16 [T, 512], normed, not yet rotated
    *,
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n], n <= T
    positions: Tensor,  # int32 or int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    q: Tensor | None = None,  # bf16 [T, H, 512]
    q_out: Tensor | None = None,  # bf16 [T, H, 512], may be q
    backend: str = "auto",
) -> Tensor | None:
    """Rotate latents, round them to bf16, encode and store them; rotate queries on the way if given.

    Rows with a negative slot write nothing; their positions may be garbage. With or without `q` the
    stored bytes are the same. Two rows with one slot: one of them wins.

    Args:
        latents: rows past `len(slots)` are not stored.
        cache: window cache of any key record.
        slots: where each row goes.
        positions: rotary positions; clamped to the table.
        rope: cos 32, sin 32.
        q: queries to rotate, or None.
        q_out: where the rotated queries go; None = a new tensor.
        backend: "auto" or a body's name.

    Returns:
        The rotated queries, or None without `q`.

    Raises:
        ShapeError, DTypeError, DeviceError, StrideError, CacheFormatError: as named, before any store.
        IndexRangeError: a slot past the cache (checked on a CPU only; a GPU skips such rows).
        UnsupportedError: the named backend cannot run it.
    """
    tokens = _check(latents, cache, slots, positions, rope)
    if q is None and q_out is not None:
        raise ArgumentError("q_out", "a tensor", "None without q", "pass q too")
    if q is not None:
        check_tensor("q", q, shape=(tokens, "H", HEAD_DIM), dtypes=_BF16, device=latents.device)
        if not 1 <= q.shape[1] <= MAX_HEADS:
            raise ShapeError("q", f"{q.shape[1]} heads", f"1 to {MAX_HEADS} heads")
        if q_out is None:
            q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        check_tensor("q_out", q_out, shape=tuple(q.shape), dtypes=_BF16, device=latents.device)
    call = WriteWindowCall(latents, cache, slots, positions, rope, q, q_out)
    heads = 1 if q is None else q.shape[1]
    problem = Problem("write_window", tokens, heads, window_record=cache.record.name)
    choice = select(problem, DeviceInfo.detect(latents.device), backend)
    load_kernel(choice.name, problem.op)(call)
    return q_out


def write_compressed(
    latents: Tensor,  # bf16 [T, 512], before rotation
    *,
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n], n <= T
    positions: Tensor,  # int32 or int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    ratio: int,
    backend: str = "auto",
) -> None:
    """Store the latents of groups that close in this step.

    A row is stored if its slot is not negative and `(position + 1) % ratio == 0`; it is rotated at its
    group's first position, `position // ratio * ratio`. Other rows may hold anything.

    Args:
        latents: the compressor's output; not modified.
        cache: compressed cache of any key record.
        slots: where each row goes.
        positions: the tokens' own positions.
        rope: cos 32, sin 32.
        ratio: tokens of a group, 1 or 2.
        backend: "auto" or a body's name.

    Raises:
        ArgumentError: a ratio below 1.
        ShapeError, DTypeError, DeviceError, StrideError, CacheFormatError: as named, before any store.
        IndexRangeError: a slot past the cache (checked on a CPU only; a GPU skips such rows).
        UnsupportedError: the named backend cannot run it.
    """
    check_at_least("ratio", ratio, 1)
    tokens = _check(latents, cache, slots, positions, rope)
    call = WriteCompressedCall(latents, cache, slots, positions, rope, ratio)
    problem = Problem("write_compressed", tokens, 1, compressed_record=cache.record.name)
    choice = select(problem, DeviceInfo.detect(latents.device), backend)
    load_kernel(choice.name, problem.op)(call)


def _check(
    latents: Tensor, cache: PagedCache, slots: Tensor, positions: Tensor, rope: Tensor
) -> int:
    check_tensor("latents", latents, shape=("T", HEAD_DIM), dtypes=_BF16)
    tokens, device = latents.shape[0], latents.device
    if cache.record not in KV_RECORDS:
        names = ", ".join(record.name for record in KV_RECORDS)
        raise CacheFormatError("cache", f"record {cache.record.name!r}", names)
    if cache.device != device:
        raise DeviceError("cache", f"device {cache.device}", f"device {device}")
    cache.check_strides("cache")
    check_tensor("slots", slots, shape=("n",), dtypes=_INTEGERS, device=device)
    if slots.shape[0] > tokens:
        raise ShapeError("slots", f"{slots.shape[0]} slots", f"at most {tokens}, one for a latent")
    check_tensor("positions", positions, shape=(tokens,), dtypes=_INTEGERS, device=device)
    check_tensor(
        "rope", rope, shape=("max_positions", ROPE_DIM), dtypes=(torch.float32,), device=device
    )
    if rope.shape[0] == 0:
        raise ShapeError("rope", "0 positions", "at least 1")
    if device.type == "cpu" and slots.numel():
        highest = int(slots.max())
        if highest >= cache.num_slots:
            raise IndexRangeError("slots", highest, f"below {cache.num_slots}, or negative to skip")
    return tokens
