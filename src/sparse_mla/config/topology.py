"""Which layer writes and which layer reads which cache.

The source of a layer is the largest id of a source list that is not above the layer. KV sources own
a compressor, a compressed cache and an index-key cache; index sources run the indexer and leave a
top-k list to the layers after them; the candidate source narrows the search of later index sources.
Every layer, drafts included, owns a window cache.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_mla.errors import ArgumentError, ConfigError, IndexRangeError

if TYPE_CHECKING:
    from sparse_mla.config.model import ModelConfig


class LayerKind(enum.Enum):
    """What a layer attends, by its compression ratio."""

    WINDOW_ONLY = "swaonly"
    RATIO_1 = "c1a"
    RATIO_2 = "c2a"

    @property
    def ratio(self) -> int:
        """Tokens of one compressed entry; 0 = the layer has no compressed set."""
        return _RATIOS[self]


_RATIOS = {LayerKind.WINDOW_ONLY: 0, LayerKind.RATIO_1: 1, LayerKind.RATIO_2: 2}
_KINDS = {ratio: kind for kind, ratio in _RATIOS.items()}


def deepseek_v41_layer_type(ratio: int) -> LayerKind:
    """The kind of a layer with this compression ratio.

    Raises:
        ConfigError: the ratio is not 0, 1 or 2.
    """
    if isinstance(ratio, bool) or ratio not in _KINDS:
        raise ConfigError(
            "compress_ratios",
            f"ratio {ratio!r}",
            "0 (window only), 1 or 2",
            "V4.1 has no other compression; check that the config is not one of another model",
        )
    return _KINDS[ratio]


@dataclass(frozen=True, slots=True)
class LayerTopology:
    """One layer's place among the caches."""

    layer_id: int
    kind: LayerKind
    ratio: int
    is_draft: bool
    kv_source: int | None  # layer whose compressed and index-key caches this layer reads
    index_source: int | None  # layer whose top-k list this layer reads
    owns_compressed_cache: bool  # is its own KV source: has a compressor
    runs_indexer: bool  # is its own index source
    has_gate: bool  # the compressor pools, so it has `wgate` and carries state between steps
    publishes_candidates: bool
    consumes_candidates: bool  # its indexer searches only the published blocks


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose caches share page tables: one block id means the same tokens in all of them."""

    name: str  # "window", "c1", "c2" or "ring"
    ratio: int  # tokens of one row; 0 for "window" and "ring", which keep single tokens
    layer_ids: tuple[int, ...]  # owners of the caches, ascending


def layer_topology(cfg: ModelConfig, layer_id: int) -> LayerTopology:
    """The topology of one layer, drafts included.

    Raises:
        IndexRangeError: no such layer.
    """
    if not 0 <= layer_id < cfg.num_layers:
        raise IndexRangeError("layer_id", layer_id, f"0..{cfg.num_layers - 1}")
    kind = deepseek_v41_layer_type(cfg.ratio(layer_id))
    compressed = kind is not LayerKind.WINDOW_ONLY
    kv_source = _source(cfg.kv_source_layer_ids, layer_id) if compressed else None
    index_source = _source(cfg.index_source_layer_ids, layer_id) if compressed else None
    owns, indexes = kv_source == layer_id, index_source == layer_id
    return LayerTopology(
        layer_id=layer_id,
        kind=kind,
        ratio=kind.ratio,
        is_draft=layer_id >= cfg.num_hidden_layers,
        kv_source=kv_source,
        index_source=index_source,
        owns_compressed_cache=owns,
        runs_indexer=indexes,
        has_gate=owns and kind.ratio > 1,
        publishes_candidates=layer_id == cfg.candidate_source_layer_id,
        consumes_candidates=indexes and 0 <= cfg.candidate_source_layer_id < layer_id,
    )


def kinds_present(
    cfg: ModelConfig, layer_ids: Iterable[int] | None = None
) -> tuple[LayerKind, ...]:
    """The kinds of these layers (default: all), each once, by ratio. One plan is made for each."""
    kinds = {layer.kind for layer in _layers(cfg, layer_ids)}
    return tuple(sorted(kinds, key=lambda kind: kind.ratio))


def cache_groups(
    cfg: ModelConfig, layer_ids: Iterable[int] | None = None
) -> tuple[CacheGroup, ...]:
    """The cache groups of these layers (default: all); a group without a member is left out.

    "window": the window cache of every layer. "c1", "c2": the compressed and index-key caches of the
    KV sources of that ratio. "ring": the compressor state of the KV sources that pool.

    Raises:
        ArgumentError: a layer's source is not among `layer_ids`.
    """
    layers = _layers(cfg, layer_ids)
    present = tuple(layer.layer_id for layer in layers)
    _, missing = with_sources(cfg, present)
    if missing:
        raise ArgumentError(
            "layer_ids", list(present), f"a list that holds the sources {list(missing)}",
            "add them with with_sources(cfg, layer_ids)",
        )  # fmt: skip
    owners = [layer for layer in layers if layer.owns_compressed_cache]
    members = [("window", 0, present)]
    for ratio in (1, 2):
        ids = tuple(layer.layer_id for layer in owners if layer.ratio == ratio)
        members.append((f"c{ratio}", ratio, ids))
    members.append(("ring", 0, tuple(layer.layer_id for layer in owners if layer.has_gate)))
    return tuple(CacheGroup(*member) for member in members if member[2])


def with_sources(
    cfg: ModelConfig, layer_ids: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Add the layers that these layers read from.

    Returns:
        (all ids ascending, the added ids ascending). KV, index and candidate sources are followed
        until nothing is missing.
    """
    wanted = {layer.layer_id for layer in _layers(cfg, layer_ids)}
    found: set[int] = set()
    pending = sorted(wanted)
    while pending:
        layer = layer_topology(cfg, pending.pop())
        found.add(layer.layer_id)
        reads = [layer.kv_source, layer.index_source]
        if layer.consumes_candidates:
            reads.append(cfg.candidate_source_layer_id)
        pending += [source for source in reads if source is not None and source not in found]
    return tuple(sorted(found)), tuple(sorted(found - wanted))


def _layers(cfg: ModelConfig, layer_ids: Iterable[int] | None) -> list[LayerTopology]:
    ids = range(cfg.num_layers) if layer_ids is None else sorted(set(layer_ids))
    return [layer_topology(cfg, layer_id) for layer_id in ids]


def _source(sources: Sequence[int], layer_id: int) -> int | None:
    below = bisect.bisect_right(sources, layer_id)
    return sources[below - 1] if below else None
