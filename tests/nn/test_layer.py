"""One layer: KV-only writes, draft blocks, FP8 output, shards, padding, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import gather_rows
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import ArgumentError, DTypeError, ShapeError
from sparse_mla.kernels.contract import Layout
from sparse_mla.nn.attention import DeepseekV41Attention
from sparse_mla.nn.stack import AttentionStack
from sparse_mla.nn.step import StepBuffers, rope_tables
from sparse_mla.testing.serve import Part, StackServer

DRAFT = 7


def arenas(server: StackServer) -> dict[str, Tensor]:
    return {info.name: info.pages.clone() for info in server.caches.buffers()}


def bf16(lab, rows: int, seed: int = 0) -> Tensor:
    return lab.hidden(rows, seed).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla", "fp8_ds_mla_v4"])
def test_kv_only_writes_the_same_bytes(lab, name: str) -> None:
    servers = [lab.server(lab.records(name), seed=3) for _ in range(2)]
    steps = [(0, 45), (45, 1), (46, 30)]
    for server, kv_only in zip(servers, (False, True), strict=True):
        request = server.request(80)
        server.parts = []
        for start, count in steps:
            rows = lab.hidden(count, start)
            state = server.state([Part(request, start, rows)], pad_to=count + 3)
            padding = torch.full((3, 256), torch.nan)
            x = torch.cat([rows, padding]).to(torch.bfloat16)
            for layer in server.stack.attention_layers():
                if kv_only:
                    layer.write_kv(x, state)
                else:
                    layer(x, state)
    full, light = arenas(servers[0]), arenas(servers[1])
    assert full.keys() == light.keys()
    assert all(torch.equal(full[key], light[key]) for key in full)
    assert all(bool(pages.any()) for pages in full.values())


def test_a_draft_block_attends_its_context_and_itself(lab) -> None:
    """All five rows see the last 32 context keys and all five block keys, in both directions."""
    server = lab.server(lab.records("fp8_ds_mla"), layer_ids=(DRAFT,), num_spec_tokens=5)
    layer = server.stack.attention_layers()[0]
    assert layer.layer.is_draft
    request = server.request(60)
    context, block = bf16(lab, 50, 1), bf16(lab, 5, 2)
    layer.write_kv(context, server.state([Part(request, 0, context)]))
    state = server.state([Part(request, 50, block)], causal=False)
    assert state.metadata.window.lengths[:5].tolist() == [37] * 5
    out = layer(block, state)
    wanted = draft_oracle(lab, server, layer, request.pages["window"], block)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3
    # The last row depends on the oldest context key and the first row on the last block row.
    layer.write_kv(-context[18:19], server.state([Part(request, 18, context[18:19])]))
    other = layer(block, server.state([Part(request, 50, block)], causal=False))
    assert bool((other != out).any(dim=1).all())
    changed = block.clone()
    changed[4] = -changed[4]
    again = layer(changed, server.state([Part(request, 50, changed)], causal=False))
    assert not torch.equal(again[0], other[0])


def draft_oracle(
    lab, server: StackServer, layer: DeepseekV41Attention, pages: list[int], block: Tensor
) -> Tensor:
    """float64 [5, hidden] from the stored keys, without lists and kernels."""
    cfg = server.cfg
    slots = torch.tensor([pages[p // 32] * 32 + p % 32 for p in range(18, 55)])
    keys = gather_rows(server.caches.window_cache(DRAFT), slots).double()
    table = rope_tables(cfg, num_positions=60, layer_ids=[DRAFT])[LayerKind.WINDOW_ONLY].double()
    angle = torch.complex(table[50:55, :32], table[50:55, 32:])[:, None]

    def norm(v: Tensor, gain: Tensor) -> Tensor:
        return v / v.square().mean(-1, keepdim=True).sqrt() * gain.double()

    def turn(v: Tensor, by: Tensor) -> Tensor:
        tail = torch.view_as_complex(v[..., 448:].reshape(5, 8, 32, 2)) * by
        return torch.cat([v[..., :448], torch.view_as_real(tail).flatten(-2)], dim=-1)

    qr = norm(block.double() @ layer.wq_a.weight.double().T, layer.q_norm.weight)
    q = turn((qr @ layer.wq_b.weight.double().T).view(5, 8, 512), angle)
    weights = (q @ keys.T * 512**-0.5).exp()
    total = weights.sum(-1, keepdim=True) + layer.attn_sink.double().exp()[:, None]
    out = turn(weights / total @ keys, angle.conj()).reshape(5, 2, -1)
    mixed = torch.einsum("tgi,goi->tgo", out, layer.wo_a.weight.double())
    return mixed.flatten(1) @ layer.wo_b.weight.double().T


def test_fp8_output_is_close_to_bf16_output(lab) -> None:
    """The cast adds at most half an e4m3 step to each value of the attention output."""
    server = lab.server(layer_ids=(1,))
    layer = server.stack.attention_layers()[0]
    x = bf16(lab, 40)
    request = server.request(40)
    server.parts = []
    exact = layer(x, server.state([Part(request, 0, x)]))
    layer.output = "fp8"
    cast = layer(x, server.state([Part(request, 0, x)]))
    error = float((cast - exact).float().norm() / exact.float().norm())
    assert 1e-3 < error < 2.0**-4


@pytest.mark.parametrize("output", ["bf16", "fp8"])
@pytest.mark.parametrize("rank", [None, 3])
def test_permuted_weights_give_the_same_layer(lab, output: str, rank: int | None) -> None:
    """The fused kernels' order of query and output, whole or on a rank of four; only sums move."""
    server = lab.server(layer_ids=(1,))
    cfg = server.cfg
    shard = None if rank is None else cfg.shard(rank, 4)
    x = bf16(lab, 40)
    request = server.request(40)
    outs, weights = [], []
    for layout in Layout:
        layer = DeepseekV41Attention(cfg, 1, shard=shard, output=output, layout=layout)
        layer.reset_parameters()
        state = server.state([Part(request, 0, x)])
        plain = dataclasses.replace(state, metadata=dataclasses.replace(state.metadata, plan={}))
        outs.append(layer(x, plain).double())
        weights.append((layer.wq_b.weight, layer.wo_a.weight))
    for standard, permuted in zip(*weights, strict=True):
        assert not torch.equal(standard, permuted)
        assert torch.equal(standard.flatten().sort().values, permuted.flatten().sort().values)
    # wo_a adds its products in another order and rounds to bf16, wo_b once more
    assert float((outs[0] - outs[1]).norm() / outs[0].norm()) < 2.0**-8


