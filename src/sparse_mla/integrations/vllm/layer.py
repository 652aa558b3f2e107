"""The attention layers: vLLM's own layer with our records, writers and kernels.

vLLM keeps what it does well (projections, norms, compressor pooling, indexer, weights, tensor
parallelism). A layer here answers five questions differently: which bytes the caches hold, how a row is
stored, what happens to the query, what attends, and what projects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.deepseek_v41 import attention
from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

from sparse_mla.config.topology import deepseek_v41_layer_type
from sparse_mla.integrations.vllm.backend import MegaBackend, SparseBackend, WindowBackend
from sparse_mla.integrations.vllm.builders import window_rows
from sparse_mla.integrations.vllm.names import MEGA, SPARSE
from sparse_mla.integrations.vllm.refusals import default_kv_dtype, explicit_kv_dtype
from sparse_mla.integrations.vllm.steps import (
    Attend,
    BoundCache,
    Shape,
    choice,
    engine_records,
    grouped_projection,
    shared_slot_lists,
    store_compressed,
    store_window,
    warm_up,
)
from sparse_mla.kernels.contract import KeySet

logger = init_logger(f"vllm.{__name__}")


@contextmanager
def v41_records() -> Iterator[None]:
    """While it lasts, vLLM lays caches out in V4.1's records, which by itself it does on SM100 only."""
    original = attention._use_v41_mxfp8_kv_record
    attention._use_v41_mxfp8_kv_record = lambda: True
    try:
        yield
    finally:
        attention._use_v41_mxfp8_kv_record = original


