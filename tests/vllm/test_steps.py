"""What a layer does with an engine's tensors, at vLLM's strides and offsets, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import MXFP8, NVFP4, V4
from sparse_mla.config.rope import apply_rope
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import CacheFormatError, ShapeError, UnsupportedError
from sparse_mla.integrations.vllm import steps
from sparse_mla.integrations.vllm.steps import (
    Attend,
    BoundCache,
    Shape,
    SlotLists,
    engine_records,
    grouped_projection,
    store_compressed,
    store_window,
    warm_up,
)
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet
from sparse_mla.metadata.plan import PlanScratch, build_plan
from sparse_mla.testing.compare import FLOAT32_BODY, TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import plain_rope_table

MakeHost = Callable[[str, str], Any]
SCALE = 512**-0.5


def normal(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)


def check_stored(view: Tensor, before: Tensor, record: Any, slots: Tensor, values: Tensor) -> None:
    """The rows hold what the codec makes of the values (both on the CPU); nothing else changed."""
    data, scales = encode_rows(record, values)
    wanted = before.cpu().contiguous()
    PagedCache.from_view(wanted, record).write_rows(slots, data, scales)
    assert torch.equal(view.cpu(), wanted)


def test_window_rows_are_the_codecs_bytes(make_host: MakeHost, pair: str, device: str) -> None:
    host = make_host(pair, device)
    view = host.window()
    before = view.clone()
    latents, positions = normal(1, 9, 512), torch.tensor([0, 1, 4095, 7, 8, 9, 10, 11, 12])
    slots = torch.tensor([5, -1, 77, 2559, 0, 31, 32])  # shorter than the rows
    rope = plain_rope_table(4096)
    cache = BoundCache(MXFP8).of(view)
    given = [t.to(device) for t in (slots, positions, rope)]
    store_window(latents.to(device), cache, *given)
    stored = slots >= 0
    turned = apply_rope(latents.float(), positions, rope).to(torch.bfloat16)[:7]
    check_stored(view, before, MXFP8, slots[stored], turned[stored])


def test_window_writer_turns_the_query_in_place(make_host: MakeHost, device: str) -> None:
    host = make_host("fp8", device)
    q = normal(2, 3, 16, 512)
    positions, rope = torch.tensor([3, 400, 4000]), plain_rope_table(4096)
    turned = apply_rope(q.float(), positions, rope).to(torch.bfloat16)
    got = q.to(device)
    cache = BoundCache(MXFP8).of(host.window())
    slots = torch.full((8,), -1)  # longer than the rows: padding of a graph
    given = [t.to(device) for t in (slots, positions, rope)]
    store_window(normal(3, 3, 512, device=device), cache, *given, got)
    # a GPU may contract a product and a sum, which flips a rounding now and then
    steps_apart = (got.cpu().view(torch.int16).int() - turned.view(torch.int16).int()).abs()
    assert int(steps_apart.max()) <= (0 if device == "cpu" else 1)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_rows_are_the_codecs_bytes(
    make_host: MakeHost, pair: str, device: str, ratio: int
) -> None:
    """The 288-byte writer among them: vLLM's own does not assemble on Hopper."""
    host = make_host(pair, device)
    view = host.compressed(ratio)
    before = view.clone()
    positions = torch.tensor([10, 11, 12, 13, 2, 3, 500])
    page_rows = 64 // ratio
    slots = torch.tensor([3, page_rows, -1, 5 * page_rows + 1, 4, -1, 7, 9])  # longer than the rows
    latents = normal(4 + ratio, 7, 512)
    closing = (positions + 1) % ratio == 0
    latents[~closing] = torch.nan
    rope = plain_rope_table(4096)
    cache = BoundCache(host.record).of(view)
    given = [t.to(device) for t in (slots, positions, rope)]
    store_compressed(latents.to(device), cache, *given, ratio)
    stored = closing & (slots[:7] >= 0)
    first = positions // ratio * ratio
    turned = apply_rope(latents[stored].float(), first[stored], rope).to(torch.bfloat16)
    check_stored(view, before, host.record, slots[:7][stored], turned)


