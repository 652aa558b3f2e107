"""Pool this step's projected rows into compressed latents and carry the open groups in the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.backends.select import DeviceInfo, Problem, load_kernel, select
from sparse_mla.errors import ArgumentError, IndexRangeError, StrideError
from sparse_mla.kernels.index_contract import CompressCall, Ring


def compress(call: CompressCall, *, backend: str = "auto") -> Tensor:
    """Latents before rotation, bf16 [T, dim]; rows that close no group are zero.

    Ring rows of positions that this step closes are read before any row is stored. Rows with a
    negative ring slot neither pool nor store.

    Args:
        call: what to pool; see `CompressCall`.
        backend: "auto" or a body's name.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, IndexRangeError: before anything is
        stored.
        UnsupportedError: the named backend cannot run it.
    """
    _check(call)
    problem = Problem("compress", call.projected.shape[0], 1)
    choice = select(problem, DeviceInfo.detect(call.projected.device), backend)
    latents: Tensor = load_kernel(choice.name, problem.op)(call)
    return latents


def _check(call: CompressCall) -> None:
    check_choice("ratio", call.ratio, (1, 2))
    dim = call.norm_weight.shape[0]
    device = call.projected.device
    wanted = torch.bfloat16 if call.ratio == 1 else torch.float32
    check_tensor("projected", call.projected, shape=("T", call.ratio * dim), dtypes=(wanted,))
    tokens = call.projected.shape[0]
    integers = (torch.int32, torch.int64)
    check_tensor("positions", call.positions, shape=(tokens,), dtypes=integers, device=device)
    floats = (torch.float32,)
    check_tensor("norm_weight", call.norm_weight, shape=("dim",), dtypes=floats, device=device)
    if call.ratio == 1:
        if call.ring is not None:
            raise ArgumentError("ring", "a ring", "None", "ratio 1 carries no state")
        return
    if call.ring is None:
        raise ArgumentError("ring", None, "a Ring", "ratio 2 carries the open group's first row")
    _check_ring(call.ring, tokens, 2 * dim, device)


def _check_ring(ring: Ring, tokens: int, width: int, device: torch.device) -> None:
    floats, ints = (torch.float32,), (torch.int32,)
    shape = ("blocks", "capacity", width)
    check_tensor("ring.rows", ring.rows, shape=shape, dtypes=floats, device=device)
    check_tensor("ring.slots", ring.slots, shape=(tokens,), dtypes=(torch.int64,), device=device)
    check_tensor("ring.request_ids", ring.request_ids, shape=(tokens,), dtypes=ints, device=device)
    check_tensor(
        "ring.query_start_loc", ring.query_start_loc, shape=("R + 1",), dtypes=ints, device=device
    )
    if ring.capacity < 2 or ring.capacity % 2:
        raise ArgumentError("ring.rows", f"capacity {ring.capacity}", "an even capacity >= 2")
    if ring.rows.stride(1) != width:
        raise StrideError("ring.rows", f"row stride {ring.rows.stride(1)}", f"row stride {width}")
    if device.type == "cpu" and tokens:
        highest = int(ring.slots.max())
        if highest >= ring.rows.shape[0] * ring.capacity:
            raise IndexRangeError(
                "ring.slots", highest, f"below {ring.rows.shape[0] * ring.capacity}"
            )
