"""Window writer in Triton; the rotation of the queries rides in the same launch."""

from __future__ import annotations

from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.kernels.division import magic_division
from sparse_mla.kernels.triton.configs import WRITE_ROWS, WRITE_WARPS
from sparse_mla.kernels.triton.launch import compile_mode, device_facts
from sparse_mla.kernels.triton.write_kernel import write_kernel
from sparse_mla.kernels.write_contract import WriteWindowCall


def write_window(call: WriteWindowCall) -> None:
    """Store the rows with a slot and rotate the queries: one launch, none if there is nothing to do.

    Slots past the cache are ignored. Of two rows with one slot any may win, byte by byte.
    """
    store_rotated(
        call.cache, call.slots, call.latents, call.positions, call.rope, 1, call.q, call.q_out
    )


def store_rotated(
    cache: PagedCache,
    slots: Tensor,  # int32 or int64 [n], negative = skip
    latents: Tensor,  # bf16 [T, 512], T >= n
    positions: Tensor,  # int32 or int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    ratio: int,  # only rows with (position + 1) % ratio == 0 are stored, rotated at the group's first
    q: Tensor | None = None,  # bf16 [T, H, 512]
    q_out: Tensor | None = None,  # bf16 [T, H, 512], may be q
) -> None:
    """The launch behind both writers."""
    rows = slots.shape[0] if cache.num_slots else 0
    row_programs = -(-rows // WRITE_ROWS)
    query, target, mode = latents, latents, "none"
    tokens = heads = query_programs = 0
    if q is not None and q_out is not None:
        query, target = q, q_out
        tokens, heads = q.shape[0], q.shape[1]
        query_programs = -(-tokens * heads // WRITE_ROWS)
        mode = "in place" if _same(q, q_out) else "copy"
    if row_programs + query_programs == 0:
        return
    hardware = device_facts(latents.device).capability >= (8, 9)
    compiled = compile_mode(write_kernel)
    write_kernel[(row_programs + query_programs,)](
        latents,
        slots,
        positions,
        rope,
        cache.pages,
        query,
        target,
        latents.stride(0),
        rows,
        rope.shape[0],
        cache.num_slots,
        cache.page_rows,
        *magic_division(cache.page_rows),
        cache.page_stride_bytes // 16,
        row_programs,
        tokens,
        max(heads, 1),
        query.stride(0),
        query.stride(1),
        target.stride(0),
        target.stride(1),
        RECORD=cache.record,
        RATIO=ratio,
        ALIGNED=latents.data_ptr() % 16 == 0 and latents.stride(0) % 8 == 0,
        ROWS=WRITE_ROWS,
        QUERY=mode,
        HARDWARE_E4M3=hardware and compiled == "ptx",
        MODE=compiled,
        num_warps=WRITE_WARPS,
        enable_fp_fusion=False,
    )


def _same(q: Tensor, q_out: Tensor) -> bool:
    return q.data_ptr() == q_out.data_ptr() and q.stride() == q_out.stride()
