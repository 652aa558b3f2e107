"""Names of KV cache formats, refusals with reasons, and bytes per token."""

import pytest

from sparse_mla.cache.kv_dtype import (
    KV_CACHE_DTYPES,
    bytes_per_token,
    resolve_kv_cache_dtype,
    ring_rows,
)
from sparse_mla.cache.records import INDEX_FP8, INDEX_MXFP4, MXFP8, NVFP4, V4
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError


@pytest.fixture(scope="module")
def cfg():
    return ModelConfig.deepseek_v41_flash()


@pytest.mark.parametrize(
    ("name", "resolved", "window", "compressed", "index"),
    [
        ("auto", "nvfp4_ds_mla", MXFP8, NVFP4, INDEX_MXFP4),
        ("nvfp4_ds_mla", "nvfp4_ds_mla", MXFP8, NVFP4, INDEX_MXFP4),
        ("fp8", "fp8_ds_mla", MXFP8, MXFP8, INDEX_FP8),
        ("fp8_ds_mla", "fp8_ds_mla", MXFP8, MXFP8, INDEX_FP8),
        ("fp8_ds_mla_v4", "fp8_ds_mla_v4", V4, V4, INDEX_FP8),
    ],
)
def test_names(name, resolved, window, compressed, index):
    records = resolve_kv_cache_dtype(name)
    assert (records.window, records.compressed, records.index) == (window, compressed, index)
    assert records.name == resolved


def test_the_list_of_names_is_what_is_accepted():
    assert KV_CACHE_DTYPES == ("auto", "fp8", "nvfp4_ds_mla", "fp8_ds_mla", "fp8_ds_mla_v4")
    for name in KV_CACHE_DTYPES:
        resolve_kv_cache_dtype(name)


@pytest.mark.parametrize("name", ["nvfp4_ds_mla", "fp8", "fp8_ds_mla_v4"])
def test_index_keys_may_be_chosen_apart(name):
    assert resolve_kv_cache_dtype(name, index_dtype="fp8").index is INDEX_FP8
    assert resolve_kv_cache_dtype(name, index_dtype="mxfp4").index is INDEX_MXFP4
    assert (
        resolve_kv_cache_dtype(name, index_dtype="mxfp4").name == resolve_kv_cache_dtype(name).name
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bfloat16", "rows without block scales belong to dense-row backends"),
        ("fp8_e4m3", "the packed e4m3 format is called 'fp8_ds_mla'"),
        ("fp8_e5m2", "two mantissa bits are too few"),
        ("int8", "no record keeps integers"),
        ("nvfp4", "is called 'nvfp4_ds_mla'"),
        ("mxfp4", "pass index_dtype='mxfp4'"),
        ("fp9", "choose one of these names"),
        ("", "choose one of these names"),
        ("FP8", "choose one of these names"),
    ],
)
def test_refusals_say_why_and_what_is_allowed(name, why):
    allowed = "auto, fp8, nvfp4_ds_mla, fp8_ds_mla, fp8_ds_mla_v4"
    with pytest.raises(
        ArgumentError, match=rf"kv_cache_dtype: got '{name}'; allowed: {allowed}; .*{why}"
    ):
        resolve_kv_cache_dtype(name)


def test_an_unknown_index_dtype_is_refused():
    with pytest.raises(ArgumentError, match="index_dtype: got 'fp4'; allowed: auto, fp8, mxfp4"):
        resolve_kv_cache_dtype("auto", index_dtype="fp4")


def test_a_backend_narrows_the_choice():
    sparse = {"backend": "FLASHMLA_SPARSE_DSV41", "supported": ["auto", "fp8_ds_mla", "fp8"]}
    assert resolve_kv_cache_dtype("auto", **sparse).name == "fp8_ds_mla"
    assert resolve_kv_cache_dtype("fp8", **sparse).name == "fp8_ds_mla"
    assert resolve_kv_cache_dtype("auto", supported=["fp8"]).name == "fp8_ds_mla"
    with pytest.raises(
        ArgumentError,
        match=r"got 'nvfp4_ds_mla'; allowed: auto, fp8, fp8_ds_mla; FLASHMLA_SPARSE_DSV41 reads auto,",
    ):
        resolve_kv_cache_dtype("nvfp4_ds_mla", **sparse)
    with pytest.raises(
        ArgumentError, match="got 'auto'; allowed: none; the chosen backend reads none"
    ):
        resolve_kv_cache_dtype("auto", supported=[])


@pytest.mark.parametrize(
    ("name", "index_dtype", "token", "window_row"),
    [
        ("nvfp4_ds_mla", "auto", 890, 528),
        ("fp8_ds_mla", "auto", 1650, 528),
        ("fp8_ds_mla_v4", "auto", 1790, 584),
        ("nvfp4_ds_mla", "fp8", 3 * (288 + 132) / 2 + 288 + 132, 528),
    ],
)
def test_bytes_per_token(cfg, name, index_dtype, token, window_row):
    cost = bytes_per_token(cfg, resolve_kv_cache_dtype(name, index_dtype=index_dtype))
    assert cost.global_per_token == token
    assert cost.window_per_token == 43 * window_row
    assert cost.window_per_request == 128 * 43 * window_row
    assert cost.ring_per_request == 98304 == 3 * 8 * 1024 * 4


def test_bytes_of_a_request(cfg):
    cost = bytes_per_token(cfg, resolve_kv_cache_dtype("auto"))
    assert cost.of_request(0) == 98304
    assert cost.of_request(100) == 100 * (890 + 43 * 528) + 98304
    assert cost.of_request(10_000) == 10_000 * 890 + 128 * 43 * 528 + 98304


def test_a_model_without_compression_costs_only_its_windows(cfg):
    plain = cfg.replace(
        compress_ratios=(),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )
    cost = bytes_per_token(plain, resolve_kv_cache_dtype("fp8"))
    assert (cost.global_per_token, cost.ring_per_request) == (0, 0)
    assert cost.window_per_token == 43 * 528


def test_ring_rows():
    assert [ring_rows(k) for k in (0, 1, 3, 5, 6, 7, 14, 15)] == [8, 8, 8, 8, 8, 16, 16, 32]
    cfg = ModelConfig.deepseek_v41_flash()
    records = resolve_kv_cache_dtype("auto")
    assert bytes_per_token(cfg, records, num_spec_tokens=7).ring_per_request == 2 * 98304
    with pytest.raises(ArgumentError, match="num_spec_tokens: got -1; allowed: an integer >= 0"):
        ring_rows(-1)
