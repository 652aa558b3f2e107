"""Weights of a layer: names, shapes, dequantisation, files, shards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_e4m3
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.weights import (
    SafetensorsWeights,
    dequantize_blocks,
    layer_prefix,
    parameter_shapes,
    random_layer,
    read_layer,
)

FLASH = ModelConfig.deepseek_v41_flash()


def small(**fields: object) -> ModelConfig:
    """A small model with one layer of each kind and one draft layer."""
    sizes: dict[str, object] = {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "o_groups": 2,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "num_hidden_layers": 4,
        "compress_ratios": (0, 2, 1, 1, 0),
        "kv_source_layer_ids": (1, 2),
        "index_source_layer_ids": (1, 2, 3),
        "candidate_source_layer_id": 2,
        "index_n_heads": 4,
        "num_nextn_predict_layers": 1,
    }
    return FLASH.replace(**{**sizes, **fields})


def test_names_and_shapes_of_the_model() -> None:
    common = {
        "wq_a": (1280, 5120),
        "q_norm": (1280,),
        "wq_b": (32768, 1280),
        "wkv": (512, 5120),
        "kv_norm": (512,),
        "attn_sink": (64,),
        "wo_a": (8192, 4096),
        "wo_b": (5120, 8192),
    }
    indexer = {"indexer.wq_b": (4096, 1280), "indexer.weights_proj": (32, 5120)}
    compressor = {
        "compressor.wkv": (512, 5120),
        "compressor.norm": (512,),
        "indexer.wk": (128, 512),
        "indexer.k_norm": (128,),
    }
    gate = {"compressor.wgate": (512, 5120)}
    assert parameter_shapes(FLASH, 0) == common
    assert parameter_shapes(FLASH, 3) == common
    assert parameter_shapes(FLASH, 41) == common
    assert parameter_shapes(FLASH, 24) == {**common, **indexer}
    assert parameter_shapes(FLASH, 20) == {**common, **indexer, **compressor}
    for source in (2, 8, 14):
        assert parameter_shapes(FLASH, source) == {**common, **indexer, **compressor, **gate}
    assert layer_prefix(FLASH, 39) == "layers.39.attn."
    assert layer_prefix(FLASH, 41) == "mtp.1.attn."


def test_dequantisation_by_tiles() -> None:
    """Every code, tiles cut off at the edges, power-of-two and float32 scales."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (40, 70), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    exponents = torch.tensor([[127, 130, 100], [120, 127, 140]], dtype=torch.uint8)
    got = dequantize_blocks(codes, exponents)
    wanted = decode_e4m3(codes)
    for row in range(40):
        for column in (0, 31, 32, 63, 64, 69):
            scale = 2.0 ** (int(exponents[row // 32, column // 32]) - 127)
            assert float(got[row, column]) == float(wanted[row, column]) * scale
    typed = dequantize_blocks(codes.view(torch.float8_e4m3fn), exponents.view(torch.float8_e8m0fnu))
    assert torch.equal(got, typed)
    factors = torch.pow(2.0, exponents.float() - 127)
    assert torch.equal(got, dequantize_blocks(codes, factors))


def test_fp8_weights_load_like_their_values() -> None:
    cfg = small()
    weights = random_layer(cfg, 1)
    plain, quantised = dict(weights), dict(weights)
    for name in ("wq_a", "wo_b", "indexer.wq_b"):
        key = f"layers.1.attn.{name}"
        rows, columns = weights[key].shape
        codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8)
        exponents = torch.randint(115, 122, (-(-rows // 32), -(-columns // 32)), dtype=torch.uint8)
        del quantised[key]
        quantised[f"{key}.weight"] = codes.view(torch.float8_e4m3fn)
        scale_name = f"{key}.weight.scale" if name == "wo_b" else f"{key}.scale"
        quantised[scale_name] = exponents.view(torch.float8_e8m0fnu)
        plain[key] = dequantize_blocks(codes, exponents)
    got, wanted = read_layer(quantised, cfg, 1), read_layer(plain, cfg, 1)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in got)
    assert got["wq_a"].dtype == torch.bfloat16
    assert got["q_norm"].dtype == torch.float32


@pytest.mark.parametrize("indexed", [False, True])
def test_a_checkpoint_on_disk(tmp_path: Path, indexed: bool) -> None:
    """Two files, layers spread over them; a layer takes its own and ignores the rest."""
    from safetensors.torch import save_file

    cfg = small()
    layers = {**random_layer(cfg, 1, seed=3), **random_layer(cfg, 4, seed=3)}
    names = sorted(layers)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: layers[key] for key in keys}, tmp_path / file)
    if indexed:
        index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = SafetensorsWeights(tmp_path)
    assert sorted(weights) == names
    assert len(weights) == len(names)
    for layer_id in (1, 4):
        loaded, fresh = DeepseekV41Attention(cfg, layer_id), DeepseekV41Attention(cfg, layer_id)
        loaded.load_weights(weights)
        fresh.reset_parameters(seed=3)
        state, wanted = loaded.state_dict(), fresh.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in state)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a \.safetensors file or a folder of them"):
        SafetensorsWeights(tmp_path)


def without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key != name}


