"""Attention on Hopper: one launch, everything fused, for any number of heads; `bodies.py` says which source runs.

Where a few tokens are left over from whole rounds of the multiprocessors, these get a launch of their own.

Rounding: the query is rotated in float32 and rounded to bf16, then held as f16; keys are widened to f16, exactly
within f16's range; logits and sums are float32; weights, 2**10 times exp(z - m), are rounded to f16; the output is rounded once,
after the inverse rotation. f16 saturates: query values at +-65504; ue8m0 block scales above 2**7 read as
2**7 (such a block holds values above 28,672); values below 2**-24 vanish. With SPARSE_MLA_HOPPER_NUMBERS=bf16 all of them
are bf16 instead, exact but for the weights, and blocks of 8 heads are not used.

Rows are shared out over clusters when there are few of them; the merge has a fixed order, so repeats are
bitwise equal. A batch-invariant call or plan shares no row out and is always one launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_mla.cache.records import RecordFormat
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.contract import HEAD_DIM, AttendCall, AttendOut, KeySet, Layout
from sparse_mla.kernels.division import magic_division
from sparse_mla.kernels.hopper.bodies import (
    BF16_BLOCKS,
    BLOCKS,
    BODIES,
    CLUSTERS_OF_132,
    HEADS_OF_A_TILE,
    MANY_HEADS,
    block_heads,
    tokens_of_launches,
)
from sparse_mla.kernels.hopper.build import (
    RECORDS,
    Variant,
    function,
    launch,
    query_map,
)
from sparse_mla.settings import settings

TILE_KEYS = 64
MAX_CACHE_BYTES = 2**35
"""Offsets of scales are 32-bit numbers of 8-byte units."""
MAX_QUERY_STRIDE = 2**39
"""Strides of a tensor map are bytes below 2**40."""
EVICT_NORMAL, EVICT_FIRST = 0x1000_0000_0000_0000, 0x12F0_0000_0000_0000
"""What `createpolicy.fractional.L2` gives for all of the bytes."""
KEPT_HEADS = 2**14
"""Heads of all tokens whose query and output, 25 MB in FP8, stay in the L2 (50 MB) if rows leave it first."""
DECODED_TOKENS = 512
"""More are taken for a prompt, whose tokens name rows that others named before."""


class _Places(ctypes.Structure):
    _fields_ = [
        ("num_slots", ctypes.c_uint32),
        ("page_mul", ctypes.c_uint32),
        ("page_shift", ctypes.c_uint32),
        ("slot_units", ctypes.c_uint32),
        ("page_units", ctypes.c_uint32),
        ("slot_scales", ctypes.c_uint32),
        ("page_scales", ctypes.c_uint32),
        ("first_scale", ctypes.c_uint32),
    ]


class _KeyArgs(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("indices_stride", ctypes.c_int64),
        ("places", _Places),
        ("width", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


class _Args(ctypes.Structure):
    _fields_ = [
        ("a", _KeyArgs),
        ("b", _KeyArgs),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("max_logits", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("head_blocks", ctypes.c_int),
        ("heads_per_group", ctypes.c_int),
        ("block_mul", ctypes.c_uint32),
        ("position_step", ctypes.c_int),
        ("rope_rows", ctypes.c_int),
        ("rotate_query", ctypes.c_int),
        ("unrotate_output", ctypes.c_int),
        ("query_chunked", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("zeros", ctypes.c_void_p),
        ("row_policy", ctypes.c_uint64),
    ]


class Part(NamedTuple):
    """What one launch does of a call, and how."""

    tokens: range
    block: int  # heads of a block
    splits: int  # CTAs that share each row


def attend(call: AttendCall, out: AttendOut) -> None:
    """Fill `out`; nothing is allocated unless q must be copied, see `_readable_query`.

    Raises:
        UnsupportedError: the call has something that this kernel does not read; every reason is named.
    """
    if call.num_tokens == 0 or call.num_heads == 0:
        return
    reasons = refusals(call)
    if reasons:
        raise UnsupportedError("this call of the Hopper kernel", reasons)
    device = call.q.device
    index = torch.cuda.current_device() if device.index is None else device.index
    sms = _multiprocessors(index)
    parts = launches_of(call, sms)
    variants = [variant_of(call, out, part.block, part.splits) for part in parts]
    q = _readable_query(call, mapped=any(variant.body is MANY_HEADS for variant in variants))
    heads = call.num_heads
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream().cuda_stream
        for (tokens, block, splits), variant in zip(parts, variants, strict=True):
            head_blocks = -(-heads // block)
            arguments = _arguments(call, out, q, head_blocks, tokens)
            kernel, arguments.zeros = function(variant, index)
            addresses = [ctypes.addressof(arguments)]
            if variant.body is MANY_HEADS:
                chunked = call.query_layout is Layout.CHUNK_INTERLEAVED
                shape = (len(tokens), heads, HEAD_DIM)
                tensor_map = query_map(arguments.q, shape, q.stride(), chunked, block)
                addresses.append(tensor_map.getPtr())
            parameters = (ctypes.c_void_p * len(addresses))(*addresses)
            items = len(tokens) * head_blocks
            ctas = items * splits if splits > 1 else min(items, sms)
            launch(kernel, variant, ctypes.addressof(parameters), ctas, stream)


def refusals(call: AttendCall) -> list[str]:
    """Every reason why this kernel cannot run the call; empty = it can."""
    reasons = []
    if not 0 < call.scale < float("inf"):
        reasons.append(f"scale: got {call.scale}; allowed: a positive number")
    for name, keys in (("window", call.window), ("compressed", call.compressed)):
        if keys is None:
            continue
        cache = keys.cache
        if cache.record not in RECORDS:
            known = ", ".join(record.name for record in RECORDS)
            reasons.append(f"{name} record: got {cache.record.name}; allowed: {known}")
        if cache.num_pages * cache.page_stride_bytes > MAX_CACHE_BYTES:
            reasons.append(f"{name} cache: got more than 32 GiB; allowed: at most 32 GiB")
    return reasons


def bf16_numbers() -> bool:
    """Whether the tensor cores get bf16 instead of f16, which only `attend.cu` can give them."""
    return settings().hopper_numbers == "bf16"


def variant_of(call: AttendCall, out: AttendOut, block: int, splits: int) -> Variant:
    """What a launch with blocks of so many heads, each shared by `splits` CTAs, is compiled for.

    `attend.cu` sums weights from before they are rounded for lse, and where they are bf16, whose 8 bits
    are too few for a sum.
    """
    numbers = bf16_numbers()
    return Variant(
        window=call.window.cache.record,
        compressed=(call.compressed or call.window).cache.record,
        splits=splits,
        fp8_output=out.is_fp8,
        out_chunked=out.layout is Layout.CHUNK_INTERLEAVED,
        with_max=out.max_logits is not None,
        head_tiles=block // HEADS_OF_A_TILE,
        with_lse=BODIES[block] is MANY_HEADS and (out.lse is not None or numbers),
        bf16_numbers=numbers,
    )


def launches_of(call: AttendCall, num_sms: int) -> tuple[Part, ...]:
    """The launches of a call of one token or more, in order; a single one without splits if its rows must not depend
    on their number.
    """
    if _batch_invariant(call):
        block = _block_heads(call.num_heads, call.num_tokens, invariant=True)
        return (Part(range(call.num_tokens), block, 1),)
    return _launches(call.num_heads, call.num_tokens, _tiles(call), num_sms)


def _launches(
    num_heads: int, num_tokens: int, tiles: int, multiprocessors: int
) -> tuple[Part, ...]:
    parts, first = [], 0
    for tokens in tokens_of_launches(num_heads, num_tokens, tiles, multiprocessors, _blocks()):
        block = _block_heads(num_heads, tokens, invariant=False)
        items = tokens * -(-num_heads // block)
        splits = choose_splits(block, items, tiles, multiprocessors)
        parts.append(Part(range(first, first + tokens), block, splits))
        first += tokens
    return tuple(parts)


@functools.cache
def warm_up_tokens(
    num_heads: int, list_widths: tuple[int, ...], most: int, device_index: int
) -> tuple[int, ...]:
    """Numbers of tokens whose calls together compile what calls of 1 to `most` tokens run.

    Args:
        num_heads: of a call.
        list_widths: of its key sets.
        most: tokens of the largest call.
        device_index: of a CUDA device.
    """
    tiles, multiprocessors = tiles_of(list_widths), _multiprocessors(device_index)
    first: dict[tuple[int, int], int] = {}
    for tokens in range(1, most + 1):
        for part in _launches(num_heads, tokens, tiles, multiprocessors):
            first.setdefault((part.block, part.splits), tokens)
    return tuple(dict.fromkeys(first.values()))  # a call of two launches may stand there twice


def tiles_of(list_widths: Iterable[int]) -> int:
    """64-key tiles of key sets of these widths, at least one."""
    return max(1, sum(-(-width // TILE_KEYS) for width in list_widths))


def row_policy(num_tokens: int, num_heads: int) -> int:
    """What the L2 does with the rows of a call: those that nobody reads again leave it before the query and the output,
    which the kernels before and after this one share with it. Measured, see docs/performance.md.
    """
    few = num_tokens <= DECODED_TOKENS and num_tokens * num_heads <= KEPT_HEADS
    return EVICT_FIRST if few else EVICT_NORMAL


def choose_splits(block: int, items: int, tiles: int, multiprocessors: int) -> int:
    """CTAs that share one row: the largest cluster that so many rows gain from (`CLUSTERS_OF_132`).

    Args:
        block: heads of a block.
        items: rows of the launch, each with a block of heads.
        tiles: 64-key tiles of the list widths; a CTA gets at least one of them.
        multiprocessors: of the device.
    """
    for splits, rows in CLUSTERS_OF_132[block]:
        if splits <= tiles and items * 132 <= rows * multiprocessors:
            return splits
    return 1


def _batch_invariant(call: AttendCall) -> bool:
    return call.batch_invariant or (call.plan is not None and call.plan.batch_invariant)


def _blocks() -> tuple[int, ...]:
    """Heads of the blocks that a call may run in."""
    return BF16_BLOCKS if bf16_numbers() else BLOCKS


def _block_heads(num_heads: int, num_tokens: int, *, invariant: bool) -> int:
    return block_heads(num_heads, num_tokens, invariant, _blocks())


def _tiles(call: AttendCall) -> int:
    sets = [call.window] + ([call.compressed] if call.compressed is not None else [])
    return tiles_of(keys.width for keys in sets)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _readable_query(call: AttendCall, *, mapped: bool) -> Tensor:
    """The query, or a copy: where its rows are not 16-byte aligned, and where a kernel that takes a tensor map of it
    cannot have one, because rows are repeated (stride 0).
    """
    q = call.q
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    if mapped:
        aligned &= all(0 < stride < MAX_QUERY_STRIDE for stride in q.stride()[:2])
    if call.query_layout is Layout.CHUNK_INTERLEAVED:
        aligned &= q.shape[1] == 1 or q.stride(1) == HEAD_DIM
    return q if aligned else q.contiguous()


def _arguments(
    call: AttendCall, out: AttendOut, q: Tensor, head_blocks: int, tokens: range
) -> _Args:
    """The arguments of a launch for some tokens, which the kernel counts from zero: what there is a row of for each token is
    addressed at the first of them. Views of it would take several times as long.
    """
    positions, rope, first = call.positions, call.rope, tokens.start
    wide = positions is not None and positions.dtype is torch.int64
    return _Args(
        a=_key_arguments(call.window, q, first),
        b=_key_arguments(call.compressed, q, first),
        q=_pointer(q, first),
        out=_pointer(out.data, first),
        scales=_pointer(out.scales, first),
        lse=_pointer(out.lse, first),
        max_logits=_pointer(out.max_logits, first),
        sink=_pointer(call.sink),
        positions=_pointer(positions, first),
        rope=_pointer(rope),
        q_token_stride=q.stride(0) * 2,
        q_head_stride=q.stride(1) * 2,
        scale_stride=0 if out.scales is None else max(1, out.scales.stride(2)),
        tokens=len(tokens),
        heads=call.num_heads,
        head_blocks=head_blocks,
        heads_per_group=out.heads_per_group,
        block_mul=-(-(2**32) // head_blocks) if head_blocks > 1 else 0,
        position_step=2 if wide else 1,
        rope_rows=0 if rope is None else rope.shape[0],
        rotate_query=call.rotate_query,
        unrotate_output=call.unrotate_output,
        query_chunked=call.query_layout is Layout.CHUNK_INTERLEAVED,
        scale=call.scale,
        row_policy=row_policy(call.num_tokens, call.num_heads),
    )


def _key_arguments(keys: KeySet | None, readable: Tensor, first: int) -> _KeyArgs:
    if keys is None or keys.width == 0 or keys.cache.num_slots == 0:
        return _KeyArgs(pages=readable.data_ptr())
    cache = keys.cache
    return _KeyArgs(
        pages=cache.pages.data_ptr(),
        indices=_pointer(keys.indices, first),
        lengths=_pointer(keys.lengths, first),
        indices_stride=keys.indices.stride(0),
        places=_places(cache.record, cache.page_rows, cache.page_stride_bytes, cache.num_slots),
        width=keys.width,
    )


@functools.cache
def _places(record: RecordFormat, page_rows: int, page_stride: int, num_slots: int) -> _Places:
    """Pages of one row are taken for one page whose rows lie as far apart as they do. Numbers are modulo 2**32."""
    mul, shift = division(page_rows)
    row, scale = record.data_stride, record.scale_stride
    if page_rows == 1:
        row = scale = page_stride
    return _Places(
        num_slots=min(num_slots, 2**31 - 1),
        page_mul=mul,
        page_shift=shift,
        slot_units=row // 16,
        page_units=(page_stride - page_rows * row) // 16,
        slot_scales=scale // 8,
        page_scales=(page_stride - page_rows * scale) // 8,
        first_scale=record.scale_base(page_rows) // 8,
    )


def division(divisor: int) -> tuple[int, int]:
    """(mul, shift) with n // divisor == (n * mul >> 32) >> shift for 0 <= n < 2**31; (0, 0) for 1.

    That is `magic_division` without doubling n; a divisor of 1 leaves no shift to take it from.
    """
    magic, shift = magic_division(divisor)
    return (magic, shift - 1) if divisor > 1 else (0, 0)


def _pointer(tensor: Tensor | None, row: int = 0) -> int | None:
    """Where a row of a tensor begins."""
    if tensor is None:
        return None
    begin = tensor.data_ptr()
    return begin + row * tensor.stride(0) * tensor.element_size() if row else begin
