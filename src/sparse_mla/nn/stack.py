"""A residual stack of attention layers, the smallest model whose results depend on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.step import StepState
from sparse_mla.nn.weights import random_layer


class AttentionStack(nn.Module):
    """`h = h + layer(bf16(h * rsqrt(mean(h**2) + eps)))` in float32, layer after layer.

    Args:
        cfg: the model.
        layer_ids: ascending, with every layer's sources (`config.topology.with_sources`).
        device: where the weights live.
        ranks: the process group that shares the heads out; every rank runs the same steps on the same
            hidden states and caches of its own.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer_ids: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        if list(layer_ids) != sorted(set(layer_ids)):
            raise ArgumentError("layer_ids", list(layer_ids), "ascending ids, each once")
        self.cfg = cfg
        self.layer_ids = tuple(layer_ids)
        self.layers = nn.ModuleList(
            DeepseekV41Attention(cfg, layer_id, device=device, ranks=ranks)
            for layer_id in layer_ids
        )

    def reset_parameters(self, seed: int = 0) -> None:
        """Seeded random weights for every layer."""
        for layer in self.attention_layers():
            layer.load_weights(random_layer(self.cfg, layer.layer_id, seed))

    @property
    def num_heads(self) -> int:
        """Query heads of this rank; a `StepMetadataBuilder` plans for as many."""
        return self.attention_layers()[0].shard.num_heads

    def attention_layers(self) -> list[DeepseekV41Attention]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DeepseekV41Attention)]

    def forward(self, hidden: Tensor, step: StepState) -> Tensor:
        """float32 [T, hidden_size] residual stream in, the stream after the last layer out."""
        for layer in self.attention_layers():
            hidden = hidden + layer(normalise(hidden, self.cfg.rms_norm_eps), step).float()
        return hidden


def normalise(hidden: Tensor, eps: float) -> Tensor:
    """bf16 [T, hidden_size] with mean square 1, float32 inside."""
    values = hidden.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * inverse).to(torch.bfloat16)
