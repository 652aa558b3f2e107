"""`scripts/hopper-launches`, what the sanitizer runs: its cases cover what they promise, its copies keep every byte; and
`scripts/hopper-acceptance`, which runs it. No GPU needed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import FEW_HEADS, MANY_HEADS, Body
from sparse_mla.kernels.hopper.build import RECORDS, Variant
from sparse_mla.kernels.torch.attend import attend as torch_attend
from sparse_mla.testing.inputs import make_problem

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    """A script as a module."""
    path = SCRIPTS / name
    if not path.is_file():
        pytest.skip(f"{name} is not here: only the repository has it")
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("hopper-launches")


def test_every_record_meets_every_split_in_both_sets_and_bodies(script: ModuleType) -> None:
    names = {record.name for record in RECORDS}
    for few, every_split in ((True, (1, 2, 3, 4, 8)), (False, (1, 2, 4))):
        for splits in every_split:
            found = [
                case
                for case in script.cases()
                if case.splits == splits and (case.heads <= 8) == few
            ]
            assert {case.window for case in found} == names
            assert {case.compressed for case in found} == names
            assert {case.fp8 for case in found} == {True, False}
    heads = {case.heads for case in script.cases()}
    assert heads == {*script.FEW_HEADS, *script.MANY_HEADS}


def test_a_moved_case_is_right(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hopper, "attend", torch_attend)
    for case in script.cases()[::6]:
        assert script.run(case, "cpu")
    assert capsys.readouterr().out.count(" right\n") == 10


def test_a_moved_tensor_keeps_its_strides_and_what_lies_around_it(script: ModuleType) -> None:
    pages = script.cases()[0].problem().window.cache.pages.repeat(1, 2)[1:, 7:90]
    moved = script.moved(pages, "cpu")
    assert moved.stride() == pages.stride()
    assert moved.storage_offset() == pages.storage_offset()
    assert bool((moved == pages).all())


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("body", "heads"), [(MANY_HEADS, 64), (MANY_HEADS, 32), (FEW_HEADS, 8)])
def test_results_stay_right_when_every_lane_arrives(
    body: Body,
    heads: int,
    splits: int,
    emulator: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    macros = Variant.macros
    monkeypatch.setattr(Variant, "macros", lambda v: macros(v) | {"EVERY_LANE_ARRIVES": 1})
    problem = make_problem(
        tokens=3 if splits == 1 else 1, heads=heads, window_keys=70, compressed_keys=200
    )
    type(emulator)(tmp_path).check(body, problem, splits=splits, fp8=True)


def test_acceptance_runs_every_split_and_all_tests_of_both_bodies() -> None:
    checks = load("hopper-acceptance").commands([1, 8])
    assert list(checks) == ["launches", "memcheck", "racecheck", "tests"]
    assert [command[-1] for command in checks["memcheck"].values()] == ["1", "2", "3", "4", "8"]
    assert [command[-1] for command in checks["racecheck"].values()] == ["1", "8"]
    assert all("--every-lane-arrives" in command for command in checks["racecheck"].values())
    tests = {Path(part).name for part in checks["tests"]["tests"] if part.endswith(".py")}
    assert {"test_hopper.py", "test_hopper_blocks.py", "test_hopper_overlap.py"} <= tests


def test_acceptance_tells_failures_and_late_ones_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceptance = load("hopper-acceptance")
    monkeypatch.setitem(acceptance.SECONDS, "memcheck", 1)
    say = "import sys, time; print('so far'); sys.stdout.flush(); "
    programs = {
        "memcheck, splits 1": "import os; print(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])",
        "memcheck, splits 2": say + "print('and no further'); sys.exit(3)",
        "memcheck, splits 4": say + "time.sleep(60)",
    }
    commands = {name: [sys.executable, "-c", text] for name, text in programs.items()}
    results = acceptance.run("memcheck", commands, tmp_path)
    assert [(result.verdict, result.lines) for result in results] == [
        ("passed", ["1"]),
        ("FAILED (3)", ["so far", "and no further"]),
        ("TIME WAS UP", ["so far"]),
    ]
    assert [str(result).splitlines()[1:] for result in results] == [[], ["    so far"], []]
    assert [result.passed for result in results] == [True, False, False]
    assert (tmp_path / "memcheck-4.log").read_text() == "so far\n"
