"""Benchmark cases of attention and the window writer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sparse_mla.backends.problem import Problem
from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import (
    MXFP8,
    MXFP8_PLANAR,
    NVFP4,
    NVFP4_PLANAR,
    V4,
    RecordFormat,
    round_up,
)
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout, allocate_scales
from sparse_mla.kernels.write_contract import WriteWindowCall
from sparse_mla.testing.bench import attention_flops, input_sets
from sparse_mla.testing.check import Fault, kernel_on
from sparse_mla.testing.check_attend import attend_fault
from sparse_mla.testing.check_caches import Sizes, check_writer
from sparse_mla.testing.compare import precision_of
from sparse_mla.testing.inputs import SCALE, plain_rope_table, poisoned_cache
from sparse_mla.testing.peer import TILE_KEYS, PeerDecode, peer_prefill

GPU_POOL_ROWS, CPU_POOL_ROWS = 200_000, 20_000
"""Rows of each pool: on a GPU 106 MB of 528-byte rows, larger than any L2."""
POOL_PAGE_ROWS = 64
POSITIONS = 4096
CHECKED_ROWS = 3
"""Rows of the timed call that are compared with the oracle before it is timed."""

Launches = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready to be timed."""

    launches: Launches
    flops: int
    moved_bytes: int
    backend: str  # which one was chosen
    fault: Fault | None  # found by the check; not to be timed then
    graph: bool = True


@dataclass(frozen=True, slots=True)
class AttendBench:
    """Attention with everything fused."""

    suite: str
    tokens: int
    heads: int
    window: RecordFormat = MXFP8
    compressed: RecordFormat | None = MXFP8
    window_keys: int = 128
    compressed_keys: int = 512
    output: str = "fp8"
    op: str = "attend"

    @property
    def keys(self) -> int:
        """Keys of a row."""
        return self.window_keys + (self.compressed_keys if self.compressed else 0)

    @property
    def label(self) -> str:
        """One line."""
        pair = self.window.name + (f" + {self.compressed.name}" if self.compressed else "")
        return f"tokens {self.tokens}, heads {self.heads}, keys {self.keys}, {pair}"

    @property
    def problem(self) -> Problem:
        """What a backend is asked."""
        return Problem(
            num_tokens=self.tokens,
            num_heads=self.heads,
            window_record=self.window.name,
            compressed_record=self.compressed.name if self.compressed else None,
            window_keys=self.window_keys,
            compressed_keys=self.compressed_keys if self.compressed else 0,
            output=self.output,
        )

    def prepare(self, backend: str, device: torch.device) -> Prepared:
        """Build the calls, run the first one, compare some of its rows with the oracle."""
        kernel = kernel_on(backend, self.problem, device)
        read = self.tokens * self.window_keys * self.window.row_bytes
        if self.compressed is not None:
            read += self.tokens * self.compressed_keys * self.compressed.row_bytes
        calls = self.calls(device, input_sets(read) if device.type == "cuda" else 2)
        out = self.allocate_out(calls[0])
        kernel(calls[0], out)
        name = kernel.__module__.split(".")[-2]
        fault = _sampled_fault(calls[0], out, name, device)
        written = self.tokens * self.heads * (512 + 16 if self.output == "fp8" else 1024)
        moved = read + self.tokens * self.heads * 1024 + written
        flops = attention_flops(self.tokens, self.heads, self.keys)
        launches: Launches = [functools.partial(kernel, call, out) for call in calls]
        return Prepared(launches, flops, moved, name, fault)

    def calls(self, device: torch.device, count: int) -> list[AttendCall]:
        """Calls over the same pools that each attend other rows."""
        generator = torch.Generator(device).manual_seed(self.tokens * 131 + self.heads)
        q = torch.randn(self.tokens, self.heads, 512, generator=generator, device=device)
        base = AttendCall(
            q=q.to(torch.bfloat16),
            window=_random_keys(self.window, self.tokens, self.window_keys, generator),
            compressed=None,
            scale=SCALE,
            sink=torch.randn(self.heads, generator=generator, device=device),
            positions=torch.randint(POSITIONS, (self.tokens,), generator=generator, device=device),
            rope=plain_rope_table(POSITIONS, device=device),
            rotate_query=True,
            unrotate_output=True,
            query_layout=self.layout,
        )
        calls = []
        for _ in range(count):
            compressed = None
            if self.compressed is not None:
                compressed = _random_keys(
                    self.compressed, self.tokens, self.compressed_keys, generator
                )
            window = _random_keys(self.window, self.tokens, self.window_keys, generator)
            calls.append(replace(base, window=window, compressed=compressed))
        return calls

    @property
    def layout(self) -> Layout:
        """The fused kernels' order with FP8, the plain one with bf16."""
        return Layout.CHUNK_INTERLEAVED if self.output == "fp8" else Layout.STANDARD

    def allocate_out(self, call: AttendCall) -> AttendOut:
        """The output of a call, alone."""
        tokens, heads, device = self.tokens, self.heads, call.q.device
        if self.output == "bf16":
            data = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device=device)
            return AttendOut(data, None, None, None, layout=self.layout)
        per_group = min(8, heads)
        groups = heads // per_group
        data = torch.empty(tokens, groups, per_group * 512, dtype=torch.uint8, device=device)
        scales = allocate_scales(tokens, groups, 4 * per_group, device)
        return AttendOut(data, scales, None, None, per_group, self.layout)

    def peer_launches(self, device: torch.device) -> Launches | None:
        """The peer's attention of the same sizes, on the rows that it reads; None = it has none."""
        widths = (self.window_keys, self.compressed_keys if self.compressed else 0)
        if any(width % TILE_KEYS for width in widths):
            return None
        if self.suite == "prefill":
            return self._peer_prefill(device)
        compressed = None if self.compressed is None else V4
        twin = replace(self, window=V4, compressed=compressed)
        row_bytes = self.tokens * self.keys * V4.row_bytes
        calls = twin.calls(device, input_sets(row_bytes))
        first = calls[0]
        body = PeerDecode(first.q, first.window, first.compressed, first.sink, SCALE)
        return [functools.partial(body, call.window, call.compressed) for call in calls]

    def _peer_prefill(self, device: torch.device) -> Launches:
        rows, generator = 32_768, torch.Generator(device).manual_seed(1)
        kv = torch.randn(rows, 1, 512, generator=generator, device=device).to(torch.bfloat16)
        shape = (self.tokens, 1, self.keys)
        indices = torch.randint(rows, shape, generator=generator, device=device).int()
        call = self.calls(device, 1)[0]
        return [functools.partial(peer_prefill, call.q, kv, indices, call.sink, SCALE)] * 2


