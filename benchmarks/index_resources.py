"""Registers, shared memory and spills of the compressor and indexer kernels, without a GPU.

    python benchmarks/index_resources.py [--targets 80,90] [--json]

Works with every Triton release that the package supports.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from sparse_mla.cache.records import INDEX_RECORDS
from sparse_mla.kernels.triton import index_scores_hopper as hopper
from sparse_mla.kernels.triton.compress import pool_kernel, store_ring_kernel
from sparse_mla.kernels.triton.index_scores import row_scores_kernel, shared_scores_kernel
from sparse_mla.kernels.triton.index_select import (
    block_maxima_kernel,
    select_blocks_kernel,
    select_positions_kernel,
)
from sparse_mla.kernels.triton.index_select_parts import select_parts_kernel
from sparse_mla.kernels.triton.index_topk import (
    FEW_LISTED,
    GROUP,
    HOPPER_REGISTERS,
    KEYS,
    MANY_LISTED,
    MAXIMA_BLOCKS,
    PART_FOLD,
    PART_KEYS,
    PART_LANES,
    PART_REGISTERS,
    PART_WARPS,
    SELECT_LANES,
    SELECT_WARPS,
    SHARED_LANES,
    SHARED_PARTS,
)
from sparse_mla.kernels.triton.prepare_index_queries import prepare_kernel
from sparse_mla.kernels.triton.rms_norm import norm_kernel
from sparse_mla.kernels.triton.write_index_keys import write_index_keys_kernel

TARGETS = (80, 86, 89, 90, 100, 120)
HEADS = 32
POINTERS = {
    "*u8": ("codes", "pages"),
    "*fp32": ("weights", "weight", "rope", "folded", "ring", "projected"),
    "*i32": ("table", "requests", "visible", "candidates", "groups", "lists", "maxima", "best",
             "request_ids", "query_start_loc"),
    "*i64": ("slots", "positions"),
    "*bf16": ("keys", "queries", "out", "rows"),
}  # fmt: skip
OVERRIDES = {  # names that mean different things in different kernels
    ("prepare_kernel", "weights"): "*bf16",
    ("prepare_kernel", "scales"): "*u8",
    ("row_scores_kernel", "scales"): "*u8",
    ("shared_scores_kernel", "scales"): "*u8",
    ("hopper_scores_kernel", "scales"): "*u8",
    ("select_positions_kernel", "positions"): "*i32",
    ("select_parts_kernel", "positions"): "*i32",
}
UNALIGNED = ("weights", "scales", "table", "requests", "visible", "candidates", "positions",
             "groups", "lists", "slots", "rope", "weight", "request_ids", "query_start_loc")  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What one compiled variant takes."""

    target: int
    kernel: str
    record: str
    registers: int
    stack_bytes: int  # local memory, spills included
    shared_bytes: int


def variants(target: int) -> Iterator[tuple[JITFunction, str, dict[str, object], int, bool]]:
    """(kernel, record, compile-time arguments, warps, whether products may be fused)."""
    for record in INDEX_RECORDS:
        common = {"RECORD": record, "UNIT": 16, "HEADS": HEADS, "KEYS": KEYS, "GROUP": GROUP}
        for filtered in (False, True):
            yield (
                row_scores_kernel,
                record.name,
                {**common, "FILTER": filtered, "MODE": "ptx"},
                4,
                True,
            )
        if target == 90:
            shape = {"KEYS": hopper.KEYS, "LAYOUTS": hopper.layouts(record, HEADS)}
            for filtered in (False, True):
                fixed = {**common, **shape, "FILTER": filtered}
                yield hopper.hopper_scores_kernel, record.name, fixed, hopper.WARPS, True
        shape = {"ROWS": SHARED_LANES // HEADS, "PARTS": SHARED_PARTS, "MODE": "ptx"}
        yield shared_scores_kernel, record.name, {**common, **shape}, 8, True
        rows = {"RECORD": record, "ROWS": 8, "MODE": "ptx"}
        yield write_index_keys_kernel, record.name, rows, 4, False
        yield prepare_kernel, record.name, rows, 4, False
    for filtered in (False, True):
        fixed = {"LANES": SELECT_LANES, "GROUP": GROUP, "FILTER": filtered}
        yield select_positions_kernel, "", fixed, SELECT_WARPS, True
        shape = {"FOLD": PART_FOLD, "KEYS": PART_KEYS, "FEW": FEW_LISTED, "MANY": MANY_LISTED}
        fixed = {**fixed, "LANES": PART_LANES, **shape}
        yield select_parts_kernel, "", fixed, PART_WARPS, True
    yield select_blocks_kernel, "", {"LANES": SELECT_LANES}, SELECT_WARPS, True
    yield block_maxima_kernel, "", {"BLOCKS": MAXIMA_BLOCKS}, 4, True
    yield pool_kernel, "", {"BLOCK": 512, "MODE": "ptx"}, 4, False
    yield store_ring_kernel, "", {"BLOCK": 1024}, 4, True
    yield norm_kernel, "", {"BLOCK": 2048, "MODE": "ptx"}, 4, False


def signature_of(kernel: JITFunction, fixed: Mapping[str, object]) -> dict[str, str]:
    """The type of every argument."""
    types = {name: kind for kind, names in POINTERS.items() for name in names}
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        kind = OVERRIDES.get((kernel.__name__, name), types.get(name, "*i32"))
        if name in fixed:
            kind = "constexpr"
        elif parameter.annotation_type:
            kind = parameter.annotation_type
        elif name == "scales":
            kind = "*u8"
        signature[name] = kind
    return signature


def measure(
    target: int, kernel: JITFunction, record: str, fixed: dict[str, object], warps: int, fuse: bool
) -> Usage:
    """Compile one variant and read its resources."""
    signature = signature_of(kernel, fixed)
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") and name not in UNALIGNED
    }
    options: dict[str, object] = {"num_warps": warps, "enable_fp_fusion": fuse}
    source = ASTSource
    if kernel is hopper.hopper_scores_kernel:
        source, options["maxnreg"] = GluonASTSource, HOPPER_REGISTERS
    if kernel is select_parts_kernel:
        options["maxnreg"] = PART_REGISTERS
    compiled = compile_kernel(
        source(kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", target, 32),
        options=options,
    )
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found is not None, said.stdout
    name = kernel.__name__ + (", filtered" if fixed.get("FILTER") else "")
    return Usage(target, name, record, int(found[1]), int(found[2]), int(compiled.metadata.shared))


def main() -> None:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="FP8 keys only")
    options = parser.parse_args()
    for target in map(int, options.targets.split(",")):
        for variant in variants(target):
            if options.quick and variant[1] not in ("", "index_fp8"):
                continue
            usage = measure(target, *variant)
            if options.json:
                print(json.dumps(asdict(usage)), flush=True)
            else:
                print(
                    f"sm_{target:<3} {usage.kernel:34} {usage.record:11} registers "
                    f"{usage.registers:3} stack {usage.stack_bytes:4} shared {usage.shared_bytes}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
