"""Choose a backend and keep the reasons.

An explicit request is honoured or refused, never replaced. `auto` takes the first backend that fits and
records why the ones before it did not. The choice is a pure function of problem and device, so it can be
asked about machines that are not there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparse_mla._checks import check_choice
from sparse_mla.backends.declarations import KERNEL_BACKENDS, KernelBackend
from sparse_mla.backends.problem import DeviceInfo, Problem
from sparse_mla.errors import UnsupportedError
from sparse_mla.settings import BACKEND_NAMES, settings

__all__ = ["BackendChoice", "DeviceInfo", "Problem", "explain", "load_kernel", "select"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backend runs, why, and why not the others that were tried before it."""

    name: str
    reason: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (backend, its refusals)

    def __str__(self) -> str:
        """`torch (plain PyTorch ...); not triton: ...`."""
        parts = [f"{self.name} ({self.reason})"]
        parts += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected]
        return "; ".join(parts)


def select(problem: Problem, device: DeviceInfo, requested: str = "auto") -> BackendChoice:
    """The backend that runs the problem on the device.

    Args:
        problem: what to run.
        device: where; `DeviceInfo.detect(tensor.device)`, or a machine that is not here.
        requested: a backend's name, or "auto"; for attention the setting SPARSE_MLA_BACKEND then
            counts as a request.

    Raises:
        ArgumentError: no backend has the requested name.
        UnsupportedError: the requested backend, or every backend, refuses; all reasons are listed.
    """
    check_choice("backend", requested, BACKEND_NAMES)
    origin = "requested by name"
    if requested == "auto" and problem.op == "attend" and settings().backend != "auto":
        requested, origin = settings().backend, "requested by SPARSE_MLA_BACKEND"
    return _select(problem, device, requested, origin)


def explain(
    problem: Problem, device: DeviceInfo
) -> tuple[tuple[KernelBackend, tuple[str, ...]], ...]:
    """Every backend with its refusals (none = it can run), in the order in which `auto` tries them."""
    return tuple((backend, tuple(backend.refusals(problem, device))) for backend in KERNEL_BACKENDS)


@functools.cache
def load_kernel(backend: str, op: str) -> Callable[..., Any]:
    """The function `op` of `kernels/<backend>/<op>.py`, imported on first use."""
    return getattr(importlib.import_module(f"sparse_mla.kernels.{backend}.{op}"), op)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, device: DeviceInfo, requested: str, origin: str) -> BackendChoice:
    if requested != "auto":
        backend = next(body for body in KERNEL_BACKENDS if body.name == requested)
        refusals = backend.refusals(problem, device)
        if refusals:
            what = f"backend {requested!r}, {origin}, for {problem.describe()} on "
            raise UnsupportedError(what + device.describe(), refusals)
        return BackendChoice(requested, origin)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for backend in KERNEL_BACKENDS:
        if not backend.automatic_on(device):
            continue
        refusals = backend.refusals(problem, device)
        if not refusals:
            return BackendChoice(backend.name, backend.reason, tuple(rejected))
        rejected.append((backend.name, tuple(refusals)))
    sentences = [f"{name}: {reason}" for name, reasons in rejected for reason in reasons]
    raise UnsupportedError(f"{problem.describe()} on {device.describe()}", sentences)
