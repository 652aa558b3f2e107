"""Every rule that a configuration must follow, checked once when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparse_mla.config.topology import deepseek_v41_layer_type
from sparse_mla.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from sparse_mla.config.model import ModelConfig

_SIZES = {  # field: least value
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "q_lora_rank": 1,
    "o_lora_rank": 1,
    "o_groups": 1,
    "sliding_window": 1,
    "index_n_heads": 1,
    "index_topk": 1,
    "candidate_topk_blocks": 1,
    "candidate_block_size": 1,
    "candidate_source_layer_id": -1,
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 1,
    "max_position_embeddings": 1,
}
_FIXED = {  # field: the one value, and what hangs on it
    "head_dim": (512, "cache records and kernels hold 512 values"),
    "qk_rope_head_dim": (64, "the last 64 dims turn"),
    "index_head_dim": (128, "index-key records hold 128 values"),
}
_YARN_NUMBERS = ("factor", "beta_fast", "beta_slow")
_YARN_KEYS = (*_YARN_NUMBERS, "original_max_position_embeddings")
_YARN_TEMPERATURES = ("attention_factor", "mscale", "mscale_all_dim")


def check_model(cfg: ModelConfig) -> None:
    """Raise `ConfigError` for the first rule that the configuration breaks."""
    for name, least in _SIZES.items():
        _check_int(name, getattr(cfg, name), least)
    for name, (value, reason) in _FIXED.items():
        if getattr(cfg, name) != value:
            raise ConfigError(name, repr(getattr(cfg, name)), str(value), reason)
    for name, above in (("rms_norm_eps", 0.0), ("rope_theta", 1.0), ("compress_rope_theta", 1.0)):
        _check_number(name, getattr(cfg, name), above)
    if cfg.num_attention_heads % cfg.o_groups:
        raise ConfigError(
            "num_attention_heads",
            cfg.num_attention_heads,
            f"a multiple of o_groups = {cfg.o_groups}",
            "every output group mixes the same number of heads",
        )
    _check_scaling(cfg)
    _check_ratios(cfg)
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_sources(cfg, name)
    _check_candidates(cfg)


def check_yarn(mapping: Any) -> dict[str, Any]:
    """The YaRN parameters of an HF `rope_scaling` entry, or `ConfigError`."""
    field = "rope_scaling"
    if not isinstance(mapping, Mapping):
        raise ConfigError(field, type(mapping).__name__, "a mapping of type yarn, or null")
    kind = mapping.get("rope_type", mapping.get("type"))
    if kind != "yarn":
        raise ConfigError(field, f"type {kind!r}", "'yarn'", "V4.1 stretches its context with yarn")
    for name in _YARN_KEYS:
        if name not in mapping:
            raise ConfigError(f"{field}.{name}", "nothing", "a number")
    for name, value in mapping.items():
        if name in _YARN_TEMPERATURES and value not in (None, 1):
            raise ConfigError(
                f"{field}.{name}", value, "1 or null", "V4.1 has no attention temperature"
            )
        if name not in (*_YARN_KEYS, *_YARN_TEMPERATURES, "type", "rope_type", "rope_theta"):
            raise ConfigError(f"{field}.{name}", "an unknown key", ", ".join(_YARN_KEYS))
    return {name: mapping[name] for name in _YARN_KEYS}


def check_shard(cfg: ModelConfig, tp_rank: int, tp_size: int) -> None:
    """Raise `ArgumentError` unless this many ranks can share the heads."""
    heads, in_group = cfg.num_attention_heads, cfg.heads_per_group
    if tp_size < 1 or heads % tp_size:
        raise ArgumentError("tp_size", tp_size, f"a divisor of {heads} heads")
    if not 0 <= tp_rank < tp_size:
        raise ArgumentError("tp_rank", tp_rank, f"0..{tp_size - 1}")
    count = heads // tp_size
    if count % in_group and in_group % count:
        raise ArgumentError(
            "tp_size",
            tp_size,
            f"a size whose {count} heads a rank fill whole groups of {in_group} or divide one",
            "a rank cannot hold parts of several groups",
        )


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, repr(value), f"an integer >= {least}")


def _check_number(name: str, value: object, above: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above:  # type: ignore[arg-type, operator]
        raise ConfigError(name, repr(value), f"a finite number > {above:g}")


def _check_scaling(cfg: ModelConfig) -> None:
    scaling = cfg.rope_scaling
    if scaling is None:
        return
    if isinstance(scaling, Mapping):
        raise ConfigError(
            "rope_scaling", "a mapping", "a YarnScaling", "build it with YarnScaling.from_hf"
        )
    for name in _YARN_NUMBERS:
        _check_number(f"rope_scaling.{name}", getattr(scaling, name), 0.0)
    name = "original_max_position_embeddings"
    _check_int(f"rope_scaling.{name}", getattr(scaling, name), 1)
    if scaling.factor < 1:
        raise ConfigError("rope_scaling.factor", scaling.factor, "a number >= 1")
    if scaling.beta_fast <= scaling.beta_slow:
        raise ConfigError(
            "rope_scaling.beta_fast", scaling.beta_fast, f"more than beta_slow {scaling.beta_slow}"
        )


def _check_ratios(cfg: ModelConfig) -> None:
    ratios, name = cfg.compress_ratios, "compress_ratios"
    if not isinstance(ratios, tuple):
        raise ConfigError(name, repr(ratios), "a list with one ratio for each layer")
    for ratio in ratios:
        deepseek_v41_layer_type(ratio)
    if len(ratios) > cfg.num_layers:
        raise ConfigError(
            name,
            f"{len(ratios)} entries",
            f"at most {cfg.num_layers}, backbone and draft layers",
            "set num_hidden_layers and num_nextn_predict_layers to match",
        )
    for layer_id in range(cfg.num_hidden_layers, len(ratios)):
        if ratios[layer_id]:
            raise ConfigError(
                name,
                f"ratio {ratios[layer_id]} for draft layer {layer_id}",
                "0",
                "draft layers attend a window only",
            )


def _check_sources(cfg: ModelConfig, name: str) -> None:
    sources: Sequence[int] = getattr(cfg, name)
    if not isinstance(sources, tuple):
        raise ConfigError(name, repr(sources), "a list of layer ids")
    for layer_id in sources:
        _check_int(name, layer_id, 0)
        if layer_id >= cfg.num_hidden_layers:
            raise ConfigError(name, f"layer {layer_id}", f"ids 0..{cfg.num_hidden_layers - 1}")
        if cfg.ratio(layer_id) == 0:
            raise ConfigError(
                name,
                f"layer {layer_id}, whose compress ratio is 0",
                "layers with ratio 1 or 2",
                "a window-only layer has no compressed entries to offer",
            )
    if list(sources) != sorted(set(sources)):
        raise ConfigError(name, list(sources), "ascending ids, each once")
    source = -1
    for layer_id in range(cfg.num_hidden_layers):
        source = layer_id if layer_id in sources else source
        ratio = cfg.ratio(layer_id)
        if ratio == 0:
            continue
        if source < 0:
            raise ConfigError(
                name,
                f"no source at or below layer {layer_id}, whose compress ratio is {ratio}",
                f"a source <= {layer_id}",
                f"add one to {name}",
            )
        if cfg.ratio(source) != ratio:
            raise ConfigError(
                name,
                f"source {source} of ratio {cfg.ratio(source)} for layer {layer_id} of ratio {ratio}",
                "a source of the layer's own ratio",
                f"add a source at the first layer of ratio {ratio}",
            )


def _check_candidates(cfg: ModelConfig) -> None:
    source, name = cfg.candidate_source_layer_id, "candidate_source_layer_id"
    if source == -1:
        return
    if source not in cfg.index_source_layer_ids:
        raise ConfigError(
            name,
            source,
            f"-1, or one of index_source_layer_ids {list(cfg.index_source_layer_ids)}",
            "only a layer with an indexer can publish candidates",
        )
    for layer_id in cfg.index_source_layer_ids:
        if layer_id > source and cfg.ratio(layer_id) != cfg.ratio(source):
            raise ConfigError(
                name,
                f"layer {source} of ratio {cfg.ratio(source)}, read by layer {layer_id} "
                f"of ratio {cfg.ratio(layer_id)}",
                "a source of its consumers' ratio",
                "candidate blocks count compressed positions",
            )
