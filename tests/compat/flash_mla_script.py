"""A program written against FlashMLA's documented API and nothing else: it imports `flash_mla` and torch.

It quantises rows into pages with its own code, calls the three entry points, and compares with its own
float64 attention over the rows that its own code reads back from the bytes. `run(device)` returns the
names of the cases; a wrong result raises AssertionError.

    python flash_mla_script.py [device]
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass

import flash_mla
import torch
from torch import Tensor

D, ROPE = 512, 64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ------------------------------------------------------------------------------------------- the records


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def ue8m0_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, scales) of 2**ceil(log2(max(amax, 1e-4) / 448))."""
    mantissa, exponent = torch.frexp(amax.double().clamp_min(1e-4) / 448)
    exponent = exponent - (mantissa == 0.5).int()
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent.double()).float()


def pack_528(rows: Tensor) -> Tensor:
    blocks = rows.view(-1, 16, 32)
    byte, scale = ue8m0_scale(blocks.abs().amax(-1))
    return torch.cat((e4m3(blocks / scale[..., None]).view(-1, 512), byte), dim=1)


def unpack_528(raw: Tensor) -> Tensor:
    values = raw[:, :512].contiguous().view(torch.float8_e4m3fn).float().double().view(-1, 16, 32)
    return (values * torch.exp2(raw[:, 512:].double() - 127)[..., None]).view(-1, D)


def pack_288(rows: Tensor) -> Tensor:
    blocks = rows.view(-1, 32, 16)
    scale_byte = e4m3((blocks.abs().amax(-1) / 6).clamp(2.0**-9, 448))
    ratio = blocks / scale_byte.view(torch.float8_e4m3fn).float()[..., None]
    values = torch.tensor(E2M1, device=rows.device)
    middles = (values[1:] + values[:-1]) / 2
    size = ratio.abs()
    code = torch.bucketize(size, middles)  # a tie goes down ...
    tie_up = torch.tensor([False, True, False, True, False, True, False], device=rows.device)
    hit = code.clamp(max=6)
    code = torch.where(
        (size == middles[hit]) & tie_up[hit], hit + 1, code
    )  # ... or to the even code
    code = (code | (torch.signbit(ratio).long() << 3)).view(-1, 256, 2).to(torch.uint8)
    return torch.cat((code[..., 0] | (code[..., 1] << 4), scale_byte), dim=1)


