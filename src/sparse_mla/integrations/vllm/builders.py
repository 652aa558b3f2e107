"""Window metadata of a step: vLLM's own values, with decode and prefill rows in one list.

vLLM's builder writes the lists of decode rows and of prefill rows to two buffers. Here the second is the
tail of the first, so that one launch attends the whole step: nothing is gathered, no prefill workspace
exists, and row t of a step has the same address however the step is split (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.models.deepseek_v41.sparse_mla import DeepseekV41SparseSWAMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparse_mla.config.topology import LayerKind, deepseek_v41_layer_type
from sparse_mla.errors import ArgumentError
from sparse_mla.integrations.vllm.steps import shared_scratch
from sparse_mla.metadata.plan import TileSchedulerPlan, build_plan

NO_PLANS = ("swaonly", "c4a", "c128a", "c1a", "c2a")
"""Layer types of vLLM's tile-scheduler dictionary; our kernels need none of FlashMLA's plans."""


@dataclass
class WindowMetadata(DeepseekSparseSWAMetadata):
    """vLLM's metadata, and all rows of the step as one list."""

    rows: Tensor | None = None  # int32 [num_rows, width] slots, -1 past the length
    row_lens: Tensor | None = None  # int32 [num_rows], 0 for padding rows
    plans: Mapping[LayerKind, TileSchedulerPlan] = field(default_factory=dict)


class WindowMetadataBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """Builds `WindowMetadata` at fixed addresses."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, without buffers of its own for prefill rows and with scratch of split launches."""
        super().__init__(*args, **kwargs)
        if self.prefill_index_width != self.window_size:
            raise ArgumentError(
                "vision_max_n_token",
                self.max_image_tokens,
                "0",
                "V4.1 image tokens attend a plain causal window",
            )
        config = self.vllm_config.model_config.hf_config
        ranks = getattr(self.vllm_config.parallel_config, "tensor_parallel_size", 1)
        self._num_heads = config.num_attention_heads // ranks
        self._topk = config.index_topk
        ratios = getattr(config, "compress_ratios", None) or [0]
        # draft layers lie past the list and are window-only
        self._kinds = {deepseek_v41_layer_type(int(ratio)) for ratio in (*ratios, 0)}
        self._scratch = shared_scratch(self._num_heads, torch.device(self.device))
        self.prefill_swa_indices = self.decode_swa_indices[:0]
        self.prefill_swa_lens = self.decode_swa_lens[:0]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        replay_start: Tensor | None = None,
    ) -> WindowMetadata:
        """Metadata of one step.

        Raises:
            ArgumentError: a non-causal step with rows beyond the decode threshold.
        """
        _, _, decodes, prefills = split_decodes_and_prefills(
            common_attn_metadata, decode_threshold=self.decode_threshold
        )
        if prefills and not common_attn_metadata.causal:
            raise ArgumentError(
                "causal", False, "True for rows beyond the decode threshold",
                "non-causal rows are a draft block's, which decodes whole",
            )  # fmt: skip
        self.prefill_swa_indices = self.decode_swa_indices[decodes:]
        self.prefill_swa_lens = self.decode_swa_lens[decodes:]
        base = super().build(common_prefix_len, common_attn_metadata, fast_build, replay_start)
        rows = decodes + prefills
        indices = self.decode_swa_indices
        if base.decode_swa_width != self.window_size:
            indices = self.decode_swa_indices_noncausal
        values = {entry.name: getattr(base, entry.name) for entry in fields(base)}
        return WindowMetadata(
            **values,
            rows=indices[:rows, 0],
            row_lens=self.decode_swa_lens[:rows],
            plans={kind: self._plan(kind, rows, indices.shape[-1]) for kind in self._kinds},
        )

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        """None for every layer type."""
        del num_decode_tokens
        return dict.fromkeys(NO_PLANS)

    def _plan(self, kind: LayerKind, rows: int, width: int) -> TileSchedulerPlan:
        return build_plan(
            kind,
            tokens=rows,
            num_heads=self._num_heads,
            window_keys=width,
            compressed_keys=self._topk if kind.ratio else 0,
            scratch=self._scratch,
        )


def window_rows(metadata: Any) -> tuple[Tensor, Tensor]:
    """(int32 [n, width] slots, int32 [n] lengths) of all rows of a step.

    Raises:
        ArgumentError: metadata of another builder.
    """
    rows, lens = getattr(metadata, "rows", None), getattr(metadata, "row_lens", None)
    if not isinstance(rows, torch.Tensor) or not isinstance(lens, torch.Tensor):
        raise ArgumentError(
            "window metadata", type(metadata).__name__, "WindowMetadata", "use WindowBackend"
        )
    return rows, lens
