"""The attention ops: results, buffers, choice of backend, and a table of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_FP8, MXFP8
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DeviceError,
    DTypeError,
    IndexRangeError,
    PlanMismatchError,
    ShapeError,
    StrideError,
    UnsupportedError,
)
from sparse_mla.kernels.contract import AttendOut, KeySet, Layout, allocate_scales
from sparse_mla.kernels.layouts import interleave_query
from sparse_mla.kernels.reference.attend import attend_exact
from sparse_mla.metadata.plan import TileSchedulerPlan
from sparse_mla.ops.attend import (
    AttendBuffers,
    AttendOptions,
    AttentionResult,
    QuantizedOutput,
    mega_attention,
    sparse_attention,
)
from sparse_mla.testing.compare import FLOAT32_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem


def _problem(**fields: Any) -> AttendProblem:
    base = {"tokens": 5, "heads": 16, "window_keys": 20, "compressed_keys": 12, "lengths": "random"}
    return make_problem(**{**base, **fields})


def _arguments(problem: AttendProblem) -> dict[str, Any]:
    return {
        "q": problem.q,
        "window": problem.window,
        "compressed": problem.compressed,
        "positions": problem.positions,
        "rope": problem.rope,
        "scale": problem.scale,
        "sink": problem.sink,
    }


def _mega(arguments: dict[str, Any]) -> AttentionResult:
    arguments = dict(arguments)
    return mega_attention(arguments.pop("q"), **arguments)


def _as_out(result: AttentionResult) -> AttendOut:
    scales = result.fp8.scales if isinstance(result.output, QuantizedOutput) else None
    data = result.bf16 if scales is None else result.fp8.data
    return AttendOut(
        data, scales, result.lse, result.max_logits, result.heads_per_group, result.layout
    )


@pytest.mark.parametrize("output", ["fp8", "bf16"])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_mega_attention(output: str, layout: Layout):
    problem = _problem()
    options = AttendOptions(
        output=output,
        query_layout=layout,
        output_layout=layout,
        return_lse=True,
        return_max_logits=True,
    )
    arguments = _arguments(problem)
    if layout is Layout.CHUNK_INTERLEAVED:
        arguments["q"] = interleave_query(problem.q)
    result = _mega({**arguments, "options": options})
    assert_matches_oracle(problem.call(), _as_out(result), FLOAT32_BODY)
    assert result.heads_per_group == 8
    assert result.choice.name == "torch"
    assert result.choice.reason
    if output == "fp8":
        values = result.dequantize()
        wanted = interleaved_output(values, 8) if layout is Layout.CHUNK_INTERLEAVED else values
        assert torch.equal(result.fp8.widen().float().flatten(), wanted.flatten())
    exact = attend_exact(problem.call()).output
    spread = 2.0**-8 if output == "bf16" else 2.0**-4
    assert (result.dequantize().double() - exact).norm() < spread * exact.norm()


def interleaved_output(values: Tensor, heads_per_group: int) -> Tensor:
    """[T, H, 512] with the blocks of 32 dims of a group's heads side by side."""
    blocks = values.unflatten(1, (-1, heads_per_group)).unflatten(3, (16, 32))
    return blocks.transpose(2, 3).contiguous()


def test_defaults():
    problem = _problem(heads=12)
    result = _mega(_arguments(problem))
    assert result.fp8.data.shape == (5, 3, 4 * 512)
    assert result.fp8.codes.dtype == torch.float8_e4m3fn
    assert result.lse is None
    assert result.max_logits is None
    bare = sparse_attention(
        problem.q, window=problem.window, compressed=problem.compressed, scale=problem.scale
    )
    assert bare.bf16.shape == (5, 12, 512)
    with pytest.raises(ArgumentError, match="output: got bf16; allowed: fp8; ask for it"):
        _ = bare.fp8
    with pytest.raises(ArgumentError, match="output: got fp8; allowed: bf16; ask for it"):
        _ = result.bf16


