"""What an attention layer does with an engine's tensors: our ops on views, nothing else. No vLLM needed.

An engine's cache is a strided view that it binds once. Its pages lie as far apart as all layers of a
group are wide, so a view is wrapped, never reshaped.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla.backends.select import BackendChoice, DeviceInfo, Problem, select
from sparse_mla.cache.kv_dtype import RecordSet, resolve_kv_cache_dtype
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import RecordFormat
from sparse_mla.errors import ShapeError, UnsupportedError
from sparse_mla.kernels.contract import HEAD_DIM, ROPE_DIM
from sparse_mla.metadata.plan import PlanScratch, TileSchedulerPlan
from sparse_mla.metadata.rules import TopkRows
from sparse_mla.ops.attend import (
    AttendBuffers,
    AttendOptions,
    KeySet,
    mega_attention,
    sparse_attention,
)
from sparse_mla.ops.bodies import metadata_rules
from sparse_mla.ops.write import write_compressed, write_window

WARM_UP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Step sizes between which the choice of a portable kernel and its splits can change."""


class BoundCache:
    """A cache view of an engine with its record, wrapped when the engine binds another one."""

    def __init__(self, record: RecordFormat) -> None:
        self.record = record
        self._view: Tensor | None = None
        self._cache: PagedCache | None = None

    def of(self, view: Tensor) -> PagedCache:
        """The paged cache of a view, bytes [pages, page_rows, row_bytes]."""
        if self._cache is None or view is not self._view:
            self._cache = PagedCache.from_view(view, self.record, "kv_cache")
            self._view = view
        return self._cache


@dataclass(frozen=True, slots=True)
class SlotLists:
    """The compressed rows that each row of a step attends, from one index source to the next."""

    slots: Tensor  # int32 [max_tokens, topk]
    lengths: Tensor  # int32 [max_tokens]

    @classmethod
    def allocate(cls, max_tokens: int, topk: int, device: torch.device | str) -> SlotLists:
        """Lists without an entry."""
        slots = torch.full((max_tokens, topk), -1, dtype=torch.int32, device=device)
        return cls(slots, torch.zeros(max_tokens, dtype=torch.int32, device=device))

    def fill(
        self,
        topk: Tensor,  # int32 [n, topk] compressed positions, negative = none
        requests: Tensor,  # int32 [n]
        block_table: Tensor,  # int32 [R, pages]
        page_rows: int,
        is_valid: Tensor,  # bool [n]
    ) -> None:
        """Turn the indexer's positions into slots of the paged cache, in place."""
        rows = topk.shape[0]
        entries = TopkRows(topk, block_table, requests, page_rows, is_valid)
        metadata_rules(topk.device).fill_topk_slots(self.slots[:rows], self.lengths[:rows], entries)

    def key_set(self, cache: PagedCache, rows: int) -> KeySet:
        """The first rows' lists over a cache."""
        return KeySet(cache, self.slots[:rows], self.lengths[:rows])


@functools.lru_cache(maxsize=8)
def shared_slot_lists(max_tokens: int, topk: int, device: torch.device) -> SlotLists:
    """The lists of a device: the layers of a model run one after another and share them."""
    return SlotLists.allocate(max_tokens, topk, device)


@functools.lru_cache(maxsize=8)
def shared_scratch(num_heads: int, device: torch.device) -> PlanScratch:
    """The scratch of split launches on a device.

    An engine has a metadata builder for each cache group, one for each layer's window among them; their
    launches follow one another, so one scratch serves all.
    """
    return PlanScratch(num_heads, DeviceInfo.detect(device).num_sms, device)


def engine_records(kv_cache_dtype: str) -> RecordSet:
    """The records behind a resolved KV cache dtype; engines keep index keys in FP8 on Hopper."""
    return resolve_kv_cache_dtype(kv_cache_dtype, index_dtype="fp8")


def store_window(
    latents: Tensor,  # bf16 [T, 512]
    cache: PagedCache,
    slots: Tensor,  # int64 [n], may be longer or shorter than T
    positions: Tensor,  # int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    q: Tensor | None = None,  # bf16 [T, H, 512], rotated in place
) -> None:
    """Store this step's window rows; rotate the query on the way if it is given."""
    tokens = latents.shape[0]
    write_window(
        latents,
        cache=cache,
        slots=slots[:tokens],
        positions=positions[:tokens],
        rope=rope,
        q=q,
        q_out=q,
    )


def store_compressed(
    latents: Tensor,  # bf16 [T, 512]; rows that close no group may hold anything
    cache: PagedCache,
    slots: Tensor,  # int64 [n], may be longer or shorter than T
    positions: Tensor,  # int64 [T]
    rope: Tensor,  # float32 [max_positions, 64]
    ratio: int,
) -> None:
    """Store the compressed rows of groups that close in this step."""
    tokens = latents.shape[0]
    write_compressed(
        latents,
        cache=cache,
        slots=slots[:tokens],
        positions=positions[:tokens],
        rope=rope,
        ratio=ratio,
    )


