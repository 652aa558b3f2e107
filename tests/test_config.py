"""ModelConfig: the embedded file, HF mappings, every rule that a config must follow, sharding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_mla.config.model import ModelConfig, YarnScaling
from sparse_mla.errors import ArgumentError, ConfigError

FLASH = ModelConfig.deepseek_v41_flash()
SHARED = Path(__file__).parents[1].parent / "shared"


def hf() -> dict[str, Any]:
    """The HF mapping of the embedded configuration."""
    values = dataclasses.asdict(FLASH)
    values["rope_scaling"]["type"] = "yarn"
    return values


def test_embedded_file_holds_the_numbers_of_the_model() -> None:
    assert (FLASH.hidden_size, FLASH.num_hidden_layers, FLASH.num_attention_heads) == (5120, 40, 64)
    assert (FLASH.head_dim, FLASH.qk_rope_head_dim, FLASH.sliding_window) == (512, 64, 128)
    assert (FLASH.q_lora_rank, FLASH.o_lora_rank, FLASH.o_groups) == (1280, 1024, 8)
    assert (FLASH.index_n_heads, FLASH.index_head_dim, FLASH.index_topk) == (32, 128, 512)
    assert (FLASH.rope_theta, FLASH.compress_rope_theta) == (10000, 160000)
    assert FLASH.rms_norm_eps == 1e-20
    assert FLASH.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert FLASH.kv_source_layer_ids == (2, 8, 14, 20)
    assert FLASH.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert FLASH.candidate_source_layer_id == 20
    assert (FLASH.candidate_topk_blocks, FLASH.candidate_block_size) == (2048, 8)
    assert FLASH.rope_scaling == YarnScaling(16, 32, 1, 65536)
    assert FLASH.max_position_embeddings == 1048576 == 65536 * 16
    assert (FLASH.num_nextn_predict_layers, FLASH.dspark_block_size) == (3, 5)
    assert FLASH.num_layers == 43
    assert FLASH.softmax_scale == 0.04419417382415922


def test_embedded_file_equals_the_official_one() -> None:
    official = SHARED / "data" / "deepseek_v41_flash_config.json"
    if not official.is_file():
        pytest.skip("the official config file is not beside this checkout")
    assert ModelConfig.from_json(official) == FLASH


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_from_hf_takes_flat_and_nested_mappings_and_objects(nested: bool, as_object: bool) -> None:
    config: Any = {**hf(), "vocab_size": 129280, "num_key_value_heads": 1, "hc_mult": 4}
    if nested:
        config = {"architectures": ["Vision"], "text_config": config}
    if as_object:
        config = SimpleNamespace(to_dict=lambda value=config: value)
    assert ModelConfig.from_hf(config) == FLASH


def test_from_hf_reads_plain_objects_and_objects_inside_objects() -> None:
    text = SimpleNamespace(**hf())
    assert ModelConfig.from_hf(text) == FLASH
    assert ModelConfig.from_hf(SimpleNamespace(text_config=text)) == FLASH


def test_missing_or_null_ratios_mean_window_only() -> None:
    for change in ({}, {"compress_ratios": None}):
        values = {**hf(), "kv_source_layer_ids": [], "index_source_layer_ids": []}
        del values["compress_ratios"], values["candidate_source_layer_id"]
        cfg = ModelConfig.from_hf({**values, **change})
        assert [cfg.ratio(layer) for layer in range(cfg.num_layers)] == [0] * 43


def test_a_layer_beyond_the_list_has_ratio_0() -> None:
    cfg = FLASH.replace(compress_ratios=FLASH.compress_ratios[:40])
    assert [cfg.ratio(layer) for layer in (39, 40, 42, 99)] == [1, 0, 0, 0]


def test_from_json_roundtrip_and_yarn_under_its_newer_name(tmp_path: Path) -> None:
    values = hf()
    values["rope_scaling"]["rope_type"] = values["rope_scaling"].pop("type")
    values["rope_scaling"]["mscale"] = 1.0
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert ModelConfig.from_json(path) == FLASH


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("{", "a JSON object"), ("[1]", "a mapping or an HF config object")],
)
def test_unreadable_files_say_which_and_why(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_json(path)


BAD: list[tuple[dict[str, Any], str, str]] = [
    # change, field that the error names, what is allowed
    ({"compress_ratios": [0, 0, 4]}, "compress_ratios", r"got ratio 4; allowed: 0 .*, 1 or 2"),
    ({"compress_ratios": [0, 0, 128]}, "compress_ratios", "got ratio 128; .*0 .*1 or 2"),
    ({"compress_ratios": [0, 0, True]}, "compress_ratios", "got ratio True"),
    ({"compress_ratios": [0, 0, "2"]}, "compress_ratios", "got ratio '2'"),
    ({"compress_ratios": 2}, "compress_ratios", "a list with one ratio for each layer"),
    ({"compress_ratios": (0,) * 44}, "compress_ratios", "44 entries; allowed: at most 43"),
    (
        {"compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 21},
        "compress_ratios",
        "ratio 1 for draft layer 40; allowed: 0",
    ),
    (
        {"compress_ratios": (0,) + (2,) * 19 + (1,) * 20},
        "kv_source_layer_ids",
        "at or below layer 1",
    ),
    ({"kv_source_layer_ids": []}, "kv_source_layer_ids", "no source at or below layer 2"),
    (
        {"kv_source_layer_ids": [2, 8, 14]},
        "kv_source_layer_ids",
        "source 14 of ratio 2 for layer 20",
    ),
    ({"kv_source_layer_ids": [2, 21]}, "kv_source_layer_ids", "source 2 of ratio 2 for layer 20"),
    (
        {"kv_source_layer_ids": [0, 2, 20]},
        "kv_source_layer_ids",
        "layer 0, whose compress ratio is 0",
    ),
    ({"kv_source_layer_ids": [2, 20, 8]}, "kv_source_layer_ids", "ascending ids, each once"),
    ({"kv_source_layer_ids": [2, 2, 20]}, "kv_source_layer_ids", "ascending ids, each once"),
    (
        {"kv_source_layer_ids": [2, 20, 40]},
        "kv_source_layer_ids",
        r"layer 40; allowed: ids 0\.\.39",
    ),
    (
        {"kv_source_layer_ids": [-1, 2, 20]},
        "kv_source_layer_ids",
        "got -1; allowed: an integer >= 0",
    ),
    ({"kv_source_layer_ids": 2}, "kv_source_layer_ids", "a list of layer ids"),
    ({"index_source_layer_ids": []}, "index_source_layer_ids", "no source at or below layer 2"),
    (
        {"index_source_layer_ids": [2, 24]},
        "index_source_layer_ids",
        "source 2 of ratio 2 for layer 20 of ratio 1; allowed: a source of the layer's own ratio",
    ),
    ({"index_source_layer_ids": [1, 2, 20]}, "index_source_layer_ids", "compress ratio is 0"),
    ({"index_source_layer_ids": [20, 2]}, "index_source_layer_ids", "ascending"),
    ({"index_source_layer_ids": [2, 20, 43]}, "index_source_layer_ids", "layer 43"),
    (
        {"candidate_source_layer_id": 21},
        "candidate_source_layer_id",
        "got 21; allowed: -1, or one of",
    ),
    ({"candidate_source_layer_id": -2}, "candidate_source_layer_id", "an integer >= -1"),
    ({"candidate_source_layer_id": 8}, "candidate_source_layer_id", "ratio 2, read by layer 20 of"),
    (
        {"num_attention_heads": 60},
        "num_attention_heads",
        "got 60; allowed: a multiple of o_groups = 8",
    ),
    ({"num_attention_heads": 0}, "num_attention_heads", "an integer >= 1"),
    ({"head_dim": 576}, "head_dim", "got 576; allowed: 512"),
    ({"qk_rope_head_dim": 32}, "qk_rope_head_dim", "got 32; allowed: 64"),
    ({"index_head_dim": 64}, "index_head_dim", "got 64; allowed: 128"),
    ({"sliding_window": 0}, "sliding_window", "got 0; allowed: an integer >= 1"),
    ({"sliding_window": 128.0}, "sliding_window", r"got 128\.0; allowed: an integer"),
    ({"hidden_size": -5120}, "hidden_size", "an integer >= 1"),
    ({"hidden_size": True}, "hidden_size", "got True; allowed: an integer"),
    ({"hidden_size": "5120"}, "hidden_size", "got '5120'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "an integer >= 1"),
    ({"num_hidden_layers": 4}, "compress_ratios", "43 entries; allowed: at most 7"),
    ({"q_lora_rank": 0}, "q_lora_rank", "an integer >= 1"),
    ({"o_lora_rank": 0}, "o_lora_rank", "an integer >= 1"),
    ({"o_groups": 0}, "o_groups", "an integer >= 1"),
    ({"index_n_heads": 0}, "index_n_heads", "an integer >= 1"),
    ({"index_topk": 0}, "index_topk", "an integer >= 1"),
    ({"candidate_topk_blocks": 0}, "candidate_topk_blocks", "an integer >= 1"),
    ({"candidate_block_size": 0}, "candidate_block_size", "an integer >= 1"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers", "an integer >= 0"),
    ({"dspark_block_size": 0}, "dspark_block_size", "an integer >= 1"),
    ({"max_position_embeddings": 0}, "max_position_embeddings", "an integer >= 1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps", "a finite number > 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "got nan; allowed: a finite number"),
    ({"rope_theta": 1.0}, "rope_theta", "a finite number > 1"),
    ({"compress_rope_theta": float("inf")}, "compress_rope_theta", "got inf"),
    ({"rope_scaling": {"factor": 16}}, "rope_scaling", r"a YarnScaling; build it with"),
    ({"rope_scaling": YarnScaling(0.5, 32, 1, 65536)}, r"rope_scaling\.factor", "a number >= 1"),
    (
        {"rope_scaling": YarnScaling(16, 1, 1, 65536)},
        r"rope_scaling\.beta_fast",
        "more than beta_slow",
    ),
    ({"rope_scaling": YarnScaling(16, 32, 0, 65536)}, r"rope_scaling\.beta_slow", "number > 0"),
    ({"rope_scaling": YarnScaling(16, 32, 1, 0)}, r"rope_scaling\.original_max", "an integer >= 1"),
    ({"no_such_field": 1}, "no_such_field", "an unknown field; allowed: one of hidden_size, "),
]


@pytest.mark.parametrize(("change", "field", "words"), BAD, ids=lambda value: str(value)[:60])
def test_every_rule_names_field_and_remedy(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"config field '{field}[^']*': .*{words}") as caught:
        FLASH.replace(**change)
    assert caught.value.field.startswith(field.replace("\\", ""))
    assert isinstance(caught.value, ValueError)


BAD_HF: list[tuple[dict[str, Any], str, str]] = [
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", "got type 'linear'; allowed: 'yarn'"),
    ({"rope_scaling": {"factor": 2}}, "rope_scaling", "got type None"),
    ({"rope_scaling": "yarn"}, "rope_scaling", "a mapping of type yarn, or null"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, r"rope_scaling\.beta_fast", "got nothing"),
    ({"num_key_value_heads": 8}, "num_key_value_heads", "got 8; allowed: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "words"), BAD_HF, ids=lambda value: str(value)[:60])
def test_hf_mappings_that_are_refused(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"config field '{field}': .*{words}"):
        ModelConfig.from_hf({**hf(), **change})


@pytest.mark.parametrize("extra", [{"attention_factor": 1.2}, {"mscale": 0.7}])
def test_an_attention_temperature_is_refused(extra: dict[str, float]) -> None:
    values = hf()
    values["rope_scaling"].update(extra)
    with pytest.raises(ConfigError, match="V4.1 has no attention temperature"):
        ModelConfig.from_hf(values)


def test_an_unknown_yarn_key_is_refused() -> None:
    values = hf()
    values["rope_scaling"]["truncate"] = False
    with pytest.raises(ConfigError, match=r"rope_scaling\.truncate.*an unknown key"):
        ModelConfig.from_hf(values)


REQUIRED = [
    field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_required_field_is_named(name: str) -> None:
    values = hf()
    del values[name]
    with pytest.raises(ConfigError, match=f"config field '{name}': got nothing"):
        ModelConfig.from_hf(values)


def test_a_missing_scaling_is_refused_and_a_null_one_is_none() -> None:
    values = hf()
    values["rope_scaling"] = None
    assert ModelConfig.from_hf(values).rope_scaling is None
    del values["rope_scaling"]
    with pytest.raises(ConfigError, match="'rope_scaling': got nothing; allowed: a yarn entry"):
        ModelConfig.from_hf(values)


def test_a_misspelt_optional_field_is_not_taken_for_a_missing_one() -> None:
    values = hf()
    values["compress_ratio"] = values.pop("compress_ratios")
    with pytest.raises(ConfigError, match="'compress_ratio': .*allowed: 'compress_ratios'"):
        ModelConfig.from_hf(values)


def test_replace_checks_again_and_leaves_the_original() -> None:
    small = FLASH.replace(hidden_size=256, num_attention_heads=16, sliding_window=8)
    assert (small.hidden_size, small.num_attention_heads, small.heads_per_group) == (256, 16, 2)
    assert FLASH.hidden_size == 5120
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16, 32, 64])
def test_shards_tile_heads_groups_and_columns(tp_size: int) -> None:
    seen_heads: list[int] = []
    columns: dict[int, list[int]] = {group: [] for group in range(8)}
    for rank in range(tp_size):
        shard = FLASH.shard(rank, tp_size)
        assert shard.num_heads == 64 // tp_size == shard.num_groups * shard.heads_per_group
        assert shard.has_part_of_group == (tp_size > 8)
        seen_heads += shard.heads
        for group in shard.groups:
            columns[group] += range(4096)[shard.wo_a_columns]
        for place, head in enumerate(shard.heads):
            group = shard.groups[place // shard.heads_per_group]
            first_column = (place % shard.heads_per_group) * 512 + shard.wo_a_columns.start
            assert group * 4096 + first_column == head * 512
    assert seen_heads == list(range(64))
    assert all(sorted(part) == list(range(4096)) for part in columns.values())


def test_shard_of_four_heads_says_its_place() -> None:
    shard = FLASH.shard(3, 16)
    assert (shard.heads, shard.groups) == (range(12, 16), range(1, 2))
    assert (shard.num_groups, shard.heads_per_group) == (1, 4)
    assert shard.wo_a_columns == slice(4 * 512, 8 * 512)
    sink = torch.arange(64, dtype=torch.float32)
    assert shard.slice_sink(sink).tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        (0, 3, "tp_size: got 3; allowed: a divisor of 64 heads"),
        (0, 0, "tp_size: got 0"),
        (8, 8, r"tp_rank: got 8; allowed: 0\.\.7"),
        (-1, 8, "tp_rank: got -1"),
        (0, 128, "a divisor of 64 heads"),
    ],
)
def test_bad_ranks(rank: int, size: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        FLASH.shard(rank, size)


def test_a_rank_may_not_hold_parts_of_several_groups() -> None:
    cfg = FLASH.replace(num_attention_heads=48)  # 6 heads a group, 4 a rank
    with pytest.raises(ArgumentError, match="fill whole groups of 6 or divide one"):
        cfg.shard(0, 12)
