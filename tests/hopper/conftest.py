"""The Hopper kernels compiled for the CPU and run thread by thread: the `emulator` of the tests here."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fences
import pytest
import torch

from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import (
    BODIES,
    MANY_HEADS,
    Body,
)
from sparse_mla.kernels.hopper.build import Variant
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem

ZEROS = torch.zeros(1024, dtype=torch.uint8)
COMPILER = shutil.which("g++")
NVCC = shutil.which("nvcc")
HERE = Path(__file__).parent / "emulation"
SECTION = "// " + "-" * 64 + " "
REPLACED = (  # instructions inside the roles, and what the headers have for them
    (r'asm volatile\("setmaxnreg[^\n]*', ""),
    (r'asm volatile\("mov\.b32[^\n]*"=r"\((\w+)\) : "r"\((\w+)\)\);', r"\1 = \2;"),
)


def kernel_text(source: str) -> str:
    """A source without its instructions, which the headers beside `run_kernel.cpp` replace."""
    text = source[source.index("#define KIND_MXFP8") :]
    text = re.sub(SECTION + r"instructions.*?(?=" + SECTION + ")", "", text, flags=re.DOTALL)
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return text


def between_fences(call: AttendCall, out: AttendOut) -> tuple[AttendCall, AttendOut, Any]:
    """A launch whose tensors all lie between pages that nobody may touch, and what copies its results back."""
    made = fences.Fences(alignment=16)

    def tensors(owner: Any, *names: str) -> dict[str, Any]:
        found = {name: getattr(owner, name) for name in names}
        return {name: made.around(tensor) for name, tensor in found.items() if tensor is not None}

    def keys(key_set: KeySet) -> KeySet:
        cache = replace(key_set.cache, **tensors(key_set.cache, "pages"))
        return replace(key_set, cache=cache, **tensors(key_set, "indices", "lengths"))

    compressed = None if call.compressed is None else keys(call.compressed)
    own = tensors(call, "q", "sink", "positions", "rope")
    moved = replace(call, window=keys(call.window), compressed=compressed, **own)
    return moved, replace(out, **tensors(out, "data", "scales", "lse", "max_logits")), made


class Emulator:
    """Runs launches of Hopper kernels on the CPU; each variant is compiled once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries: dict[Variant, ctypes.CDLL] = {}

    def compiled(self, variant: Variant) -> ctypes.CDLL:
        """A variant of a source, compiled for the CPU."""
        if COMPILER is None:
            pytest.skip("g++ is not installed: the kernel cannot be emulated here")
        if variant not in self.libraries:
            folder = self.folder / str(len(self.libraries))
            folder.mkdir(exist_ok=True)  # it is there if compiling failed before
            (folder / "kernel.inc").write_text(kernel_text(variant.body.source()))
            macros = [f"-D{name}={value}" for name, value in variant.macros().items()]
            macros.append(f"-DCTA_THREADS={variant.threads}")
            flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
            target = folder / "kernel.so"
            files = ["-I", str(folder), str(HERE / "run_kernel.cpp"), "-o", str(target)]
            done = subprocess.run(
                [COMPILER, *flags, *macros, *files], capture_output=True, text=True, check=False
            )
            if "_Float16" in done.stderr:
                pytest.skip("this g++ has no _Float16: the kernel cannot be emulated here")
            assert done.returncode == 0, done.stderr
            self.libraries[variant] = ctypes.CDLL(str(target))
        return self.libraries[variant]

    def run(
        self,
        body: Body,
        call: AttendCall,
        out: AttendOut,
        *,
        splits: int = 1,
        ctas: int = 3,
        seed: int = 1,
        block: int | None = None,
    ) -> None:
        """What `attend` launches, on `ctas` multiprocessors; the seed sets how fast each warp is.

        `block`: heads of a block, not given = as a batch-invariant call has it.
        """
        if block is None:
            block = hopper._block_heads(call.num_heads, 1, invariant=True)
        assert BODIES[block] is body
        variant = hopper.variant_of(call, out, block, splits)
        head_blocks = -(-call.num_heads // block)
        q = hopper._readable_query(call, mapped=body is MANY_HEADS)
        call, out, made = between_fences(replace(call, q=q), out)
        arguments = hopper._arguments(call, out, call.q, head_blocks, range(call.num_tokens))
        arguments.zeros = ZEROS.data_ptr()
        items = call.num_tokens * head_blocks
        grid = items * splits if splits > 1 else min(items, ctas)
        assert self.compiled(variant).emulate(ctypes.byref(arguments), grid, seed) == 0
        made.copy_back()

    def attend(self, call: AttendCall, out: AttendOut, sms: int) -> list[tuple[str, int, int]]:
        """`attend` itself on `sms` multiprocessors: each launch's source, CTAs and splits, in order."""
        launches = []

        def launch(
            kernel: Variant, variant: Variant, arguments: int, ctas: int, stream: int
        ) -> None:
            launches.append((variant.body.file, ctas, variant.splits))
            address = ctypes.c_void_p.from_address(arguments)
            assert self.compiled(variant).emulate(address, ctas, 1) == 0

        call, out, made = between_fences(call, out)
        with (
            mock.patch.object(hopper, "_multiprocessors", return_value=sms),
            mock.patch.object(hopper, "function", lambda variant, _: (variant, ZEROS.data_ptr())),
            mock.patch.object(hopper, "query_map"),
            mock.patch.object(hopper, "launch", launch),
            mock.patch.multiple(
                torch.cuda, device=mock.MagicMock(), current_device=int, current_stream=mock.Mock()
            ),
        ):
            hopper.query_map.return_value.getPtr.return_value = 0
            hopper.attend(call, out)
        made.copy_back()
        return launches

    def check(
        self,
        body: Body,
        problem: AttendProblem,
        call: AttendCall | None = None,
        *,
        splits: int = 1,
        block: int | None = None,
        **outputs: Any,
    ) -> None:
        """Run a problem and compare it with the oracle; many heads also without lse, which sums other weights."""
        call = call or problem.call()
        bare = {"lse": False, "max_logits": False}
        for options in ({}, bare) if body is MANY_HEADS else ({},):
            out = problem.allocate_out(**options | outputs)
            self.run(body, call, out, splits=splits, block=block)
            assert_matches_oracle(call, out, HOPPER_BODY)


def compile_report(variant: Variant, folder: Path) -> str:
    """What ptxas says about one variant; skips without an nvcc that knows sm_90a."""
    if NVCC is None:
        pytest.skip("nvcc is not installed: the budget cannot be checked here")
    path = folder / "attend.cu"
    path.write_text(variant.body.source())
    macros = [f"-D{name}={value}" for name, value in variant.macros().items()]
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [NVCC, *target, *macros, "-o", str(folder / "attend.cubin"), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    if "Unsupported gpu architecture" in text:
        pytest.skip("this nvcc does not know sm_90a")
    assert done.returncode == 0, text
    return text


@pytest.fixture(scope="session")
def ptxas() -> Callable[[Variant, Path], str]:
    """Compiles a variant into a folder and returns what ptxas says about it."""
    return compile_report


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))