@dataclass(frozen=True, slots=True)
class Attend:
    """One layer's attention over one step; the output keeps the query's shape."""

    q: Tensor  # bf16 [T, H, 512]
    window: KeySet  # of n <= T rows
    compressed: KeySet | None
    positions: Tensor  # int64 [T]
    rope: Tensor  # float32 [max_positions, 64]
    sink: Tensor  # float32 [H]
    scale: float
    plan: TileSchedulerPlan | None

    def run(self, output: Tensor, *, mega: bool, backend: str = "auto") -> None:
        """Fill `output`, bf16 [T, H, 512] contiguous; rows past the lists become zero.

        Args:
            output: what the engine's output projection reads.
            mega: rotate the query and rotate the output back; otherwise neither.
            backend: of the op.
        """
        rows, tokens = self.window.indices.shape[0], self.q.shape[0]
        if rows > tokens:
            raise ShapeError("window", f"{rows} rows", f"at most the query's {tokens}")
        if rows < tokens:
            output[rows:].zero_()
        if not rows:
            return
        options = AttendOptions(output="bf16", backend=backend)
        buffers = AttendBuffers(data=output[:rows])
        if mega:
            mega_attention(
                self.q[:rows],
                window=self.window,
                compressed=self.compressed,
                positions=self.positions[:rows],
                rope=self.rope,
                scale=self.scale,
                sink=self.sink,
                plan=self.plan,
                options=options,
                buffers=buffers,
            )
            return
        sparse_attention(
            self.q[:rows],
            window=self.window,
            compressed=self.compressed,
            scale=self.scale,
            sink=self.sink,
            plan=self.plan,
            options=options,
            buffers=buffers,
        )


def grouped_projection(attn_out: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The first output projection, group by group.

    Args:
        attn_out: bf16 [T, H, 512] contiguous, rotated back; a group's heads lie side by side.
        weight: bf16 [groups * rank, H / groups * 512].
        groups: output groups of this rank.

    Returns:
        bf16 [T, groups * rank]

    Raises:
        UnsupportedError: a weight that is not bf16: its scales would have to be applied too.
    """
    if weight.dtype != torch.bfloat16:
        raise UnsupportedError(
            "the output projection wo_a",
            [f"dtype: got {weight.dtype}; allowed: torch.bfloat16, as vLLM keeps it on Hopper"],
        )
    tokens, rank = attn_out.shape[0], weight.shape[0] // groups
    heads = attn_out.view(tokens, groups, weight.shape[1])
    out = attn_out.new_empty(tokens, groups, rank)
    per_group = weight.view(groups, rank, -1).transpose(1, 2)
    torch.bmm(heads.transpose(0, 1), per_group, out=out.transpose(0, 1))
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides which kernels a layer needs."""

    heads: int
    window_record: RecordFormat
    compressed_record: RecordFormat | None  # None on window-only layers
    window_keys: int
    compressed_keys: int
    ratio: int
    mega: bool
    writes_compressed: bool


def choice(shape: Shape, device: torch.device) -> BackendChoice:
    """The kernels that attention of this shape takes on a device."""
    problem = Problem(
        op="attend",
        num_heads=shape.heads,
        window_record=shape.window_record.name,
        compressed_record=None if shape.compressed_record is None else shape.compressed_record.name,
        window_keys=shape.window_keys,
        compressed_keys=shape.compressed_keys,
    )
    return select(problem, DeviceInfo.detect(device))


def warm_up_sizes(shape: Shape, device: torch.device, max_tokens: int) -> list[int]:
    """Step sizes that together run every kernel that steps of up to `max_tokens` tokens run."""
    if device.type != "cuda":
        return [1]
    counts = set(WARM_UP_TOKENS)
    if choice(shape, device).name == "hopper":
        from sparse_mla.kernels.hopper.attend import warm_up_tokens

        index = torch.cuda.current_device() if device.index is None else device.index
        widths = (shape.window_keys, shape.compressed_keys)
        counts.update(warm_up_tokens(shape.heads, widths, max_tokens, index))
    return sorted({min(count, max_tokens) for count in counts})


@functools.cache
def warm_up(shape: Shape, device: torch.device, max_tokens: int) -> None:
    """Run every kernel of a shape once on caches of one page, so that serving compiles nothing.

    Nothing is attended or stored: all lists are empty and all slots negative. Runs once per shape and
    process.
    """
    window = PagedCache.allocate(shape.window_record, num_pages=1, page_rows=32, device=device)
    record = shape.compressed_record
    compressed = None
    if record is not None:
        compressed = PagedCache.allocate(record, num_pages=1, page_rows=32, device=device)
    rope = torch.zeros(1, ROPE_DIM, device=device)
    sink = torch.zeros(shape.heads, device=device)
    for tokens in warm_up_sizes(shape, device, max_tokens):
        q = torch.zeros(tokens, shape.heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        latents = torch.zeros(tokens, HEAD_DIM, dtype=torch.bfloat16, device=device)
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        slots = torch.full_like(positions, -1)
        store_window(latents, window, slots, positions, rope, None if shape.mega else q)
        extra = None
        if compressed is not None:
            if shape.writes_compressed:
                store_compressed(latents, compressed, slots, positions, rope, shape.ratio)
            lists = SlotLists.allocate(tokens, shape.compressed_keys, device)
            table, valid = slots.view(1, -1).int(), slots >= 0
            lists.fill(lists.slots.clone(), positions.int(), table, compressed.page_rows, valid)
            extra = lists.key_set(compressed, tokens)
        keys = SlotLists.allocate(tokens, shape.window_keys, device).key_set(window, tokens)
        call = Attend(q, keys, extra, positions, rope, sink, HEAD_DIM**-0.5, None)
        call.run(torch.empty_like(q), mega=shape.mega)
