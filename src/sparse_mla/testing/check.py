"""Run cases against the oracle on a device, and shrink what fails to its smallest form.

A case is anything with `op`, `name`, `fields`, `run` and `smaller`; the files `check_*.py` have them. A
fault names the first wrong coordinate, what was there, what the oracle says, and how far it may be off.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparse_mla.backends.declarations import KERNEL_BACKENDS
from sparse_mla.backends.problem import DeviceInfo, Problem
from sparse_mla.errors import UnsupportedError

SHRINK_SECONDS = 20.0
"""Time that is spent on making one failing case smaller."""
MAX_FAILURES = 3
"""Cases that are shrunk and reported; the run ends there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first place where a result is wrong."""

    what: str  # "output", "lse", "bytes", ...
    coordinate: tuple[int, ...]  # of that tensor
    got: float | str
    wanted: float | str
    bound: float = 0.0  # largest |got - wanted| that is right; 0 = equal

    @property
    def sentence(self) -> str:
        """`output[1, 3, 448]: got nan, wanted 0.25 within 1e-3`."""
        place = f"[{', '.join(str(part) for part in self.coordinate)}]" if self.coordinate else ""
        within = f" within {self.bound:.3g}" if self.bound else ""
        return f"{self.what}{place}: got {_show(self.got)}, wanted {_show(self.wanted)}{within}"


class CheckCase(Protocol):
    """One thing to check."""

    @property
    def op(self) -> str:
        """The kernel op, or another group of checks."""

    @property
    def name(self) -> str:
        """Unique among the cases."""

    def fields(self) -> dict[str, Any]:
        """Everything that makes the case, ready for JSON."""

    def run(self, backend: str, device: torch.device) -> Fault | None:
        """Compute and compare; None = right.

        Raises:
            UnsupportedError: the backend declares that it cannot run this.
        """

    def smaller(self) -> Iterator[CheckCase]:
        """Simpler variants, the boldest first."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed, in its smallest form."""

    op: str
    backend: str
    name: str  # of the case before it was made smaller
    case: dict[str, Any]  # the smallest form
    fault: Fault

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "sentence": self.fault.sentence}


