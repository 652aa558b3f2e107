"""These tests run the Triton kernels on the CPU, in Triton's interpreter."""

import os

import fences
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import


@pytest.fixture(autouse=True)
def _fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch works on copies between pages that nobody may touch."""
    monkeypatch.setattr(torch.UntypedStorage, "cpu", fences.between_fences)


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu runs these kernels on it")
    from sparse_mla.kernels.triton.attend_kernel import attend_kernel
    from sparse_mla.kernels.triton.launch import compile_mode

    if compile_mode(attend_kernel) != "interpreted":
        pytest.skip("the kernels were imported before TRITON_INTERPRET was set")