@dataclass(frozen=True, slots=True)
class WriterBench:
    """The window writer."""

    tokens: int
    window: RecordFormat = MXFP8
    suite: str = "writers"
    op: str = "write_window"
    heads: int | None = None
    window_keys: int | None = None
    compressed_keys: int | None = None
    compressed: RecordFormat | None = None
    output: str = "cache"

    @property
    def label(self) -> str:
        """One line."""
        return f"rows {self.tokens}, {self.window.name}"

    def prepare(self, backend: str, device: torch.device) -> Prepared:
        """Compare every byte with plain loops, then build calls that write other rows of a large pool."""
        problem = Problem("write_window", self.tokens, 1, window_record=self.window.name)
        kernel = kernel_on(backend, problem, device)
        fault = check_writer(Sizes(record=self.window.name), backend, device)
        cache = random_pool(self.window, device)
        generator = torch.Generator(device).manual_seed(self.tokens)
        latents = torch.randn(self.tokens, 512, generator=generator, device=device)
        positions = torch.randint(POSITIONS, (self.tokens,), generator=generator, device=device)
        rope = plain_rope_table(POSITIONS, device=device)
        moved = self.tokens * (1024 + self.window.row_bytes)
        launches: Launches = []
        for _ in range(input_sets(moved, most=64) if device.type == "cuda" else 2):
            order = torch.randperm(cache.num_slots, generator=generator, device=device)
            call = WriteWindowCall(
                latents.to(torch.bfloat16), cache, order[: self.tokens], positions, rope
            )
            launches.append(functools.partial(kernel, call))
        return Prepared(launches, 0, moved, kernel.__module__.split(".")[-2], fault)

    def peer_launches(self, device: torch.device) -> Launches | None:
        """The peer has no writer."""
        del device
        return None