def test_sparse_attention_is_mega_without_rotations():
    problem = _problem()
    off = AttendOptions(output="bf16", rotate_query=False, unrotate_output=False, return_lse=True)
    mega = _mega({**_arguments(problem), "options": off, "positions": None, "rope": None})
    bare = sparse_attention(
        problem.q,
        window=problem.window,
        compressed=problem.compressed,
        scale=problem.scale,
        sink=problem.sink,
        options=AttendOptions(return_lse=True, rotate_query=True),
    )
    assert torch.equal(mega.bf16, bare.bf16)
    assert torch.equal(mega.lse, bare.lse)
    call = problem.call(rotate_query=False, unrotate_output=False)
    assert_matches_oracle(call, _as_out(bare), FLOAT32_BODY)


@pytest.mark.parametrize("unrotate", [False, True])
def test_rotations_are_independent(unrotate: bool):
    problem = _problem()
    options = AttendOptions(
        output="bf16", rotate_query=not unrotate, unrotate_output=unrotate, return_lse=True
    )
    result = _mega({**_arguments(problem), "options": options})
    call = problem.call(rotate_query=not unrotate, unrotate_output=unrotate)
    assert_matches_oracle(call, _as_out(result), FLOAT32_BODY)


def test_keyless_row_at_the_edge():
    """Codes 0, scale byte 105, lse +inf, max -inf."""
    problem = _problem(lengths="zero")
    options = AttendOptions(return_lse=True, return_max_logits=True)
    result = _mega({**_arguments(problem), "options": options})
    assert int(result.fp8.data.count_nonzero()) == 0
    assert torch.all(result.fp8.scales == 105 * 0x01010101)
    assert torch.all(result.lse == torch.inf)
    assert torch.all(result.max_logits == -torch.inf)


def test_no_tokens():
    problem = _problem(tokens=0, lengths="full")
    result = _mega({**_arguments(problem), "options": AttendOptions(return_lse=True)})
    assert result.fp8.data.shape == (0, 2, 4096)
    assert result.fp8.dequantize().shape == (0, 16, 512)
    assert result.lse.shape == (0, 16)


@pytest.mark.parametrize("output", ["fp8", "bf16"])
def test_buffers_are_filled_in_place(output: str):
    """Prefill and decode fill disjoint token ranges of one pair of tensors."""
    problem = _problem(tokens=9)
    whole = _mega({**_arguments(problem), "options": AttendOptions(output=output)})
    out = problem.allocate_out(fp8=output == "fp8")
    addresses = [t.data_ptr() for t in (out.data, out.lse, out.max_logits)]
    for rows in (slice(0, 4), slice(4, 9)):
        part = problem.rows(torch.arange(rows.start, rows.stop))
        buffers = AttendBuffers(
            data=out.data[rows],
            scales=None if out.scales is None else out.scales[rows],
            lse=out.lse[rows],
            max_logits=out.max_logits[rows],
        )
        options = AttendOptions(output=output)
        result = _mega({**_arguments(part), "options": options, "buffers": buffers})
        assert result.lse.data_ptr() == out.lse[rows].data_ptr()
    assert [t.data_ptr() for t in (out.data, out.lse, out.max_logits)] == addresses
    assert torch.equal(out.data.view(torch.uint8), _as_out(whole).data.view(torch.uint8))
    if output == "fp8":
        assert torch.equal(out.scales, whole.fp8.scales)
    assert_matches_oracle(problem.call(), out, FLOAT32_BODY)


def test_float8_buffer_is_accepted():
    problem = _problem()
    data = torch.zeros(5, 2, 4096, dtype=torch.uint8)
    view = data.view(torch.float8_e4m3fn)
    _mega({**_arguments(problem), "buffers": AttendBuffers(data=view)})
    assert torch.equal(data, _mega(_arguments(problem)).fp8.data)


def test_inputs_are_not_modified():
    problem = _problem()
    before = [t.clone() for t in _tensors(problem)]
    _mega(_arguments(problem))
    for kept, now in zip(before, _tensors(problem), strict=True):
        assert torch.equal(kept.view(torch.uint8), now.view(torch.uint8))


def _tensors(problem: AttendProblem) -> list[Tensor]:
    return [
        problem.q,
        problem.window.cache.pages,
        problem.window.indices,
        problem.compressed.cache.pages,
        problem.compressed.indices,
        problem.positions,
        problem.rope,
        problem.sink,
    ]


