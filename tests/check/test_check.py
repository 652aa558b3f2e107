"""The checker finds what is wrong, names the place, and makes the case small."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparse_mla.cli import check as cli_check
from sparse_mla.cli.main import app
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout
from sparse_mla.testing import check_attend, check_caches
from sparse_mla.testing.cases import Case, attend_with
from sparse_mla.testing.check import (
    MAX_FAILURES,
    Fault,
    backends_there,
    first_wrong,
    in_turn,
    run_checks,
    shrink,
)
from sparse_mla.testing.check_attend import AttendCheck, quick_attend, random_attend
from sparse_mla.testing.check_caches import CacheCheck, Sizes, cache_checks
from sparse_mla.testing.inputs import ProblemSpec

sys.path.append(str(Path(__file__).parent))  # new processes must find the module by its name
from fake_checks import Fake, Leaves

CPU = torch.device("cpu")
BIG = AttendCheck(
    Case(
        "big",
        ProblemSpec(
            tokens=4, heads=6, window_keys=24, compressed_keys=31, compressed_record="nvfp4",
            hole_probability=0.2, lengths="random", page_padding_bytes=64, strided=True, seed=3,
        ),
        fp8=True,
        layout=Layout.CHUNK_INTERLEAVED,
    )
)  # fmt: skip


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments])


# ---------------------------------------------------------------------------------------- broken kernels


def drops_the_last_lane(backend: str, call: AttendCall, out: AttendOut) -> None:
    """A mask that is one lane too short, in the window alone."""
    keys = call.window
    if keys.width:
        lengths = None if keys.lengths is None else (keys.lengths - 1).clamp(min=0)
        call = replace(call, window=KeySet(keys.cache, keys.indices[:, :-1], lengths))
    attend_with(backend, call, out)


def forgets_the_sink(backend: str, call: AttendCall, out: AttendOut) -> None:
    attend_with(backend, replace(call, sink=None), out)


def spoils_one_value(backend: str, call: AttendCall, out: AttendOut) -> None:
    attend_with(backend, call, out)
    if not out.is_fp8 and call.num_heads > 1:
        out.data[-1, 1, 70] = torch.nan


def base_two_lse(backend: str, call: AttendCall, out: AttendOut) -> None:
    attend_with(backend, call, out)
    assert out.lse is not None
    out.lse.mul_(1.4427)


def wobbles(backend: str, call: AttendCall, out: AttendOut) -> None:
    """Right, but never twice the same."""
    attend_with(backend, call, out)
    wobbles.calls += 1  # type: ignore[attr-defined]
    assert out.lse is not None
    out.lse.view(torch.int32).add_(wobbles.calls % 2)  # type: ignore[attr-defined]


wobbles.calls = 0  # type: ignore[attr-defined]


def test_a_short_mask_is_found_and_made_small(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", drops_the_last_lane)
    fault = BIG.run("auto", CPU)
    assert fault is not None
    small, fault = shrink(BIG, fault, "auto", CPU)
    fields = small.fields()
    assert (fields["tokens"], fields["heads"], fields["window_keys"]) == (1, 1, 1)
    assert fields["fp8"] is False
    assert fields["rotate"] is False
    assert not {"compressed_keys", "strided", "hole_probability", "sink", "lengths"} & set(
        fields
    ) - {"sink"}
    assert fault.what == "output"
    assert fault.coordinate == (0, 0, 0)
    assert "output[0, 0, 0]: got 0, wanted" in fault.sentence


def test_a_lost_sink_keeps_the_sink_in_the_small_case(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", forgets_the_sink)
    fault = BIG.run("auto", CPU)
    assert fault is not None
    small, fault = shrink(BIG, fault, "auto", CPU)
    assert "sink" not in small.fields()  # the default, a random sink
    assert small.case.spec.sink == "random"
    assert small.case.spec.tokens == small.case.spec.heads == 1


def test_the_first_wrong_coordinate_is_named(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", spoils_one_value)
    case = AttendCheck(Case("one", ProblemSpec(tokens=3, heads=2, window_keys=8)))
    fault = case.run("auto", CPU)
    assert fault is not None
    assert fault.coordinate == (2, 1, 70)
    assert "output[2, 1, 70]: got nan, wanted" in fault.sentence


def test_a_wrong_lse_base_is_named(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", base_two_lse)
    fault = AttendCheck(Case("one", ProblemSpec(tokens=1, heads=1, window_keys=8))).run("auto", CPU)
    assert fault is not None
    assert fault.what == "lse"
    assert fault.coordinate == (0, 0)
    assert fault.got == pytest.approx(1.4427 * float(fault.wanted), rel=1e-3)


def test_a_result_that_does_not_repeat_is_a_fault(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", wobbles)
    fault = AttendCheck(Case("one", ProblemSpec(tokens=1, heads=2, window_keys=8))).run("auto", CPU)
    assert fault is not None
    assert fault.what == "lse of the second run"


def test_an_error_of_a_kernel_is_a_fault(monkeypatch):
    def fails(backend: str, call: AttendCall, out: AttendOut) -> None:
        raise RuntimeError("an illegal memory access\nmore lines")

    monkeypatch.setattr(check_attend, "attend_with", fails)
    report = run_checks([BIG], device=CPU, backends=["auto"])
    assert report.failures[0].fault.sentence == (
        "error: got RuntimeError: an illegal memory access, wanted none"
    )
    assert report.failures[0].case["tokens"] == 1


def test_a_writer_that_misses_a_byte_is_found(monkeypatch):
    real = check_caches.kernel_on

    def broken(backend: str, problem: Any, device: torch.device) -> Any:
        kernel = real(backend, problem, device)

        def write(call: Any) -> None:
            kernel(call)
            if len(call.slots) > 1:
                page, row = divmod(int(call.slots[1]), call.cache.page_rows)
                call.cache.pages[page, row * call.cache.record.data_stride] ^= 1

        return write

    monkeypatch.setattr(check_caches, "kernel_on", broken)
    report = run_checks(
        [CacheCheck("write_window", check_caches.check_writer, Sizes(record="mxfp8"))],
        device=CPU,
        backends=["auto"],
    )
    failure = report.failures[0]
    assert failure.fault.what == "byte of the storage"
    assert failure.case["rows"] == 2  # row 0 has no slot
    assert failure.case["record"] == "mxfp8"


# ------------------------------------------------------------------------------------------ the machinery


def test_shrinking_ends_at_the_smallest_that_fails():
    fault = Fault("x", (), 1.0, 2.0)
    assert shrink(Fake(100), fault, "auto", CPU)[0].fields() == {"size": 3}
    assert shrink(Fake(100), fault, "auto", CPU, seconds=0.0)[0].fields() == {"size": 100}


def test_a_run_ends_after_a_few_failures_or_when_the_time_is_up():
    report = run_checks([Fake(5)] * 8, device=CPU, backends=["auto"])
    assert (len(report.failures), report.left_out, report.good) == (
        MAX_FAILURES,
        8 - MAX_FAILURES,
        False,
    )
    report = run_checks([Fake(1)] * 8, device=CPU, backends=["auto"], seconds=1e-9)
    assert report.left_out == 8
    assert not report.good  # nothing ran


def test_processes_find_what_one_finds():
    writers = [case for case in cache_checks() if case.op == "write_window"][:4]
    wrong = [Fake(5, name="large"), Fake(4, name="middle")]
    cases = [*writers, *wrong, *[Fake(1)] * 3]
    heard: list[str] = []
    one = run_checks(cases, device=CPU, backends=("torch", "hopper"))
    two = run_checks(
        cases,
        device=CPU,
        backends=("torch", "hopper"),
        processes=2,
        on_case=lambda case, backend: heard.append(f"{case.name} {backend}"),
    )
    assert two.failures
    assert {failure.case["size"] for failure in two.failures} == {3}
    assert len(two.failures) == len(one.failures) == MAX_FAILURES
    assert len(heard) == 2 * len(cases) - two.left_out
    right = cases[:4] + cases[6:]
    one = run_checks(right, device=CPU, backends=("torch", "hopper"))
    two = run_checks(right, device=CPU, backends=("torch", "hopper"), processes=2)
    assert (two.passed, two.refused, two.left_out) == (one.passed, one.refused, 0)
    assert one.refused  # by Hopper, of which none is here


def test_a_process_that_ends_by_itself_is_an_error():
    with pytest.raises(RuntimeError, match="processes=1"):
        run_checks([Leaves()], device=CPU, backends=["auto"], processes=2)


def test_first_wrong():
    inf, nan = torch.inf, torch.nan
    got = torch.tensor([[1.0, inf], [2.0, nan]])
    assert first_wrong("x", got[:, :1], torch.tensor([[1.0], [2.1]]), 0.2) is None
    fault = first_wrong("x", got, torch.tensor([[1.0, inf], [2.0, 3.0]]), 100.0)
    assert fault is not None
    assert fault.coordinate == (1, 1)
    fault = first_wrong("x", got, torch.tensor([[1.0, -inf], [2.0, 3.0]]), torch.full((2, 2), 0.5))
    assert fault is not None
    assert (fault.coordinate, fault.bound) == ((0, 1), 0.5)
    assert first_wrong("x", torch.empty(0), torch.empty(0)) is None


def test_groups_take_turns():
    groups = ([Fake(1), Fake(2), Fake(3)], [Fake(7)], [])
    assert [case.size for case in in_turn(*groups)] == [1, 7, 2, 3]  # type: ignore[attr-defined]


def test_random_cases_repeat_with_their_seed_and_differ_without():
    first = [case.fields() for case in random_attend(5, 20, few_variants=False)]
    assert first == [case.fields() for case in random_attend(5, 20, few_variants=False)]
    assert first != [case.fields() for case in random_attend(6, 20, few_variants=False)]
    few = list(random_attend(5, 60, few_variants=True))
    kinds = {
        (c.case.spec.window_record.name, c.case.spec.compressed_record.name, c.case.fp8)
        for c in few
    }
    assert kinds == {("mxfp8", "nvfp4", True), ("mxfp8", "mxfp8", True), ("v4", "v4", False)}


def test_every_case_has_a_name_of_its_own():
    for cases in (cache_checks(), quick_attend(), check_attend.named_attend()):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)


def test_the_far_page_lies_past_the_border():
    assert 2 * (check_attend.FAR_PAGE_BYTES // 32 * 32) > 2**31
    case = next(c for c in check_attend.named_attend() if c.far_pages)
    assert case.run("torch", CPU) is None


# ----------------------------------------------------------------------------------------- the command


def test_quick_passes_here():
    result = invoke("--quick", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "check passed" in result.stdout
    assert "seed 0" in result.stdout


def test_json():
    result = invoke("--quick", "--json", "--seed", "7", "--device", "cpu", "--backend", "torch")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["good"] is True
    assert report["seed"] == 7
    assert report["passed"]["attend torch"] == 14
    assert report["failures"] == []


def test_a_failure_gives_exit_code_1_the_smallest_case_and_the_place(monkeypatch):
    monkeypatch.setattr(check_attend, "attend_with", drops_the_last_lane)
    result = invoke("--quick", "--device", "cpu")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "check FAILED" in text
    assert "output[0, 0, 0]: got 0" in text
    assert "smallest case: tokens=1, heads=1, window_keys=1" in text
    result = invoke("--quick", "--json", "--device", "cpu")
    assert result.exit_code == 1
    failure = json.loads(result.stdout)["failures"][0]
    assert failure["fault"]["coordinate"] == [0, 0, 0]
    assert failure["case"]["tokens"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device: got 'tpu'"),
        (("--device", "cuda:99"), "--device: got 'cuda:99'"),
        (("--backend", "fast"), "--backend: got 'fast'"),
        (("--backend", "hopper", "--device", "cpu"), "device: got CPU; allowed: cuda"),
        (("--quick", "--all"), "--quick: got with --all"),
    ],
)
def test_bad_input(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_all_asks_every_backend_of_the_device(monkeypatch):
    seen: list[tuple[str, ...]] = []

    def run(device: torch.device, backends: tuple[str, ...], **rest: Any) -> Any:
        seen.append(backends)
        return run_checks([Fake(1)], device=device, backends=backends)

    monkeypatch.setattr(cli_check, "run", run)
    assert invoke("--all", "--device", "cpu").exit_code == 0
    assert invoke("--device", "cpu").exit_code == 0
    assert seen == [backends_there(CPU), ("auto",)]
    assert "torch" in seen[0]
    assert "reference" not in seen[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_passes_on_a_gpu():
    result = invoke("--quick", "--device", "cuda", "--json")
    assert result.exit_code == 0, result.output
