"""Memory for all caches of a model: one arena per cache group.

A physical block of a group holds one page of every cache in the group, side by side:

    arena "c2"    block 0: [layer 2 compressed | layer 2 index | layer 8 compressed | ...] block 1: [...]

so one block id in a request's table stands for the same tokens in all of them, and the pages of one
cache lie `block_bytes` apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least
from sparse_mla.cache.kv_dtype import RING_WIDTH, RecordSet, resolve_kv_cache_dtype, ring_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.pages import PageAllocator
from sparse_mla.cache.records import RecordFormat, round_up
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import CacheGroup, cache_groups, layer_topology
from sparse_mla.errors import ArgumentError

__all__ = ["BufferInfo", "CachePool", "GroupLayout", "MemberLayout", "PageAllocator"]

WINDOW, RING = "window", "ring"
_RING_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class MemberLayout:
    """One cache inside a group's block."""

    layer_id: int
    role: str  # "window", "compressed", "index" or "ring"
    record: RecordFormat | None  # None for the ring, whose rows are float32 [1024]
    offset_bytes: int  # of its page in the block
    page_bytes: int  # rows only, padding not counted

    @property
    def name(self) -> str:
        """For example `layers.2.compressed`."""
        return f"layers.{self.layer_id}.{self.role}"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A cache group: caches that share block ids."""

    name: str  # "window", "c1", "c2" or "ring"
    ratio: int  # tokens of one row; 0 for "window" and "ring", which keep single tokens
    page_rows: int
    tokens_per_page: int
    num_blocks: int
    block_bytes: int
    members: tuple[MemberLayout, ...]

    @property
    def first_block(self) -> int:
        """Smallest id to hand out: block 0 of "ring" is the null block."""
        return 1 if self.name == RING else 0

    def allocator(self) -> PageAllocator:
        """A fresh allocator of this group's blocks."""
        return PageAllocator(self.num_blocks - self.first_block, self.first_block, self.name)


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """One cache as plain bytes: all that is needed to move blocks of it elsewhere."""

    name: str
    group: str  # block ids of this group's table select `pages`
    shape: tuple[int, int]  # blocks, bytes of a page
    stride: tuple[int, int]  # bytes
    bytes: int  # of a page
    offset: int  # bytes from the start of the group's arena
    pages: Tensor = field(repr=False, compare=False)  # uint8 `shape`, a view of the arena


def plan_group(
    group: CacheGroup,
    records: RecordSet,
    *,
    num_blocks: int,
    block_size: int,
    window_page_rows: int,
    ring_capacity: int,
) -> GroupLayout:
    """Lay a group's caches out in a block.

    Every page begins at a multiple of its record's page alignment from the block's start (index keys
    take the compressed record's alignment if that is larger), and the block is as long as the common
    multiple of all stride rules demands.
    """
    tokens = {WINDOW: window_page_rows, RING: ring_capacity}.get(group.name, block_size)
    rows = tokens // max(group.ratio, 1)
    members: list[MemberLayout] = []
    end, multiple = 0, 1
    for layer_id in group.layer_ids:
        for role, record in _roles(group, records):
            if record is None:
                alignment, size = _RING_ALIGNMENT_BYTES, rows * RING_WIDTH * 4
                multiple = math.lcm(multiple, alignment)
            else:
                alignment, size = record.page_alignment_bytes, rows * record.row_bytes
                if role == "index":
                    alignment = max(alignment, records.compressed.page_alignment_bytes)
                multiple = math.lcm(
                    multiple, record.stride_multiple_bytes, record.row_alignment_bytes
                )
            offset = round_up(end, alignment)
            members.append(MemberLayout(layer_id, role, record, offset, size))
            end = offset + round_up(size, alignment)
    return GroupLayout(
        name=group.name,
        ratio=group.ratio,
        page_rows=rows,
        tokens_per_page=tokens,
        num_blocks=num_blocks,
        block_bytes=round_up(end, multiple),
        members=tuple(members),
    )


def _roles(group: CacheGroup, records: RecordSet) -> tuple[tuple[str, RecordFormat | None], ...]:
    if group.name == WINDOW:
        return ((WINDOW, records.window),)
    if group.name == RING:
        return ((RING, None),)
    return (("compressed", records.compressed), ("index", records.index))