def test_named_backend_runs_or_refuses():
    problem = _problem()
    for name in ("torch", "reference"):
        result = _mega({**_arguments(problem), "options": AttendOptions(backend=name)})
        assert result.choice.name == name
    with pytest.raises(UnsupportedError, match="'hopper'") as caught:
        _mega({**_arguments(problem), "options": AttendOptions(backend="hopper")})
    assert caught.value.reasons
    with pytest.raises(ArgumentError, match="backend: got 'cuda'"):
        _mega({**_arguments(problem), "options": AttendOptions(backend="cuda")})


def _plan(**changes: Any) -> TileSchedulerPlan:
    fields = {
        "kind": LayerKind.RATIO_1,
        "max_tokens": 8,
        "num_heads": 16,
        "window_keys": 20,
        "compressed_keys": 12,
        "splits": 1,
        "batch_invariant": False,
        "partial": None,
        "arrivals": None,
    }
    return TileSchedulerPlan(**{**fields, **changes})


def test_plan_of_this_shape_is_accepted():
    problem = _problem()
    planned = _mega({**_arguments(problem), "plan": _plan()})
    assert torch.equal(planned.fp8.data, _mega(_arguments(problem)).fp8.data)


@dataclass(frozen=True)
class Mutation:
    """One wrong argument, the error and a part of its message."""

    name: str
    change: Callable[[dict[str, Any]], None]
    error: type[Exception]
    match: str


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda a: a.update({key: value(a[key]) if callable(value) else value})


