"""Layer kinds, sources and cache groups."""

from __future__ import annotations

import pytest

from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import (
    CacheGroup,
    LayerKind,
    cache_groups,
    deepseek_v41_layer_type,
    kinds_present,
    layer_topology,
    with_sources,
)
from sparse_mla.errors import ArgumentError, ConfigError, IndexRangeError

FLASH = ModelConfig.deepseek_v41_flash()
WINDOW_ONLY = FLASH.replace(
    compress_ratios=(),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    candidate_source_layer_id=-1,
)


def source(sources: tuple[int, ...], layer: int) -> int:
    """The rule of the model: the largest id that is not above the layer."""
    return max(one for one in sources if one <= layer)


def test_kinds_and_their_names() -> None:
    assert [(kind.value, kind.ratio) for kind in LayerKind] == [
        ("swaonly", 0),
        ("c1a", 1),
        ("c2a", 2),
    ]
    assert [deepseek_v41_layer_type(ratio) for ratio in (0, 1, 2)] == list(LayerKind)


@pytest.mark.parametrize("ratio", [-1, 3, 4, 128, True, None, 1.5, "1"])
def test_another_ratio_is_a_value_error_that_names_it(ratio: object) -> None:
    with pytest.raises(ConfigError, match=rf"ratio {ratio!r}; allowed: 0 .*1 or 2") as caught:
        deepseek_v41_layer_type(ratio)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("layer_id", range(43))
def test_every_layer_of_the_model(layer_id: int) -> None:
    layer = layer_topology(FLASH, layer_id)
    compressed = 2 <= layer_id < 40
    assert layer.ratio == (0 if not compressed else 2 if layer_id < 20 else 1) == layer.kind.ratio
    assert layer.is_draft == (layer_id >= 40)
    assert layer.kv_source == (source((2, 8, 14, 20), layer_id) if compressed else None)
    indexers = (2, 8, 14, 20, 24, 28, 32, 36)
    assert layer.index_source == (source(indexers, layer_id) if compressed else None)
    assert layer.owns_compressed_cache == (layer_id in (2, 8, 14, 20))
    assert layer.runs_indexer == (layer_id in indexers)
    assert layer.has_gate == (layer_id in (2, 8, 14))
    assert layer.publishes_candidates == (layer_id == 20)
    assert layer.consumes_candidates == (layer_id in (24, 28, 32, 36))


def test_worked_sources() -> None:
    kv = {layer: layer_topology(FLASH, layer).kv_source for layer in (2, 7, 8, 13, 14, 19, 20, 39)}
    assert kv == {2: 2, 7: 2, 8: 8, 13: 8, 14: 14, 19: 14, 20: 20, 39: 20}
    index = {layer: layer_topology(FLASH, layer).index_source for layer in (7, 19, 23, 24, 27, 39)}
    assert index == {7: 2, 19: 14, 23: 20, 24: 24, 27: 24, 39: 36}


@pytest.mark.parametrize("layer_id", [-1, 43, 100])
def test_no_such_layer(layer_id: int) -> None:
    with pytest.raises(IndexRangeError, match=rf"layer_id: got {layer_id}; allowed: 0\.\.42"):
        layer_topology(FLASH, layer_id)


def test_kinds_present_follow_the_ratios() -> None:
    every = (LayerKind.WINDOW_ONLY, LayerKind.RATIO_1, LayerKind.RATIO_2)
    assert kinds_present(FLASH) == every
    assert kinds_present(FLASH, [39, 3, 20]) == every[1:]
    assert kinds_present(FLASH, [0, 42]) == every[:1]
    assert kinds_present(WINDOW_ONLY) == every[:1]
    assert kinds_present(FLASH, []) == ()


def test_cache_groups_of_the_model_count_all_caches() -> None:
    assert cache_groups(FLASH) == (
        CacheGroup("window", 0, tuple(range(43))),
        CacheGroup("c1", 1, (20,)),
        CacheGroup("c2", 2, (2, 8, 14)),
        CacheGroup("ring", 0, (2, 8, 14)),
    )


def test_cache_groups_of_some_layers() -> None:
    assert cache_groups(FLASH, [20, 0]) == (
        CacheGroup("window", 0, (0, 20)),
        CacheGroup("c1", 1, (20,)),
    )
    assert [group.name for group in cache_groups(FLASH, [2])] == ["window", "c2", "ring"]
    assert [group.name for group in cache_groups(WINDOW_ONLY)] == ["window"]
    with pytest.raises(
        ArgumentError, match=r"got \[3\]; .*sources \[2\]; add them with with_sources"
    ):
        cache_groups(FLASH, [3])


@pytest.mark.parametrize(
    ("asked", "everything", "added"),
    [
        ([0, 2, 20], (0, 2, 20), ()),
        ([5], (2, 5), (2,)),
        ([39], (20, 36, 39), (20, 36)),
        ([24], (20, 24), (20,)),
        ([27], (20, 24, 27), (20, 24)),
        ([40, 1], (1, 40), ()),
        ([9, 9, 3], (2, 3, 8, 9), (2, 8)),
        ([], (), ()),
    ],
)
def test_missing_sources_are_added(
    asked: list[int], everything: tuple[int, ...], added: tuple[int, ...]
) -> None:
    assert with_sources(FLASH, asked) == (everything, added)


def test_the_candidate_source_is_followed_even_if_it_is_no_other_source() -> None:
    cfg = FLASH.replace(kv_source_layer_ids=(2, 20, 32), candidate_source_layer_id=24)
    assert with_sources(cfg, [36]) == ((20, 24, 32, 36), (20, 24, 32))


def test_no_candidate_source_means_no_candidates() -> None:
    cfg = FLASH.replace(candidate_source_layer_id=-1)
    layers = [layer_topology(cfg, layer) for layer in range(cfg.num_layers)]
    assert not any(layer.publishes_candidates or layer.consumes_candidates for layer in layers)
