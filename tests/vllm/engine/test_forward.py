"""The layer on caches that vLLM planned, allocated and bound, against the float64 oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import fake_hopper
import torch
from steps_of import Step, fill, key_lists, make_step, poison, slot
from torch import Tensor
from vllm.forward_context import set_forward_context

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import MXFP8, NVFP4, RecordFormat
from sparse_mla.config.rope import apply_rope
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet
from sparse_mla.testing.compare import FLOAT32_BODY, assert_matches_oracle

QUERY_LENS, SEQ_LENS = [1, 1, 3, 9], [40, 200, 150, 260]
HEADS = 16


def compressed_record(engine: SimpleNamespace) -> RecordFormat:
    return NVFP4 if engine.name == "nvfp4_ds_mla" else MXFP8


@pytest.fixture(scope="module")
def step(engine: SimpleNamespace) -> Step:
    poison(engine)
    step = make_step(engine, QUERY_LENS, SEQ_LENS)
    for layer in engine.attention:
        swa = layer.swa_cache_layer
        fill(swa.kv_cache, MXFP8, step.tables[swa.prefix], max(SEQ_LENS), layer.layer_id)
        if layer.is_kv_source:
            rows = max(SEQ_LENS) // layer.compress_ratio
            record = compressed_record(engine)
            fill(layer.kv_cache, record, step.tables[layer.prefix], rows, 10 + layer.layer_id)
    return step


def choose(layer: Any, step: Step) -> list[list[int]]:
    """What an indexer would choose: up to 50 of the entries that a row sees, in ascending order."""
    generator = torch.Generator().manual_seed(layer.layer_id)
    chosen = []
    for position in step.positions.tolist():
        visible = (position + 1) // layer.compress_ratio
        order = torch.randperm(visible, generator=generator)[:50]
        chosen.append(sorted(order.tolist()))
    return chosen


def oracle_call(
    layer: Any, step: Step, q: Tensor, chosen: list[list[int]], record: RecordFormat
) -> AttendCall:
    """The same attention, its lists written down one by one."""
    rows = list(zip(step.requests, step.positions.tolist(), strict=True))
    swa = layer.swa_cache_layer
    tables = step.tables[swa.prefix]
    window = [[slot(tables[r], n, 32) for n in range(max(0, p - 127), p + 1)] for r, p in rows]
    keys = KeySet(PagedCache.from_view(swa.kv_cache, MXFP8), *key_lists(window))
    compressed = None
    if layer.compress_ratio:
        cache = PagedCache.from_view(layer._compressed_kv_cache(), record)
        tables = step.tables[layer.compressed_cache_prefix]
        lists = [
            [slot(tables[r], entry, 64 // layer.compress_ratio) for entry in entries]
            for (r, _), entries in zip(rows, chosen, strict=True)
        ]
        compressed = KeySet(cache, *key_lists(lists))
    mega = layer.mega
    return AttendCall(
        q=q,
        window=keys,
        compressed=compressed,
        scale=512**-0.5,
        sink=layer.attn_sink.data,
        positions=step.positions if mega else None,
        rope=layer.rotary_emb.cos_sin_cache if mega else None,
        rotate_query=mega,
        unrotate_output=mega,
    )


def attend(layer: Any, q: Tensor, step: Step, config: Any, padding: int = 0) -> Tensor:
    rows = q.shape[0]
    q = torch.cat((q, torch.full_like(q[:padding], torch.nan)))
    positions = torch.cat((step.positions, torch.full((padding,), 10**9)))
    output = torch.full_like(q, torch.nan)
    with set_forward_context(step.metadata, config):
        layer.forward_mqa(q, q.new_empty(0), positions, output)
    assert not output[rows:].any()
    return output[:rows]


def query(seed: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, 512, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("padding", [0, 2])
def test_attention_equals_the_oracle_on_vllms_caches(
    engine: SimpleNamespace, step: Step, padding: int
) -> None:
    chosen: list[list[int]] = []
    for layer in engine.attention:
        if layer.is_index_source:
            chosen = choose(layer, step)
            layer.topk_indices_buffer.fill_(-1)
            for row, entries in enumerate(chosen):
                layer.topk_indices_buffer[row, : len(entries)] = torch.tensor(entries)
        q = query(layer.layer_id, len(step.requests))
        got = attend(layer, q, step, engine.config, padding)
        call = oracle_call(layer, step, q, chosen, compressed_record(engine))
        out = AttendOut(got.contiguous(), None, None, None)
        assert_matches_oracle(call, out, FLOAT32_BODY)


def test_page_strides_and_offsets_are_the_hosts(engine: SimpleNamespace) -> None:
    """The views that the oracle test ran on: pages far apart, some off the start of the storage."""
    layer = engine.attention[3]
    cache = layer._compressed_kv_cache()
    assert cache.shape[1:] == (64, compressed_record(engine).row_bytes)
    assert cache.stride(0) > 1.5 * cache.shape[1] * cache.shape[2]
    assert cache.storage_offset() > 0
    assert engine.attention[1].kv_cache.shape[1] == 32
    assert engine.attention[0].swa_cache_layer.kv_cache.shape[1:] == (32, MXFP8.row_bytes)


def test_the_window_writer_stores_the_codecs_bytes(engine: SimpleNamespace, step: Step) -> None:
    for layer in (engine.attention[0], engine.attention[2]):
        swa = layer.swa_cache_layer
        before = swa.kv_cache.clone()
        rows = len(step.requests)
        kv, q = query(50 + layer.layer_id, rows)[:, 0].contiguous(), query(7, rows)
        kept = q.clone()
        back = layer._fused_qnorm_rope_kv_insert(q, kv, step.positions, step.metadata)
        assert back is q
        assert torch.equal(back, kept)  # the kernel rotates it
        slots = torch.tensor(
            [
                slot(step.tables[swa.prefix][r], int(p), 32)
                for r, p in zip(step.requests, step.positions, strict=True)
            ]
        )
        rope = layer.rotary_emb.cos_sin_cache
        turned = apply_rope(kv.float(), step.positions, rope).to(torch.bfloat16)
        check_stored(swa.kv_cache, before, MXFP8, slots, turned)


def test_the_compressed_writer_stores_the_codecs_bytes(engine: SimpleNamespace, step: Step) -> None:
    record = compressed_record(engine)
    for layer in (engine.attention[1], engine.attention[3]):
        ratio = layer.compress_ratio
        before = layer.kv_cache.clone()
        rows = len(step.requests)
        latent = query(90 + ratio, rows)[:, 0].contiguous()
        closing = [n for n, p in enumerate(step.positions.tolist()) if (p + 1) % ratio == 0]
        for row in set(range(rows)) - set(closing):
            latent[row] = torch.nan
        with set_forward_context(step.metadata, engine.config):
            layer.compressor.insert_cache(latent, step.positions, layer.rotary_emb)
            layer.compressor.insert_cache(None, step.positions, layer.rotary_emb)
        groups = step.positions[closing] // ratio
        slots = torch.tensor(
            [
                slot(step.tables[layer.prefix][step.requests[n]], int(group), 64 // ratio)
                for n, group in zip(closing, groups, strict=True)
            ]
        )
        rope = layer.rotary_emb.cos_sin_cache
        turned = apply_rope(latent[closing].float(), groups * ratio, rope).to(torch.bfloat16)
        check_stored(layer.kv_cache, before, record, slots, turned)


def check_stored(
    view: Tensor, before: Tensor, record: RecordFormat, slots: Tensor, values: Tensor
) -> None:
    """The rows hold what the codec makes of the values, every other byte what it held."""
    data, scales = encode_rows(record, values)
    got = PagedCache.from_view(view, record).read_rows(slots)
    assert torch.equal(got[0], data)
    assert torch.equal(got[1], scales)
    wanted = before.contiguous()
    PagedCache.from_view(wanted, record).write_rows(slots, data, scales)
    assert torch.equal(view, wanted)


def test_a_replayed_prefix_writes_what_forward_writes(
    engine: SimpleNamespace, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = engine.attention[3]
    rows = len(step.requests)
    kv, latent = query(11, rows)[:, 0].contiguous(), query(12, rows)[:, 0].contiguous()
    produced = []
    monkeypatch.setattr(layer, "_run_parallel_input_projections", lambda hidden: (None, None, None))
    monkeypatch.setattr(layer, "_split_qkv_and_norm", lambda qr_kv: (None, None, kv))
    monkeypatch.setattr(layer.compressor, "forward", lambda kv_score, positions: latent)
    monkeypatch.setattr(layer.indexer, "_produce_k", lambda *given: produced.append(given[0]))
    with set_forward_context(step.metadata, engine.config):
        layer._fused_qnorm_rope_kv_insert(query(1, rows), kv, step.positions, step.metadata)
        layer.compressor.insert_cache(latent, step.positions, layer.rotary_emb)
        wanted = layer.swa_cache_layer.kv_cache.clone(), layer.kv_cache.clone()
        written = [
            step.metadata[name].slot_mapping
            for name in (layer.swa_cache_layer.prefix, layer.prefix)
        ]
        for view, record, slots in zip(
            (layer.swa_cache_layer.kv_cache, layer.kv_cache),
            (MXFP8, compressed_record(engine)),
            written,
            strict=True,
        ):
            data, scales = encode_rows(record, torch.zeros(rows, 512))
            PagedCache.from_view(view, record).write_rows(slots, data, scales)
        layer.forward_kv(step.positions, torch.empty(rows, 256))
    assert torch.equal(layer.swa_cache_layer.kv_cache, wanted[0])
    assert torch.equal(layer.kv_cache, wanted[1])
    assert produced == [latent] or torch.equal(produced[0], latent)


def test_a_profiling_run_needs_no_metadata_no_caches_and_no_workspace(
    engine: SimpleNamespace,
) -> None:
    for layer in engine.attention[:4]:
        q = query(1, 3)
        output = torch.full_like(q, torch.nan)
        with set_forward_context(None, engine.config):
            assert layer._fused_qnorm_rope_kv_insert(q, q[:, 0], torch.zeros(3), None) is q
            layer.forward_mqa(q, q[:, 0], torch.zeros(3, dtype=torch.int64), output)
        assert not output.any()


def test_the_output_projection_is_grouped(engine: SimpleNamespace) -> None:
    layer = engine.attention[0]
    attn_out = query(4, 6)
    got = layer._o_proj(attn_out, torch.arange(6))
    weight = layer.wo_a.weight.double().view(2, 128, 8 * 512)
    grouped = torch.einsum("tgk,grk->tgr", attn_out.double().view(6, 2, 8 * 512), weight)
    wanted = grouped.flatten(1) @ layer.wo_b.weight.double().T
    assert got.shape == (6, 256)
    magnitude = grouped.flatten(1).abs() @ layer.wo_b.weight.double().abs().T
    assert bool(((got.double() - wanted).abs() <= 2**-7 * magnitude).all())


def test_a_projection_that_is_not_bf16_is_refused(engine: SimpleNamespace) -> None:
    layer = engine.attention[0]
    kept = layer.wo_a.weight
    layer.wo_a.weight = torch.nn.Parameter(kept.to(torch.float8_e4m3fn), requires_grad=False)
    try:
        with pytest.raises(UnsupportedError, match="wo_a is not supported"):
            layer._o_proj(query(4, 2), torch.arange(2))
    finally:
        layer.wo_a.weight = kept


def test_no_head_is_padded_and_lists_are_shared(engine: SimpleNamespace) -> None:
    layers = engine.attention
    assert {layer.padded_heads for layer in layers} == {HEADS}
    assert layers[1]._lists is layers[4]._lists
    assert [layer._fills_lists for layer in layers[1:]] == [True, False, True, False]


def test_without_mega_the_writer_turns_the_query_and_attention_is_bare() -> None:
    config = fake_hopper.engine_config("auto", fake_hopper.SPARSE)
    layers = fake_hopper.make_layers(config)
    caches = vars(fake_hopper.plan_caches(config))
    engine = SimpleNamespace(name="fp8_ds_mla", config=config, attention=layers, **caches)
    assert config.cache_config.cache_dtype == "fp8_ds_mla"  # what `auto` means there
    assert layers[1].kv_cache.shape[-1] == MXFP8.row_bytes
    poison(engine)
    step = make_step(engine, QUERY_LENS, SEQ_LENS)
    layer = engine.attention[0]
    swa = layer.swa_cache_layer
    fill(swa.kv_cache, MXFP8, step.tables[swa.prefix], max(SEQ_LENS), 0)
    q = query(3, len(step.requests))
    rope = layer.rotary_emb.cos_sin_cache
    turned = apply_rope(q.float(), step.positions, rope).to(torch.bfloat16)
    kv = query(5, len(step.requests))[:, 0].contiguous()
    back = layer._fused_qnorm_rope_kv_insert(q, kv, step.positions, step.metadata)
    assert torch.equal(back, turned)
    got = attend(layer, back, step, engine.config)
    call = oracle_call(layer, step, turned, [], MXFP8)
    assert_matches_oracle(call, AttendOut(got, None, None, None), FLOAT32_BODY)