def _keys(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        keys = arguments["window"]
        new = {name: value(getattr(keys, name)) for name, value in fields.items()}
        arguments["window"] = replace(keys, **new)

    return change


def _options(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return _set("options", AttendOptions(**fields))


def _buffers(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return _set("buffers", AttendBuffers(**fields))


def _wrong(cache: PagedCache, **fields: Any) -> PagedCache:
    return replace(cache, **fields)


META = torch.device("meta")
MUTATIONS = [
    Mutation("q rank", _set("q", lambda q: q[0]), ShapeError, r"q: got shape \[16, 512\]"),
    Mutation("q width", _set("q", lambda q: q[..., :448]), ShapeError, r"\[T, H, 512\]"),
    Mutation("q dtype", _set("q", lambda q: q.half()), DTypeError, "q: got dtype float16"),
    Mutation("q last stride", _set("q", lambda q: torch.empty(5, 16, 1024).bfloat16()[..., ::2]),
             StrideError, "q: got last stride 2"),
    Mutation("q no tensor", _set("q", [1.0]), ArgumentError, "q: got list"),
    Mutation("no heads", _set("q", lambda q: q[:, :0]), ShapeError, "q: got 0 heads; allowed: 1"),
    Mutation("129 heads", _set("q", torch.zeros(5, 129, 512).bfloat16()), ShapeError, "129 heads"),
    Mutation("q on another device", _set("q", lambda q: q.to(META)), DeviceError, "window.cache"),
    Mutation("scale zero", _set("scale", 0.0), ArgumentError, "scale: got 0.0"),
    Mutation("scale NaN", _set("scale", float("nan")), ArgumentError, "scale: got nan"),
    Mutation("scale tensor", _set("scale", torch.ones(1)), ArgumentError, "scale: got Tensor"),
    Mutation("sink length", _set("sink", lambda s: s[:8]), ShapeError, r"sink: got shape \[8\]; allowed: shape \[16\]"),
    Mutation("sink dtype", _set("sink", lambda s: s.bfloat16()), DTypeError, "sink: got dtype"),
    Mutation("sink device", _set("sink", lambda s: s.to(META)), DeviceError, "sink: got device meta"),
    Mutation("no positions", _set("positions", None), ArgumentError, "positions: got None"),
    Mutation("few positions", _set("positions", lambda p: p[:4]), ShapeError, r"positions: got shape \[4\]"),
    Mutation("float positions", _set("positions", lambda p: p.float()), DTypeError, "positions"),
    Mutation("no table", _set("rope", None), ArgumentError, "rope: got None"),
    Mutation("table width", _set("rope", lambda r: r[:, :32]), ShapeError, r"rope: got shape \[4096, 32\]"),
    Mutation("table dtype", _set("rope", lambda r: r.double()), DTypeError, "rope: got dtype float64"),
    Mutation("empty table", _set("rope", lambda r: r[:0]), ShapeError, "rope: got 0 positions"),
    Mutation("no key set", _set("window", None), ArgumentError, "window: got NoneType"),
    Mutation("raw cache", _keys(cache=lambda c: c.pages), ArgumentError, "window.cache: got Tensor; allowed: a PagedCache"),
    Mutation("index record", _keys(cache=lambda c: _wrong(c, record=INDEX_FP8)), CacheFormatError, "window.cache: got record 'index_fp8'"),
    Mutation("wrong page rows", _keys(cache=lambda c: _wrong(c, page_rows=31)), ShapeError, "window.cache: got pages of shape"),
    Mutation("overlapping pages", _keys(cache=lambda c: _wrong(c, pages=c.pages.as_strided(c.pages.shape, (528, 1)))), StrideError, "window.cache: got 528 bytes between pages"),
    Mutation("odd page stride", _keys(cache=lambda c: _wrong(c, pages=c.pages.as_strided((2, c.pages.shape[1]), (c.pages.shape[1] + 1, 1)))), StrideError, "window.cache"),
    Mutation("odd first byte", _keys(cache=lambda c: _wrong(c, pages=c.pages.as_strided((2, c.pages.shape[1]), c.pages.stride(), c.pages.storage_offset() + 1))), StrideError, "address"),
    Mutation("cache device", _keys(cache=lambda c: _wrong(c, pages=c.pages.to(META))), DeviceError, "window.cache: got device meta"),
    Mutation("indices dtype", _keys(indices=lambda i: i.long()), DTypeError, "window.indices: got dtype int64"),
    Mutation("indices rank", _keys(indices=lambda i: i[:, None]), ShapeError, "window.indices"),
    Mutation("indices rows", _keys(indices=lambda i: i[:3]), ShapeError, r"window.indices: got shape \[3, 20\]; allowed: shape \[5, K\]"),
    Mutation("indices stride", _keys(indices=lambda i: i.T.contiguous().T), StrideError, "window.indices: got last stride 5"),
    Mutation("indices device", _keys(indices=lambda i: i.to(META)), DeviceError, "window.indices"),
    Mutation("index past the cache", _keys(indices=lambda i: torch.full_like(i, 256), lengths=lambda _: None), IndexRangeError, "window.indices: got 256; allowed: below the cache's 256 slots"),
    Mutation("lengths dtype", _keys(lengths=lambda n: n.long()), DTypeError, "window.lengths"),
    Mutation("lengths shape", _keys(lengths=lambda n: n[:2]), ShapeError, r"window.lengths: got shape \[2\]"),
    Mutation("lengths past the list", _keys(lengths=lambda n: torch.full_like(n, 21)), IndexRangeError, "window.lengths: got 21; allowed: at most the 20 lanes"),
    Mutation("plan heads", _set("plan", _plan(num_heads=8)), PlanMismatchError, "build a plan"),
    Mutation("plan tokens", _set("plan", _plan(max_tokens=4)), PlanMismatchError, "5 tokens"),
    Mutation("plan keys", _set("plan", _plan(compressed_keys=0)), PlanMismatchError, "plan: got"),
    Mutation("heads per group", _options(heads_per_group=5), ArgumentError, "heads_per_group: got 5; allowed: a divisor of 16 heads: 1, 2, 4, 8, 16"),
    Mutation("no heads per group", _options(heads_per_group=0), ArgumentError, "heads_per_group"),
    Mutation("output", _options(output="fp16"), ArgumentError, "output: got 'fp16'"),
    Mutation("query layout", _options(query_layout="standard"), ArgumentError, "query_layout"),
    Mutation("output layout", _options(output_layout=None), ArgumentError, "output_layout"),
    Mutation("backend", _options(backend="cutlass"), ArgumentError, "backend: got 'cutlass'"),
    Mutation("data shape", _buffers(data=torch.zeros(5, 2, 4095, dtype=torch.uint8)), ShapeError, "buffers.data"),
    Mutation("data dtype", _buffers(data=torch.zeros(5, 2, 4096).bfloat16()), DTypeError, "buffers.data"),
    Mutation("data strides", _buffers(data=torch.zeros(5, 4, 4096, dtype=torch.uint8)[:, ::2]), StrideError, "buffers.data"),
    Mutation("scales shape", _buffers(scales=torch.zeros(5, 2, 31, dtype=torch.int32)), ShapeError, "buffers.scales"),
    Mutation("scales order", _buffers(scales=torch.zeros(5, 2, 32, dtype=torch.int32)), StrideError, "buffers.scales: got strides"),
    Mutation("lse shape", _buffers(lse=torch.zeros(16, 5)), ShapeError, "buffers.lse"),
    Mutation("max dtype", _buffers(max_logits=torch.zeros(5, 16).double()), DTypeError, "buffers.max_logits"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_one_wrong_argument(mutation: Mutation):
    """Each raises its documented error, and neither caches nor outputs have changed."""
    problem = _problem()
    out = problem.allocate_out(fp8=True)
    arguments = {
        **_arguments(problem),
        "plan": None,
        "options": AttendOptions(),
        "buffers": AttendBuffers(out.data, out.scales, out.lse, out.max_logits),
    }
    watched = [*_tensors(problem), out.data, out.scales.contiguous(), out.lse, out.max_logits]
    before = [tensor.clone() for tensor in watched]
    mutation.change(arguments)
    with pytest.raises(mutation.error, match=mutation.match):
        _mega(arguments)
    for kept, now in zip(before, watched, strict=True):
        assert torch.equal(kept.view(torch.uint8), now.view(torch.uint8))


def test_compressed_set_is_checked_by_its_own_name():
    problem = _problem()
    bad = replace(problem.compressed, indices=problem.compressed.indices.long())
    with pytest.raises(DTypeError, match=r"compressed\.indices"):
        _mega({**_arguments(problem), "compressed": bad})


def test_invariance_needs_an_invariant_plan():
    problem = _problem()
    options = AttendOptions(batch_invariant=True)
    with pytest.raises(PlanMismatchError, match="build one with batch_invariant=True"):
        _mega({**_arguments(problem), "plan": _plan(), "options": options})
    _mega({**_arguments(problem), "plan": _plan(batch_invariant=True), "options": options})


def test_scales_refused_for_bf16():
    problem = _problem()
    scales = allocate_scales(5, 2, 32, torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r"buffers\.scales: got a tensor; allowed: None"):
        _mega(
            {
                **_arguments(problem),
                "options": AttendOptions(output="bf16"),
                "buffers": AttendBuffers(scales=scales),
            }
        )


def test_interleaved_query_must_be_dense():
    problem = _problem()
    wide = torch.zeros(5, 32, 512).bfloat16()[:, ::2]
    options = AttendOptions(query_layout=Layout.CHUNK_INTERLEAVED)
    with pytest.raises(StrideError, match="q: got head stride 1024"):
        _mega({**_arguments(problem), "q": wide, "options": options})


def test_lanes_past_the_length_are_not_range_checked():
    problem = _problem()
    keys = problem.window
    indices = keys.indices.clone()
    past = torch.arange(20) >= keys.lengths[:, None]
    indices[past] = 2_000_000_000
    result = _mega({**_arguments(problem), "window": replace(keys, indices=indices)})
    assert torch.equal(result.fp8.data, _mega(_arguments(problem)).fp8.data)


def test_engine_views_of_both_ranks_are_accepted():
    problem = _problem()
    cache = problem.window.cache
    view = cache.pages.view(cache.num_pages, cache.page_rows, MXFP8.row_bytes)
    wanted = _mega(_arguments(problem)).fp8.data
    for shape in (view, view.unsqueeze(2), view.view(torch.float8_e4m3fn)):
        keys = KeySet(
            PagedCache.from_view(shape, MXFP8), problem.window.indices, problem.window.lengths
        )
        assert torch.equal(_mega({**_arguments(problem), "window": keys}).fp8.data, wanted)
