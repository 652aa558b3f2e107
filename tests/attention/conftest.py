"""Backends under test: torch on the CPU always, the GPU bodies with `-m gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparse_mla.backends.declarations import KERNEL_BACKENDS
from sparse_mla.backends.select import DeviceInfo
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.testing.cases import Case, attend_with, run_case
from sparse_mla.testing.compare import Comparison, Precision, assert_matches_oracle, precision_of
from sparse_mla.testing.inputs import AttendProblem, make_problem


@dataclass(frozen=True)
class Body:
    """One kernel body on one device."""

    name: str
    device: str

    @property
    def precision(self) -> Precision:
        return precision_of(self.name)

    def problem(self, **fields: Any) -> AttendProblem:
        return make_problem(device=self.device, **fields)

    def attend(self, call: AttendCall, out: AttendOut) -> None:
        try:
            attend_with(self.name, call, out)
        except UnsupportedError as error:
            pytest.skip(f"declared refusal: {error}")

    def run(
        self, problem: AttendProblem, *, fp8: bool = False, layout: Layout = Layout.STANDARD
    ) -> AttendOut:
        out = problem.allocate_out(fp8=fp8, layout=layout)
        self.attend(problem.call(query_layout=layout), out)
        return out

    def check(self, problem: AttendProblem, **asked: Any) -> AttendOut:
        """Run and compare with the oracle."""
        out = self.run(problem, **asked)
        layout = asked.get("layout", Layout.STANDARD)
        assert_matches_oracle(problem.call(query_layout=layout), out, self.precision)
        return out

    def run_case(self, case: Case) -> Comparison:
        try:
            return run_case(case, self.name, self.device)
        except UnsupportedError as error:
            pytest.skip(f"declared refusal: {error}")


def skip_unless_here(backend: str, device: str) -> None:
    """Skip with the reasons by which the backend's own declaration refuses this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{backend}: needs a CUDA device")
    declaration = next(body for body in KERNEL_BACKENDS if body.name == backend)
    reasons = declaration.device_refusals(DeviceInfo.detect(device))
    if not declaration.has_kernel("attend"):
        reasons.append("it has no attend kernel")
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")


BODIES = [
    pytest.param(Body("torch", "cpu"), id="torch"),
    pytest.param(Body("torch", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(Body("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
    pytest.param(Body("hopper", "cuda"), id="hopper", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest) -> Body:
    """Each kernel body that this machine has."""
    chosen: Body = request.param
    skip_unless_here(chosen.name, chosen.device)
    return chosen


@pytest.fixture(params=["triton", "hopper"])
def gpu_backend(request: pytest.FixtureRequest) -> str:
    """The name of each GPU body that this machine has."""
    skip_unless_here(request.param, "cuda")
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Small products are quicker on one thread, and their bits do not depend on the machine's size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
