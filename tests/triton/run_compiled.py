"""Compile the portable kernels for a GPU that is not here and run what the compiler made on `ptx_machine`.

    python tests/triton/run_compiled.py [--target 90] [--list] [case ...]

Prints one line a case; the exit code is 1 if one fails. Give it a process of its own: Triton's
interpreter must be off (`TRITON_INTERPRET=0`), and the launches are turned over to the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from ptx_machine import Cta, Memory
from ptx_program import Program, PtxError
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from sparse_mla.cache.records import record_named
from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.reference import write_window as reference
from sparse_mla.kernels.triton import attend, write_window
from sparse_mla.kernels.triton.configs import FEW_HEADS
from sparse_mla.kernels.triton.launch import DeviceFacts
from sparse_mla.kernels.write_contract import WriteWindowCall
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import make_problem, plain_rope_table, poisoned_cache

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
MULTIPROCESSORS = 132
TRAPS = {
    "hole_probability": 0.2, "beyond_probability": 0.1, "lengths": "random",
    "page_padding_bytes": 64, "offset_rows": 3,
}  # fmt: skip


class OnMachine:
    """Stands in for a kernel: `kernel[grid](...)` compiles it and runs CTA after CTA."""

    def __init__(self, kernel: Any, target: int) -> None:
        self.kernel = kernel
        self.target = target

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            values = dict(zip(self.kernel.arg_names, arguments, strict=False))
            compiled = self.compiled(values, named, options)
            program, memory = Program(compiled.asm["ptx"]), Memory()
            bits = [_bits(name, value, memory) for name, value in values.items()]
            bits += [0] * (len(program.parameters) - len(bits))  # scratch that no kernel here uses
            names = [name for _, name in program.parameters]
            parameters = dict(zip(names, bits, strict=True))
            for index in range(grid[0]):
                Cta(program, memory, parameters, index, compiled.metadata.shared).run()

        return launch

    def compiled(
        self, values: dict[str, Any], constants: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        """What Triton compiles for these arguments, with the types and alignments of a launch."""
        signature, attributes = {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = values.get(parameter.name)
            if parameter.name in constants:
                signature[parameter.name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES.get(value.dtype, "*u8")
                if not parameter.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                scalar = "fp32" if isinstance(value, float) else "i32"
                signature[parameter.name] = parameter.annotation_type or scalar
        source = ASTSource(self.kernel, signature, constants, attributes)
        return compile_kernel(source, target=GPUTarget("cuda", self.target, 32), options=options)


def _bits(name: str, value: Any, memory: Memory) -> int:
    """What a launch passes for an argument."""
    if isinstance(value, torch.Tensor):
        return memory.address(name, value)
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


@dataclass(frozen=True, slots=True)
class AttendCase:
    """One launch of the attention kernel, compared with the oracle."""

    problem: dict[str, Any]
    splits: int = 1
    fp8: bool = False
    layout: Layout = Layout.STANDARD  # of the query and of the output
    rotate: bool = True
    traps: dict[str, Any] = field(default_factory=lambda: TRAPS)

    def run(self) -> None:
        problem = make_problem(**self.problem, **self.traps)
        tokens, heads = problem.q.shape[:2]
        call = problem.call(
            query_layout=self.layout, rotate_query=self.rotate, unrotate_output=self.rotate
        )
        out = problem.allocate_out(fp8=self.fp8, layout=self.layout)
        rows = tokens * self.splits * heads
        partial = torch.full((rows * 514,), torch.nan)
        blocks = -(-heads // FEW_HEADS.heads)
        arrivals = torch.zeros(tokens, blocks, dtype=torch.int32)
        launch = attend.Launch(FEW_HEADS, self.splits, partial, rows * 512, arrivals)
        attend.launch_attend(call, out, launch)
        assert_matches_oracle(call, out, TENSOR_CORE_BODY)
        assert not arrivals.any(), f"arrivals are left: {arrivals.tolist()}"


@dataclass(frozen=True, slots=True)
class WriteCase:
    """One launch of the window writer, compared with the reference byte for byte."""

    record: str

    def run(self) -> None:
        generator = torch.Generator().manual_seed(3)
        latents = torch.randn(7, 512, generator=generator)
        latents *= torch.exp2(torch.randint(-20, 12, (7, 1), generator=generator).float())
        slots = torch.tensor([3, -1, 20, 0, 7, -5])
        positions = torch.tensor([0, 5, 127, 4095, 2**40, -3, 1000])
        queries = torch.randn(7, 2, 512, generator=generator).to(torch.bfloat16)
        results = []
        for write in (write_window.write_window, reference.write_window):
            cache = poisoned_cache(
                record_named(self.record),
                num_pages=3,
                page_rows=7,
                page_padding_bytes=96,
                offset_rows=2,
            )
            rotated = torch.full_like(queries, torch.nan)
            rows, rope = latents.to(torch.bfloat16), plain_rope_table(4096)
            write(WriteWindowCall(rows, cache, slots, positions, rope, queries, rotated))
            every_byte = torch.empty(0, dtype=torch.uint8).set_(cache.pages.untyped_storage())
            results.append((every_byte, rotated))
        wrong = int((results[0][0] != results[1][0]).sum())
        assert wrong == 0, f"{wrong} bytes of the cache are not the reference's"
        assert torch.equal(results[0][1], results[1][1]), "the queries are not the reference's"


def _sizes(window: str = "mxfp8", compressed: str = "mxfp8", **sizes: int) -> dict[str, Any]:
    plain = {"tokens": 2, "heads": 4, "window_keys": 33, "compressed_keys": 165}
    return {**plain, **sizes, "window_record": window, "compressed_record": compressed}


INTERLEAVED = Layout.CHUNK_INTERLEAVED
CASES: dict[str, AttendCase | WriteCase] = {
    "bf16": AttendCase(_sizes(heads=8)),
    "bf16-split": AttendCase(_sizes(heads=8), splits=3),
    "fp8": AttendCase(_sizes(heads=8), fp8=True),
    "fp8-split": AttendCase(_sizes(heads=8), splits=3, fp8=True),
    "mxfp8-nvfp4": AttendCase(_sizes("mxfp8", "nvfp4"), fp8=True),
    "mxfp8-nvfp4-split": AttendCase(_sizes("mxfp8", "nvfp4"), splits=2),
    "nvfp4-planar": AttendCase(_sizes("nvfp4_planar", "nvfp4_planar"), splits=2, fp8=True),
    "v4-mxfp8": AttendCase(_sizes("v4", "mxfp8"), fp8=True),
    "v4-mxfp8-split": AttendCase(_sizes("v4", "mxfp8"), splits=2),
    "interleaved": AttendCase(_sizes(tokens=1, heads=16), fp8=True, layout=INTERLEAVED),
    "heads-48": AttendCase(_sizes(tokens=1, heads=48, window_keys=20, compressed_keys=20)),
    "no-rotation": AttendCase(_sizes(heads=16), fp8=True, rotate=False),
    "no-lengths": AttendCase(_sizes(heads=16), fp8=True, traps={}),
    "write-mxfp8": WriteCase("mxfp8"),
    "write-nvfp4": WriteCase("nvfp4"),
    "write-v4": WriteCase("v4"),
}


def take_over(target: int) -> None:
    """From here on the launches of this process go to the machine, as for a GPU of this capability."""
    facts = DeviceFacts(divmod(target, 10), MULTIPROCESSORS)
    for module, name in ((attend, "attend_kernel"), (write_window, "write_kernel")):
        replaced = {
            name: OnMachine(getattr(module, name), target),
            "compile_mode": lambda kernel: "ptx",
            "device_facts": lambda device: facts,
        }
        for attribute, value in replaced.items():
            setattr(module, attribute, value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiled kernels on a machine made of NumPy.")
    parser.add_argument("cases", nargs="*", help="names of cases; all of them if none is given")
    parser.add_argument("--target", type=int, default=90, help="compute capability, 90 for sm_90")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return 0
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; --list prints the names")
    take_over(options.target)
    failed = 0
    for name in options.cases or CASES:
        begin, verdict = time.monotonic(), "ok"
        try:
            CASES[name].run()
        except (AssertionError, PtxError) as error:
            verdict, failed = f"FAILED {error}".replace("\n", " | "), failed + 1
        seconds = time.monotonic() - begin
        print(
            f"sm_{options.target} triton {triton.__version__} {name}: {verdict} ({seconds:.1f} s)",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
