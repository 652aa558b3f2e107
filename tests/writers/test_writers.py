"""Cache writers: bytes by value, both bodies, every record, and what must stay untouched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.backends.select import load_kernel
from sparse_mla.cache.codec import decode_rows, encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, KV_RECORDS, MXFP8, NVFP4
from sparse_mla.config.rope import apply_rope
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DeviceError,
    DTypeError,
    IndexRangeError,
    ShapeError,
    StrideError,
    UnsupportedError,
)
from sparse_mla.ops.write import write_compressed, write_window
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache

BODIES = [
    pytest.param(("torch", "cpu"), id="torch"),
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("torch", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
]
ROPE = plain_rope_table(512)


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(backend, device)"""
    name, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for op in ("write_window", "write_compressed"):
        try:
            load_kernel(name, op)
        except ModuleNotFoundError as error:
            pytest.skip(f"body not there: {error}")
    return name, device


def _latents(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 512, generator=generator).bfloat16()


def _cache(record, device: str = "cpu", **fields: Any) -> PagedCache:
    return poisoned_cache(
        record,
        **{"num_pages": 3, "page_rows": 4, "page_padding_bytes": 600, "offset_rows": 2, **fields},
        device=device,
    )


def _storage(cache: PagedCache) -> Tensor:
    storage = cache.pages.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)


