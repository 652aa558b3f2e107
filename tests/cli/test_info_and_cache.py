"""`sparse-mla info` and `sparse-mla cache`: numbers, reasons, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparse_mla.backends.declarations import KERNEL_BACKENDS
from sparse_mla.cli.common import human_bytes, parse_bytes, parse_layers
from sparse_mla.config.model import ModelConfig
from sparse_mla.errors import ArgumentError


def test_help_names_every_command(cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    for name in ("run", "info", "cache"):
        assert name in result.stdout


def test_info_lists_every_backend_with_a_reason(cli) -> None:
    result = cli("info", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["kind"] == "cpu"
    backends = report["devices"][0]["backends"]
    assert [row["name"] for row in backends] == [backend.name for backend in KERNEL_BACKENDS]
    for row in backends:
        assert row["runs"] == (not row["reasons"])
    hopper = next(row for row in backends if row["name"] == "hopper")
    assert not hopper["runs"]
    assert any("got CPU; allowed: cuda" in reason for reason in hopper["reasons"])


def test_info_about_a_machine_that_is_not_here(cli) -> None:
    report = json.loads(cli("info", "--machine", "7.5", "--json").stdout)
    (device,) = report["devices"]
    triton = next(row for row in device["backends"] if row["name"] == "triton")
    assert triton["reasons"] == ["compute capability: got 7.5; allowed: 8.0 and up"]
    text = cli("info", "--machine", "sm90", "--heads", 8).stdout
    assert "H200 (SM90)" in text
    assert "8 heads" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("info", "--machine", "fast"), "capability: got 'fast'"),
        (("info", "--kv-cache-dtype", "int8"), "kv_cache_dtype: got 'int8'"),
        (("info", "--output", "fp4"), "output: got 'fp4'"),
        (("cache", "--memory", "80 apples"), "--memory: got '80 apples'"),
        (("cache", "--memory", "0"), "--memory: got '0'"),
        (("cache", "--config", "none.json"), "No such file"),
    ],
)
def test_bad_input_exits_with_2(cli, arguments: tuple[str, ...], complaint: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_cache_gives_the_known_bytes_per_token(cli) -> None:
    result = cli("cache", "--memory", "80GiB", "--requests", 16, "--json")
    assert result.exit_code == 0
    sizes = json.loads(result.stdout)
    costs = {row["kv_cache_dtype"]: row["bytes_per_token"] for row in sizes["formats"]}
    assert costs == {"fp8_ds_mla_v4": 1790, "fp8_ds_mla": 1650, "nvfp4_ds_mla": 890}
    for row in sizes["formats"]:
        tokens, room = row["tokens_that_fit"], 80 * 2**30 - 16 * row["allocated_per_request"]
        assert tokens % 64 == 0
        assert tokens * row["allocated_per_token"] <= room
        assert (tokens + 64) * row["allocated_per_token"] > room
        assert row["allocated_per_token"] >= row["bytes_per_token"]
    table = cli("cache").stdout
    for number in ("1,790", "1,650", "890"):
        assert number in table


def test_cache_of_a_window_only_model_has_no_limit(cli, small_config: Path) -> None:
    config = json.loads(small_config.read_text())
    for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
        config[name] = []
    config["candidate_source_layer_id"] = -1
    small_config.write_text(json.dumps(config))
    sizes = json.loads(cli("cache", "--config", small_config, "--json").stdout)
    assert {row["tokens_that_fit"] for row in sizes["formats"]} == {None}
    assert "no limit" in cli("cache", "--config", small_config).stdout


def test_too_little_memory_fits_nothing(cli) -> None:
    sizes = json.loads(cli("cache", "--memory", "1MB", "--json").stdout)
    assert {row["tokens_that_fit"] for row in sizes["formats"]} == {0}


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", (0,)), ("0,2,20", (0, 2, 20)), (" 3 , 1-3,2", (1, 2, 3)), ("all", tuple(range(40)))],
)
def test_layer_lists(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, ModelConfig.deepseek_v41_flash()) == layers


@pytest.mark.parametrize("text", ["", "x", "1,,2", "-1", "40", "3-2", "0-40", "1.5", "١"])
def test_bad_layer_lists(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--layers: got .*allowed: ids 0\.\.39"):
        parse_layers(text, ModelConfig.deepseek_v41_flash())


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("141GB", 141 * 10**9), ("1.5k", 1500), ("7", 7), ("2 MiB", 2**21)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "5 i", "0.1"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ArgumentError, match="--memory: got"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert human_bytes(1023) == "1023 B"
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(3 * 2**40) == "3.0 TiB"
