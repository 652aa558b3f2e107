"""The compressor of a KV source: project hidden states and pool them into latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_mla.config.model import ModelConfig
from sparse_mla.kernels.index_contract import CompressCall, Ring
from sparse_mla.nn.projections import Linear, RMSNorm
from sparse_mla.ops.compress import compress


class Compressor(nn.Module):
    """Ratio 1: a bf16 product and a norm. Ratio 2: float32 `u ++ s` of every token, pooled in pairs.

    The float32 weights of ratio 2 are the bf16 checkpoint values, widened. A GPU keeps them in bf16 and
    multiplies into float32, which is the same product of the same values.
    """

    def __init__(self, cfg: ModelConfig, ratio: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.ratio = ratio
        out_dtype = torch.bfloat16 if ratio == 1 else torch.float32
        self.projection = Linear(
            cfg.hidden_size,
            ratio * cfg.head_dim,
            device=device,
            dtype=torch.bfloat16 if torch.device(device).type == "cuda" else out_dtype,
            out_dtype=out_dtype,
        )
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, device=device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take `compressor.*` from a layer's tensors."""
        parts = [tensors["compressor.wkv"]]
        if self.ratio == 2:
            parts.append(tensors["compressor.wgate"])
        self.projection.weight.data.copy_(torch.cat(parts))
        self.norm.weight.data.copy_(tensors["compressor.norm"])

    def forward(self, x: Tensor, positions: Tensor, ring: Ring | None) -> Tensor:
        """Latents before rotation, bf16 [T, 512], zero where no group closes; the ring is updated."""
        return compress(
            CompressCall(
                projected=self.projection(x),
                ratio=self.ratio,
                positions=positions,
                norm_weight=self.norm.weight,
                eps=self.norm.eps,
                ring=ring,
            )
        )
