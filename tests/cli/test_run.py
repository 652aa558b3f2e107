"""`sparse-mla run`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sparse_mla.cli import checking
from sparse_mla.engine.run import Engine
from sparse_mla.engine.scheduler import Request

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
SMALL_RUN = ("--shared-prefix", 200, "--max-batched-tokens", 96, "--layers", "0,1,2,3,5")


def test_json_of_a_small_run(cli, small_config: Path, trace: Path, tmp_path: Path) -> None:
    result = cli("run", "--config", small_config, "--trace", trace, *SMALL_RUN, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["passed"] is True
    assert [layer["kind"] for layer in summary["layers"]] == ["swaonly", "c2a", "c2a", "c1a", "c1a"]
    assert (summary["prompt_tokens"], summary["generated_tokens"]) == (680, 11)
    assert summary["requests"] == 4
    assert summary["rows"] == 680 + 11 - 4 - summary["reused_tokens"]
    assert summary["kv_cache_dtype"] == "nvfp4_ds_mla"
    assert summary["kv_bytes_per_token"] == 356 * 1.5
    assert summary["kv_bytes_peak"] <= summary["kv_bytes_allocated"]
    assert set(summary["pages"]) == {"window", "c1", "c2", "ring"}
    for group in summary["pages"].values():
        assert 0 < group["peak"] <= group["total"]
    assert summary["backend"] == "torch"
    assert summary["backend_rejected"][0]["reasons"]
    assert summary["checks"]
    for check in summary["checks"]:
        assert 0 < check["error"] <= check["bound"]
        assert check["passed"] is True
        assert check["faults"] == []
    assert max(check["list_entries"] for check in summary["checks"]) > 1000
    width, height = png_size(tmp_path / "run-report.png")
    assert width > 500
    assert height > 300


@pytest.mark.parametrize(
    ("replay", "layers", "reused"), [("bounded", "0,1,3", 192), ("exact", "0,1", 64)]
)
def test_prefix_hits_are_checked_in_both_replay_modes(
    cli, small_config: Path, trace: Path, replay: str, layers: str, reused: int
) -> None:
    trace.write_text("prompt,output\n400,2\n20,1\n450,3\n")
    result = cli(
        "run", "--config", small_config, "--trace", trace, "--layers", layers, "--json",
        "--shared-prefix", 330, "--replay", replay, "--max-requests", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    hits = {check["request_id"]: check["hit"] for check in summary["checks"]}
    assert hits[2] == 320
    assert summary["reused_tokens"] == reused


def test_table_names_what_was_added(cli, small_config: Path, trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "here.png"
    result = cli(
        "run", "--config", small_config, "--trace", trace, "--layers", "2", "--requests", 2,
        "--kv-cache-dtype", "fp8", "--plot", plot,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "added layers 1" in result.stderr
    for text in ("1 (c2a, added), 2 (c2a)", "fp8_ds_mla", "check passed", "here.png"):
        assert text in result.stdout
    assert png_size(plot)[0] > 500
    assert not (tmp_path / "run-report.png").exists()


def test_a_failed_check_exits_with_1(
    cli, small_config: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checking.check_request

    def strict(*arguments: object) -> checking.CheckResult:
        return dataclasses.replace(honest(*arguments), bound=1e-12)

    monkeypatch.setattr(checking, "check_request", strict)
    result = cli("run", "--config", small_config, "--trace", trace, "--layers", "0")
    assert result.exit_code == 1
    assert "check FAILED" in result.stdout


def test_without_a_check(cli, small_config: Path, trace: Path) -> None:
    result = cli("run", "--config", small_config, "--trace", trace, "--layers", "0", "--no-check")
    assert result.exit_code == 0
    assert "no check was asked for" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--trace", "none.csv"), "none.csv:0: No such file"),
        (("--config", "none.json"), "No such file"),
        (("--layers", "0,41"), "--layers: got '41'"),
        (("--kv-cache-dtype", "fp8_e5m2"), "kv_cache_dtype: got 'fp8_e5m2'"),
        (("--device", "tpu"), "--device: got 'tpu'"),
        (("--plot", "none/here.png"), "--plot: got none/here.png"),
        (("--plot", "here.txt"), "--plot: got here.txt"),
        (("--requests", 0), "--requests"),
        (("--max-batched-tokens", 0), "--max-batched-tokens"),
        (("--replay", "never"), "--replay"),
        (("--requests", "many"), "--requests"),
    ],
)
def test_bad_input_exits_with_2_and_runs_nothing(
    cli,
    small_config: Path,
    trace: Path,
    tmp_path: Path,
    arguments: tuple[object, ...],
    complaint: str,
) -> None:
    base = ["--config", small_config, "--trace", trace]
    result = cli("run", *base, *arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert not (tmp_path / "run-report.png").exists()


def test_a_bad_line_is_named(cli, small_config: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,5,1\nnow,5,1\n")
    result = cli("run", "--config", small_config, "--trace", bad)
    assert result.exit_code == 2
    assert "bad.csv:3: TIMESTAMP is 'now'" in " ".join(result.stderr.split())
    bad.write_text("prompt,output\n5000,1\n")
    result = cli("run", "--config", small_config, "--trace", bad)
    assert result.exit_code == 2
    assert ":2: 5000 tokens, but the model takes 4096" in " ".join(result.stderr.split())


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces in ../shared/data are not there")
@pytest.mark.parametrize(
    ("name", "requests", "layers"),
    [("azure_llm_conv_2023.csv", 2, "0,1,3"), ("azure_llm_code_2023.csv", 3, "1")],
)
def test_real_lengths_on_a_shrunken_model(
    cli, small_config: Path, name: str, requests: int, layers: str
) -> None:
    config = json.loads(small_config.read_text())
    small_config.write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    result = cli(
        "run", "--config", small_config, "--trace", SHARED / name, "--requests", requests,
        "--layers", layers, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["passed"] is True
    assert summary["requests"] == requests


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return int(width), int(height)


@pytest.mark.parametrize(
    ("rows", "sampled"),
    [
        ([40, 1000, 300, 1300], [0, 1, 2]),  # shortest, longest affordable, last with a prefix
        ([40, 60, 5000, 1300, 2000], [0, 1, 3]),  # no list is full below 1300 rows
        ([30, 5000], [0]),  # too long even for that
        ([1500, 1400], [1]),
        ([1], [0]),
    ],
)
def test_sampled_requests(rows: list[int], sampled: list[int]) -> None:
    requests = [
        Request(index, count, count, stream=index, shared_tokens=min(count, 200))
        for index, count in enumerate(rows)
    ]
    engine = SimpleNamespace(
        requests=requests,
        scheduler=SimpleNamespace(limits=SimpleNamespace(replay_tokens=128)),
        cfg=SimpleNamespace(index_topk=512),
    )
    assert checking.sample_requests(cast("Engine", engine)) == sampled
