"""Attention in Triton: one launch on any GPU that Triton knows (and its interpreter).

Rounding: the query is rotated in float32 and rounded to bf16; keys are widened to bf16 exactly;
logits and sums are float32; probabilities are rounded to bf16 before the value product; the output is
rounded once, after the inverse rotation.

A block scale of ue8m0 byte 255 reads as infinity; NaN codes read as +-480 (no finite row holds either).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout
from sparse_mla.kernels.division import magic_division
from sparse_mla.kernels.triton.attend_kernel import attend_kernel
from sparse_mla.kernels.triton.configs import AttendConfig, attend_config, attend_splits
from sparse_mla.kernels.triton.launch import compile_mode, device_facts

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch of a call looks like."""

    config: AttendConfig
    splits: int
    partial: Tensor | None  # float32, at least T * splits * H * 514
    stats_offset: int  # where the (max, total) pairs begin in `partial`
    arrivals: Tensor | None  # int32, at least T * ceil(H / 16), zero


def attend(call: AttendCall, out: AttendOut) -> None:
    """Fill `out`. With a plan nothing is allocated; without one, a split call allocates its scratch.

    A row's result depends on the other rows only through their number, which decides the config and the
    splits; in a batch-invariant call, or with such a plan, it does not depend on them at all.
    """
    if call.num_tokens == 0 or call.num_heads == 0:
        return
    launch_attend(call, out, plan_launch(call))


def plan_launch(call: AttendCall) -> Launch:
    """Config, splits and scratch of a call."""
    plan = call.plan
    device = call.q.device
    facts = device_facts(device)
    tokens, heads = call.num_tokens, call.num_heads
    keys = call.window.width + (0 if call.compressed is None else call.compressed.width)
    invariant = call.batch_invariant or (plan is not None and plan.batch_invariant)
    # a batch-invariant call takes the config of a large one, whatever its size, and is never split
    sized = facts.num_sms + 1 if invariant else tokens
    config = attend_config(facts.capability, heads, sized, facts.num_sms)
    splits = 1 if invariant else attend_splits(config, tokens, heads, keys, facts.num_sms)
    if plan is not None:
        splits = min(splits, plan.splits)
    if splits == 1:
        return Launch(config, 1, None, 0, None)
    if plan is not None and plan.partial is not None and plan.arrivals is not None:
        offset = plan.max_tokens * splits * heads * 512
        return Launch(config, splits, plan.partial, offset, plan.arrivals)
    rows = tokens * splits * heads
    partial = torch.empty(rows * 514, dtype=torch.float32, device=device)
    arrivals = torch.zeros(tokens, -(-heads // 16), dtype=torch.int32, device=device)
    return Launch(config, splits, partial, rows * 512, arrivals)


def launch_attend(call: AttendCall, out: AttendOut, launch: Launch) -> None:
    """One launch of the kernel with a given config."""
    config, q = launch.config, call.q
    mode = compile_mode(attend_kernel)
    rotates = call.rotate_query or call.unrotate_output
    positions = call.positions if rotates else call.window.indices
    rope = call.rope if rotates else q
    assert positions is not None and rope is not None
    window, extra = call.window, call.compressed or call.window
    interleaved_query = call.query_layout is Layout.CHUNK_INTERLEAVED
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    programs = -(-call.num_heads // config.heads) * launch.splits * call.num_tokens
    attend_kernel[(programs,)](
        q,
        positions,
        rope,
        q if call.sink is None else call.sink,
        *_set_pointers(window),
        *_set_pointers(extra),
        q if launch.partial is None else launch.partial,
        q if launch.arrivals is None else launch.arrivals,
        out.data,
        out.data if out.scales is None else out.scales,
        q if out.lse is None else out.lse,
        q if out.max_logits is None else out.max_logits,
        call.scale * LOG2E,
        call.num_heads,
        q.stride(0),
        q.stride(1),
        rope.shape[0],
        *_set_sizes(window),
        *_set_sizes(extra),
        launch.splits,
        launch.stats_offset,
        0 if out.scales is None else out.scales.stride(2),
        WINDOW_RECORD=window.cache.record,
        EXTRA_RECORD=None if call.compressed is None else extra.cache.record,
        WINDOW_LENGTHS=window.lengths is not None,
        EXTRA_LENGTHS=extra.lengths is not None,
        ROTATE_QUERY=call.rotate_query,
        UNROTATE_OUTPUT=call.unrotate_output,
        SINK=call.sink is not None,
        QUERY_INTERLEAVED=interleaved_query,
        QUERY_ALIGNED=aligned,
        QUERY_THROUGH_OUT=config.query_through_out and _may_park(out, config.heads),
        OUT_INTERLEAVED=out.layout is Layout.CHUNK_INTERLEAVED,
        FP8=out.is_fp8,
        LSE=out.lse is not None,
        MAX_LOGITS=out.max_logits is not None,
        SPLIT=launch.splits > 1,
        HEADS_PER_GROUP=out.heads_per_group,
        HEADS=config.heads,
        KEYS=config.keys,
        AHEAD=config.ahead,
        HARDWARE_E4M3=mode == "ptx" and device_facts(q.device).capability >= (8, 9),
        MODE=mode,
        num_warps=config.num_warps,
        num_stages=1,
        **({} if config.registers is None else {"maxnreg": config.registers}),
    )


def _may_park(out: AttendOut, heads: int) -> bool:
    """Whether a program's output bytes are its own until it ends: no other program's heads among them."""
    return out.layout is Layout.STANDARD or heads % out.heads_per_group == 0


def _set_pointers(keys: KeySet) -> tuple[Tensor, Tensor, Tensor]:
    lengths = keys.indices if keys.lengths is None else keys.lengths
    return keys.cache.pages, keys.indices, lengths


def _set_sizes(keys: KeySet) -> tuple[int, ...]:
    cache = keys.cache
    return (
        keys.indices.stride(0),
        keys.width,
        cache.num_slots,
        cache.page_rows,
        *magic_division(cache.page_rows),
        cache.page_stride_bytes // 16,
    )