@dataclass(frozen=True, slots=True)
class _Run:
    """A case on a backend."""

    case: CheckCase
    backend: str
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a run gave: it passed unless one of the others is there."""

    run: _Run
    refusals: tuple[str, ...] | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class CheckReport:
    """What a run of checks found."""

    device: str
    seed: int
    passed: Counter[str] = field(default_factory=Counter)  # by "op backend"
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)  # "op backend": reasons
    failures: list[Failure] = field(default_factory=list)
    left_out: int = 0  # cases, each on each backend, that the time limit did not reach
    seconds: float = 0.0

    def add(self, outcome: _Outcome) -> None:
        """Count one outcome."""
        key = f"{outcome.run.case.op} {outcome.run.backend}"
        if outcome.refusals is not None:
            self.refused.setdefault(key, outcome.refusals)
        elif outcome.failure is not None:
            self.failures.append(outcome.failure)
        else:
            self.passed[key] += 1

    @property
    def good(self) -> bool:
        """Whether nothing failed and something ran."""
        return not self.failures and bool(self.passed)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "device": self.device,
            "seed": self.seed,
            "good": self.good,
            "passed": dict(self.passed),
            "refused": {name: list(reasons) for name, reasons in self.refused.items()},
            "failures": [failure.as_dict() for failure in self.failures],
            "left_out": self.left_out,
            "seconds": round(self.seconds, 2),
        }


def run_checks(
    cases: Sequence[CheckCase],
    *,
    device: torch.device,
    backends: Sequence[str],
    seed: int = 0,
    seconds: float = 0.0,
    processes: int = 1,
    on_case: Callable[[CheckCase, str], None] | None = None,
) -> CheckReport:
    """Run every case on every backend that can, until the time is up or too much has failed.

    Args:
        cases: in the order in which they run.
        device: where.
        backends: by name, or "auto".
        seed: kept in the report.
        seconds: no case begins later than this; 0 = no limit.
        processes: how many share the cases; new ones, so that their kernels compile side by side.
        on_case: hears of each case once it has run.

    Raises:
        RuntimeError: one of several processes ended by itself.
    """
    report = CheckReport(DeviceInfo.detect(device).describe(), seed)
    began = time.perf_counter()
    runs = [_Run(case, backend, device) for case in cases for backend in backends]
    report.left_out = len(runs)
    with closing(_one_by_one(runs) if processes == 1 else _shared(runs, processes)) as outcomes:
        while report.left_out and len(report.failures) < MAX_FAILURES:
            if seconds and time.perf_counter() - began > seconds:
                break
            outcome = next(outcomes)
            report.left_out -= 1
            report.add(outcome)
            if on_case is not None:
                on_case(outcome.run.case, outcome.run.backend)
    report.seconds = time.perf_counter() - began
    return report


def _one_by_one(runs: Sequence[_Run]) -> Generator[_Outcome, None, None]:
    yield from map(_outcome, runs)


def _shared(runs: Sequence[_Run], processes: int) -> Generator[_Outcome, None, None]:
    """Outcomes as they come; closing drops what has not begun."""
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),  # CUDA does not live through a fork
        initializer=torch.set_num_threads,
        initargs=(max(1, (os.cpu_count() or 1) // processes),),
    )
    try:
        for done in as_completed([pool.submit(_outcome, run) for run in runs]):
            yield done.result()
    except BrokenProcessPool as error:
        raise RuntimeError("a process ended by itself; processes=1 shows at which case") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _outcome(run: _Run) -> _Outcome:
    try:
        fault = _guarded(run.case, run.backend, run.device)
    except UnsupportedError as error:
        return _Outcome(run, refusals=error.reasons)
    if fault is None:
        return _Outcome(run)
    smallest, fault = shrink(run.case, fault, run.backend, run.device)
    failure = Failure(run.case.op, run.backend, run.case.name, smallest.fields(), fault)
    return _Outcome(run, failure=failure)


def shrink(
    case: CheckCase,
    fault: Fault,
    backend: str,
    device: torch.device,
    seconds: float = SHRINK_SECONDS,
) -> tuple[CheckCase, Fault]:
    """The smallest form of a failing case that still fails, and its fault.

    Greedy: the first smaller variant that fails is the next one to make smaller.
    """
    until = time.perf_counter() + seconds
    found = True
    while found:
        found = False
        for smaller in case.smaller():
            if time.perf_counter() > until:
                return case, fault
            other = _fault_of(smaller, backend, device)
            if other is not None:
                case, fault, found = smaller, other, True
                break
    return case, fault


def _fault_of(case: CheckCase, backend: str, device: torch.device) -> Fault | None:
    try:
        return _guarded(case, backend, device)
    except UnsupportedError:
        return None


def _guarded(case: CheckCase, backend: str, device: torch.device) -> Fault | None:
    """Run a case; an error of the kernel (a failed launch, a failed compilation) is a fault too."""
    try:
        return case.run(backend, device)
    except UnsupportedError:
        raise
    except (RuntimeError, AssertionError, IndexError, ValueError) as error:
        lines = str(error).splitlines() or [""]
        return Fault("error", (), f"{type(error).__name__}: {lines[0]}", "none")


def backends_there(device: torch.device) -> tuple[str, ...]:
    """Names of the backends that `auto` may take on a device: not the oracle, no interpreter."""
    info = DeviceInfo.detect(device)
    return tuple(
        body.name
        for body in KERNEL_BACKENDS
        if body.automatic_on(info) and not body.device_refusals(info)
    )


def kernel_on(backend: str, problem: Problem, device: torch.device) -> Callable[..., Any]:
    """The kernel that a backend (or "auto") has for a problem.

    Raises:
        UnsupportedError: it has none.
    """
    from sparse_mla.backends.select import load_kernel, select

    choice = select(problem, DeviceInfo.detect(device), backend)
    return load_kernel(choice.name, problem.op)


def first_wrong(
    what: str, got: Tensor, wanted: Tensor, bound: Tensor | float = 0.0
) -> Fault | None:
    """The first coordinate where `got` is further from `wanted` than `bound`; equal infinities are right."""
    if got.numel() == 0:
        return None
    got, wanted = got.double(), wanted.double()
    right = (got == wanted) | ((got - wanted).abs() <= bound)
    if bool(right.all()):
        return None
    flat = int((~right).reshape(-1).to(torch.uint8).argmax())
    at = tuple(int(part) for part in torch.unravel_index(torch.tensor(flat), got.shape))
    limit = float(bound[at]) if isinstance(bound, Tensor) else bound
    return Fault(what, at, float(got[at]), float(wanted[at]), limit)


def in_turn(*groups: Iterable[CheckCase]) -> list[CheckCase]:
    """One case of each group after the other, so that a time limit cuts all of them alike."""
    waiting = [iter(group) for group in groups]
    order: list[CheckCase] = []
    while waiting:
        for group in list(waiting):
            case = next(group, None)
            if case is None:
                waiting.remove(group)
            else:
                order.append(case)
    return order


def _show(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
