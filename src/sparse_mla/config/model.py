"""The part of a DeepSeek-V4.1 configuration that attention needs, and its split over ranks."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_mla.config.validation import check_model, check_shard, check_yarn
from sparse_mla.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: rotary frequencies stretched for contexts longer than the pretraining one."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int  # tokens

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> YarnScaling:
        """Read an HF `rope_scaling` entry (`type` or `rope_type`).

        Raises:
            ConfigError: another type than yarn, a missing or unknown key, or an attention
                temperature (V4.1 has none: queries, keys and the softmax scale stay as they are).
        """
        return cls(**check_yarn(mapping))


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The heads of one tensor-parallel rank.

    With at most as many ranks as groups a rank owns whole groups. Beyond that a rank owns part of one
    group: `groups` names that one group, `heads_per_group` is the part, and the rank multiplies only
    its own input columns of the group's block of `wo_a` (`wo_a_columns`). Both output projections are
    linear, so the all-reduce that sums ranks after `wo_b` also sums the parts.
    """

    tp_rank: int
    tp_size: int
    heads: range  # query heads of the model that are here
    groups: range  # output groups that are here, whole or in part
    heads_per_group: int  # heads of one group that are here
    model_heads_per_group: int  # heads of one group in the whole model
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Query heads here, `num_groups * heads_per_group`."""
        return len(self.heads)

    @property
    def num_groups(self) -> int:
        """Output groups here, whole or in part."""
        return len(self.groups)

    @property
    def has_part_of_group(self) -> bool:
        """Whether other ranks hold the rest of this rank's group."""
        return self.heads_per_group < self.model_heads_per_group

    @property
    def wo_a_columns(self) -> slice:
        """Input columns here of one group's block of `wo_a`, whose width is group heads * 512."""
        first = self.heads.start % self.model_heads_per_group
        return slice(first * self.head_dim, (first + self.heads_per_group) * self.head_dim)

    def slice_sink(self, sink: Tensor) -> Tensor:
        """The part here of the attention sink, float32 [num_attention_heads] (a view)."""
        return sink[self.heads.start : self.heads.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checked configuration under its HF names. Building one raises `ConfigError` if it is wrong."""

    hidden_size: int
    num_hidden_layers: int  # backbone layers, drafts not counted
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int  # width of one group after `wo_a`
    o_groups: int
    rms_norm_eps: float
    sliding_window: int  # tokens, the query itself counted
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # compressed entries that a query attends
    rope_theta: float  # rotary base of ratio-0 layers
    compress_rope_theta: float  # rotary base of every other layer
    max_position_embeddings: int  # tokens
    compress_ratios: tuple[int, ...] = ()  # a layer beyond the end has ratio 0
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int = -1  # -1 = no candidate filter
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8  # compressed positions
    rope_scaling: YarnScaling | None = None  # ratio > 0 layers only
    num_nextn_predict_layers: int = 0  # DSpark draft layers, numbered after the backbone
    dspark_block_size: int = 5  # tokens

    def __post_init__(self) -> None:
        """Check every field and the topology that they imply."""
        for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_model(self)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read an HF `config.json`.

        Raises:
            ConfigError: the file is not there, is not JSON, or is not a V4.1 configuration.
        """
        file = Path(path)
        remedy = "pass the path of the model's config.json"
        try:
            mapping = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            reason = f"{file}: {error.strerror}"
            raise ConfigError("(file)", reason, "a readable file", remedy) from error
        except ValueError as error:
            raise ConfigError("(file)", f"{file}: {error}", "a JSON object", remedy) from error
        return cls.from_hf(mapping)

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a mapping or an HF config object, flat or with its text part in `text_config`.

        Fields that attention does not use are ignored; a misspelt name of one that it uses is not.
        A missing or null `compress_ratios` means window-only layers.

        Raises:
            ConfigError: a required field is missing, misspelt or wrong.
        """
        mapping = _text_part(config)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        _check_names(mapping, fields)
        values = {name: mapping[name] for name in fields if mapping.get(name) is not None}
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = YarnScaling.from_hf(values["rope_scaling"])
        if any(values.get("compress_ratios", ())) and "rope_scaling" not in mapping:
            raise ConfigError(
                "rope_scaling",
                "nothing",
                "a yarn entry, or null for none",
                "compressed layers turn their queries and keys with it",
            )
        return cls(**values)

    @classmethod
    def deepseek_v41_flash(cls) -> ModelConfig:
        """The configuration of DeepSeek-V4.1-Flash, from the file inside this package."""
        text = resources.files("sparse_mla.config").joinpath("deepseek_v41_flash.json").read_text()
        return cls.from_hf(json.loads(text))

    @property
    def softmax_scale(self) -> float:
        """Factor of every attention score, `head_dim ** -0.5`."""
        return float(self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        """Backbone and draft layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def heads_per_group(self) -> int:
        """Query heads that one output group mixes."""
        return self.num_attention_heads // self.o_groups

    def ratio(self, layer_id: int) -> int:
        """Compression ratio of a layer; 0 beyond the list."""
        return self.compress_ratios[layer_id] if layer_id < len(self.compress_ratios) else 0

    def replace(self, **fields: Any) -> ModelConfig:
        """A copy with some fields changed, checked again.

        Raises:
            ConfigError: no such field, or the result is wrong.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in known:
                raise ConfigError(name, "an unknown field", "one of " + ", ".join(known))
        return dataclasses.replace(self, **fields)

    def shard(self, tp_rank: int, tp_size: int) -> HeadShard:
        """The heads, groups and sinks of one rank.

        Raises:
            ArgumentError: the ranks cannot share the heads evenly, or a rank would hold parts of
                several groups.
        """
        check_shard(self, tp_rank, tp_size)
        count, in_group = self.num_attention_heads // tp_size, self.heads_per_group
        first = tp_rank * count
        return HeadShard(
            tp_rank=tp_rank,
            tp_size=tp_size,
            heads=range(first, first + count),
            groups=range(first // in_group, (first + count - 1) // in_group + 1),
            heads_per_group=min(count, in_group),
            model_heads_per_group=in_group,
            head_dim=self.head_dim,
        )


def _text_part(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        config = to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    if not isinstance(config, Mapping):
        raise ConfigError("(config)", type(config).__name__, "a mapping or an HF config object")
    nested = config.get("text_config")
    return config if nested is None else _text_part(nested)


def _check_names(mapping: Mapping[str, Any], fields: Mapping[str, dataclasses.Field[Any]]) -> None:
    absent = [name for name in fields if name not in mapping]
    for key in mapping:
        close = difflib.get_close_matches(key, absent, n=1, cutoff=0.92)
        if key not in fields and close:
            raise ConfigError(key, "an unknown field", repr(close[0]), "correct its spelling")
    for name, field in fields.items():
        if mapping.get(name) is None and field.default is dataclasses.MISSING:
            raise ConfigError(
                name, "nothing", "a value", "the config must be that of a DeepSeek-V4.1 model"
            )
    if mapping.get("num_key_value_heads", 1) != 1:
        raise ConfigError(
            "num_key_value_heads",
            mapping["num_key_value_heads"],
            "1",
            "one latent serves as key and value of all heads",
        )
