"""Weights of one attention layer: names, shapes, reading, dequantising, and random ones.

Checkpoint names are `layers.{i}.attn.NAME` for the backbone and `mtp.{i}.attn.NAME` for draft layer
i, with or without a trailing `.weight`. A matrix is bf16, float32 (rounded to bf16), or e4m3 with
one scale per 32 x 32 tile in `NAME.scale` (ue8m0 bytes or float32).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_e4m3, decode_ue8m0
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.errors import ArgumentError, DTypeError, ShapeError

WEIGHT_TILE = 32
"""Rows and columns of a quantised matrix that share one scale."""
_VECTORS = ("q_norm", "kv_norm", "attn_sink", "compressor.norm", "indexer.k_norm")
_FLOATS = (torch.bfloat16, torch.float32)


def layer_prefix(cfg: ModelConfig, layer_id: int) -> str:
    """What the checkpoint names of a layer begin with."""
    if layer_id >= cfg.num_hidden_layers:
        return f"mtp.{layer_id - cfg.num_hidden_layers}.attn."
    return f"layers.{layer_id}.attn."


def parameter_shapes(cfg: ModelConfig, layer_id: int) -> dict[str, tuple[int, ...]]:
    """Name (without prefix) and [out, in] shape of every tensor of a layer, unsharded."""
    layer = layer_topology(cfg, layer_id)
    heads, dim, index_dim = cfg.num_attention_heads, cfg.head_dim, cfg.index_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (cfg.q_lora_rank, cfg.hidden_size),
        "q_norm": (cfg.q_lora_rank,),
        "wq_b": (heads * dim, cfg.q_lora_rank),
        "wkv": (dim, cfg.hidden_size),
        "kv_norm": (dim,),
        "attn_sink": (heads,),
        "wo_a": (cfg.o_groups * cfg.o_lora_rank, cfg.heads_per_group * dim),
        "wo_b": (cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank),
    }
    if layer.owns_compressed_cache:
        shapes["compressor.wkv"] = (dim, cfg.hidden_size)
        if layer.has_gate:
            shapes["compressor.wgate"] = (dim, cfg.hidden_size)
        shapes["compressor.norm"] = (dim,)
    if layer.runs_indexer:
        shapes["indexer.wq_b"] = (cfg.index_n_heads * index_dim, cfg.q_lora_rank)
        shapes["indexer.weights_proj"] = (cfg.index_n_heads, cfg.hidden_size)
    if layer.owns_compressed_cache:
        shapes["indexer.wk"] = (index_dim, dim)
        shapes["indexer.k_norm"] = (index_dim,)
    return shapes


def read_layer(weights: Mapping[str, Tensor], cfg: ModelConfig, layer_id: int) -> dict[str, Tensor]:
    """The tensors of one layer by name without prefix: bf16 matrices, float32 norms and sinks.

    Tensors of other layers may be in the mapping.

    Raises:
        ArgumentError: tensors of this layer are missing, or one is not known; all are named.
        ShapeError, DTypeError: a tensor does not fit.
    """
    prefix = layer_prefix(cfg, layer_id)
    shapes = parameter_shapes(cfg, layer_id)
    found = {name: key for key in weights if (name := _short_name(key, prefix)) is not None}
    missing = [prefix + name for name in shapes if name not in found]
    matrices = [name for name in shapes if name not in _VECTORS]
    known = {*shapes, *(f"{name}.scale" for name in matrices)}
    extra = [key for name, key in found.items() if name not in known]
    if missing or extra:
        got = f"without {', '.join(missing)}" if missing else f"with {', '.join(extra)}"
        raise ArgumentError(
            "weights", got, f"exactly {', '.join(shapes)} under {prefix!r}",
            "check that the checkpoint and the config are of the same model",
        )  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        scale_key = found.get(name + ".scale")
        scale = weights[scale_key] if scale_key else None
        tensors[name] = _convert(found[name], name, weights[found[name]], scale, shape)
    return tensors


def _short_name(key: str, prefix: str) -> str | None:
    """`NAME` or `NAME.scale` of a checkpoint key of this layer."""
    if not key.startswith(prefix):
        return None
    name = key.removeprefix(prefix)
    if name.endswith(".weight.scale"):
        return name.removesuffix(".weight.scale") + ".scale"
    return name.removesuffix(".weight")


def _convert(
    key: str, name: str, tensor: Tensor, scale: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ShapeError(key, f"shape {list(tensor.shape)}", f"shape {list(shape)}")
    if scale is not None:
        return dequantize_blocks(tensor, scale, key)
    if tensor.dtype not in _FLOATS:
        wanted = "bfloat16 or float32" if name in _VECTORS else "bfloat16, float32, or e4m3 + scale"
        raise DTypeError(key, f"dtype {tensor.dtype}", wanted)
    return tensor.to(torch.float32 if name in _VECTORS else torch.bfloat16)


def dequantize_blocks(weight: Tensor, scale: Tensor, name: str = "weight") -> Tensor:
    """bf16 [out, in] = e4m3 value * scale of its 32 x 32 tile; exact for power-of-two scales.

    Args:
        weight: float8_e4m3fn or uint8 codes [out, in].
        scale: float8_e8m0fnu or uint8 exponents, or float32, [ceil(out/32), ceil(in/32)].
        name: how errors call the weight.

    Raises:
        DTypeError, ShapeError: as named.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise DTypeError(name, f"dtype {weight.dtype}", "float8_e4m3fn beside a scale")
    rows, columns = weight.shape
    tiles = (-(-rows // WEIGHT_TILE), -(-columns // WEIGHT_TILE))
    if tuple(scale.shape) != tiles:
        raise ShapeError(f"{name} scale", f"shape {list(scale.shape)}", f"shape {list(tiles)}")
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        factors = decode_ue8m0(scale.view(torch.uint8))
    elif scale.dtype == torch.float32:
        factors = scale
    else:
        raise DTypeError(f"{name} scale", f"dtype {scale.dtype}", "float8_e8m0fnu or float32")
    wide = factors.repeat_interleave(WEIGHT_TILE, dim=1)[:, :columns]
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    for tile in range(tiles[0]):
        band = slice(tile * WEIGHT_TILE, (tile + 1) * WEIGHT_TILE)
        result[band] = decode_e4m3(weight[band].view(torch.uint8)) * wide[tile]
    return result


def random_layer(cfg: ModelConfig, layer_id: int, seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights under checkpoint names, the same on every machine and for every shard.

    Matrices are uniform with variance 1 / in_features, so that a normed input gives outputs of
    order 1 through every projection; norm gains lie in 0.5..1.5, sinks in -1..1.
    """
    prefix = layer_prefix(cfg, layer_id)
    weights = {}
    for name, shape in parameter_shapes(cfg, layer_id).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{layer_id}/{name}".encode()))
        values = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        if name == "attn_sink":
            weights[prefix + name] = values
        elif name in _VECTORS:
            weights[prefix + name] = values.mul_(0.5).add_(1.0)
        else:
            weights[prefix + name] = values.mul_((3.0 / shape[1]) ** 0.5).to(torch.bfloat16)
    return weights


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its file when asked for.

    `path` is a .safetensors file, or a folder of them (with or without an index file). Needs the
    `safetensors` package.

    Raises:
        ArgumentError: no such file, or nothing to read in it.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        self._open = safe_open
        root = Path(path)
        index = root / "model.safetensors.index.json"
        self._files: dict[str, Path] = {}
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: root / file for name, file in named.items()}
            return
        files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
        if not files:
            raise ArgumentError("path", str(path), "a .safetensors file or a folder of them")
        for file in files:
            with safe_open(file, framework="pt") as handle:
                self._files.update(dict.fromkeys(handle.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        with self._open(self._files[name], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
