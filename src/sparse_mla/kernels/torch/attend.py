"""Attention in plain PyTorch: the CPU body, and the fallback everywhere.

Tokens go through in chunks, so scratch is bounded whatever T is (`scratch_bytes`). Per chunk the named
rows are decoded once to float32 (exactly; each row once however many lanes name it), gathered into
[n, K, 512], and two batched float32 products make logits and output.

float32, not bf16, products: PyTorch's CPU bf16 products round their result to bf16, and a logit rounded to
bf16 moves its weight by a factor of up to exp(2**-8 * |z|); `out_dtype=float32` does not exist on a CPU. On
cores with AVX-512 and without AMX float32 is the faster one besides: 130 to 175 against 75 to 100 GFLOP/s
per core for 16 tokens of 64 heads and 640 keys (torch 2.13). Logits are kept as [K, H]: keys times query is
a third faster than query times keys there.

On a CPU a row's result does not depend on the rows beside it: every product has the same shape per token, whatever
the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.cache.codec import E4M3_MAX, E4M3_NAN
from sparse_mla.kernels.contract import HEAD_DIM, ROPE_DIM, AttendCall, AttendOut, KeySet
from sparse_mla.kernels.layouts import standard_query, store_output
from sparse_mla.kernels.torch.rows import BLOCK_BYTES, decode_into

CHUNK_BYTES = 32 << 20
"""Scratch aimed at: larger chunks share more decoded rows, smaller ones stay in the processor's cache.
16 to 64 MiB measured alike, 8 and 128 MiB a quarter slower."""
UNIQUE_SHARE = 0.6
"""Rows are decoded once and copied to their lanes if at most this share of the lanes is distinct; above
it the copy costs more than the second decode (a row: 0.5 us to decode, 0.2 us to copy)."""


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Buffers of one `attend`, sized for its largest chunk and used by every chunk."""

    query: Tensor  # float32 [n, H, 512]
    logits: Tensor  # float32 [n, K, H], the sets' lanes one after the other
    values: Tensor  # float32 [n, H, 512]
    lanes: tuple[Tensor, ...]  # per key set: float32 [n, K, 512]
    rows: Tensor  # float32 [UNIQUE_SHARE * n * K, 512], decoded rows of one set

    @classmethod
    def allocate(cls, call: AttendCall, tokens: int) -> _Scratch:
        heads, widths = call.num_heads, [keys.width for keys in _key_sets(call)]
        rows = int(UNIQUE_SHARE * tokens * max(widths, default=0)) + 1

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=call.q.device)

        return cls(
            query=empty(tokens, heads, HEAD_DIM),
            logits=empty(tokens, sum(widths), heads),
            values=empty(tokens, heads, HEAD_DIM),
            lanes=tuple(empty(tokens, width, HEAD_DIM) for width in widths),
            rows=empty(0 if call.q.is_cuda else rows, HEAD_DIM),
        )


def attend(call: AttendCall, out: AttendOut) -> None:
    """Fill `out`. Reads nothing but the named rows of the caches."""
    chunk = chunk_tokens(call, out.is_fp8)
    scratch = _Scratch.allocate(call, chunk)
    for first in range(0, call.num_tokens, chunk):
        _attend_chunk(call, out, slice(first, min(first + chunk, call.num_tokens)), scratch)


