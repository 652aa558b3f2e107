"""Backends under test: torch on the CPU always, the GPU bodies with `-m gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparse_mla.backends.select import load_kernel
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
    if chosen.device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if chosen.name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs an SM90 GPU")
        try:
            load_kernel(chosen.name, "attend")
        except ModuleNotFoundError as error:
            pytest.skip(f"body not there: {error}")
    return chosen


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Small products are quicker on one thread, and their bits do not depend on the machine's size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
