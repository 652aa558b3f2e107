"""Registers, shared memory and local-memory spills of the attention kernel, without a GPU.

    python benchmarks/resources.py [--targets 80,90] [--json]

Compiles the configs that `kernels/triton/configs.py` uses for each compute capability and reads what the
assembler reports. Works with every Triton release that the package supports.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from sparse_mla.cache.records import MXFP8, NVFP4, V4, RecordFormat
from sparse_mla.kernels.triton.attend_kernel import attend_kernel
from sparse_mla.kernels.triton.configs import FEW_HEADS, MANY_HEADS_HOPPER, AttendConfig

TARGETS = (80, 86, 89, 90, 100, 120)
SHARED_LIMIT_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
RECORDS = ((MXFP8, MXFP8), (MXFP8, NVFP4), (V4, V4))
POINTERS = {
    "q": "*bf16", "positions": "*i64", "rope": "*fp32", "sink": "*fp32", "window_pages": "*u8",
    "window_indices": "*i32", "window_lengths": "*i32", "extra_pages": "*u8",
    "extra_indices": "*i32", "extra_lengths": "*i32", "partial": "*fp32", "arrivals": "*i32",
    "out": "*u8", "scales": "*i32", "lse": "*fp32", "max_logits": "*fp32", "scale_log2": "fp32",
}  # fmt: skip
ALIGNED = ("q", "out", "window_pages", "extra_pages", "partial")
WIDE = ("stride", "stats_offset", "magic")  # arguments whose names hold one of these are int64


@dataclass(frozen=True)
class Usage:
    """What one compiled variant takes."""

    target: int
    config: str
    window: str
    compressed: str
    split: bool
    registers: int
    stack_bytes: int  # local memory, spills included
    shared_bytes: int


def constants(
    target: int, config: AttendConfig, records: tuple[RecordFormat, RecordFormat], split: bool
) -> dict[str, object]:
    """Compile-time arguments of the fused FP8 form."""
    return {
        "WINDOW_RECORD": records[0], "EXTRA_RECORD": records[1], "WINDOW_LENGTHS": True,
        "EXTRA_LENGTHS": True, "ROTATE_QUERY": True, "UNROTATE_OUTPUT": True, "SINK": True,
        "QUERY_INTERLEAVED": False, "QUERY_ALIGNED": True,
        "QUERY_THROUGH_OUT": config.query_through_out, "OUT_INTERLEAVED": False, "FP8": True,
        "LSE": False, "MAX_LOGITS": False, "SPLIT": split, "HEADS_PER_GROUP": 8,
        "HEADS": config.heads, "KEYS": config.keys, "AHEAD": config.ahead,
        "HARDWARE_E4M3": target >= 89, "MODE": "ptx",
    }  # fmt: skip


def measure(
    target: int, config: AttendConfig, records: tuple[RecordFormat, RecordFormat], split: bool
) -> Usage:
    """Compile one variant and read its resources."""
    fixed = constants(target, config, records, split)
    names = attend_kernel.arg_names
    signature = {}
    for name in names:
        scalar = "i64" if any(part in name for part in WIDE) else "i32"
        signature[name] = POINTERS.get(name, "constexpr" if name in fixed else scalar)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED}
    compiled = compile_kernel(
        ASTSource(attend_kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", target, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": 1,
            "maxnreg": config.registers,
        },
    )
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found is not None, said.stdout
    return Usage(
        target=target,
        config=f"{config.heads} heads x {config.keys} keys, {config.num_warps} warps",
        window=records[0].name,
        compressed=records[1].name,
        split=split,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
    )


def variants(target: int) -> list[tuple[AttendConfig, bool]]:
    """(config, split) pairs that a GPU of this capability runs."""
    few = [(FEW_HEADS, False), (FEW_HEADS, True)]
    return [*few, (MANY_HEADS_HOPPER, False)] if target == 90 else few


def main() -> None:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description="Resources of the portable attention kernel.")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one variant of each config")
    options = parser.parse_args()
    for target in map(int, options.targets.split(",")):
        for config, split in variants(target):
            if options.quick and not split:
                continue
            for records in RECORDS[:1] if options.quick else RECORDS:
                usage = measure(target, config, records, split)
                if options.json:
                    print(json.dumps(asdict(usage)))
                else:
                    print(
                        f"sm_{target:<3} {usage.config:30} {usage.window:6} {usage.compressed:6} "
                        f"{'split' if split else '     '} registers {usage.registers:3} "
                        f"stack {usage.stack_bytes:4} shared {usage.shared_bytes}"
                    )


if __name__ == "__main__":
    main()
