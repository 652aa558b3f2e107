"""The attention layer of DeepSeek-V4.1, from normed hidden states to the layer's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from sparse_mla._checks import check_choice, check_tensor
from sparse_mla.config.model import HeadShard, ModelConfig
from sparse_mla.config.topology import layer_topology
from sparse_mla.errors import ArgumentError
from sparse_mla.kernels.contract import KeySet, Layout
from sparse_mla.kernels.index_contract import Ring
from sparse_mla.nn.compressor import Compressor
from sparse_mla.nn.indexer import Indexer, IndexKeys
from sparse_mla.nn.parallel import Ranks
from sparse_mla.nn.projections import GroupedLinear, Linear, RMSNorm
from sparse_mla.nn.step import StepState
from sparse_mla.nn.weights import random_layer, read_layer
from sparse_mla.ops.attend import AttendOptions, QuantizedOutput, mega_attention
from sparse_mla.ops.bodies import rms_norm
from sparse_mla.ops.layouts import permute_q_b_proj, permute_wv_proj
from sparse_mla.ops.write import write_compressed, write_window


class DeepseekV41Attention(nn.Module):
    """One layer of any kind: window only, ratio 1, ratio 2, or a DSpark draft layer.

    A layer always writes its own window cache. A KV source also writes the compressed and index-key
    caches, an index source the step's shared lists; layers after them in the same step read both,
    so the layers of a step run in ascending order.

    Args:
        cfg: the model. layer_id: which layer; drafts follow the backbone. shard: the heads of this
        rank. The output is then this rank's share: the sum over ranks is the layer's output.
        Caches, compressor and indexer are the same on every rank. ranks: the process group; the
        layer then takes its own rank's heads and adds the shares up itself, once, after `wo_b`.
        device: where the weights live and the inputs come from.
        dtype: bfloat16, the only compute dtype.
        output: what attention hands to the output projection: "bf16", or "fp8" (quantised with a
            scale each 32 dims, as FP8 grouped products take it; widened again here).
        layout: order of a token's query and output values between the products and attention. The
            chunk-interleaved one is the fused kernels' own: `wq_b` and `wo_a` are permuted when weights
            are loaded, and nothing is reordered in a step.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer_id: int,
        *,
        shard: HeadShard | None = None,
        ranks: Ranks | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        output: str = "bf16",
        layout: Layout = Layout.STANDARD,
    ) -> None:
        super().__init__()
        check_choice("dtype", dtype, (torch.bfloat16,))
        check_choice("layout", layout, tuple(Layout))
        check_choice("output", output, ("bf16", "fp8"))
        self.cfg = cfg
        self.layer_id = layer_id
        self.layer = layer_topology(cfg, layer_id)
        self.ranks = ranks
        self.shard = shard or (cfg.shard(0, 1) if ranks is None else ranks.shard(cfg))
        if ranks is not None and self.shard != ranks.shard(cfg):
            raise ArgumentError("shard", self.shard, f"rank {ranks.rank} of {ranks.size}, or None")
        self.output = output
        self.layout = layout
        self.on_selection: Callable[[int, StepState], None] | None = None
        """Called by an index source after it has filled the step's lists (to watch them)."""
        eps, here = cfg.rms_norm_eps, self.shard
        self.wq_a = Linear(cfg.hidden_size, cfg.q_lora_rank, device=device)
        self.q_norm = RMSNorm(cfg.q_lora_rank, eps, device=device)
        self.wq_b = Linear(cfg.q_lora_rank, here.num_heads * cfg.head_dim, device=device)
        self.wkv = Linear(cfg.hidden_size, cfg.head_dim, device=device)
        self.kv_norm = RMSNorm(cfg.head_dim, eps, device=device)
        self.attn_sink = nn.Parameter(
            torch.empty(here.num_heads, device=device), requires_grad=False
        )
        width = here.heads_per_group * cfg.head_dim
        self.wo_a = GroupedLinear(here.num_groups, width, cfg.o_lora_rank, device=device)
        self.wo_b = Linear(here.num_groups * cfg.o_lora_rank, cfg.hidden_size, device=device)
        self.compressor: Compressor | None = None
        self.index_keys: IndexKeys | None = None
        self.indexer: Indexer | None = None
        if self.layer.owns_compressed_cache:
            self.compressor = Compressor(cfg, self.layer.ratio, device=device)
            self.index_keys = IndexKeys(cfg, self.layer.ratio, device=device)
        if self.layer.runs_indexer:
            self.indexer = Indexer(cfg, self.layer, device=device)

    def reset_parameters(self, seed: int = 0) -> None:
        """Seeded random weights; every shard takes its part of the same unsharded weights."""
        self.load_weights(random_layer(self.cfg, self.layer_id, seed))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take this layer's tensors, unsharded, under their checkpoint names (see `nn.weights`).

        Raises:
            ArgumentError: tensors are missing, or one under this layer's prefix is not known.
            ShapeError, DTypeError: a tensor does not fit. Nothing is changed then.
        """
        tensors = read_layer(weights, self.cfg, self.layer_id)
        cfg, here = self.cfg, self.shard
        rows = slice(here.heads.start * cfg.head_dim, here.heads.stop * cfg.head_dim)
        ranks = slice(here.groups.start * cfg.o_lora_rank, here.groups.stop * cfg.o_lora_rank)
        for name in ("wq_a", "wkv"):
            getattr(self, name).weight.data.copy_(tensors[name])
        for name in ("q_norm", "kv_norm"):
            getattr(self, name).weight.data.copy_(tensors[name])
        wq_b = tensors["wq_b"][rows]
        self.attn_sink.data.copy_(here.slice_sink(tensors["attn_sink"]))
        grouped = tensors["wo_a"][ranks][:, here.wo_a_columns]
        wo_a = grouped.reshape(here.num_groups, cfg.o_lora_rank, -1)
        if self.layout is Layout.CHUNK_INTERLEAVED:
            wq_b, _ = permute_q_b_proj(wq_b, None, here.num_heads)
            wo_a, _ = permute_wv_proj(wo_a, None, here.heads_per_group)
        self.wq_b.weight.data.copy_(wq_b)
        self.wo_a.weight.data.copy_(wo_a)
        self.wo_b.weight.data.copy_(tensors["wo_b"][:, ranks])
        for part in (self.compressor, self.index_keys, self.indexer):
            if part is not None:
                part.load(tensors)

    def forward(self, x: Tensor, step: StepState) -> Tensor:
        """Write this layer's caches, choose positions, attend, project.

        Args:
            x: bf16 [T, hidden_size], normed; T = `step.num_tokens`. Padding rows may hold anything
                and only their own output rows depend on it.
            step: caches, metadata and shared lists. On draft layers the step of a block is
                non-causal and the block's own keys are written here; its context came through
                `write_kv`.

        Returns:
            bf16 [T, hidden_size]; with a shard and no `ranks`, this rank's summand.

        Raises:
            ShapeError, DTypeError, DeviceError: before anything is written.
        """
        self._check(x, step)
        self._write(x, step)
        qr = rms_norm(self.wq_a(x), self.q_norm.weight, self.q_norm.eps)
        if self.indexer is not None:
            self.indexer(x, qr, step)
            if self.on_selection is not None:
                self.on_selection(self.layer_id, step)
        q = self.wq_b(qr).view(-1, self.shard.num_heads, self.cfg.head_dim)
        return self._project(self._attend(q, step))

    def write_kv(self, x: Tensor, step: StepState) -> None:
        """Only the cache writes of `forward`, with bit-identical bytes.

        On a draft layer `x` is the normed context projection (`main_x`) of context tokens.
        """
        self._check(x, step)
        self._write(x, step)

    def _check(self, x: Tensor, step: StepState) -> None:
        check_tensor(
            "x",
            x,
            shape=(step.num_tokens, self.cfg.hidden_size),
            dtypes=(torch.bfloat16,),
            device=self.wkv.weight.device,
        )

    def _write(self, x: Tensor, step: StepState) -> None:
        rope = step.rope[self.layer.kind]
        latent = rms_norm(self.wkv(x), self.kv_norm.weight, self.kv_norm.eps)
        window = step.caches.window_cache(self.layer_id)
        slots = step.metadata.window.slot_mapping
        write_window(latent, cache=window, slots=slots, positions=step.positions, rope=rope)
        if self.compressor is None or self.index_keys is None:
            return
        metadata = step.metadata.compressed[self.layer.ratio]
        pooled = self.compressor(x, step.positions, self._ring(step))
        keys = step.caches.index_cache(self.layer_id)
        self.index_keys(pooled, step.positions, rope, keys, metadata.slot_mapping)
        write_compressed(
            pooled,
            cache=step.caches.compressed_cache(self.layer_id),
            slots=metadata.slot_mapping,
            positions=step.positions,
            rope=rope,
            ratio=self.layer.ratio,
        )

    def _ring(self, step: StepState) -> Ring | None:
        if not self.layer.has_gate:
            return None
        metadata = step.metadata.ring
        assert metadata is not None  # a pool with this layer has a ring
        return Ring(
            rows=step.caches.ring(self.layer_id),
            slots=metadata.slots,
            request_ids=metadata.token_to_req_indices,
            query_start_loc=metadata.query_start_loc,
        )

    def _attend(self, q: Tensor, step: StepState) -> Tensor:
        """bf16 [T, heads, 512] in the layer's layout, rotated back."""
        window = step.metadata.window
        compressed = None
        if self.layer.ratio:
            tokens = step.num_tokens
            compressed = KeySet(
                step.caches.compressed_cache(self.layer_id),
                step.buffers.slots[:tokens],
                step.buffers.lengths[:tokens],
            )
        plan = step.metadata.plan.get(self.layer.kind)
        invariant = plan is not None and plan.batch_invariant
        result = mega_attention(
            q,
            window=KeySet(step.caches.window_cache(self.layer_id), window.indices, window.lengths),
            compressed=compressed,
            positions=step.positions,
            rope=step.rope[self.layer.kind],
            sink=self.attn_sink,
            scale=self.cfg.softmax_scale,
            plan=plan,
            options=AttendOptions(
                output=self.output,
                query_layout=self.layout,
                output_layout=self.layout,
                heads_per_group=self.shard.heads_per_group,
                batch_invariant=invariant,
            ),
        )
        if isinstance(result.output, QuantizedOutput):
            return result.output.widen()
        return result.output

    def _project(self, attended: Tensor) -> Tensor:
        groups = attended.reshape(attended.shape[0], self.shard.num_groups, -1)
        out: Tensor = self.wo_b(self.wo_a(groups).flatten(1))
        return out if self.ranks is None else self.ranks.add(out)