@pytest.mark.parametrize("record", KV_RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_window_rows_and_nothing_else(body, record, dtype):
    """Stored rows decode to the rotated, bf16-rounded, encoded latent; every other byte stays."""
    backend, device = body
    cache = _cache(record, device)
    before = _storage(cache).clone()
    latents = _latents(6).to(device)
    slots = torch.tensor([5, -1, 0, 11, -(2**31), 7], dtype=dtype, device=device)
    positions = torch.tensor([3, 2**31 - 1, 511, 0, -9, 100], dtype=dtype, device=device)
    write_window(
        latents,
        cache=cache,
        slots=slots,
        positions=positions,
        rope=ROPE.to(device),
        backend=backend,
    )
    kept = [0, 2, 3, 5]
    turned = apply_rope(latents[kept].cpu(), positions[kept].cpu(), ROPE)
    data, scales = encode_rows(record, turned)
    got_data, got_scales = cache.read_rows(slots[kept])
    assert torch.equal(got_data.cpu(), data)
    assert torch.equal(got_scales.cpu(), scales)
    decoded = decode_rows(record, got_data.cpu(), got_scales.cpu())
    rough = 0.04 if record.value_bits == 8 else 0.15
    assert (decoded - turned.float()).norm() < rough * turned.float().norm()
    touched = torch.zeros_like(before, dtype=torch.bool)
    mask = replace(cache, pages=_same_view(cache, touched))
    mask.write_rows(slots[kept], torch.ones_like(got_data), torch.ones_like(got_scales))
    changed = _storage(cache) != before
    assert not bool((changed & ~touched).any()), "a byte outside the written rows changed"


def _same_view(cache: PagedCache, storage: Tensor) -> Tensor:
    flat = storage.view(torch.uint8)
    pages = cache.pages
    return flat.as_strided(pages.shape, pages.stride(), pages.storage_offset())


@pytest.mark.parametrize("record", KV_RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_rows(body, record, ratio: int):
    """Only closing rows with a slot are stored, at the group's first position."""
    backend, device = body
    cache = _cache(record, device)
    before = _storage(cache).clone()
    latents = _latents(7, seed=1).to(device)
    latents[2] = torch.nan  # position 12 closes no group of two
    positions = torch.tensor([10, 11, 12, 13, 14, 15, 16], device=device)
    slots = torch.tensor([0, 1, -1, 3, -1, -1, 8], device=device)
    write_compressed(
        latents,
        cache=cache,
        slots=slots,
        positions=positions,
        rope=ROPE.to(device),
        ratio=ratio,
        backend=backend,
    )
    kept = [0, 1, 3, 6] if ratio == 1 else [1, 3]
    first = positions[kept].cpu() // ratio * ratio
    data, scales = encode_rows(record, apply_rope(latents[kept].cpu(), first, ROPE))
    got_data, got_scales = cache.read_rows(slots[kept])
    assert torch.equal(got_data.cpu(), data)
    assert torch.equal(got_scales.cpu(), scales)
    rest = [slot for slot in range(12) if slot not in slots[kept].tolist()]
    raw, raw_scales = cache.read_rows(torch.tensor(rest, device=device))
    assert torch.all(raw == 0xFF)
    assert torch.all(raw_scales == 0xFF)
    assert int((_storage(cache) != before).sum()) <= len(kept) * record.row_bytes


def test_negative_slots_write_nothing(body):
    backend, device = body
    cache = _cache(MXFP8, device)
    before = _storage(cache).clone()
    latents = torch.full((4, 512), torch.nan, dtype=torch.bfloat16, device=device)
    slots = torch.full((4,), -1, device=device)
    positions = torch.tensor([0, -5, 2**40, 7], device=device)
    rope = ROPE.to(device)
    write_window(latents, cache=cache, slots=slots, positions=positions, rope=rope, backend=backend)
    write_compressed(
        latents, cache=cache, slots=slots, positions=positions, rope=rope, ratio=2, backend=backend
    )
    assert torch.equal(_storage(cache), before)


def test_query_rotation_in_the_same_call(body):
    """The fused call stores the same bytes, and rotates q exactly like the rotation alone."""
    backend, device = body
    rope = ROPE.to(device)
    latents = _latents(3).to(device)
    q = torch.randn(3, 4, 512, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    slots, positions = torch.tensor([1, 2, -1]).to(device), torch.tensor([5, 6, 400]).to(device)
    alone, fused = _cache(MXFP8, device), _cache(MXFP8, device)
    fields = {"slots": slots, "positions": positions, "rope": rope, "backend": backend}
    assert write_window(latents, cache=alone, **fields) is None
    kept = q.clone()
    turned = write_window(latents, cache=fused, q=q, **fields)
    assert torch.equal(_storage(alone), _storage(fused))
    assert torch.equal(q, kept)
    assert torch.equal(turned.cpu(), apply_rope(q.cpu(), positions.cpu(), ROPE))
    in_place = write_window(latents, cache=fused, q=q, q_out=q, **fields)
    assert in_place is q
    assert torch.equal(q, turned)


def test_rows_past_the_slots_are_not_stored(body):
    """Data-parallel padding: more latents and queries than slots; all queries are rotated."""
    backend, device = body
    cache = _cache(MXFP8, device)
    latents = _latents(5).to(device)
    q = torch.ones(5, 1, 512, dtype=torch.bfloat16, device=device)
    positions = torch.arange(5, device=device)
    slots = torch.tensor([4, 9], device=device)
    turned = write_window(
        latents, cache=cache, slots=slots, positions=positions, rope=ROPE.to(device), q=q,
        backend=backend,
    )  # fmt: skip
    stored = (cache.read_rows(torch.arange(12, device=device))[0] != 0xFF).any(dim=1)
    assert stored.nonzero().view(-1).tolist() == [4, 9]
    assert torch.equal(turned.cpu(), apply_rope(q.cpu(), positions.cpu(), ROPE))


@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_in_strided_latents(body, ratio: int):
    backend, device = body
    wide = torch.randn(6, 1024).bfloat16().to(device)
    latents = wide[::2, 256:768]
    positions, slots = torch.tensor([1, 3, 5]).to(device), torch.tensor([2, 0, 1]).to(device)
    first, second = _cache(NVFP4, device), _cache(NVFP4, device)
    fields = {
        "slots": slots, "positions": positions, "rope": ROPE.to(device), "ratio": ratio,
        "backend": backend,
    }  # fmt: skip
    write_compressed(latents, cache=first, **fields)
    write_compressed(latents.contiguous(), cache=second, **fields)
    assert torch.equal(_storage(first), _storage(second))


def test_one_bad_row_spoils_no_other(body):
    """NaN and infinity in one block of one row: every other row and block is stored as usual."""
    backend, device = body
    latents = _latents(3).to(device)
    bad = latents.clone()
    bad[1, 7], bad[1, 40] = torch.nan, torch.inf
    fields = {
        "slots": torch.arange(3, device=device),
        "positions": torch.arange(3, device=device),
        "rope": ROPE.to(device),
        "backend": backend,
    }
    clean, spoiled = _cache(MXFP8, device), _cache(MXFP8, device)
    write_window(latents, cache=clean, **fields)
    write_window(bad, cache=spoiled, **fields)
    want, got = (cache.read_rows(torch.arange(3, device=device)) for cache in (clean, spoiled))
    assert torch.equal(got[0][[0, 2]], want[0][[0, 2]])
    assert torch.equal(got[1][[0, 2]], want[1][[0, 2]])
    assert torch.equal(got[0][1, 64:], want[0][1, 64:])
    assert torch.equal(got[1][1, 2:], want[1][1, 2:])


def test_pages_past_two_gigabytes(body):
    """A slot whose byte offset does not fit in 31 or 32 bits is written where it belongs."""
    backend, device = body
    rows, stride = 64, 64 * MXFP8.row_bytes
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of GPU memory")
    pages = torch.empty(2**32 // stride + 2, stride, dtype=torch.uint8, device=device)
    cache = PagedCache(pages, MXFP8, rows)
    for border in (2**31, 2**32):
        slots = torch.tensor([border // stride * rows - 1, (border // stride + 1) * rows])
        positions = torch.tensor([7, 8])
        low = _cache(MXFP8, device)
        latents = _latents(2).to(device)
        fields = {"positions": positions.to(device), "rope": ROPE.to(device), "backend": backend}
        write_window(latents, cache=cache, slots=slots.to(device), **fields)
        write_window(latents, cache=low, slots=torch.arange(2, device=device), **fields)
        want = low.read_rows(torch.arange(2, device=device))
        got = cache.read_rows(slots.to(device))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@dataclass(frozen=True)
class Mutation:
    name: str
    change: Callable[[dict[str, Any]], Any]
    error: type[Exception]
    match: str


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda a: a.update({key: value(a[key]) if callable(value) else value})


META = torch.device("meta")
COMMON = [
    Mutation("latents rank", _set("latents", lambda x: x[0]), ShapeError, r"latents: got shape \[512\]"),
    Mutation("latents width", _set("latents", lambda x: x[:, :256]), ShapeError, r"\[T, 512\]"),
    Mutation("latents dtype", _set("latents", lambda x: x.float()), DTypeError, "latents: got dtype float32"),
    Mutation("latents stride", _set("latents", lambda x: x.T.contiguous().T), StrideError, "latents"),
    Mutation("cache device", _set("cache", lambda c: replace(c, pages=c.pages.to(META))), DeviceError, "cache: got device meta"),
    Mutation("index record", _set("cache", lambda c: replace(c, record=INDEX_FP8)), CacheFormatError, "cache: got record 'index_fp8'"),
    Mutation("overlap", _set("cache", lambda c: replace(c, pages=c.pages.as_strided(c.pages.shape, (16, 1)))), StrideError, "cache: got 16 bytes"),
    Mutation("slots dtype", _set("slots", lambda s: s.float()), DTypeError, "slots"),
    Mutation("slots rank", _set("slots", lambda s: s[None]), ShapeError, "slots"),
    Mutation("too many slots", _set("slots", lambda s: s.repeat(2)), ShapeError, "slots: got 6 slots; allowed: at most 3"),
    Mutation("slot past the cache", _set("slots", lambda s: s + 10), IndexRangeError, "slots: got 12; allowed: below 12"),
    Mutation("slots device", _set("slots", lambda s: s.to(META)), DeviceError, "slots: got device meta"),
    Mutation("positions dtype", _set("positions", lambda p: p.double()), DTypeError, "positions"),
    Mutation("positions shape", _set("positions", lambda p: p[:2]), ShapeError, r"positions: got shape \[2\]"),
    Mutation("table width", _set("rope", lambda r: r[:, :63]), ShapeError, "rope: got shape"),
    Mutation("table dtype", _set("rope", lambda r: r.bfloat16()), DTypeError, "rope: got dtype bfloat16"),
    Mutation("empty table", _set("rope", lambda r: r[:0]), ShapeError, "rope: got 0 positions"),
    Mutation("backend", _set("backend", "cuda"), ArgumentError, "backend: got 'cuda'"),
    Mutation("refused backend", _set("backend", "hopper"), UnsupportedError, "hopper"),
]  # fmt: skip
WINDOW_ONLY = [
    Mutation("q rows", _set("q", torch.zeros(2, 4, 512).bfloat16()), ShapeError, "q: got shape"),
    Mutation("q dtype", _set("q", torch.zeros(3, 4, 512)), DTypeError, "q: got dtype float32"),
    Mutation("q heads", _set("q", torch.zeros(3, 129, 512).bfloat16()), ShapeError, "q: got 129 heads"),
    Mutation("q_out alone", _set("q_out", torch.zeros(3, 4, 512).bfloat16()), ArgumentError, "pass q too"),
    Mutation("q_out shape", lambda a: a.update(q=torch.zeros(3, 4, 512).bfloat16(), q_out=torch.zeros(3, 2, 512).bfloat16()), ShapeError, "q_out"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", [*COMMON, *WINDOW_ONLY], ids=lambda mutation: mutation.name)
def test_one_wrong_argument_of_write_window(mutation: Mutation):
    _expect(write_window, mutation, {})


@pytest.mark.parametrize(
    "mutation",
    [*COMMON, Mutation("ratio", _set("ratio", 0), ArgumentError, "ratio: got 0")],
    ids=lambda mutation: mutation.name,
)
def test_one_wrong_argument_of_write_compressed(mutation: Mutation):
    _expect(write_compressed, mutation, {"ratio": 2})


def _expect(op: Callable[..., Any], mutation: Mutation, more: dict[str, Any]) -> None:
    cache = _cache(MXFP8)
    before = _storage(cache).clone()
    arguments: dict[str, Any] = {
        "latents": _latents(3),
        "cache": cache,
        "slots": torch.arange(3),
        "positions": torch.arange(3),
        "rope": ROPE,
        "backend": "auto",
        **more,
    }
    mutation.change(arguments)
    with pytest.raises(mutation.error, match=mutation.match):
        op(arguments.pop("latents"), **arguments)
    assert torch.equal(_storage(cache), before)
