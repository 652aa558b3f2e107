"""What the compiler makes of the portable kernels is run without a GPU: values, bounds, alignment, races.

In a process of its own: this one decorates kernels for the interpreter.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent
SCRIPT = HERE / "run_compiled.py"
QUICK = ("bf16-split", "mxfp8-nvfp4", "v4-mxfp8", "write-nvfp4")


def run(*options: str) -> list[str]:
    """Lines that the script prints."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="0")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.splitlines()


def check(target: int, *cases: str) -> None:
    lines = run("--target", str(target), *cases)
    assert len(lines) == len(cases)
    for line, case in zip(lines, cases, strict=True):
        assert line.startswith(f"sm_{target} ")
        assert f" {case}: ok " in line


def test_quick_cases() -> None:
    check(90, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 89, 90, 100, 120])
def test_every_case(target: int) -> None:
    check(target, *run("--list"))


# What the machine notices: a kernel that adds 1 to 64 numbers by way of shared memory, and faults put into it.

KERNEL = """
.visible .entry add_one(
	.param .u64 .ptr .global .align 1 add_one_param_0,
	.param .u32 add_one_param_1
)
.reqntid 64
{
	.reg .pred %p<2>;
	ld.param.b64 %rd1, [add_one_param_0];
	ld.param.b32 %r1, [add_one_param_1];
	mov.u32 %r2, %tid.x;  // the thread
	setp.ge.s32 %p1, %r2, %r1;
	mul.wide.u32 %rd2, %r2, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r3, %r2, 2;
	ld.global.b32 %r4, [%rd3];
	st.shared.b32 [%r3], %r4;
	bar.sync 0;
	xor.b32 %r5, %r3, 128;  // the place of a thread of the other warp
	ld.shared.b32 %r6, [%r5];
	@%p1 bra $L__end;
	add.f32 %r7, %r6, 0f3F800000;
	bar.sync 0;
	st.shared.b32 [%r3], %r7;
	bar.sync 0;
	ld.shared.b32 %r8, [%r5];
	st.global.b32 [%rd3], %r8;
$L__end:
	ret;
}
"""
FAULTS = {
    "load beyond a tensor": (
        "[%rd3];",
        "[%rd3+4];",
        "ld.global.*out of bounds, at byte 256 of `x`",
    ),
    "store beyond a tensor": ("[%rd3], %r8", "[%rd3+256], %r8", "st.global.*out of bounds"),
    "before every tensor": ("[%rd3];", "[%rd2];", "ld.global.*before every tensor"),
    "misaligned": ("[%rd3];", "[%rd3+2];", "ld.global.*4 bytes at .*misaligned"),
    "misaligned shared": ("[%r3], %r4", "[%r3+1], %r4", "st.shared.*misaligned"),
    "beyond shared memory": ("[%r3], %r4", "[%r3+4], %r4", "shared byte 259 is out of bounds"),
    "read without a barrier": ("%r4;\n\tbar.sync 0;", "%r4;", "ld.shared.*a race: a warp reads"),
    "write without a barrier": ("00;\n\tbar.sync 0;", "00;", "st.shared.*a race: a warp writes"),
    "two values at one place": ("[%r3], %r4", "[0], %r4", "a race: two threads write different"),
    "threads that disagree": ("%r2, %r1;", "%r2, 9;", "bra.*the threads do not agree"),
    "unknown instruction": ("xor.b32", "crc.b32", "crc.b32.*not known here"),
    "unknown type": ("xor.b32", "xor.b128", "the type b128 is not known"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("ptx_machine")


def run_text(machine: ModuleType, text: str, numbers: torch.Tensor) -> None:
    program, memory = machine.Program(text), machine.Memory()
    values = [memory.address("x", numbers), 64]
    names = [name for _, name in program.parameters]
    machine.Cta(program, memory, dict(zip(names, values, strict=True)), 0, 256).run()


def test_machine_runs_a_kernel(machine: ModuleType) -> None:
    numbers = torch.arange(64, dtype=torch.float32)
    run_text(machine, KERNEL, numbers)
    assert torch.equal(numbers, torch.arange(1, 65, dtype=torch.float32))


@pytest.mark.parametrize("fault", FAULTS)
def test_machine_notices(machine: ModuleType, fault: str) -> None:
    before, after, said = FAULTS[fault]
    assert KERNEL.count(before) == 1
    with pytest.raises(machine.PtxError, match=f"(?s){said}"):
        run_text(machine, KERNEL.replace(before, after), torch.arange(64, dtype=torch.float32))