@pytest.mark.parametrize("tp_size", [2, 8])
def test_ranks_add_up(lab, tp_size: int) -> None:
    """Whole groups a rank, and a quarter of a group a rank."""
    server = lab.server(layer_ids=(3,))
    cfg, whole = server.cfg, server.stack.attention_layers()[0]
    x = bf16(lab, 33)
    request = server.request(33)
    server.parts = []
    wanted = whole(x, server.state([Part(request, 0, x)])).double()
    total = torch.zeros_like(wanted)
    bytes_before = arenas(server)
    for rank in range(tp_size):
        layer = DeepseekV41Attention(cfg, 3, shard=cfg.shard(rank, tp_size))
        layer.reset_parameters()
        state = server.state([Part(request, 0, x)])
        plain = dataclasses.replace(state, metadata=dataclasses.replace(state.metadata, plan={}))
        total += layer(x, plain).double()
    assert all(torch.equal(pages, bytes_before[name]) for name, pages in arenas(server).items())
    # Each rank rounds its parts of z and y once more.
    assert float((total - wanted).norm() / wanted.norm()) < 2.0**-8 * tp_size**0.5


def test_padding_rows_do_not_matter(lab) -> None:
    """NaN, huge and zero padding inputs: real rows and caches keep their bits."""
    outs, bytes_ = [], []
    for filler in (torch.nan, 3e38, 0.0):
        server = lab.server(seed=1)
        request = server.request(20)
        x = bf16(lab, 20)
        padded = torch.cat([x, torch.full((5, 256), filler).to(torch.bfloat16)])
        server.parts = []
        state = server.state([Part(request, 0, x)], pad_to=25)
        out = [layer(padded, state)[:20] for layer in server.stack.attention_layers()]
        outs.append(torch.stack(out))
        bytes_.append(arenas(server))
    for out, pages in zip(outs[1:], bytes_[1:], strict=True):
        assert torch.equal(out, outs[0])
        assert all(torch.equal(pages[name], bytes_[0][name]) for name in pages)
    assert bool(outs[0].isfinite().all())


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (torch.zeros(20, 255, dtype=torch.bfloat16), ShapeError, r"x: got shape \[20, 255\]"),
        (torch.zeros(19, 256, dtype=torch.bfloat16), ShapeError, r"allowed: shape \[20, 256\]"),
        (torch.zeros(20, 256), DTypeError, "x: got dtype float32; allowed: dtype bfloat16"),
        (torch.zeros(1, 20, 256, dtype=torch.bfloat16), ShapeError, "x: got shape"),
    ],
)
def test_bad_input_leaves_caches_untouched(
    lab, x: Tensor, error: type[Exception], match: str
) -> None:
    server = lab.server()
    request = server.request(20)
    state = server.state([Part(request, 0, bf16(lab, 20))])
    before = arenas(server)
    for layer in server.stack.attention_layers():
        for method in (layer, layer.write_kv):
            with pytest.raises(error, match=match):
                method(x, state)
    assert all(torch.equal(pages, before[name]) for name, pages in arenas(server).items())


def test_buffers_smaller_than_the_step_are_refused(lab) -> None:
    server = lab.server()
    request = server.request(20)
    server.buffers = StepBuffers.allocate(server.cfg, 19)
    with pytest.raises(ShapeError, match="room for 19 rows; allowed: at least the step's 20 rows"):
        server.state([Part(request, 0, bf16(lab, 20))])
    with pytest.raises(ArgumentError, match="max_tokens"):
        StepBuffers.allocate(server.cfg, 0)


def test_buffers_and_tables_of_a_model(lab) -> None:
    cfg = lab.shrunken()
    buffers = StepBuffers.allocate(cfg, 10)
    assert buffers.topk.shape == (10, 12)
    assert buffers.candidates.shape == (10, 5)
    without = cfg.replace(candidate_source_layer_id=-1)
    assert StepBuffers.allocate(without, 10).candidates.shape == (10, 0)
    tables = rope_tables(cfg, num_positions=9)
    assert set(tables) == {LayerKind.WINDOW_ONLY, LayerKind.RATIO_1, LayerKind.RATIO_2}
    assert tables[LayerKind.RATIO_1] is tables[LayerKind.RATIO_2]
    assert not torch.equal(tables[LayerKind.RATIO_1][8], tables[LayerKind.WINDOW_ONLY][8])


def test_stack_order() -> None:
    with pytest.raises(ArgumentError, match="ascending"):
        AttentionStack(None, [2, 1])  # type: ignore[arg-type]
