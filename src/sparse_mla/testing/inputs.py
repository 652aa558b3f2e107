"""Attention problems with every trap of real use built in.

A problem's caches are poisoned: each byte of each row that no valid lane names is 0xFF (NaN codes and
NaN scales), page tails, the space between pages and the space before the first page too. Lanes at or past
a row's length hold huge values and slots of poisoned rows. A kernel that reads what it must not read
shows it as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import MXFP8, RecordFormat, record_named
from sparse_mla.kernels.contract import (
    HEAD_DIM,
    ROPE_DIM,
    AttendCall,
    AttendOut,
    KeySet,
    Layout,
    allocate_scales,
)
from sparse_mla.kernels.layouts import interleave_query
from sparse_mla.metadata.plan import TileSchedulerPlan

POISON = 0xFF
SCALE = HEAD_DIM**-0.5
GARBAGE_LANES = (2_000_000_000, 0x7FC00000, 2**31 - 1, -(2**31))
HOLES = (-1, -2, -64, -(2**31))


@dataclass(frozen=True, slots=True)
class ProblemSpec:
    """What `make_problem` builds; every field has a plain default."""

    tokens: int
    heads: int
    window_keys: int = 128  # list width
    compressed_keys: int | None = None  # list width; None = no compressed set
    window_record: RecordFormat | str = MXFP8
    compressed_record: RecordFormat | str = MXFP8
    seed: int = 0
    device: str | torch.device = "cpu"
    window_page_rows: int = 32
    compressed_page_rows: int = 64
    hole_probability: float = 0.0  # share of lanes that hold a negative index
    beyond_probability: float = 0.0  # share of lanes that hold an index past the cache
    lengths: str = "full"  # "full" (None), "random" (0..K), or "zero"
    pool_rows: int | None = (
        None  # rows of each cache, rounded up to pages; None = 2 K, 256 at least
    )
    named_share: float = 0.75  # share of the rows that lanes may name; the rest is poison
    page_padding_bytes: int = 0  # more bytes between pages, rounded up to the record's alignment
    offset_rows: int = 0  # bytes before the first page, in units of the record's alignment
    poison: bool = True
    sink: str | float | None = "random"  # "random" (normal), a number for all heads, or None
    key_scale: float = 1.0  # standard deviation of the latents
    outlier_dims: int = 0  # first dims of the latent that are 64 times larger
    max_position: int = 4096
    positions_dtype: torch.dtype = torch.int64
    strided: bool = False  # q and indices are views with padding between rows


@dataclass(frozen=True, slots=True)
class AttendProblem:
    """Inputs of one attention call."""

    spec: ProblemSpec
    q: Tensor  # bf16 [T, H, 512] in standard order
    window: KeySet
    compressed: KeySet | None
    sink: Tensor | None  # float32 [H]
    positions: Tensor  # int32 or int64 [T]
    rope: Tensor  # float32 [max_position, 64]
    scale: float

    def call(
        self,
        *,
        rotate_query: bool = True,
        unrotate_output: bool = True,
        query_layout: Layout = Layout.STANDARD,
        plan: TileSchedulerPlan | None = None,
    ) -> AttendCall:
        """The call that a kernel gets. With the interleaved layout q is a permuted copy."""
        q = self.q if query_layout is Layout.STANDARD else interleave_query(self.q)
        return AttendCall(
            q=q,
            window=self.window,
            compressed=self.compressed,
            scale=self.scale,
            sink=self.sink,
            positions=self.positions,
            rope=self.rope,
            rotate_query=rotate_query,
            unrotate_output=unrotate_output,
            query_layout=query_layout,
            plan=plan,
        )

    def rows(self, rows: Tensor) -> AttendProblem:
        """The same problem for some of its tokens (int64 [n], any order, on the problem's device)."""

        def pick(keys: KeySet) -> KeySet:
            lengths = None if keys.lengths is None else keys.lengths[rows]
            return KeySet(keys.cache, keys.indices[rows], lengths)

        return replace(
            self,
            q=self.q[rows],
            window=pick(self.window),
            compressed=None if self.compressed is None else pick(self.compressed),
            positions=self.positions[rows],
        )

    def allocate_out(
        self,
        *,
        fp8: bool = False,
        heads_per_group: int | None = None,
        layout: Layout = Layout.STANDARD,
        lse: bool = True,
        max_logits: bool = True,
    ) -> AttendOut:
        """Outputs full of NaN (0xFF bytes), so that a row that is not written shows."""
        tokens, heads, _ = self.q.shape
        device = self.q.device
        per_group = heads_per_group or next(n for n in (8, 4, 2, 1) if heads % n == 0)
        nan = torch.full((2, tokens, heads), torch.nan, device=device)
        scales = None
        if fp8:
            groups = heads // per_group
            data = torch.full(
                (tokens, groups, per_group * HEAD_DIM), POISON, dtype=torch.uint8, device=device
            )
            scales = allocate_scales(tokens, groups, 4 * per_group, device)
            scales.fill_(-1)
        else:
            data = torch.full(
                (tokens, heads, HEAD_DIM), torch.nan, dtype=torch.bfloat16, device=device
            )
        return AttendOut(
            data=data,
            scales=scales,
            lse=nan[0] if lse else None,
            max_logits=nan[1] if max_logits else None,
            heads_per_group=per_group,
            layout=layout,
        )


def make_problem(spec: ProblemSpec | None = None, /, **fields: Any) -> AttendProblem:
    """Build a problem from a `ProblemSpec`, or from its fields by name.

    The same spec on the same kind of device gives the same bytes.
    """
    spec = ProblemSpec(**fields) if spec is None else replace(spec, **fields)
    device = torch.device(spec.device)
    generator = torch.Generator(device).manual_seed(spec.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    window = _key_set(spec, spec.window_keys, spec.window_record, spec.window_page_rows, generator)
    compressed = None
    if spec.compressed_keys is not None:
        compressed = _key_set(
            spec, spec.compressed_keys, spec.compressed_record, spec.compressed_page_rows, generator
        )
    if spec.strided:
        base = normal(spec.tokens, spec.heads + 3, HEAD_DIM + 64).to(torch.bfloat16)
        q = base[:, 1 : spec.heads + 1, 32 : 32 + HEAD_DIM]
    else:
        q = normal(spec.tokens, spec.heads, HEAD_DIM).to(torch.bfloat16)
    sink = None
    if spec.sink == "random":
        sink = normal(spec.heads) * 2
    elif spec.sink is not None:
        sink = torch.full((spec.heads,), float(spec.sink), device=device)
    positions = torch.randint(
        spec.max_position, (spec.tokens,), generator=generator, device=device
    ).to(spec.positions_dtype)
    rope = plain_rope_table(spec.max_position, device=device)
    return AttendProblem(spec, q, window, compressed, sink, positions, rope, SCALE)


def plain_rope_table(
    num_positions: int, base: float = 10000.0, device: torch.device | str = "cpu"
) -> Tensor:
    """float32 [num_positions, 64]: cos 32, then sin 32, computed on the CPU without YaRN."""
    exponents = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM
    frequencies = 1.0 / torch.pow(torch.tensor(base, dtype=torch.float32), exponents)
    turns = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=1).to(device)


def poisoned_cache(
    record: RecordFormat,
    *,
    num_pages: int,
    page_rows: int,
    page_padding_bytes: int = 0,
    offset_rows: int = 0,
    fill: int = POISON,
    device: torch.device | str = "cpu",
) -> PagedCache:
    """A cache whose every byte, padding included, is `fill`; its pages lie apart and off the start."""
    unit = record.row_alignment_bytes
    stride = page_rows * record.row_bytes + page_padding_bytes
    stride = -(-stride // unit) * unit
    offset = offset_rows * unit
    storage = torch.full((offset + num_pages * stride,), fill, dtype=torch.uint8, device=device)
    pages = storage[offset:].view(num_pages, stride)[:, : page_rows * record.row_bytes]
    return PagedCache(pages, record, page_rows)


def random_latents(num_rows: int, spec: ProblemSpec, generator: torch.Generator) -> Tensor:
    """bf16 [num_rows, 512] normal latents, some dims larger when the spec asks for outliers."""
    values = torch.randn(num_rows, HEAD_DIM, generator=generator, device=generator.device)
    values *= spec.key_scale
    values[:, : spec.outlier_dims] *= 64
    return values.to(torch.bfloat16)


def _key_set(
    spec: ProblemSpec,
    width: int,
    record: RecordFormat | str,
    page_rows: int,
    generator: torch.Generator,
) -> KeySet:
    record = record_named(record) if isinstance(record, str) else record
    device = torch.device(spec.device)
    wanted_rows = spec.pool_rows or max(256, 2 * width)
    num_pages = -(-wanted_rows // page_rows)
    cache = poisoned_cache(
        record,
        num_pages=num_pages,
        page_rows=page_rows,
        page_padding_bytes=spec.page_padding_bytes,
        offset_rows=spec.offset_rows,
        fill=POISON if spec.poison else 0,
        device=device,
    )
    order = torch.randperm(cache.num_slots, generator=generator, device=device)
    count = max(1, int(cache.num_slots * spec.named_share))
    named, unnamed = order[:count], order[count:]
    for some in torch.split(named, 16384):
        cache.write_rows(some, *encode_rows(record, random_latents(len(some), spec, generator)))
    indices = _lanes(spec, width, cache.num_slots, named, generator)
    lengths = None
    if spec.lengths != "full":
        limit = width + 1 if spec.lengths == "random" else 1
        lengths = torch.randint(
            limit, (spec.tokens,), dtype=torch.int32, generator=generator, device=device
        )
        _spoil_lanes_past(lengths, indices, unnamed)
    if spec.strided:
        padded = torch.full(
            (spec.tokens, width + 5), GARBAGE_LANES[0], dtype=torch.int32, device=device
        )
        padded[:, 2 : 2 + width] = indices
        indices = padded[:, 2 : 2 + width]
    return KeySet(cache, indices, lengths)


def _lanes(
    spec: ProblemSpec, width: int, num_slots: int, named: Tensor, generator: torch.Generator
) -> Tensor:
    """int32 [T, width]: slots of named rows (repeats allowed), holes, and slots past the cache."""
    shape = (spec.tokens, width)
    device = named.device

    def draw(limit: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator, device=device)

    lanes = named[draw(len(named))]
    if spec.hole_probability:
        holes = torch.tensor(HOLES, device=device)[draw(len(HOLES))]
        lanes = torch.where(draw(10**6) < spec.hole_probability * 10**6, holes, lanes)
    if spec.beyond_probability:
        beyond = torch.tensor([num_slots, num_slots + 1, 2**31 - 1], device=device)[draw(3)]
        lanes = torch.where(draw(10**6) < spec.beyond_probability * 10**6, beyond, lanes)
    return lanes.to(torch.int32)


def _spoil_lanes_past(lengths: Tensor, indices: Tensor, unnamed: Tensor) -> None:
    """Fill lanes at or past the lengths with garbage and with slots of poisoned rows, in place."""
    width = indices.shape[1]
    lane = torch.arange(width, device=indices.device)
    garbage = torch.tensor(GARBAGE_LANES, device=indices.device)[lane % len(GARBAGE_LANES)]
    if len(unnamed):
        garbage = torch.where(lane % 3 == 0, unnamed[lane % len(unnamed)], garbage)
    past = lane >= lengths[:, None]
    indices.copy_(torch.where(past, garbage.to(torch.int32), indices))
