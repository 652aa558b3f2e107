"""Hopper attention beside the peer, one line a case: each checked against the oracle, then both timed in one process.

    python benchmarks/hopper.py --peer PATH [--cases "64x128 8x32:v4"] [--write FILE --commit 1a2b3c4] [--block 32]

Cases are written as in `hopper_sources.py`. `--write` appends result lines to a file, under the commit that is given: where there is a
GPU there may be no repository. With `--block` every call is one launch in blocks of so many heads, as `bodies.MICROSECONDS` has it.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import common
import torch
from attend import Case, head_commit, peer_microseconds, ragged_problem, result_of
from hopper_sources import calls_of, case_of, one_launch_a_call

from sparse_mla.cache.records import V4
from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.kernels.hopper.bodies import BLOCKS
from sparse_mla.testing import peer
from sparse_mla.testing.bench import append_lines
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle

CASES = " ".join(
    [f"64x{tokens}" for tokens in (1, 8, 32, 64, 128, 136, 160, 192, 256, 512, 4096)]
    + ["64x512+16256", "64x128:nvfp4", "64x128:v4", "128x128"]
    + [f"{heads}x{tokens}" for heads in (8, 16, 32) for tokens in (1, 32, 128, 512)]
    + ["8x512:nvfp4", "16x512:nvfp4", "32x512:nvfp4", "8x128:v4", "16x128:v4", "32x128:v4"]
)
MOST_CHECKED = 300
"""Tokens that are compared with the oracle: several rows a CTA, and a rest of their rounds."""
HEADS_OF_PEER = 64
"""Fewer are padded by the peer."""


def check(case: Case) -> None:
    """The oracle on a ragged problem of the same kind."""
    problem = ragged_problem(case, MOST_CHECKED)
    call, out = problem.call(), problem.allocate_out(fp8=True, layout=Layout.CHUNK_INTERLEAVED)
    hopper.attend(call, out)
    assert_matches_oracle(call, out, HOPPER_BODY)


@cache
def peer_of(tokens: int, heads: int, window_keys: int, compressed_keys: int) -> float:
    """Microseconds of the peer, whose rows are its own whatever ours are; asked once for all our head counts that it pads."""
    return peer_microseconds(Case(tokens, heads, V4, V4, window_keys, compressed_keys))


def measure(case: Case, commit: str, *, with_peer: bool) -> tuple[common.Result, str]:
    """A case's result, and the launches that a call of it is."""
    if case.compressed_keys <= 512:  # the oracle would take a minute for more
        check(case)
    calls, out = calls_of(case)
    ours = common.time_launches([lambda call=call: hopper.attend(call, out) for call in calls])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    launches = " + ".join(
        f"{len(part.tokens)} in blocks of {part.block}, splits {part.splits}"
        for part in hopper.launches_of(calls[0], sms)
    )
    theirs = None
    if with_peer and case.compressed.name != "nvfp4":
        heads = max(case.heads, HEADS_OF_PEER)
        theirs = peer_of(case.tokens, heads, case.window_keys, case.compressed_keys)
    return result_of(case, "hopper", ours, theirs, commit), launches


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description="Hopper attention against the peer.")
    parser.add_argument("--peer", type=Path, help="path of _flashmla_C.abi3.so")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--commit", default=head_commit())
    parser.add_argument("--block", type=int, choices=BLOCKS)
    options = parser.parse_args()
    if options.block is not None:
        hopper.block_heads = lambda *_: options.block
        one_launch_a_call()
    if options.peer is not None:
        peer.load_peer(options.peer)
    for name in options.cases.split():
        result, launches = measure(
            case_of(name), options.commit, with_peer=options.peer is not None
        )
        print(
            f"{name:14} {result.microseconds:8.2f} us {result.tflops:6.1f} TFLOP/s "
            f"peer {result.peer_microseconds or float('nan'):8.2f} us  {launches}",
            flush=True,
        )
        if options.write is not None:
            append_lines([result], options.write)


if __name__ == "__main__":
    main()