def test_refusals_name_the_tensor_and_change_nothing() -> None:
    cfg = small()
    layer = DeepseekV41Attention(cfg, 2)
    layer.reset_parameters(1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    good = random_layer(cfg, 2)
    key = "layers.2.attn."
    halves = good[key + "wq_a"].view(torch.uint8)
    cases: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        (without(good, key + "kv_norm"), ArgumentError, r"without layers\.2\.attn\.kv_norm"),
        ({**good, key + "ape": torch.ones(1)}, ArgumentError, r"with layers\.2\.attn\.ape"),
        (
            {**good, key + "compressor.wgate": torch.ones(512, 96)},
            ArgumentError,
            r"with layers\.2\.attn\.compressor\.wgate",
        ),
        ({**good, key + "q_norm.scale": torch.ones(1)}, ArgumentError, r"with .*q_norm\.scale"),
        ({**good, key + "wkv": torch.ones(96, 512)}, ShapeError, r"wkv: got shape \[96, 512\]"),
        ({**good, key + "wkv": torch.ones(512, 96).half()}, DTypeError, r"wkv: got dtype"),
        ({**good, key + "wq_a": halves[:, ::2]}, DTypeError, r"e4m3 \+ scale"),
        (
            {**good, key + "wq_a": halves[:, ::2], key + "wq_a.scale": torch.ones(2, 2)},
            ShapeError,
            r"wq_a scale: got shape \[2, 2\]; allowed: shape \[2, 3\]",
        ),
        (
            {**good, key + "wq_a.scale": torch.ones(2, 3)},
            DTypeError,
            "allowed: float8_e4m3fn beside a scale",
        ),
        (
            {**good, key + "wq_a": halves[:, ::2], key + "wq_a.scale": torch.ones(2, 3).half()},
            DTypeError,
            "float8_e8m0fnu or float32",
        ),
        (random_layer(cfg, 3), ArgumentError, r"without layers\.2\.attn\.wq_a"),
    ]
    for weights, error, match in cases:
        with pytest.raises(error, match=match):
            layer.load_weights(weights)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_random_weights_keep_outputs_of_order_one() -> None:
    weights = read_layer(random_layer(small(), 1), small(), 1)
    x = torch.randn(200, 96).to(torch.bfloat16)
    assert 0.8 < float((x @ weights["wq_a"].T).float().std()) < 1.2
    assert float(weights["q_norm"].min()) >= 0.5
    assert float(weights["attn_sink"].abs().max()) <= 1
    again = random_layer(small(), 1)
    assert all(torch.equal(again[name], value) for name, value in random_layer(small(), 1).items())
    other = random_layer(small(), 1, seed=1)
    assert not torch.equal(other["layers.1.attn.wkv"], again["layers.1.attn.wkv"])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_hold_slices_of_the_unsharded_weights(tp_size: int) -> None:
    """Four ranks over two groups: a rank holds half the heads of a group."""
    cfg = small()
    whole = DeepseekV41Attention(cfg, 2)
    whole.reset_parameters(0)
    ranks = []
    for rank in range(tp_size):
        layer = DeepseekV41Attention(cfg, 2, shard=cfg.shard(rank, tp_size))
        layer.reset_parameters(0)
        ranks.append(layer)
    assert torch.equal(torch.cat([rank.wq_b.weight for rank in ranks]), whole.wq_b.weight)
    assert torch.equal(torch.cat([rank.attn_sink for rank in ranks]), whole.attn_sink)
    for name in ("wq_a.weight", "wkv.weight", "compressor.projection.weight"):
        assert all(torch.equal(r.state_dict()[name], whole.state_dict()[name]) for r in ranks)
    # The output projections are linear: the ranks' summands add up to the whole.
    heads = torch.randn(5, 4, 512, dtype=torch.float64)
    total = torch.zeros(5, 96, dtype=torch.float64)
    for rank in ranks:
        part = heads[:, rank.shard.heads.start : rank.shard.heads.stop]
        grouped = part.reshape(5, rank.shard.num_groups, -1)
        mixed = torch.einsum("tgi,goi->tgo", grouped, rank.wo_a.weight.double())
        total += mixed.flatten(1) @ rank.wo_b.weight.double().T
    grouped = heads.reshape(5, 2, -1)
    mixed = torch.einsum("tgi,goi->tgo", grouped, whole.wo_a.weight.double())
    wanted = mixed.flatten(1) @ whole.wo_b.weight.double().T
    assert torch.allclose(total, wanted, rtol=1e-12, atol=1e-12)


def test_constructor_refusals() -> None:
    with pytest.raises(ArgumentError, match="dtype"):
        DeepseekV41Attention(small(), 0, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="output: got 'int8'; allowed: 'bf16', 'fp8'"):
        DeepseekV41Attention(small(), 0, output="int8")
    with pytest.raises(ValueError, match="layer_id"):
        DeepseekV41Attention(small(), 5)