class CachePool:
    """All caches of a model (or of some of its layers) on one device. Build it with `allocate`."""

    def __init__(
        self,
        cfg: ModelConfig,
        records: RecordSet,
        groups: Mapping[str, GroupLayout],
        arenas: Mapping[str, Tensor],  # uint8 [num_blocks, block_bytes] by group
    ) -> None:
        self.cfg = cfg
        self.records = records
        self.groups = dict(groups)
        self.arenas = dict(arenas)
        self._caches: dict[tuple[str, int], PagedCache] = {}
        self._rings: dict[int, Tensor] = {}
        for group in self.groups.values():
            for member in group.members:
                pages = _member_pages(self.arenas[group.name], member)
                if member.record is None:
                    rows = pages.view(torch.float32)
                    shape = (group.num_blocks, group.page_rows, RING_WIDTH)
                    strides = (group.block_bytes // 4, RING_WIDTH, 1)
                    self._rings[member.layer_id] = rows.as_strided(shape, strides)
                else:
                    cache = PagedCache(pages, member.record, group.page_rows)
                    cache.check_strides(member.name)
                    self._caches[member.role, member.layer_id] = cache

    @classmethod
    def allocate(
        cls,
        cfg: ModelConfig,
        *,
        pages: int | Mapping[str, int],
        kv_cache_dtype: str | RecordSet = "auto",
        device: torch.device | str = "cpu",
        block_size: int = 64,
        window_page_rows: int = 32,
        layer_ids: Iterable[int] | None = None,
        num_spec_tokens: int = 0,
    ) -> CachePool:
        """Zero-filled caches.

        Args:
            cfg: the model.
            pages: blocks of every group, or of each group by name ("window", "c1", "c2", "ring": those
                that the layers need). A request needs one "ring" block; block 0 there is the null block
                and never handed out.
            kv_cache_dtype: a name that `resolve_kv_cache_dtype` knows, or its result.
            device: where the arenas live.
            block_size: tokens of a page of the compressed caches; a multiple of every ratio.
            window_page_rows: tokens of a page of the window caches.
            layer_ids: only these layers' caches; their sources must be among them.
            num_spec_tokens: draft tokens of a step, which size the ring.

        Raises:
            ArgumentError: a size below 1, a block size that a ratio does not divide, a group that is
                missing or unknown in `pages`, a dtype that is refused, sources missing in `layer_ids`.
        """
        records = kv_cache_dtype
        if isinstance(records, str):
            records = resolve_kv_cache_dtype(records)
        check_at_least("block_size", block_size, 1)
        check_at_least("window_page_rows", window_page_rows, 1)
        wanted = cache_groups(cfg, layer_ids)
        for group in wanted:
            if group.ratio and block_size % group.ratio:
                raise ArgumentError("block_size", block_size, f"a multiple of {group.ratio}")
        counts = _block_counts(pages, [group.name for group in wanted])
        groups = {
            group.name: plan_group(
                group,
                records,
                num_blocks=counts[group.name],
                block_size=block_size,
                window_page_rows=window_page_rows,
                ring_capacity=ring_rows(num_spec_tokens),
            )
            for group in wanted
        }
        arenas = {
            name: torch.zeros(
                layout.num_blocks, layout.block_bytes, dtype=torch.uint8, device=device
            )
            for name, layout in groups.items()
        }
        return cls(cfg, records, groups, arenas)

    def window_cache(self, layer_id: int) -> PagedCache:
        """The window cache of a layer.

        Raises:
            ArgumentError: the pool does not hold the layer.
        """
        return self._cache(WINDOW, layer_id, layer_id)

    def compressed_cache(self, layer_id: int) -> PagedCache:
        """The compressed cache that a layer reads: its KV source's.

        Raises:
            ArgumentError: the layer has none, or the pool does not hold it.
        """
        return self._cache("compressed", layer_id, self._source(layer_id))

    def index_cache(self, layer_id: int) -> PagedCache:
        """The index keys that a layer's indexer scores: its KV source's.

        Raises:
            ArgumentError: the layer has none, or the pool does not hold it.
        """
        return self._cache("index", layer_id, self._source(layer_id))

    def ring(self, layer_id: int) -> Tensor:
        """Compressor state of a ratio-2 KV source, float32 [blocks, capacity, 1024], a view.

        Raises:
            ArgumentError: the layer keeps no such state, or the pool does not hold it.
        """
        if layer_id not in self._rings:
            raise ArgumentError("layer_id", layer_id, f"layers with a ring: {sorted(self._rings)}")
        return self._rings[layer_id]

    def allocators(self) -> dict[str, PageAllocator]:
        """A fresh allocator for every group; the null block of "ring" is left out."""
        return {name: group.allocator() for name, group in self.groups.items()}

    def buffers(self) -> list[BufferInfo]:
        """Every cache of the pool as bytes.

        To move a request, copy `pages[its blocks of that group]` of every buffer to the buffer of the
        same name in a pool of the same configuration, at the blocks it gets there.
        """
        return [
            BufferInfo(
                name=member.name,
                group=group.name,
                shape=(group.num_blocks, member.page_bytes),
                stride=(group.block_bytes, 1),
                bytes=member.page_bytes,
                offset=member.offset_bytes,
                pages=_member_pages(self.arenas[group.name], member),
            )
            for group in self.groups.values()
            for member in group.members
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.numel() for arena in self.arenas.values())

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return next(iter(self.arenas.values())).device

    def _source(self, layer_id: int) -> int:
        source = layer_topology(self.cfg, layer_id).kv_source
        if source is None:
            raise ArgumentError(
                "layer_id", layer_id, "a layer of ratio 1 or 2", "this one attends its window only"
            )
        return source

    def _cache(self, role: str, layer_id: int, owner: int) -> PagedCache:
        if (role, owner) not in self._caches:
            held = sorted(layer for kind, layer in self._caches if kind == role)
            raise ArgumentError(
                "layer_id", f"layer {layer_id} ({role} cache of layer {owner})", f"layers {held}",
                "allocate the pool with this layer in layer_ids",
            )  # fmt: skip
        return self._caches[role, owner]


def _member_pages(arena: Tensor, member: MemberLayout) -> Tensor:
    return arena[:, member.offset_bytes : member.offset_bytes + member.page_bytes]


def _block_counts(pages: int | Mapping[str, int], names: list[str]) -> dict[str, int]:
    if not isinstance(pages, Mapping):
        pages = dict.fromkeys(names, pages)
    if set(pages) != set(names):
        got = f"groups {sorted(pages)}"
        raise ArgumentError("pages", got, f"one number for each of {sorted(names)}")
    for name, count in pages.items():
        check_at_least(f"pages[{name!r}]", count, 1)
    return dict(pages)
