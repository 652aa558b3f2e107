"""Attention a second time, written differently, to judge the oracle.

NumPy instead of PyTorch, one query head after the other, one key after the other with an online softmax
(running maximum, running sum), its own decoder of the records' bytes, and complex numbers for rotations.
It shares nothing with `attend.py` but the contract.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import ScaleFormat, ValueFormat
from sparse_mla.kernels.contract import AttendCall, KeySet, Layout

Floats = npt.NDArray[np.float64]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def attend_alternative(call: AttendCall) -> tuple[Floats, Floats, Floats]:
    """Output [T, H, 512], lse [T, H] and largest logit [T, H], all float64, standard order."""
    tokens, heads, dim = call.q.shape
    output = np.zeros((tokens, heads, dim))
    lse = np.full((tokens, heads), math.inf)
    largest = np.full((tokens, heads), -math.inf)
    flat = call.q.float().reshape(tokens, heads * dim).numpy()
    for token in range(tokens):
        keys = _token_keys(call, token)
        turn = _phase(call, token)
        for head in range(heads):
            query = _query_head(call, flat[token], head, turn)
            sink = -math.inf if call.sink is None else float(call.sink[head])
            scale = call.scale
            if call.query_scale is not None:
                scale *= float(call.query_scale[token, head])
            values, lse[token, head], largest[token, head] = _one_head(query, keys, scale, sink)
            if call.unrotate_output and turn is not None:
                pairs = (values[-64::2] + 1j * values[-63::2]) * np.conj(turn.astype(np.complex128))
                values[-64::2], values[-63::2] = pairs.real, pairs.imag
            output[token, head] = values
    return output, lse, largest


def _one_head(
    query: Floats, keys: list[Floats], scale: float, sink: float
) -> tuple[Floats, float, float]:
    running, total, weighted = -math.inf, 0.0, np.zeros(len(query))
    for key in keys:
        logit = scale * math.fsum(query * key)
        new = max(running, logit)
        keep = math.exp(running - new) if running > -math.inf else 0.0
        weight = math.exp(logit - new)
        total = total * keep + weight
        weighted = weighted * keep + weight * key
        running = new
    if not keys:
        return weighted, math.inf, -math.inf
    lse = running + math.log(total)
    share = 0.0 if sink - lse > 700 else 1.0 / (1.0 + math.exp(sink - lse))
    return weighted / total * share, lse, running


def _query_head(
    call: AttendCall,
    row: npt.NDArray[np.float32],
    head: int,
    turn: npt.NDArray[np.complex64] | None,
) -> Floats:
    heads, dim = call.q.shape[1:]
    lanes = np.arange(dim)
    if call.query_layout is Layout.CHUNK_INTERLEAVED:
        query = row[(lanes // 16) * (16 * heads) + head * 16 + lanes % 16].copy()
    else:
        query = row[head * dim + lanes].copy()
    if call.rotate_query and turn is not None:
        even, odd = query[-64::2].copy(), query[-63::2].copy()
        query[-64::2] = even * turn.real - odd * turn.imag
        query[-63::2] = odd * turn.real + even * turn.imag
        query = _round_bf16(query)
    wide: Floats = query.astype(np.float64)
    return wide


def _round_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to nearest even at bit 16, finite values."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def _phase(call: AttendCall, token: int) -> npt.NDArray[np.complex64] | None:
    """Phases cos + i sin of the token's 32 pairs."""
    if call.positions is None or call.rope is None:
        return None
    row = min(max(int(call.positions[token]), 0), call.rope.shape[0] - 1)
    table = call.rope[row].numpy()
    return (table[:32] + 1j * table[32:]).astype(np.complex64)


def _token_keys(call: AttendCall, token: int) -> list[Floats]:
    keys: list[Floats] = []
    for keyset in (call.window, call.compressed):
        if keyset is not None:
            keys += [_decode_row(keyset.cache, slot) for slot in _valid_slots(keyset, token)]
    return keys


def _valid_slots(keys: KeySet, token: int) -> list[int]:
    lanes = [int(lane) for lane in keys.indices[token]]
    if keys.lengths is not None:
        lanes = lanes[: max(int(keys.lengths[token]), 0)]
    return [lane for lane in lanes if 0 <= lane < keys.cache.num_slots]


def _decode_row(cache: PagedCache, slot: int) -> Floats:
    """The row's values by the byte offsets of the record."""
    record, rows = cache.record, cache.page_rows
    page, row = divmod(slot, rows)
    raw = cache.pages[page].numpy()
    values = np.empty(record.dim)
    for dim in range(record.dim):
        at = record.value_offset(row, dim, rows)
        if dim >= record.quantised_dims:
            bits = np.uint32(int(raw[at]) | int(raw[at + 1]) << 8) << np.uint32(16)
            values[dim] = float(np.array(bits, dtype=np.uint32).view(np.float32))
            continue
        byte = int(raw[at])
        if record.value_format is ValueFormat.E2M1:
            nibble = byte >> 4 if dim % 2 else byte & 15
            code = -_E2M1[nibble & 7] if nibble & 8 else _E2M1[nibble]
        else:
            code = _e4m3(byte)
        scale = int(raw[record.scale_offset(row, dim, rows)])
        ue8m0 = record.scale_format is ScaleFormat.UE8M0
        values[dim] = code * (2.0 ** (scale - 127) if ue8m0 else _e4m3(scale))
    return values


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 128 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
