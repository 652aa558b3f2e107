"""Portable attention and the window writer against the peer, each checked against the oracle first.

    python benchmarks/attend.py [--peer PATH] [--write] [--variants]

Prints one row per case; `--write` appends result lines to `benchmarks/baselines/<gpu>.jsonl`. `--variants`
times other launch configs of the portable kernel instead, one line each, in use or not.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import common
import torch
import triton

from sparse_mla.cache.records import MXFP8, NVFP4, V4, RecordFormat
from sparse_mla.kernels.contract import AttendCall, KeySet, Layout
from sparse_mla.kernels.triton.attend import Launch, attend, launch_attend, plan_launch
from sparse_mla.kernels.triton.configs import FEW_HEADS, MANY_HEADS_HOPPER, AttendConfig
from sparse_mla.testing import peer
from sparse_mla.testing.compare import TENSOR_CORE_BODY, assert_matches_oracle
from sparse_mla.testing.inputs import AttendProblem, make_problem

POOL_ROWS = 200_000
"""Rows of each pool: 106 MB of 528-byte rows, larger than any L2."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    tokens: int
    heads: int
    window: RecordFormat = MXFP8
    compressed: RecordFormat = MXFP8
    window_keys: int = 128
    compressed_keys: int = 512


CASES = (
    *(Case(tokens, 64) for tokens in (1, 8, 32, 64, 128, 512, 4096)),
    *(Case(tokens, 8) for tokens in (1, 16, 128)),
    Case(128, 16),
    Case(128, 128),
    Case(128, 64, V4, V4),
    Case(128, 64, MXFP8, NVFP4),
)


PAIRED = AttendConfig(16, 64, 8, ahead=False, registers=128)
"""Two programs of 8 warps on a multiprocessor, which cover each other's waits."""
VARIANTS: tuple[tuple[Case, AttendConfig | None, int], ...] = (  # None = as launched
    (Case(128, 8), None, 1),
    (Case(128, 8), PAIRED, 1),
    (Case(128, 8), PAIRED, 2),
    (Case(128, 8), replace(PAIRED, ahead=True), 2),
    (Case(128, 8), replace(PAIRED, keys=32), 2),
    (Case(128, 8), AttendConfig(16, 32, 4), 2),
    (Case(128, 8), FEW_HEADS, 2),
    (Case(128, 8), replace(PAIRED, num_warps=16), 1),
    (Case(128, 8), replace(PAIRED, keys=128, num_warps=16), 1),
    (Case(128, 8), replace(PAIRED, num_warps=16, ahead=True), 1),
    (Case(128, 8), replace(PAIRED, keys=128, num_warps=16, ahead=True), 1),
    (Case(512, 8), None, 1),
    (Case(512, 8), PAIRED, 1),
    (Case(66, 8), None, 1),
    (Case(66, 8), PAIRED, 4),
    (Case(16, 8), None, 1),
    (Case(16, 8), PAIRED, 10),
    (Case(128, 8, MXFP8, NVFP4), None, 1),
    (Case(128, 8, MXFP8, NVFP4), PAIRED, 2),
    (Case(8, 64), None, 1),
    (Case(8, 64), PAIRED, 8),
    (Case(32, 64), None, 1),
    (Case(32, 64), PAIRED, 2),
    (Case(64, 64), None, 1),
    (Case(64, 64), PAIRED, 1),
    (Case(64, 64), AttendConfig(32, 64, 8, ahead=False), 1),
    (Case(128, 64, MXFP8, NVFP4), None, 1),
    (Case(128, 64, MXFP8, NVFP4), replace(MANY_HEADS_HOPPER, keys=32), 1),
    (Case(128, 64, MXFP8, NVFP4), replace(MANY_HEADS_HOPPER, query_through_out=False), 1),
)
"""(case, config, splits)."""


def build(
    case: Case, window: RecordFormat, compressed: RecordFormat
) -> tuple[AttendProblem, list[AttendCall]]:
    """A problem over large pools and calls that each attend other rows of them."""
    problem = make_problem(
        tokens=case.tokens,
        heads=case.heads,
        window_keys=case.window_keys,
        compressed_keys=case.compressed_keys,
        window_record=window,
        compressed_record=compressed,
        pool_rows=POOL_ROWS,
        poison=False,
        named_share=1.0,
        device="cuda",
    )
    keys = case.window_keys + case.compressed_keys
    base = problem.call()
    calls = []
    for _ in range(common.input_sets(case.tokens * keys * compressed.row_bytes)):
        assert base.compressed is not None
        calls.append(replace(base, window=other(base.window), compressed=other(base.compressed)))
    return problem, calls


def other(keys: KeySet) -> KeySet:
    """The same cache with other random rows, all lanes valid, lengths given."""
    shape = keys.indices.shape
    slots = torch.randint(keys.cache.num_slots, shape, dtype=torch.int32, device="cuda")
    return KeySet(
        keys.cache, slots, torch.full(shape[:1], shape[1], dtype=torch.int32, device="cuda")
    )