def unpack_288(raw: Tensor) -> Tensor:
    table = torch.tensor(
        [*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=raw.device
    )
    codes = torch.stack((raw[:, :256] & 15, raw[:, :256] >> 4), dim=-1).long()
    scales = raw[:, 256:].contiguous().view(torch.float8_e4m3fn).float().double()
    return (table[codes].view(-1, 32, 16) * scales[..., None]).view(-1, D)


def pack_584(rows: Tensor) -> Tensor:
    """Data, then scales; the page keeps the two apart."""
    blocks = rows[:, :448].reshape(-1, 7, 64)
    byte, scale = ue8m0_scale(blocks.abs().amax(-1))
    tail = rows[:, 448:].bfloat16().contiguous().view(torch.uint8)
    codes = e4m3(blocks / scale[..., None]).view(-1, 448)
    return torch.cat((codes, tail, byte, torch.zeros_like(byte[:, :1])), dim=1)


def unpack_584(raw: Tensor) -> Tensor:
    values = raw[:, :448].contiguous().view(torch.float8_e4m3fn).float().double().view(-1, 7, 64)
    values = values * torch.exp2(raw[:, 576:583].double() - 127)[..., None]
    tail = raw[:, 448:576].contiguous().view(torch.bfloat16).double()
    return torch.cat((values.view(-1, 448), tail), dim=1)


PACKERS = {584: (pack_584, unpack_584), 528: (pack_528, unpack_528), 288: (pack_288, unpack_288)}


@dataclass
class Cache:
    """A paged cache in which only `slots` hold rows; every other byte is 0xFF, a NaN code."""

    view: Tensor  # uint8 [pages, page_rows, 1, row_bytes]
    slots: Tensor  # int64 [n]
    rows: Tensor  # float64 [pages * page_rows, 512], zero where there is none

    @classmethod
    def make(cls, width: int, page_rows: int, count: int, generator: torch.Generator) -> Cache:
        device = generator.device
        pages = -(-2 * count // page_rows) + 1
        unit = 576 if width == 584 else width  # FlashMLA's rule for page strides
        stride = -(-(page_rows + 3) * width // unit) * unit
        storage = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=device)
        slots = torch.randperm(pages * page_rows, generator=generator, device=device)[:count]
        latents = torch.randn(count, D, generator=generator, device=device).bfloat16().float()
        pack, unpack = PACKERS[width]
        raw = pack(latents)
        flat = storage.as_strided((pages, page_rows, width), (stride, width, 1))
        page, row = slots // page_rows, slots % page_rows
        if width == 584:  # all data of a page, then all its scales
            data = storage.as_strided((pages, page_rows, 576), (stride, 576, 1))
            scales = storage.as_strided((pages, page_rows, 8), (stride, 8, 1), page_rows * 576)
            data[page, row], scales[page, row] = raw[:, :576], raw[:, 576:]
        else:
            flat[page, row] = raw
        rows = torch.zeros(pages * page_rows, D, dtype=torch.float64, device=device)
        rows[slots] = unpack(raw)
        return cls(flat[:, :, None], slots, rows)


# --------------------------------------------------------------------------------------------- the maths


def attention(
    q: Tensor,  # float64 [T, H, 512]
    lists: list[tuple[Tensor, Tensor, Tensor | None]],  # rows [N, 512], slots [T, K], lengths [T]
    scale: float,
    sink: Tensor | None,
    logit_scale: Tensor | None = None,  # float64 [T, H]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, H, 512], largest logit [T, H], lse [T, H] in float64."""
    outs = []
    for t in range(q.shape[0]):
        keys = []
        for rows, slots, lengths in lists:
            row = slots[t] if lengths is None else slots[t, : int(lengths[t])]
            keys.append(rows[row[(row >= 0) & (row < rows.shape[0])].long()])
        key = torch.cat(keys)
        z = scale * (q[t] @ key.T)
        if logit_scale is not None:
            z = z * logit_scale[t][:, None]
        if key.shape[0] == 0:
            nothing = torch.full(z.shape[:1], torch.inf, dtype=torch.float64, device=q.device)
            outs.append((torch.zeros_like(q[t]), -nothing, nothing))
            continue
        lse = torch.logsumexp(z, dim=-1)
        out = torch.exp(z - lse[:, None]) @ key
        if sink is not None:
            out = out * torch.sigmoid(lse - sink.double())[:, None]
        outs.append((out, z.amax(-1), lse))
    out, largest, lse = (torch.stack(parts) for parts in zip(*outs, strict=True))
    return out, largest, lse


def rotate(x: Tensor, positions: Tensor, table: Tensor, sign: float) -> Tensor:
    cos, sin = (
        table[positions][:, None, :32].to(x.dtype),
        table[positions][:, None, 32:].to(x.dtype),
    )
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    turned = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), dim=-1)
    return torch.cat((x[..., :-ROPE], turned.flatten(-2)), dim=-1)


def close(
    name: str, got: Tensor, want: Tensor, absolute: float, relative: float, cosine: float
) -> None:
    """FlashMLA's comparison: abs or rel for each element, cosine difference, equal special values."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, wanted {list(want.shape)}"
    special = ~torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), ~special), f"{name}: inf or NaN in other places"
    assert torch.equal(got[special], want[special]), f"{name}: other special values"
    got, want = got[~special], want[~special]
    if got.numel() == 0:
        return
    error = (got - want).abs()
    bad = (error > absolute) & (error > relative * want.abs())
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {bad.numel()} off, worst {float(error.max())}"
    )
    norm = float((got * got + want * want).sum())
    distance = 1 - 2 * float((got * want).sum()) / norm if norm > 1e-12 else 0.0
    assert distance < cosine, f"{name}: cosine difference {distance}"


# ----------------------------------------------------------------------------------------------- the cases


@dataclass
class Case:
    name: str
    b: int
    s_q: int
    page: int
    topk: int
    heads: int = 64
    extra: tuple[int, int, int] | None = None  # row bytes, page rows, list width
    lengths: bool = False
    sink: float | str | None = None
    invalid: float = 0.1
    row_bytes: int = 528


DECODE = (
    Case("one token, pages of 2", 1, 1, 2, 64),
    Case(
        "two caches, lengths, sink",
        3,
        2,
        64,
        128,
        extra=(528, 576, 320),
        lengths=True,
        sink="random",
    ),
    Case("batch 300, sink -inf", 300, 1, 32, 64, sink=-math.inf),
    Case("128 heads, 4-bit extra, sink +inf", 2, 3, 100, 192, 128, (288, 33, 192), True, math.inf),
    Case("top-k 2048", 2, 1, 576, 2048, lengths=True, sink="random"),
    Case("every index invalid", 2, 2, 64, 64, extra=(288, 64, 64), invalid=1.0, sink="random"),
    Case("584-byte rows", 3, 1, 32, 128, 64, (584, 64, 512), True, "random", row_bytes=584),
)


def random_case(seed: int) -> Case:
    """Sizes, lists, sinks and records at random, inside what FlashMLA takes."""
    choose = random.Random(seed)
    width = choose.choice((528, 528, 584))
    extra = None
    if choose.random() < 0.7:
        second = choose.choice((528, 288)) if width == 528 else 584
        extra = (second, choose.choice((2, 20, 64, 576)), choose.choice((64, 128, 512)))
    return Case(
        f"random {seed}",
        b=choose.choice((1, 2, 5, 17)),
        s_q=choose.choice((1, 2, 3)),
        page=choose.choice((2, 16, 50, 64, 576)),
        topk=choose.choice((64, 128, 192, 512)),
        heads=choose.choice((64, 64, 128)),
        extra=extra,
        lengths=choose.random() < 0.5,
        sink=choose.choice((None, "random", -math.inf, math.inf)),
        invalid=choose.choice((0.0, 0.1, 0.9)),
        row_bytes=width,
    )


def lists_of(
    case: Case, cache: Cache, width: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Indices [b, s_q, width] and lengths [b]; lanes past a length name rows that hold NaN."""
    device = generator.device
    shape = (case.b, case.s_q, width)
    pick = torch.randint(len(cache.slots), shape, generator=generator, device=device)
    indices = cache.slots[pick]
    hole = torch.rand(shape, generator=generator, device=device) < case.invalid
    indices = torch.where(hole, -1, indices)
    if not case.lengths:
        return indices.int(), None
    lengths = torch.randint(width + 1, (case.b,), generator=generator, device=device)
    lengths[0] = 0
    unused = torch.ones(cache.rows.shape[0], dtype=torch.bool, device=device)
    unused[cache.slots] = False
    lane = torch.arange(width, device=device)
    indices = torch.where(lane >= lengths[:, None, None], int(unused.nonzero()[0]), indices)
    return indices.int(), lengths.int()


def sink_of(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.sink is None:
        return None
    if case.sink == "random":
        return torch.randn(case.heads, generator=generator, device=generator.device)
    return torch.full((case.heads,), float(case.sink), device=generator.device)


def flat(indices: Tensor, lengths: Tensor | None, s_q: int) -> tuple[Tensor, Tensor | None]:
    per_token = None if lengths is None else lengths.repeat_interleave(s_q)
    return indices.view(-1, indices.shape[-1]), per_token


def run_decode(case: Case, device: str) -> None:
    generator = torch.Generator(device).manual_seed(case.topk + case.b)
    cache = Cache.make(case.row_bytes, case.page, 600, generator)
    indices, lengths = lists_of(case, cache, case.topk, generator)
    lists = [(cache.rows, *flat(indices, lengths, case.s_q))]
    extra = {}
    if case.extra is not None:
        width, page, topk = case.extra
        second = Cache.make(width, page, 500, generator)
        extra_indices, extra_lengths = lists_of(case, second, topk, generator)
        lists.append((second.rows, *flat(extra_indices, extra_lengths, case.s_q)))
        extra = {
            "extra_k_cache": second.view,
            "extra_indices_in_kvcache": extra_indices,
            "extra_topk_length": extra_lengths,
        }
    q = torch.randn(case.b, case.s_q, case.heads, D, generator=generator, device=device).bfloat16()
    sink = sink_of(case, generator)
    schedule, _ = flash_mla.get_mla_metadata()
    for _repeat in range(2 if case.b < 10 else 1):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, cache.view.view(torch.float8_e4m3fn), None, None, D, schedule, None, D**-0.5, False, True,
            indices, sink, topk_length=lengths, **extra,
        )  # fmt: skip
    want, _, want_lse = attention(q.view(-1, case.heads, D).double(), lists, D**-0.5, sink)
    close("out", out, want.view(case.b, case.s_q, case.heads, D), 1e-3, 2.01 / 128, 5e-6)
    want_lse = want_lse.view(case.b, case.s_q, case.heads).transpose(1, 2)
    close("lse", lse, want_lse, 1e-6, 8.01 / 65536, 1e-6)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def run_prefill(case: Case, device: str) -> None:
    """`flash_mla_sparse_fwd`: plain rows, invalid indices on both sides, unused rows NaN."""
    generator = torch.Generator(device).manual_seed(case.topk)
    kv, indices, lengths, rows = plain(case, generator)
    q = torch.randn(case.b, case.heads, D, generator=generator, device=device).bfloat16()
    sink = sink_of(case, generator)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, D**-0.5, D, sink, lengths)
    want = attention(q.double(), [(rows, indices[:, 0], lengths)], D**-0.5, sink)
    close("out", out, want[0], 1e-3, 2.01 / 128, 5e-6)
    close("max_logits", largest, want[1], 1e-6, 4.01 / 65536, 1e-6)
    close("lse", lse, want[2], 1e-6, 4.01 / 65536, 1e-6)


