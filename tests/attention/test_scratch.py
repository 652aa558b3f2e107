"""Memory of the CPU body: bounded, stated, and measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from sparse_mla.kernels.torch.attend import CHUNK_BYTES, chunk_tokens, scratch_bytes
from sparse_mla.kernels.torch.rows import BLOCK_BYTES
from sparse_mla.testing.inputs import make_problem

MEASURE = """
import torch
torch.set_num_threads(1)
from sparse_mla.kernels.torch.attend import attend, scratch_bytes
from sparse_mla.testing.inputs import make_problem

problem = make_problem(tokens={tokens}, heads={heads}, window_keys=128, compressed_keys=512, pool_rows=2048)
small = problem.rows(torch.arange(2))
attend(small.call(), small.allocate_out(fp8=True))  # loads tables and libraries
call, out = problem.call(), problem.allocate_out(fp8=True)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # peak = now

def status(key):
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key))
    return int(line.split()[1]) * 1024

before = status("VmRSS")
attend(call, out)
print(status("VmHWM") - before, scratch_bytes(call))
"""


def _measure(tokens: int, heads: int) -> tuple[int, int]:
    code = MEASURE.format(tokens=tokens, heads=heads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "clear_refs" in done.stderr or "VmHWM" in done.stderr:
        pytest.skip("peak memory cannot be read on this system")
    assert done.returncode == 0, done.stderr
    peak, stated = done.stdout.split()
    return int(peak), int(stated)


def test_peak_scratch_of_a_prefill_is_below_its_statement():
    """4096 tokens, 64 heads, 640 keys: far below 2 GB, and below what `scratch_bytes` says."""
    peak, stated = _measure(4096, 64)
    assert stated < 512 << 20
    assert peak < stated, f"{peak} bytes measured, {stated} stated"


@pytest.mark.parametrize("tokens", [1, 512, 32_768])
def test_statement_does_not_grow_with_tokens(tokens: int):
    problem = make_problem(tokens=1, heads=64, window_keys=128, compressed_keys=512)
    call = replace(problem.call(), q=problem.q.expand(tokens, -1, -1))
    assert 1 <= chunk_tokens(call) <= tokens
    assert scratch_bytes(call) <= CHUNK_BYTES + BLOCK_BYTES


def test_one_huge_row_takes_one_row():
    problem = make_problem(tokens=3, heads=2, window_keys=60_000, pool_rows=256)
    assert chunk_tokens(problem.call()) == 1
    assert scratch_bytes(problem.call()) < 60_000 * 2 * 2200 + BLOCK_BYTES