def chunk_tokens(call: AttendCall, fp8: bool = True) -> int:
    """Tokens that go through together: at least one."""
    return min(max(1, CHUNK_BYTES // _token_bytes(call, fp8)), max(1, call.num_tokens))


def scratch_bytes(call: AttendCall, fp8: bool = True) -> int:
    """An upper bound of the memory that `attend` takes beside its inputs and outputs.

    At most `CHUNK_BYTES` and the decoder's block, or one token if that is larger: it does not grow with T.
    """
    return chunk_tokens(call, fp8) * _token_bytes(call, fp8) + BLOCK_BYTES


def _token_bytes(call: AttendCall, fp8: bool) -> int:
    """Scratch of one token: lanes, decoded rows and slot lists, logits, query, output and its casts."""
    lanes = sum(keys.width for keys in _key_sets(call))
    heads = call.num_heads
    keys = lanes * (HEAD_DIM * 4 * 2 + 64)
    logits = heads * (lanes * 5 + 64)
    values = heads * HEAD_DIM * ((4 + 4 + 4) + (4 + 4 + 1 if fp8 else 2))
    return keys + logits + values


def _key_sets(call: AttendCall) -> list[KeySet]:
    """The sets that have lanes."""
    sets = [call.window] if call.compressed is None else [call.window, call.compressed]
    return [keys for keys in sets if keys.width]


def _attend_chunk(call: AttendCall, out: AttendOut, rows: slice, scratch: _Scratch) -> None:
    tokens = rows.stop - rows.start
    query, values = scratch.query[:tokens], scratch.values[:tokens]
    logits = scratch.logits[:tokens]  # [n, K, H], then the weights
    _load_query(call, rows, query)
    parts = []  # (float32 [n, K, 512], float32 [n, K, H]) of each set
    edge = 0
    for keys, buffer in zip(_key_sets(call), scratch.lanes, strict=True):
        lanes = buffer[:tokens]
        block = logits[:, edge : edge + keys.width]
        valid = _load_lanes(keys, rows, lanes, scratch.rows)
        torch.bmm(lanes, query.transpose(1, 2), out=block)
        block.masked_fill_(~valid[:, :, None], -torch.inf)
        parts.append((lanes, block))
        edge += keys.width
    logits.mul_(call.scale)
    if call.query_scale is not None:
        logits.mul_(call.query_scale[rows, None, :])
    top = logits.amax(dim=1) if parts else values.new_full(values.shape[:2], -torch.inf)
    keyless = top == -torch.inf
    base = top.masked_fill(keyless, 0.0)
    total = logits.sub_(base[:, None, :]).exp_().sum(dim=1)  # [n, H]
    if not parts:
        values.zero_()
    for number, (lanes, block) in enumerate(parts):
        weights = block.transpose(1, 2)
        torch.baddbmm(values, weights, lanes, beta=float(number > 0), out=values)
    denominator = total if call.sink is None else total + torch.exp(call.sink - base)
    values.mul_(denominator.reciprocal().masked_fill_(keyless, 0.0)[:, :, None])
    if call.unrotate_output:
        _turn_tail(call, rows, values, inverse=True)
    store_output(out, rows.start, values, encode_quickly)
    if out.lse is not None:
        out.lse[rows] = (base + total.log()).masked_fill_(keyless, torch.inf)
    if out.max_logits is not None:
        out.max_logits[rows] = top


def encode_quickly(values: Tensor) -> Tensor:
    """e4m3 codes of float32 values by PyTorch's own cast: the codec's bits, eight times as fast."""
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(codes == 0xFF, E4M3_NAN)  # the cast keeps the sign of a NaN


def _load_query(call: AttendCall, rows: slice, query: Tensor) -> None:
    """Fill float32 [n, H, 512] with bf16 values: standard order, rotated if the call says so."""
    query.copy_(standard_query(call.q[rows], call.query_layout))
    if call.rotate_query:
        _turn_tail(call, rows, query, inverse=False)
        tail = query[:, :, -ROPE_DIM:]
        tail.copy_(tail.to(torch.bfloat16))


def _turn_tail(call: AttendCall, rows: slice, values: Tensor, *, inverse: bool) -> None:
    """Rotate the last 64 dims of float32 [n, H, 512] in place; positions are clamped to the table."""
    assert call.positions is not None
    assert call.rope is not None
    positions = call.positions[rows].long().clamp(0, call.rope.shape[0] - 1)
    table = call.rope[positions][:, None, :]
    cos, sin = table[..., : ROPE_DIM // 2], table[..., ROPE_DIM // 2 :]
    if inverse:
        sin = -sin
    tail = values[:, :, -ROPE_DIM:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = even * cos - odd * sin, odd * cos + even * sin
    torch.add(turned[0], 0.0, out=even)  # -0 becomes +0: rows without a key are all zero bits
    torch.add(turned[1], 0.0, out=odd)


def _load_lanes(keys: KeySet, rows: slice, lanes: Tensor, decoded: Tensor) -> Tensor:
    """Fill float32 [n, K, 512] with the lanes' keys, zero where invalid; return bool [n, K] valid."""
    indices = keys.indices[rows]
    cache = keys.cache
    valid = (indices >= 0) & (indices < cache.num_slots)
    if keys.lengths is not None:
        valid &= torch.arange(keys.width, device=indices.device) < keys.lengths[rows, None]
    flat = lanes.view(-1, HEAD_DIM)
    if cache.num_slots == 0:
        flat.zero_()
        return valid
    slots = torch.where(valid, indices, 0).view(-1).long()
    if indices.is_cuda:  # counting distinct rows or finding invalid lanes would wait for the device
        decode_into(cache, slots, flat)
        flat.masked_fill_(~valid.view(-1, 1), 0.0)
        return valid
    distinct, lane_row = torch.unique(slots, return_inverse=True)
    if len(distinct) <= min(UNIQUE_SHARE * len(slots), len(decoded)):
        decode_into(cache, distinct, decoded[: len(distinct)])
        torch.index_select(decoded, 0, lane_row, out=flat)
    else:
        decode_into(cache, slots, flat)
    flat.index_fill_(0, (~valid).view(-1).nonzero().view(-1), 0.0)
    return valid