def plain(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """bf16 [s_kv, 1, 512] with NaN in unused rows, indices [s_q, 1, topk], lengths, float64 rows."""
    device, s_kv = generator.device, 700
    kv = torch.randn(s_kv, 1, D, generator=generator, device=device).bfloat16()
    rows = kv[:, 0].double()
    kv[350:] = torch.nan
    shape = (case.b, 1, case.topk)
    indices = torch.randint(350, shape, generator=generator, device=device)
    hole = torch.rand(shape, generator=generator, device=device)
    outside = torch.where(hole < case.invalid / 2, s_kv + 5, -1)
    indices = torch.where(hole < case.invalid, outside, indices).int()
    lengths = None
    if case.lengths:
        lengths = torch.randint(
            case.topk + 1, (case.b,), dtype=torch.int32, generator=generator, device=device
        )
        lengths[0] = 0
    return kv, indices, lengths, rows


def interleave_query(q: Tensor) -> Tensor:
    """What a query projection with permuted weights gives: (h, d) at (d//16)*(16*H) + h*16 + d%16."""
    tokens, heads, _ = q.shape
    flat = torch.empty(tokens, heads * D, dtype=q.dtype, device=q.device)
    h = torch.arange(heads, device=q.device)[:, None]
    d = torch.arange(D, device=q.device)
    flat[:, (d // 16 * (16 * heads) + h * 16 + d % 16).reshape(-1)] = q.reshape(tokens, -1)
    return flat.view(tokens, heads, D)


def dequantise(codes: Tensor, scales: Tensor, heads: int) -> Tensor:
    """float64 [T, H, 512] of the fused output: groups of 8 heads, chunk-interleaved."""
    tokens = codes.shape[0]
    h = torch.arange(8, device=codes.device)[:, None]
    d = torch.arange(D, device=codes.device)
    place = ((d // 32) * 8 + h) * 32 + d % 32
    block = (d // 32) * 8 + h
    words = scales[:, :, block // 4].long()
    byte = (words >> (8 * (block % 4))) & 255
    values = codes.float().double()[:, :, place] * torch.exp2(byte.double() - 127)
    return values.reshape(tokens, heads, D)


def rope_table(device: str) -> Tensor:
    angle = torch.arange(5000)[:, None] / 10000 ** (torch.arange(32) / 32)
    return torch.cat((angle.cos(), angle.sin()), dim=1).float().to(device)


def run_fused(case: Case, device: str, mode: str, norm: bool) -> None:
    generator = torch.Generator(device).manual_seed(case.topk + 1)
    q = torch.randn(case.b, case.heads, D, generator=generator, device=device).bfloat16() * 1.5
    positions = torch.randint(5000, (case.b,), generator=generator, device=device).int()
    table, sink = rope_table(device), sink_of(case, generator)
    groups = case.heads // 8
    head = (
        norm,
        1e-6,
        positions,
        False,
        ROPE,
        table,
        groups,
        32,
        True,
        True,
        True,
        interleave_query(q),
    )
    largest = None
    if mode == "prefill":
        kv, indices, lengths, rows = plain(case, generator)
        lists = [(rows, indices[:, 0], lengths)]
        result = flash_mla.fused_norm_rope_attn_rope_cast.prefill(
            *head, kv, indices, D**-0.5, attn_sink=sink, topk_length=lengths
        )
        codes, scales, largest, lse = result
    else:
        cache = Cache.make(case.row_bytes, case.page, 600, generator)
        indices, lengths = lists_of(case, cache, case.topk, generator)
        lists, extra = [(cache.rows, indices[:, 0], lengths)], {}
        if case.extra is not None:
            width, page, topk = case.extra
            second = Cache.make(width, page, 500, generator)
            extra_indices, extra_lengths = lists_of(case, second, topk, generator)
            lists.append((second.rows, extra_indices[:, 0], extra_lengths))
            extra = {
                "extra_k_cache": second.view.view(torch.int8),
                "extra_indices_in_kvcache": extra_indices[:, 0],
                "extra_topk_length": extra_lengths,
            }
        codes, scales, lse = flash_mla.fused_norm_rope_attn_rope_cast.decode(
            *head, cache.view, indices[:, 0], D**-0.5, D, sink, lengths, **extra
        )
    aligned = -(-case.b // 4) * 4
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.int32)
    assert codes.is_contiguous()
    assert list(scales.shape) == [case.b, groups, 32]
    assert scales.stride() == (1, 32 * aligned, aligned)
    rotated = rotate(q.float(), positions.long(), table, 1.0).bfloat16()
    factor = torch.rsqrt(q.double().square().mean(-1) + 1e-6) if norm else None
    want, want_largest, want_lse = attention(rotated.double(), lists, D**-0.5, sink, factor)
    want = rotate(want, positions.long(), table, -1.0)
    close("out", dequantise(codes, scales, case.heads), want, 1.1e-3, 1.01 / 8, 1e-3)
    close("lse", lse, want_lse, 1e-5, 4.01 / 65536, 1e-6)
    if largest is not None:
        close("max_logits", largest, want_largest, 1e-5, 4.01 / 65536, 1e-6)


def run_permutes(device: str) -> None:
    """Product with permuted weights = permuted product."""
    generator = torch.Generator(device).manual_seed(5)
    heads, rank = 8, 128
    weight = torch.randn(heads * D, rank, generator=generator, device=device).to(
        torch.float8_e4m3fn
    )
    scales = torch.randint(
        2**30, (1, heads * D), dtype=torch.int32, generator=generator, device=device
    ).T
    fused = flash_mla.fused_norm_rope_attn_rope_cast
    moved, moved_scales = fused.permute_q_b_proj((weight, scales), heads, D)
    plain_product = weight.float().sum(1).view(1, heads, D)
    assert torch.equal(moved.float().sum(1).view(1, heads, D), interleave_query(plain_product))
    assert torch.equal(
        moved_scales.T.reshape(1, heads, D), interleave_query(scales.T.reshape(1, heads, D))
    )
    assert moved_scales.stride(0) == 1
    wide = torch.randn(2, 3, 8 * D, generator=generator, device=device).to(torch.float8_e4m3fn)
    words = torch.randint(2**30, (2, 32, 3), dtype=torch.int32, generator=generator, device=device)
    moved, moved_scales = fused.permute_wv_proj((wide, words.transpose(1, 2)), 8, D)
    ones = torch.full((2, 3, 32), 0x7F7F7F7F, dtype=torch.int32, device=device)
    back = dequantise(
        moved.transpose(0, 1), ones.transpose(0, 1), 16
    )  # a row as if it were an output
    assert torch.equal(back.reshape(3, 2, 8 * D).transpose(0, 1), wide.float().double())
    assert (list(moved_scales.shape), moved_scales.stride(1)) == ([2, 3, 32], 1)


def cases(device: str) -> dict[str, object]:
    """Every case by name, as a function without arguments."""
    decode = (*DECODE, *(random_case(seed) for seed in range(10)))
    found: dict[str, object] = {}
    for c in decode:
        found[f"decode: {c.name}"] = lambda c=c: run_decode(c, device)
    prefill = (
        Case("plain rows", 5, 1, 0, 64, invalid=0.2),
        Case("plain rows, lengths, sink", 4, 1, 0, 512, 128, lengths=True, sink="random"),
        Case("plain rows, no valid index", 3, 1, 0, 128, invalid=1.0, sink=-math.inf),
    )
    found |= {f"prefill: {c.name}": (lambda c=c: run_prefill(c, device)) for c in prefill}
    fused = (
        Case("one cache", 5, 1, 32, 128, sink="random"),
        Case("two caches", 6, 1, 64, 128, extra=(288, 20, 512), lengths=True, sink="random"),
        Case("no valid index, sink +inf", 2, 1, 64, 64, 128, invalid=1.0, sink=math.inf),
    )
    for c in fused:
        for mode in ("decode", "prefill"):
            for norm in (False, True):
                name = f"fused {mode}: {c.name}{', norm' if norm else ''}"
                found[name] = lambda c=c, m=mode, n=norm: run_fused(c, device, m, n)
    found["weight permutes"] = lambda: run_permutes(device)
    return found


def run(device: str = "cuda") -> list[str]:
    names = []
    for name, case in cases(device).items():
        case()  # type: ignore[operator]
        names.append(name)
    return names


if __name__ == "__main__":
    print("\n".join(run(*sys.argv[1:])), "all passed", sep="\n")
