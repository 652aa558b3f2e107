"""Speed of attention on this CPU beside the machine's own matmul rate at the same shapes.

    python benchmarks/cpu_attend.py [--threads 1] [--tokens 64] [--repeats 5] [--output fp8]

A case is timed only after its result passed the comparison with the oracle. Rates count the two products
alone (4 * T * H * K * 512 operations); decoding, softmax, rotations and the output cast are what the
difference goes to. The reference rates are `torch.bmm` of T matrices of the same sizes, both products, in
bf16 and float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from sparse_mla.kernels.contract import HEAD_DIM
from sparse_mla.kernels.torch.attend import attend, chunk_tokens, scratch_bytes
from sparse_mla.testing.compare import FLOAT32_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

CASES = (  # heads, window keys, compressed keys, compressed record
    (64, 128, 512, "mxfp8"),
    (64, 128, 512, "nvfp4"),
    (64, 128, None, "mxfp8"),
    (128, 128, 512, "mxfp8"),
    (16, 128, 512, "mxfp8"),
    (8, 128, 512, "mxfp8"),
)


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """Shortest of some runs after a warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_rate(dtype: torch.dtype, tokens: int, heads: int, keys: int, repeats: int) -> float:
    """GFLOP/s of the two products of attention at these sizes, without anything else."""
    tokens = min(tokens, 16)
    q = torch.randn(tokens, heads, HEAD_DIM).to(dtype)
    k = torch.randn(tokens, keys, HEAD_DIM).to(dtype)
    p = torch.randn(tokens, heads, keys).to(dtype)

    def both() -> None:
        torch.bmm(q, k.transpose(1, 2))
        torch.bmm(p, k)

    return 4 * tokens * heads * keys * HEAD_DIM / best_seconds(both, repeats) / 1e9


def check(problem: AttendProblem, fp8: bool) -> None:
    """Compare some tokens with the oracle."""
    some = problem.rows(torch.arange(0, problem.q.shape[0], 17))
    out = some.allocate_out(fp8=fp8)
    attend(some.call(), out)
    assert_matches_oracle(some.call(), out, FLOAT32_BODY)


def main() -> None:
    """Print one line for a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", choices=("bf16", "fp8"), default="fp8")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fp8 = options.output == "fp8"
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.tokens} tokens")
    print(
        "heads window compressed record  pool      us/token GFLOP/s  bmm bf16 bmm f32  share bf16/f32"
    )
    for heads, window, compressed, record in CASES:
        for pool, rows in (("random", 65536), ("shared", 1024)):
            problem = make_problem(
                tokens=options.tokens,
                heads=heads,
                window_keys=window,
                compressed_keys=compressed,
                compressed_record=record,
                pool_rows=rows,
            )
            check(problem, fp8)
            call, out = problem.call(), problem.allocate_out(fp8=fp8)
            seconds = best_seconds(lambda: attend(call, out), options.repeats)  # noqa: B023
            keys = window + (compressed or 0)
            rate = 4 * options.tokens * heads * keys * HEAD_DIM / seconds / 1e9
            bf16, f32 = (
                matmul_rate(dtype, options.tokens, heads, keys, options.repeats)
                for dtype in (torch.bfloat16, torch.float32)
            )
            micro = seconds / options.tokens * 1e6
            print(
                f"{heads:5} {window:6} {compressed or 0:10} {record:7} {pool:7} {micro:10.0f} {rate:7.1f}"
                f" {bf16:8.1f} {f32:8.1f}  {rate / bf16:6.0%} {rate / f32:4.0%}"
                f"  chunk {chunk_tokens(call, fp8)}, scratch {scratch_bytes(call, fp8) >> 20} MiB"
            )


if __name__ == "__main__":
    main()