class SparseAttention(DeepseekV4FlashMLAAttention):
    """`SPARSE_MLA_DSV41`: the writer rotates the query, vLLM's projection rotates the output back."""

    backend_cls = SparseBackend
    swa_backend_cls = WindowBackend
    mega: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's layer with V4.1's records, then put our writer in place."""
        cache_config = vllm_config.cache_config
        cache_config.cache_dtype = explicit_kv_dtype(cache_config.cache_dtype)
        with v41_records():
            super().__init__(vllm_config, *args, **kwargs)
        self._kind = deepseek_v41_layer_type(self.compress_ratio)
        records = engine_records(self.kv_cache_dtype)
        self._window = BoundCache(records.window)
        self._compressed = BoundCache(records.compressed)
        widths = (records.window.row_bytes, records.compressed.row_bytes)
        assert widths == (self.swa_bytes_per_token, self.compressed_bytes_per_token)
        if self.indexer is not None and self.is_kv_source:
            _keep_v41_records(self.indexer.k_cache)
        if self.compressor is not None:
            self.compressor.insert_cache = self._store_compressed
        topk_width = 0
        if self._kind.ratio:
            topk = self.topk_indices_buffer
            topk_width = topk.shape[-1]
            self._lists = shared_slot_lists(*topk.shape, topk.device)
            self._fills_lists = self._is_first_reader()
        self._shape = Shape(
            heads=self.n_local_heads,
            window_record=records.window,
            compressed_record=records.compressed if self._kind.ratio else None,
            window_keys=self.window_size,
            compressed_keys=topk_width,
            ratio=self.compress_ratio,
            mega=self.mega,
            writes_compressed=self.compressor is not None,
        )

    @property
    def packed_kv_cache_dtype(self) -> str:
        """What `--kv-cache-dtype auto` means."""
        return default_kv_dtype(self.backend_cls.get_name())

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """No head is padded."""
        return num_heads

    def forward_kv(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Write the caches that `forward` writes, and nothing else (replay of a prefix)."""
        metadata = get_forward_context().attn_metadata
        qr_kv, kv_score, _ = self._run_parallel_input_projections(hidden_states)
        _, _, latents = self._split_qkv_and_norm(qr_kv)
        if isinstance(metadata, dict):
            self._store_window(latents, positions, metadata)
        if self.compressor is None:
            return
        latent = self.compressor(kv_score, positions)
        self.compressor.insert_cache(latent, positions, self.rotary_emb)
        if self.indexer is not None and self.indexer.owns_k:
            self.indexer._produce_k(latent, positions, self.indexer_rotary_emb)

    def _fused_qnorm_rope_kv_insert(
        self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any
    ) -> Tensor:
        """Store the step's window rows; the query comes back rotated, or as it is for mega attention."""
        if isinstance(attn_metadata, dict):
            self._store_window(kv, positions, attn_metadata, None if self.mega else q)
        return q

    def _store_window(
        self, latents: Tensor, positions: Tensor, metadata: dict[str, Any], q: Tensor | None = None
    ) -> None:
        slots = metadata[self.swa_cache_layer.prefix].slot_mapping
        cache = self._window.of(self.swa_cache_layer.kv_cache)
        store_window(latents, cache, slots, positions, self.rotary_emb.cos_sin_cache, q)

    def _store_compressed(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:
        """Takes the place of the compressor's `insert_cache`."""
        if latent is None:  # profiling run
            return
        metadata = get_forward_context().attn_metadata
        slots = metadata[self.prefix].slot_mapping
        cache = self._compressed.of(self.kv_cache)
        rope = rotary_emb.cos_sin_cache
        store_compressed(latent, cache, slots, positions, rope, self.compress_ratio)

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attend this step's rows into `output`; `kv` is read from the cache."""
        del kv
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # profiling run
            self._warm_up(q.device)
            output.zero_()
            return
        swa = metadata[self.swa_cache_layer.prefix]
        rows, lengths = window_rows(swa)
        compressed = None
        if self.compressed_cache_prefix is not None and rows.shape[0]:
            compressed = self._compressed_keys(swa, metadata[self.compressed_cache_prefix])
        Attend(
            q=q,
            window=KeySet(self._window.of(self.swa_cache_layer.kv_cache), rows, lengths),
            compressed=compressed,
            positions=positions,
            rope=self.rotary_emb.cos_sin_cache,
            sink=self.attn_sink.data,
            scale=self.scale,
            plan=swa.plans.get(self._kind),
        ).run(output, mega=self.mega)

    def _is_first_reader(self) -> bool:
        """Whether no layer before this one turned the same positions into slots of the same cache."""
        if self.is_index_source or self.kv_source_layer_id > self.index_source_layer_id:
            return True
        source = attention._replace_layer_index(self.prefix, self.index_source_layer_id)
        return source not in self._static_forward_context  # on another pipeline rank

    def _compressed_keys(self, swa: Any, source: Any) -> KeySet:
        """The compressed rows that the latest index source chose, as slots of the source's cache."""
        rows = swa.rows.shape[0]
        if self._fills_lists:
            self._lists.fill(
                self.topk_indices_buffer[:rows],
                swa.token_to_req_indices[:rows],
                source.block_table,
                source.block_size // self.compress_ratio,
                swa.is_valid_token[:rows],
            )
        return self._lists.key_set(self._compressed.of(self._compressed_kv_cache()), rows)

    def _warm_up(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        warm_up(self._shape, device, self.max_num_batched_tokens)
        records = [self._shape.window_record, self._shape.compressed_record]
        logger.info_once(
            "sparse_mla: %s on layers of ratio %d, %d heads: %s; KV cache %s (%s)",
            self.backend_cls.get_name(),
            self.compress_ratio,
            self.n_local_heads,
            choice(self._shape, device),
            self.kv_cache_dtype,
            " + ".join(f"{record.row_bytes} B" for record in records if record is not None),
        )


class MegaAttention(SparseAttention):
    """`SPARSE_MLA_MEGA_DSV41`: one launch rotates, attends and rotates back."""

    backend_cls = MegaBackend
    mega = True

    def _o_proj(self, attn_out: Tensor, positions: Tensor) -> Tensor:
        """Both output projections of an output that is already rotated back."""
        del positions
        grouped = grouped_projection(attn_out, self.wo_a.weight, self.n_local_groups)
        projected: Tensor = self._wo_b_proj(grouped)
        return projected


LAYERS = {MEGA: MegaAttention, SPARSE: SparseAttention}
"""Backend name: layer."""


def _keep_v41_records(index_cache: Any) -> None:
    """Let the index-key cache's pages have the alignment of V4.1's records, which share its blocks."""
    original = index_cache.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        with v41_records():
            return original(vllm_config)

    index_cache.get_kv_cache_spec = get_kv_cache_spec