def window_lists(tables: list[list[int]], rows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    lists, lengths = torch.full((len(rows), 128), -1, dtype=torch.int32), []
    for number, (request, p) in enumerate(rows):
        first = max(0, p - 127)
        named = [tables[request][n // 32] * 32 + n % 32 for n in range(first, p + 1)]
        lists[number, : len(named)] = torch.tensor(named)
        lengths.append(len(named))
    return lists, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("mega", [True, False])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("heads", [8, 64])
def test_attention_equals_the_oracle(
    make_host: MakeHost, pair: str, device: str, ratio: int, heads: int, mega: bool
) -> None:
    """Decode, speculative and prefill rows together, padding rows behind them."""
    host = make_host(pair, device)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    tables = [order[:5].tolist(), order[5:14].tolist()]
    host.fill(host.window(), MXFP8, order[:14], 1)
    positions = torch.tensor([130, 131, 132, 250, 0, 1])
    rows = [(0, 130), (0, 131), (0, 132), (1, 250), (1, 0), (1, 1)]
    indices, lengths = window_lists(tables, rows)
    rope = plain_rope_table(4096)
    window = KeySet(BoundCache(MXFP8).of(host.window()), indices.to(device), lengths.to(device))
    compressed = None
    if ratio:
        view = host.compressed(ratio)
        host.fill(view, host.record, order[20:30], 2)
        table = order[20:30].view(2, 5).int()
        topk = torch.full((6, 64), -1, dtype=torch.int32)
        for number, (_, p) in enumerate(rows):
            count = min(64, (p + 1) // ratio)
            topk[number, :count] = torch.randperm((p + 1) // ratio)[:count].sort().values
        lists = SlotLists.allocate(8, 64, device)
        requests = torch.tensor([request for request, _ in rows], dtype=torch.int32)
        valid = torch.ones(6, dtype=torch.bool)
        lists.fill(*(t.to(device) for t in (topk, requests, table)), 64 // ratio, valid.to(device))
        wanted = torch.where(
            topk >= 0,
            table[requests.long()[:, None], topk.clamp_min(0).long() // (64 // ratio)]
            * (64 // ratio)
            + topk % (64 // ratio),
            -1,
        )
        assert torch.equal(lists.slots[:6].cpu(), wanted)
        assert torch.equal(lists.lengths[:6].cpu(), (topk >= 0).sum(dim=1).int())
        compressed = lists.key_set(BoundCache(host.record).of(view), 6)
    q = normal(7, 6, heads, 512, device=device)
    padded = torch.cat((q, torch.full_like(q[:2], torch.nan)))
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(8)).to(device)
    where = torch.cat((positions, torch.tensor([10**9, -1]))).to(device)
    scratch = PlanScratch(heads, steps.DeviceInfo.detect(device).num_sms, device)
    kind = {0: LayerKind.WINDOW_ONLY, 1: LayerKind.RATIO_1, 2: LayerKind.RATIO_2}[ratio]
    plan = build_plan(
        kind, tokens=6, num_heads=heads, window_keys=128, compressed_keys=64 if ratio else 0,
        scratch=scratch,
    )  # fmt: skip
    output = torch.full_like(padded, torch.nan)
    call = Attend(padded, window, compressed, where, rope.to(device), sink, SCALE, plan)
    call.run(output, mega=mega)
    assert not output[6:].any()
    oracle = AttendCall(
        q=q,
        window=window,
        compressed=compressed,
        scale=SCALE,
        sink=sink,
        positions=where[:6] if mega else None,
        rope=rope.to(device) if mega else None,
        rotate_query=mega,
        unrotate_output=mega,
    )
    precision = FLOAT32_BODY if device == "cpu" else TENSOR_CORE_BODY
    assert_matches_oracle(oracle, AttendOut(output[:6], None, None, None), precision)


def test_a_step_without_rows_gives_zeros(make_host: MakeHost) -> None:
    host = make_host("fp8", "cpu")
    lists = SlotLists.allocate(4, 128, "cpu")
    window = lists.key_set(BoundCache(MXFP8).of(host.window()), 0)
    q, sink = normal(1, 3, 8, 512), torch.zeros(8)
    output = torch.full_like(q, torch.nan)
    call = Attend(q, window, None, torch.zeros(3).long(), plain_rope_table(8), sink, SCALE, None)
    call.run(output, mega=True)
    assert not output.any()
    few = lists.key_set(BoundCache(MXFP8).of(host.window()), 4)
    with pytest.raises(ShapeError, match="window: got 4 rows; allowed: at most the query's 3"):
        Attend(q, few, None, call.positions, call.rope, sink, SCALE, None).run(output, mega=True)


def test_a_bound_cache_follows_the_engine(make_host: MakeHost) -> None:
    first, second = make_host("nvfp4", "cpu").window(), make_host("nvfp4", "cpu").window()
    bound = BoundCache(MXFP8)
    cache = bound.of(first)
    assert bound.of(first) is cache
    assert bound.of(second) is not cache
    assert bound.of(second).pages.data_ptr() == second.data_ptr()
    with pytest.raises(CacheFormatError, match="kv_cache: got a last dimension of 528 bytes"):
        BoundCache(V4).of(first)


def test_records_of_a_kv_cache_dtype() -> None:
    fp4, fp8 = engine_records("nvfp4_ds_mla"), engine_records("fp8_ds_mla")
    assert (fp4.window, fp4.compressed) == (MXFP8, NVFP4)
    assert (fp8.window, fp8.compressed) == (MXFP8, MXFP8)
    assert fp4.index is fp8.index
    assert fp4.index.row_bytes == 132


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_are_projected_apart(groups: int, device: str) -> None:
    attn_out = normal(1, 5, 16, 512, device=device)
    weight = normal(2, groups * 64, 16 // groups * 512, device=device)
    got = grouped_projection(attn_out, weight, groups)
    heads = attn_out.double().view(5, groups, -1)
    per_group = weight.double().view(groups, 64, -1)
    wanted = torch.einsum("tgk,grk->tgr", heads, per_group).flatten(1)
    magnitude = torch.einsum("tgk,grk->tgr", heads.abs(), per_group.abs()).flatten(1)
    bound = 2**-8 * wanted.abs() + 2**-16 * magnitude
    assert got.shape == (5, groups * 64)
    assert bool(((got.double() - wanted).abs() <= bound).all())
    assert grouped_projection(attn_out[:0], weight, groups).shape == (0, groups * 64)


def test_a_projection_in_fp8_is_refused() -> None:
    weight = normal(1, 64, 8 * 512).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="dtype: got torch.float8_e4m3fn; allowed"):
        grouped_projection(normal(2, 1, 8, 512), weight, 1)


@pytest.mark.parametrize("mega", [True, False])
def test_warm_up_runs_every_kernel_once(
    monkeypatch: pytest.MonkeyPatch, device: str, mega: bool
) -> None:
    called: list[str] = []
    for name in ("store_window", "store_compressed"):
        real = getattr(steps, name)

        def counted(*given: Any, real: Any = real, name: str = name) -> None:
            called.append(name)
            real(*given)

        monkeypatch.setattr(steps, name, counted)
    shape = Shape(
        heads=8, window_record=MXFP8, compressed_record=NVFP4, window_keys=128, compressed_keys=64,
        ratio=1, mega=mega, writes_compressed=True,
    )  # fmt: skip
    steps.warm_up.cache_clear()
    place = torch.device(device)
    warm_up(shape, place, 4)
    counts = 1 if device == "cpu" else 3
    assert called.count("store_window") == called.count("store_compressed") == counts
    warm_up(shape, place, 4)
    assert len(called) == 2 * counts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_follows_its_inputs(make_host: MakeHost, pair: str) -> None:
    """Writers, lists and attention of a layer in one CUDA graph, replayed on other inputs."""
    host = make_host(pair, "cuda")
    blocks = torch.arange(80)
    host.fill(host.window(), MXFP8, blocks[:16], 1)
    host.fill(host.compressed(1), host.record, blocks[16:32], 2)
    window, compressed = BoundCache(MXFP8).of(host.window()), BoundCache(host.record)
    rows, heads = 8, 64

    def inputs(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def draw(limit: int, *shape: int) -> Tensor:
            return torch.randint(limit, shape, generator=generator)

        table = blocks[16:32].view(2, 8).int()
        given = [
            normal(seed, rows, heads, 512),
            normal(seed + 1, rows, 512),
            torch.arange(rows) + 32 * draw(16, 1),  # window slots
            torch.arange(rows) + 64 * (16 + draw(16, 1)),  # compressed slots
            draw(4000, rows),  # positions
            draw(512, rows, 128).int(),  # window lists
            draw(129, rows).int(),
            draw(512, rows, 64).int(),  # chosen positions
            draw(2, rows).int(),  # requests
            table,
        ]
        return [tensor.cuda() for tensor in given]

    static = inputs(0)
    lists, rope = SlotLists.allocate(rows, 64, "cuda"), plain_rope_table(4096, device="cuda")
    sink, valid = torch.zeros(heads, device="cuda"), torch.ones(rows, dtype=torch.bool).cuda()
    output = torch.empty_like(static[0])
    scratch = PlanScratch(heads, steps.DeviceInfo.detect("cuda").num_sms, "cuda")
    plan = build_plan(
        LayerKind.RATIO_1, tokens=rows, num_heads=heads, window_keys=128, compressed_keys=64,
        scratch=scratch,
    )  # fmt: skip

    def layer() -> None:
        q, kv, own, closed, positions, indices, lengths, topk, requests, table = static
        store_window(kv, window, own, positions, rope)
        store_compressed(kv, compressed.of(host.compressed(1)), closed, positions, rope, 1)
        lists.fill(topk, requests, table, 64, valid)
        keys = KeySet(window, indices, lengths)
        extra = lists.key_set(compressed.of(host.compressed(1)), rows)
        Attend(q, keys, extra, positions, rope, sink, SCALE, plan).run(output, mega=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for seed in (10, 20):
        before = host.arena.clone()
        for tensor, value in zip(static, inputs(seed), strict=True):
            tensor.copy_(value)
        layer()
        wanted, bytes_wanted = output.clone(), host.arena.clone()
        host.arena.copy_(before)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, wanted)
        assert torch.equal(host.arena, bytes_wanted)
