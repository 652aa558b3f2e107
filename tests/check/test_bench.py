"""Benchmarks: nothing wrong is timed, lines have the agreed fields, comparisons and plots are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparse_mla.cache.records import MXFP8, NVFP4
from sparse_mla.cli import bench_report
from sparse_mla.cli.bench import SUITES, measure_case, parse_suites
from sparse_mla.cli.main import app
from sparse_mla.errors import ArgumentError, TraceError, UnsupportedError
from sparse_mla.testing import bench, bench_attend, bench_steps, peer
from sparse_mla.testing.bench import Limits, Result
from sparse_mla.testing.bench_attend import AttendBench, WriterBench

CPU = torch.device("cpu")
FIELDS = [
    "date", "commit", "gpu", "torch", "triton", "op", "backend", "heads", "tokens", "window_keys", "compressed_keys", "window_record", "compressed_record", "output", "microseconds", "tflops", "gbps", "peer", "peer_microseconds", "ratio",
]  # fmt: skip
SMALL = AttendBench("decode", 2, 4, MXFP8, NVFP4, 16, 24)
LINE = Result(
    "2026-11-29", "abc", "NVIDIA H200", "2.11", "3.6", "attend", "hopper", 64, 128, 128, 512, "mxfp8",
    "mxfp8", "fp8", 40.0, 268.0, 1000.0, "peer", 48.0, 1.2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(bench.time_cpu, "__defaults__", (0.0,))
    monkeypatch.setattr(bench_attend, "CPU_POOL_ROWS", 640)
    bench_attend.random_pool.cache_clear()
    yield
    bench_attend.random_pool.cache_clear()


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])


def test_a_case_is_checked_timed_and_counted():
    measured = measure_case(SMALL, CPU, "auto")
    result = measured.result
    assert result is not None
    assert (result.backend, result.op, result.tokens, result.heads) == ("torch", "attend", 2, 4)
    assert (result.window_record, result.compressed_record) == ("mxfp8", "nvfp4")
    assert result.microseconds > 0
    flops = 4 * 2 * 4 * 40 * 512
    assert result.tflops == pytest.approx(flops / result.microseconds / 1e6, abs=6e-4)
    moved = 2 * (16 * 528 + 24 * 288) + 2 * 4 * (1024 + 512 + 16)
    assert result.gbps == pytest.approx(moved / result.microseconds / 1e3, rel=0.01, abs=6e-3)
    assert result.peer is result.ratio is None
    limits = bench.measure_limits(CPU)
    assert measured.share == pytest.approx(
        limits.microseconds(flops, moved) / result.microseconds, rel=0.01, abs=1e-4
    )


def test_what_is_wrong_is_not_timed(monkeypatch):
    def broken(backend: str, problem: Any, device: torch.device) -> Any:
        from sparse_mla.kernels.torch.attend import attend

        def forgets_sink(call: Any, out: Any) -> None:
            attend(replace(call, sink=None), out)

        forgets_sink.__module__ = attend.__module__
        return forgets_sink

    monkeypatch.setattr(bench_attend, "kernel_on", broken)
    monkeypatch.setattr(bench, "time_on", lambda *args, **rest: pytest.fail("was timed"))
    measured = measure_case(SMALL, CPU, "auto")
    assert measured.result is None
    assert measured.wrong
    assert measured.problem.startswith("not timed: output[0, 0, ")
    monkeypatch.setitem(SUITES, "decode", lambda device, quick: [SMALL])
    result = invoke("--suite", "decode")
    assert result.exit_code == 1
    assert "not timed" in result.stdout


def test_refusals_are_shown_and_no_failure(monkeypatch):
    monkeypatch.setitem(SUITES, "writers", lambda device, quick: [WriterBench(3)])

    def none(backend: str, problem: Any, device: torch.device) -> Any:
        raise UnsupportedError("x", ["no such kernel"])

    monkeypatch.setattr(bench_attend, "kernel_on", none)
    result = invoke("--suite", "writers")
    assert result.exit_code == 0
    assert "no such kernel" in result.stdout


def test_lines_have_the_agreed_fields_and_come_back(tmp_path):
    path = bench.append_lines([LINE, replace(LINE, tokens=1)], tmp_path / "deep" / "h200.jsonl")
    bench.append_lines([replace(LINE, microseconds=39.0)], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(list(line) == FIELDS for line in lines)
    assert [(r.tokens, r.microseconds) for r in bench.read_lines(path)] == [(1, 40.0), (128, 39.0)]


def test_the_committed_lines_can_be_read():
    for path in (Path(__file__).parents[2] / "benchmarks" / "baselines").glob("*.jsonl"):
        lines = bench.read_lines(path)
        assert lines
        for line in lines:
            if line.peer_microseconds:
                assert line.ratio == pytest.approx(
                    line.peer_microseconds / line.microseconds, abs=1e-3
                )


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ('{"date": 1}', "missing fields: backend")]
)
def test_spoilt_lines_are_named(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(LINE.line() + "\n" + text + "\n")
    with pytest.raises(TraceError, match=f"x.jsonl:2: .*{message}"):
        bench.read_lines(path)


def test_comparison_matches_cases_of_one_device():
    before = [LINE, replace(LINE, tokens=1), replace(LINE, gpu="L40S", tokens=64)]
    now = [replace(LINE, microseconds=50.0, ratio=1.0), replace(LINE, tokens=64)]
    changes = bench_report.compare(before, now)
    assert [(c.label, c.before, c.now, c.factor) for c in changes] == [
        ("attend, 128 tokens, 64 heads, mxfp8 + mxfp8", 40.0, 50.0, 1.25)
    ]
    assert (changes[0].ratio_before, changes[0].ratio_now) == (1.2, 1.0)


def test_limits_take_the_slower_of_the_two():
    limits = Limits(tflops=2.0, gbps=100.0, what="")
    assert limits.microseconds(4e6, 0) == 2.0
    assert limits.microseconds(4e6, 1e6) == 10.0


def test_input_sets_exceed_the_cache_twice():
    assert bench.input_sets(10**6) * 10**6 >= 2 * bench.L2_BYTES
    assert bench.input_sets(10**12) == 2
    assert bench.input_sets(1) == 256


def test_suites_by_name():
    assert parse_suites("all") == tuple(SUITES)
    assert parse_suites("decode, layer") == ("decode", "layer")
    for text in ("", "fast", "decode,,x"):
        with pytest.raises(ArgumentError, match="--suite"):
            parse_suites(text)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_suites_have_the_cases_that_goals_exist_for(kind):
    device = torch.device(kind)
    decode = {(case.tokens, case.heads) for case in bench_attend.decode_suite(device, False)}
    if kind == "cuda":
        assert {(t, 64) for t in (1, 32, 64, 128, 256, 512)} | {(128, 128), (128, 8)} <= decode
        assert bench_attend.prefill_suite(device, False)[0].tokens == 4096
    assert len(bench_attend.decode_suite(device, True)) < len(decode)
    labels = [case.label for case in bench_attend.records_suite(device, False)]
    assert len(set(labels)) == len(labels) == 5


def test_metadata_is_checked_by_its_rules(monkeypatch):
    case = bench_steps.MetadataBench(2, 200, MXFP8)
    ready = case.prepare("auto", CPU)
    assert ready.fault is None
    serving = bench_steps.serving_of(2, 200, CPU)
    built = serving.builder.build(serving.batch)
    built.window.indices[1, 5] += 1
    fault = bench_steps.metadata_fault(serving, built)
    assert fault is not None
    assert fault.what == "window list"
    assert fault.coordinate[0] == 1
    with pytest.raises(UnsupportedError, match="metadata by triton"):
        case.prepare("triton", CPU)


def test_layers_refuse_a_backend_that_they_would_not_take():
    case = bench_steps.LayerBench(0, 1, 64, MXFP8, None)
    assert case.op == "layer swaonly"
    with pytest.raises(UnsupportedError, match="layers take what auto takes, torch here"):
        case.prepare("reference", CPU)


def test_the_command_writes_compares_and_draws(tmp_path, monkeypatch):
    monkeypatch.setitem(SUITES, "decode", lambda device, quick: [SMALL])
    lines, plot = tmp_path / "cpu.jsonl", tmp_path / "plot.svg"
    first = invoke("--suite", "decode", "--write", lines, "--plot", plot)
    assert first.exit_code == 0, first.output
    assert "limits measured here" in first.stdout
    assert plot.read_text().startswith("<?xml")
    again = invoke("--suite", "decode", "--baseline", lines, "--json")
    report = json.loads(again.stdout)
    assert len(report["changes"]) == len(report["cases"]) == 1
    assert report["changes"][0]["before"] == bench.read_lines(lines)[0].microseconds
    assert report["limits"]["tflops"] > 0
    other = tmp_path / "other.jsonl"
    other.write_text(LINE.line())
    shown = invoke("--suite", "decode", "--baseline", other)
    assert "no case of" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "fast"), "--suite: got 'fast'"),
        (("--peer", "x.so"), "--peer: got with device cpu; allowed: a CUDA device"),
        (("--baseline", "none.jsonl"), "--baseline: got none.jsonl"),
        (("--plot", "x.txt"), "a .png, .svg or .pdf file"),
        (("--backend", "hopper"), "device: got CPU"),
    ],
)
def test_bad_input(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_peer_must_be_a_library(tmp_path):
    with pytest.raises(ArgumentError, match="_flashmla_C.abi3.so"):
        peer.load_peer(tmp_path / "none.so")
    fake = tmp_path / "fake.so"
    fake.write_bytes(b"no library")
    with pytest.raises(UnsupportedError, match="peer library fake.so"):
        peer.load_peer(fake)


def test_the_peer_takes_lists_in_tiles_alone():
    assert replace(SMALL).peer_launches(CPU) is None
    assert WriterBench(3).peer_launches(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_on_a_gpu(tmp_path):
    lines = tmp_path / "gpu.jsonl"
    arguments = [
        "bench",
        "--device",
        "cuda",
        "--quick",
        "--suite",
        "decode,metadata",
        "--write",
        str(lines),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert any(line.op == "attend" and line.tflops > 1 for line in bench.read_lines(lines))