def decode_suite(device: torch.device, quick: bool) -> list[AttendBench]:
    """Decode steps by tokens and heads."""
    if device.type == "cpu":
        sizes = [(1, 64), (16, 64), (16, 8)] if quick else [(1, 64), (16, 64), (64, 64), (64, 8)]
    elif quick:
        sizes = [(1, 64), (128, 64), (128, 8)]
    else:
        sizes = [(tokens, 64) for tokens in (1, 8, 32, 64, 128, 256, 512)]
        sizes += [(1, 8), (16, 8), (128, 8), (128, 16), (128, 128)]
    return [AttendBench("decode", tokens, heads) for tokens, heads in sizes]


def prefill_suite(device: torch.device, quick: bool) -> list[AttendBench]:
    """A prefill chunk straight from the paged caches."""
    tokens = 4096 if device.type == "cuda" else 64 if quick else 256
    return [AttendBench("prefill", tokens, 64)]


def records_suite(device: torch.device, quick: bool) -> list[AttendBench]:
    """The same step on every pair of records, and the window alone."""
    tokens = 128 if device.type == "cuda" else 16
    pairs: list[tuple[RecordFormat, RecordFormat | None]] = [
        (MXFP8, None), (MXFP8, MXFP8), (MXFP8, NVFP4), (V4, V4), (MXFP8_PLANAR, NVFP4_PLANAR),
    ]  # fmt: skip
    return [AttendBench("records", tokens, 64, a, b) for a, b in (pairs[1:3] if quick else pairs)]


def writers_suite(device: torch.device, quick: bool) -> list[WriterBench]:
    """The window writer by rows, and the three widths."""
    most = 4096 if device.type == "cuda" else 512
    by_rows = [WriterBench(tokens) for tokens in ((128,) if quick else (1, 128, most))]
    return by_rows + ([] if quick else [WriterBench(128, record) for record in (NVFP4, V4)])


@functools.lru_cache(maxsize=12)
def random_pool(record: RecordFormat, device: torch.device) -> PagedCache:
    """A pool full of random rows, pages apart by FlashMLA's rule for page strides."""
    rows = GPU_POOL_ROWS if device.type == "cuda" else CPU_POOL_ROWS
    raw = POOL_PAGE_ROWS * record.row_bytes
    padding = (
        round_up(raw + 1, math.lcm(record.stride_multiple_bytes, record.row_alignment_bytes)) - raw
    )
    cache = poisoned_cache(
        record,
        num_pages=-(-rows // POOL_PAGE_ROWS),
        page_rows=POOL_PAGE_ROWS,
        page_padding_bytes=padding,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(7)
    slots = torch.arange(cache.num_slots, device=device)
    for some in torch.split(slots, 16384):
        values = torch.randn(len(some), 512, generator=generator, device=device)
        cache.write_rows(some, *encode_rows(record, values.to(torch.bfloat16)))
    return cache


def _random_keys(
    record: RecordFormat, tokens: int, width: int, generator: torch.Generator
) -> KeySet:
    """Random rows of the pool, every lane valid, lengths given."""
    cache, device = random_pool(record, generator.device), generator.device
    slots = torch.randint(cache.num_slots, (tokens, width), dtype=torch.int32,
                          generator=generator, device=device)  # fmt: skip
    return KeySet(cache, slots, torch.full((tokens,), width, dtype=torch.int32, device=device))


def _sampled_fault(
    call: AttendCall, out: AttendOut, backend: str, device: torch.device
) -> Fault | None:
    """Compare the first, the last and a middle row with the oracle; coordinates count those rows."""
    last = call.num_tokens - 1
    rows = torch.tensor(sorted({0, last // 2, last})[:CHECKED_ROWS], device=device)

    def pick(keys: KeySet | None) -> KeySet | None:
        if keys is None or keys.lengths is None:
            return keys
        return KeySet(keys.cache, keys.indices[rows], keys.lengths[rows])

    assert call.positions is not None
    window = pick(call.window)
    assert window is not None
    part = replace(call, q=call.q[rows], window=window, compressed=pick(call.compressed),
                   positions=call.positions[rows])  # fmt: skip
    scales = None if out.scales is None else out.scales[rows]
    part_out = replace(out, data=out.data[rows], scales=scales)
    return attend_fault(part, part_out, precision_of(backend, device))
