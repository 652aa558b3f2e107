"""Attention over one or two key sets: bare, or with both rotations and the output cast in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_mla.backends.select import BackendChoice, DeviceInfo, Problem, load_kernel, select
from sparse_mla.errors import ArgumentError
from sparse_mla.kernels.contract import (
    HEAD_DIM,
    AttendCall,
    AttendOut,
    KeySet,
    Layout,
    allocate_scales,
)
from sparse_mla.kernels.layouts import dequantize_output, standard_output, standard_query
from sparse_mla.metadata.plan import TileSchedulerPlan
from sparse_mla.ops.attend_checks import check_buffers, check_call, check_options
from sparse_mla.ops.attend_options import AttendBuffers, AttendOptions
from sparse_mla.ops.bodies import widen_output

__all__ = [
    "AttendBuffers",
    "AttendOptions",
    "AttentionResult",
    "KeySet",
    "Layout",
    "QuantizedOutput",
    "mega_attention",
    "sparse_attention",
]


@dataclass(frozen=True, slots=True)
class QuantizedOutput:
    """FP8 attention output: value = code * 2**(byte - 127), one byte for 32 dims of a head."""

    data: Tensor  # uint8 (e4m3 codes) [T, G, heads_per_group * 512]
    scales: (
        Tensor  # int32 [T, G, 4 * heads_per_group], four ue8m0 bytes a word, token-major innermost
    )
    layout: Layout
    heads_per_group: int

    @property
    def codes(self) -> Tensor:
        """`data` as float8_e4m3fn, for an FP8 product."""
        return self.data.view(torch.float8_e4m3fn)

    def dequantize(self) -> Tensor:
        """float32 [T, H, 512] in standard order."""
        return dequantize_output(self.data, self.scales, self.heads_per_group, self.layout)

    def widen(self) -> Tensor:
        """bf16 [T, G, heads_per_group * 512] in this layout, exact: what a grouped product takes where
        the device has none for FP8 with a scale for 32 values (below compute capability 10).
        """
        return widen_output(self.data, self.scales)


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """What attention returns."""

    output: Tensor | QuantizedOutput  # bf16 [T, H, 512] in `layout`, or FP8
    lse: Tensor | None  # float32 [T, H], natural log, without the sink; +inf for a row without keys
    # float32 [T, H]; -inf for a row without keys, any number where `lse` is NaN
    max_logits: Tensor | None
    choice: BackendChoice  # which backend ran, and why
    layout: Layout
    heads_per_group: int

    @property
    def bf16(self) -> Tensor:
        """The bf16 output.

        Raises:
            ArgumentError: the output is FP8.
        """
        if isinstance(self.output, QuantizedOutput):
            raise ArgumentError("output", "fp8", "bf16", 'ask for it: AttendOptions(output="bf16")')
        return self.output

    @property
    def fp8(self) -> QuantizedOutput:
        """The FP8 output.

        Raises:
            ArgumentError: the output is bf16.
        """
        if not isinstance(self.output, QuantizedOutput):
            raise ArgumentError("output", "bf16", "fp8", 'ask for it: AttendOptions(output="fp8")')
        return self.output

    def dequantize(self) -> Tensor:
        """float32 [T, H, 512] in standard order, whatever the format and layout."""
        if isinstance(self.output, QuantizedOutput):
            return self.output.dequantize()
        return standard_output(self.output, self.heads_per_group, self.layout).float()


def mega_attention(
    q: Tensor,  # bf16 [T, H, 512], not rotated
    *,
    window: KeySet,
    compressed: KeySet | None = None,
    positions: Tensor | None,  # int32 or int64 [T]
    rope: Tensor | None,  # float32 [max_positions, 64], cos 32 then sin 32
    scale: float,
    sink: Tensor | None = None,  # float32 [H]
    plan: TileSchedulerPlan | None = None,
    options: AttendOptions | None = None,
    buffers: AttendBuffers | None = None,
) -> AttentionResult:
    """Rotate the query, attend both key sets in one softmax, rotate the output back, cast it to FP8.

        z_k = scale * <rot(q_h), key_k>      o_h = sum_k exp(z_k) key_k / (sum_k exp(z_k) + exp(sink_h))

    Valid keys: lane below the row's length, index not negative. Duplicates count twice. A row without a
    key gives output 0 (FP8: codes 0, scale byte 105), lse +inf, max -inf. A sink of -inf is no sink, +inf
    gives output 0. Positions outside the table (padding rows) are clamped. Nothing but the named rows of
    a cache is looked at, and no argument is modified. No host sync on a GPU; with `buffers` and a `plan`
    no allocation, so a call can be captured into a CUDA graph.

    Args:
        q: any token and head stride; in the chunk-interleaved layout a token's values are adjacent.
        window: this layer's own cache and the rows that each query attends.
        compressed: the shared cache and its rows; None on window-only layers.
        positions: needed, as `rope` is, unless both rotations are switched off in `options`.
        rope: rotary table of the layer kind.
        scale: of the logits, positive; 512**-0.5 for this model.
        sink: logit of a value-less key of each head; None = none.
        plan: launch plan of the layer kind.
        options: output format, layouts, extras, backend.
        buffers: outputs to fill; None = new tensors.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, StrideError, CacheFormatError,
        PlanMismatchError: as named, before anything is written.
        IndexRangeError: an index past its cache or a length past its list; checked on a CPU only, ignored
            as invalid on a GPU.
        UnsupportedError: no backend, or not the named one, runs this; carries every reason.
    """
    options = options or AttendOptions()
    call = AttendCall(
        q=q,
        window=window,
        compressed=compressed,
        scale=scale,
        sink=sink,
        positions=positions,
        rope=rope,
        rotate_query=options.rotate_query,
        unrotate_output=options.unrotate_output,
        query_layout=options.query_layout,
        plan=plan,
        batch_invariant=options.batch_invariant,
    )
    return _run(call, replace(options, output=options.output or "fp8"), buffers or AttendBuffers())


def sparse_attention(
    q: Tensor,  # bf16 [T, H, 512], rotated
    *,
    window: KeySet,
    compressed: KeySet | None = None,
    scale: float,
    sink: Tensor | None = None,  # float32 [H]
    plan: TileSchedulerPlan | None = None,
    options: AttendOptions | None = None,
    buffers: AttendBuffers | None = None,
) -> AttentionResult:
    """`mega_attention` without the rotations, bf16 output unless `options` says FP8.

    The switches `rotate_query` and `unrotate_output` of the options do not apply here; everything else,
    errors included, is as there. The lse makes shards combinable: see `merge_lse`.
    """
    options = options or AttendOptions()
    call = AttendCall(
        q=q,
        window=window,
        compressed=compressed,
        scale=scale,
        sink=sink,
        positions=None,
        rope=None,
        rotate_query=False,
        unrotate_output=False,
        query_layout=options.query_layout,
        plan=plan,
        batch_invariant=options.batch_invariant,
    )
    return _run(call, replace(options, output=options.output or "bf16"), buffers or AttendBuffers())


def _run(call: AttendCall, options: AttendOptions, buffers: AttendBuffers) -> AttentionResult:
    per_group = options.heads_per_group
    check_call(call)
    if per_group is None:
        per_group = math.gcd(call.num_heads, 8)
    check_options(call, options, per_group)
    check_buffers(call, options, buffers, per_group)
    if options.query_norm_eps is not None:
        call = replace(call, query_scale=_query_scale(call, options.query_norm_eps))
    problem = Problem(
        op="attend",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        window_record=call.window.cache.record.name,
        compressed_record=None if call.compressed is None else call.compressed.cache.record.name,
        window_keys=call.window.width,
        compressed_keys=0 if call.compressed is None else call.compressed.width,
        output=options.output or "bf16",
        batch_invariant=options.batch_invariant,
        query_norm=call.query_scale is not None,
    )
    choice = select(problem, DeviceInfo.detect(call.q.device), options.backend)
    out = _allocate(call, options, buffers, per_group)
    if call.num_tokens:
        load_kernel(choice.name, problem.op)(call, out)
    output: Tensor | QuantizedOutput = out.data
    if out.scales is not None:
        output = QuantizedOutput(out.data, out.scales, out.layout, per_group)
    return AttentionResult(output, out.lse, out.max_logits, choice, out.layout, per_group)


def _query_scale(call: AttendCall, eps: float) -> Tensor:
    """float32 [T, H]: 1 / sqrt(mean(q**2) + eps) of each head."""
    q = standard_query(call.q, call.query_layout).float()
    return torch.rsqrt(q.square_().mean(dim=-1) + eps)


def _allocate(
    call: AttendCall, options: AttendOptions, buffers: AttendBuffers, per_group: int
) -> AttendOut:
    tokens, heads, device = call.num_tokens, call.num_heads, call.q.device
    groups = heads // per_group
    data, scales, lse, largest = buffers.data, buffers.scales, buffers.lse, buffers.max_logits
    if options.output == "fp8":
        if data is None:
            shape = (tokens, groups, per_group * HEAD_DIM)
            data = torch.empty(shape, dtype=torch.uint8, device=device)
        data = data.view(torch.uint8)
        if scales is None:
            scales = allocate_scales(tokens, groups, 4 * per_group, device)
    elif data is None:
        data = torch.empty(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    if lse is None and options.return_lse:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    if largest is None and options.return_max_logits:
        largest = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    return AttendOut(data, scales, lse, largest, per_group, options.output_layout)