def launch_of(call: AttendCall, config: AttendConfig | None, splits: int) -> Launch:
    """A launch of a call with a given config, scratch included; None = as `attend` launches it."""
    if config is None:
        return plan_launch(call)
    rows = call.num_tokens * splits * call.num_heads
    partial = torch.empty(rows * 514, dtype=torch.float32, device="cuda")
    counters = call.num_tokens * -(-call.num_heads // 16)
    arrivals = torch.zeros(counters, dtype=torch.int32, device="cuda")
    return Launch(config, splits, partial, rows * 512, arrivals)


def ragged_problem(case: Case, most_tokens: int) -> AttendProblem:
    """A problem of a case's kind with holes and lengths, small enough for the oracle."""
    return make_problem(
        tokens=min(case.tokens, most_tokens),
        heads=case.heads,
        window_keys=case.window_keys,
        compressed_keys=case.compressed_keys,
        window_record=case.window,
        compressed_record=case.compressed,
        lengths="random",
        hole_probability=0.1,
        device="cuda",
    )


def check(case: Case, config: AttendConfig | None = None, splits: int = 1) -> None:
    """The oracle on a small problem of the same kind; raises if it does not hold."""
    problem = ragged_problem(case, 4)
    call, out = problem.call(), problem.allocate_out(fp8=True, layout=Layout.CHUNK_INTERLEAVED)
    launch_attend(call, out, launch_of(call, config, splits))
    assert_matches_oracle(call, out, TENSOR_CORE_BODY)


def measure_variant(case: Case, config: AttendConfig | None, splits: int) -> str:
    """One line: a case with a config."""
    check(case, config, splits)
    problem, calls = build(case, case.window, case.compressed)
    out = problem.allocate_out(
        fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=False, max_logits=False
    )
    launch = launch_of(calls[0], config, splits)
    micro = common.time_launches(
        [lambda call=call: launch_attend(call, out, launch) for call in calls]
    )
    used = launch.config
    return (
        f"tokens {case.tokens:4} heads {case.heads:3} {case.window.name:6} {case.compressed.name:6} "
        f"{micro:8.1f} us  {used.heads} heads x {used.keys} keys, {used.num_warps} warps, "
        f"splits {launch.splits}{', ahead' if used.ahead else ''}"
        f"{f', {used.registers} registers' if used.registers else ''}"
        f"{', query through out' if used.query_through_out else ''}"
        f"{'  (in use)' if config is None else ''}"
    )


def measure(case: Case, with_peer: bool) -> common.Result:
    """Time a case, and the peer's attention on 584-byte rows in the same process."""
    check(case)
    problem, calls = build(case, case.window, case.compressed)
    out = problem.allocate_out(
        fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=False, max_logits=False
    )
    ours = common.time_launches([lambda call=call: attend(call, out) for call in calls])
    theirs = peer_microseconds(case) if with_peer and case.compressed_keys % 64 == 0 else None
    return result_of(case, "triton", ours, theirs, head_commit())


def peer_microseconds(case: Case) -> float:
    """The peer's attention alone, on 584-byte rows; it pads fewer than 64 heads."""
    problem, calls = build(case, V4, V4)
    body = peer.PeerDecode(
        problem.q, calls[0].window, calls[0].compressed, problem.sink, problem.scale
    )
    return common.time_launches(
        [lambda call=call: body(call.window, call.compressed) for call in calls]
    )


def head_commit() -> str:
    """The commit that is checked out, `unknown` outside a repository."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return commit.stdout.strip() or "unknown"


def result_of(
    case: Case, backend: str, ours: float, theirs: float | None, commit: str
) -> common.Result:
    """A case as it is kept; times in microseconds, the peer's if it ran."""
    keys = case.window_keys + case.compressed_keys
    read = case.tokens * (
        case.window_keys * case.window.row_bytes + case.compressed_keys * case.compressed.row_bytes
    )
    moved = read + case.tokens * case.heads * (1024 + 512 + 16)
    return common.Result(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        op="attend",
        backend=backend,
        heads=case.heads,
        tokens=case.tokens,
        window_keys=case.window_keys,
        compressed_keys=case.compressed_keys,
        window_record=case.window.name,
        compressed_record=case.compressed.name,
        output="fp8",
        microseconds=round(ours, 2),
        tflops=round(common.attention_flops(case.tokens, case.heads, keys) / ours / 1e6, 1),
        gbps=round(moved / ours / 1e3, 1),
        peer=peer.NAME if theirs else None,
        peer_microseconds=round(theirs, 2) if theirs else None,
        ratio=round(round(theirs, 2) / round(ours, 2), 3) if theirs else None,  # of what is written
    )


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description="Portable attention against the peer.")
    parser.add_argument("--peer", type=Path, help="path of _flashmla_C.abi3.so")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    if options.variants:
        for variant in VARIANTS:
            print(measure_variant(*variant), flush=True)
        return
    with_peer = options.peer is not None
    if with_peer:
        peer.load_peer(options.peer)
    results = [measure(case, with_peer) for case in CASES]
    for result in results:
        print(
            f"tokens {result.tokens:5} heads {result.heads:3} {result.window_record:6} "
            f"{result.compressed_record:6} {result.microseconds:8.1f} us {result.tflops:6.1f} TFLOP/s "
            f"peer {result.peer_microseconds or float('nan'):8.1f} us"
        )
    if options.write:
        name = results[0].gpu.lower().replace("nvidia ", "").replace(" ", "-")
        print("appended to", common.append_results(results, name))


if __name__ == "__main__":
    main()
