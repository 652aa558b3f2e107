"""Arguments, layouts and refusals of the FlashMLA entry points; the numbers are checked by the script."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import BF16, MXFP8, MXFP8_PLANAR, NVFP4, NVFP4_PLANAR, V4
from sparse_mla.compat import flash_mla
from sparse_mla.compat.flash_mla.differences import DIFFERENCES
from sparse_mla.errors import (
    ArgumentError,
    CacheFormatError,
    DTypeError,
    PlanMismatchError,
    ShapeError,
    StrideError,
    UnsupportedError,
)
from sparse_mla.kernels.contract import KeySet
from sparse_mla.ops.attend import sparse_attention
from sparse_mla.testing.inputs import AttendProblem, make_problem

SCALE = 512**-0.5


def view(cache: PagedCache, dtype: torch.dtype = torch.uint8) -> Tensor:
    """[pages, page_rows, 1, row_bytes] as an engine holds it."""
    rows, width = cache.page_rows, cache.record.row_bytes
    strides = (cache.page_stride_bytes, width, width, 1)
    return cache.pages.as_strided((cache.num_pages, rows, 1, width), strides).view(dtype)


def problem(**fields: Any) -> AttendProblem:
    base = {"tokens": 6, "heads": 4, "window_keys": 20, "compressed_keys": 30, "sink": "random"}
    return make_problem(**{**base, **fields})


def decode_arguments(case: AttendProblem, batch: int = 2) -> dict[str, Any]:
    assert case.compressed is not None
    tokens, heads, _ = case.q.shape
    shape = (batch, tokens // batch)
    return {
        "q": case.q.view(*shape, heads, 512),
        "k_cache": view(case.window.cache),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "indices": case.window.indices.view(*shape, -1),
        "attn_sink": case.sink,
        "extra_k_cache": view(case.compressed.cache),
        "extra_indices_in_kvcache": case.compressed.indices.view(*shape, -1),
    }


def fused_arguments(case: AttendProblem) -> dict[str, Any]:
    return {
        "enable_q_norm": False,
        "rms_norm_eps": 0.0,
        "token_positions": case.positions.int(),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": case.rope,
        "n_wv_group": 1,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
        "q": case.q,
        "k_cache": view(case.window.cache),
        "indices_in_kvcache": case.window.indices,
        "sm_scale": SCALE,
    }


# ---------------------------------------------------------------------------------- records and layouts


@pytest.mark.parametrize(
    ("layout", "main", "extra"),
    [
        ("interleaved", MXFP8, NVFP4),
        ("planar", MXFP8_PLANAR, NVFP4_PLANAR),
        ("planar", V4, V4),
        ("interleaved", NVFP4, V4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("by", ["argument", "setting"])
def test_both_generations_of_a_width(layout, main, extra, by, monkeypatch):
    case = problem(window_record=main, compressed_record=extra, page_padding_bytes=64)
    want = sparse_attention(
        case.q, window=case.window, compressed=case.compressed, scale=SCALE, sink=case.sink
    )
    arguments = decode_arguments(case)
    if by == "setting":
        monkeypatch.setattr(flash_mla, "kv_layout", layout)
    else:
        arguments["kv_layout"] = layout
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments)
    assert torch.equal(out.view(6, 4, 512), want.bf16)
    assert lse.shape == (2, 4, 3)


def test_the_wrong_generation_gives_other_numbers():
    case = problem(window_record=MXFP8_PLANAR, compressed_record=MXFP8_PLANAR, poison=False)
    arguments = decode_arguments(case)
    planar, _ = flash_mla.flash_mla_with_kvcache(**arguments, kv_layout="planar")
    interleaved, _ = flash_mla.flash_mla_with_kvcache(**arguments, kv_layout="interleaved")
    assert not torch.equal(planar, interleaved)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_every_byte_dtype(dtype):
    case = problem(compressed_record=NVFP4)
    arguments = decode_arguments(case)
    want = flash_mla.flash_mla_with_kvcache(**arguments)
    arguments["k_cache"] = arguments["k_cache"].view(dtype)
    arguments["extra_k_cache"] = arguments["extra_k_cache"].view(dtype)
    got = flash_mla.flash_mla_with_kvcache(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_lengths_belong_to_batch_items():
    case = problem()
    arguments = decode_arguments(case)
    lengths = torch.tensor([7, 0], dtype=torch.int32)
    out, _ = flash_mla.flash_mla_with_kvcache(
        **arguments, topk_length=lengths, extra_topk_length=torch.tensor([0, 3], dtype=torch.int32)
    )
    assert case.compressed is not None
    for token in range(6):
        item = token // 3
        window = KeySet(case.window.cache, case.window.indices[token, None, : (7, 0)[item]])
        extra = KeySet(case.compressed.cache, case.compressed.indices[token, None, : (0, 3)[item]])
        want = sparse_attention(
            case.q[token, None], window=window, compressed=extra, scale=SCALE, sink=case.sink
        )
        torch.testing.assert_close(out.view(6, 4, 512)[token, None], want.bf16)


def test_out_is_filled_and_returned():
    case = problem()
    arguments = decode_arguments(case)
    want, _ = flash_mla.flash_mla_with_kvcache(**arguments)
    out = torch.full_like(want, torch.nan)
    got, _ = flash_mla.flash_mla_with_kvcache(**arguments, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, want)


def test_fused_outputs_fill_slices_of_a_step():
    case = problem(compressed_keys=None, heads=8)
    arguments = fused_arguments(case)
    codes, scales, _ = flash_mla.fused_norm_rope_attn_rope_cast.decode(**arguments)
    all_codes = torch.zeros(16, 1, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    all_scales = torch.zeros(1, 32, 16, dtype=torch.int32).permute(2, 0, 1)
    flash_mla.fused_norm_rope_attn_rope_cast.decode(
        **arguments, out_fp8=all_codes[4:10], out_sf=all_scales[4:10]
    )
    assert torch.equal(all_codes[4:10].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(all_scales[4:10], scales)
    assert not all_codes[:4].view(torch.uint8).any()
    assert not all_scales[10:].any()


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_rows_are_bitwise_equal_alone(invariant):
    case = problem()
    arguments = decode_arguments(case)
    out, _ = flash_mla.flash_mla_with_kvcache(**arguments, enable_batch_invariant=invariant)
    one = decode_arguments(case.rows(torch.tensor([4])), batch=1)
    alone, _ = flash_mla.flash_mla_with_kvcache(**one, enable_batch_invariant=invariant)
    assert torch.equal(alone.view(4, 512), out.view(6, 4, 512)[4])


def test_scalar_defaults():
    case = problem()
    arguments = decode_arguments(case)
    want, _ = flash_mla.flash_mla_with_kvcache(
        **arguments, softmax_scale=SCALE, is_fp8_kvcache=True
    )
    got, _ = flash_mla.flash_mla_with_kvcache(**arguments)
    assert torch.equal(got, want)


def test_plain_rows_may_be_strided_and_empty():
    base = torch.randn(9, 2, 512).bfloat16()
    kv = base[:, :1]
    q = torch.randn(3, 2, 512).bfloat16()
    indices = torch.randint(9, (3, 1, 5), dtype=torch.int32)
    strided = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE)
    dense = flash_mla.flash_mla_sparse_fwd(q, kv.contiguous(), indices, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv[:0], indices, SCALE)
    assert not out.any()
    assert torch.equal(largest, torch.full((3, 2), -torch.inf))
    assert torch.equal(lse, torch.full((3, 2), torch.inf))


def test_rows_stay_bf16():
    assert (BF16.row_bytes, BF16.scale_bytes) == (1024, 0)
    kv = torch.full((1, 1, 512), 1.00390625).bfloat16()  # one bf16 step above 1
    q = torch.randn(1, 1, 512).bfloat16()
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q, kv, torch.zeros(1, 1, 1, dtype=torch.int32), SCALE
    )
    assert torch.equal(out, kv)


# ------------------------------------------------------------------------------------ scheduler objects


def test_the_scheduler_object_remembers_the_first_call():
    schedule, nothing = flash_mla.get_mla_metadata(1, foo=2)
    assert nothing is None
    assert not schedule.have_initialized
    arguments = decode_arguments(problem())
    arguments["tile_scheduler_metadata"] = schedule
    flash_mla.flash_mla_with_kvcache(**arguments)
    assert schedule.have_initialized
    config = schedule.config
    assert (config.b, config.s_q, config.h_q, config.h_k) == (2, 3, 4, 1)
    assert (config.page_block_size, config.extra_page_block_size) == (32, 64)
    assert (config.topk, config.extra_topk, config.causal, config.is_fp8_kvcache) == (
        20,
        30,
        False,
        True,
    )
    flash_mla.flash_mla_with_kvcache(**arguments)  # same sizes: fine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 3}, "b: got 3, first 2; s_q: got 2, first 3"),
        ({"heads": 5}, "h_q: got 5, first 4"),
        ({"window_keys": 21}, "topk: got 21, first 20"),
        ({"compressed_keys": 31}, "extra_topk: got 31, first 30"),
        ({"window_page_rows": 16}, "page_block_size: got 16, first 32"),
        ({"compressed_page_rows": 16}, "extra_page_block_size: got 16, first 64"),
        ({"invariant": True}, "enable_batch_invariant: got True, first False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_reuse_for_another_call_is_refused(change, message):
    schedule, _ = flash_mla.get_mla_metadata()
    first = decode_arguments(problem()) | {"tile_scheduler_metadata": schedule}
    flash_mla.flash_mla_with_kvcache(**first)
    fields = dict(change)
    batch, invariant = fields.pop("batch", 2), fields.pop("invariant", False)
    other = decode_arguments(problem(**fields), batch) | {"tile_scheduler_metadata": schedule}
    with pytest.raises(PlanMismatchError, match=message):
        flash_mla.flash_mla_with_kvcache(**other, enable_batch_invariant=invariant)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": None}, UnsupportedError, "dense attention"),
        ({"causal": True}, ArgumentError, "causal: got True; allowed: False"),
        ({"is_fp8_kvcache": False}, ArgumentError, "is_fp8_kvcache: got False"),
        ({"num_splits": torch.zeros(3)}, ArgumentError, "num_splits"),
        ({"head_dim_v": 576}, ArgumentError, "head_dim_v: got 576; allowed: 512"),
        ({"tile_scheduler_metadata": None}, ArgumentError, "a FlashMLASchedMeta"),
        ({"q": torch.zeros(2, 3, 4, 576, dtype=torch.bfloat16)}, UnsupportedError, "DeepSeek-V3.2"),
        ({"q": torch.zeros(2, 3, 4, 512)}, DTypeError, "q: got dtype float32"),
        ({"k_cache": torch.zeros(4, 32, 1, 656, dtype=torch.uint8)}, UnsupportedError, "V3.2"),
        (
            {"k_cache": torch.zeros(4, 32, 1, 500, dtype=torch.uint8)},
            CacheFormatError,
            "584 .v4., 528",
        ),
        (
            {"k_cache": torch.zeros(4, 32, 1, 132)},
            CacheFormatError,
            "k_cache: got a last dimension of 132",
        ),
        ({"indices": torch.zeros(2, 3, 4)}, DTypeError, "indices: got dtype float32"),
        ({"indices": torch.zeros(6, 4, dtype=torch.int32)}, ShapeError, "indices"),
        ({"topk_length": torch.zeros(6, dtype=torch.int32)}, ShapeError, "topk_length"),
        ({"extra_indices_in_kvcache": None}, ArgumentError, "give both or neither"),
        ({"extra_k_cache": None}, ArgumentError, "extra_k_cache: got None"),
        ({"kv_layout": "new"}, ArgumentError, "'interleaved', 'planar'"),
        ({"backend": "hopper"}, UnsupportedError, "device: got CPU"),
        ({"out": torch.zeros(6, 4, 512, dtype=torch.bfloat16)}, ShapeError, "out: got shape"),
        (
            {"out": torch.zeros(2, 3, 512, 4, dtype=torch.bfloat16).transpose(2, 3)},
            ArgumentError,
            "out",
        ),
        ({"attn_sink": torch.zeros(5)}, ShapeError, "sink"),
    ],
    ids=str,
)
def test_decode_refuses(change, error, message):
    arguments = decode_arguments(problem()) | change
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**arguments)
    schedule = arguments["tile_scheduler_metadata"]
    assert schedule is None or not schedule.have_initialized


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_rope_neox_style": True}, "is_rope_neox_style: got True; allowed: False"),
        ({"rope_dim": 32}, "rope_dim: got 32; allowed: 64"),
        ({"num_per_channels": 128}, "num_per_channels: got 128; allowed: 32"),
        ({"round_sf": False}, "round_sf: got False"),
        ({"use_packed_ue8m0": False}, "use_packed_ue8m0"),
        ({"use_tma_aligned_col_major_sf": False}, "use_tma_aligned_col_major_sf"),
        ({"d_v": 256}, "d_v: got 256"),
        ({"n_wv_group": 3}, "n_wv_group: got 3; allowed: a divisor of 8 heads"),
        ({"enable_q_norm": True, "rms_norm_eps": -1.0}, "query_norm_eps"),
        ({"cos_sin_cache": torch.zeros(10, 128)}, "rope"),
        ({"indices_in_kvcache": torch.zeros(6, 1, 4, dtype=torch.int32)}, "indices_in_kvcache"),
    ],
    ids=str,
)
def test_fused_decode_refuses(change, message):
    arguments = fused_arguments(problem(heads=8, compressed_keys=None)) | change
    with pytest.raises(ArgumentError, match=message):
        flash_mla.fused_norm_rope_attn_rope_cast.decode(**arguments)


@pytest.mark.parametrize(
    ("kv", "error", "message"),
    [
        (torch.zeros(4, 2, 512, dtype=torch.bfloat16), ShapeError, "2 key heads"),
        (torch.zeros(4, 1, 512), DTypeError, "kv: got dtype float32"),
        (
            torch.zeros(4, 1, 516, dtype=torch.bfloat16)[:, :, :512],
            StrideError,
            "kv: got 1032 bytes",
        ),
    ],
    ids=str,
)
def test_prefill_refuses(kv, error, message):
    q = torch.zeros(2, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_sparse_fwd(q, kv, torch.zeros(2, 1, 3, dtype=torch.int32), SCALE)


def test_query_norm_and_plain_rows_name_the_backends_without_them():
    from sparse_mla.backends.problem import DeviceInfo, Problem
    from sparse_mla.backends.select import select

    hopper = DeviceInfo.from_capability("9.0")
    choice = select(Problem(window_record="bf16"), hopper)
    assert choice.name == "torch"
    assert "window record: got bf16" in str(choice)
    choice = select(Problem(window_record="mxfp8", query_norm=True), hopper)
    assert choice.name == "torch"
    assert "query norm: got one" in str(choice)


@pytest.mark.parametrize("name", ["", "_qkvpacked", "_kvpacked"])
def test_dense_attention_is_refused(name):
    function = getattr(flash_mla, f"flash_attn_varlen{name}_func")
    with pytest.raises(UnsupportedError, match="sparse MLA only"):
        function(torch.zeros(1), causal=True)


def test_permutes_refuse_other_widths():
    fused = flash_mla.fused_norm_rope_attn_rope_cast
    weight, scales = torch.zeros(8 * 512, 128), torch.zeros(1, 8 * 512, dtype=torch.int32).T
    with pytest.raises(ArgumentError, match="d_q: got 576"):
        fused.permute_q_b_proj((weight, scales), 8, 576)
    with pytest.raises(ArgumentError, match="d_o: got 128"):
        fused.permute_wv_proj((weight, scales), 8, 128)


def test_every_public_name_exists_and_every_difference_is_complete():
    for name in flash_mla.__all__:
        assert hasattr(flash_mla, name), name
    assert len(DIFFERENCES) == len({row.what for row in DIFFERENCES})
    assert all(all(row) for row in DIFFERENCES)


def test_only_foreign_signatures_may_be_long(tmp_path):
    """The house rule about parameters spares this folder and nothing else."""
    path = Path(__file__).parents[2] / "scripts" / "house_rules.py"
    spec = importlib.util.spec_from_file_location("house_rules_for_compat", path)
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = rules
    spec.loader.exec_module(rules)
    code = "def f(a, b, c, d, e, f, g, h, i, j, k): ..."
    for inner, count in (("compat/x.py", 0), ("ops/x.py", 1)):
        source = rules.Source(inner, inner, ast.parse(code), 1)
        assert len(list(rules.functions(source))) == count
