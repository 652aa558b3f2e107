"""The Hopper bodies for 8 to 128 heads, each case checked against the oracle first; the peer beside them.

python benchmarks/few_heads.py [--peer PATH] [--heads 8 16 32 64 128]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import torch
from attend import Case, build, ragged_problem

from sparse_mla.cache.records import MXFP8, NVFP4, V4
from sparse_mla.kernels.contract import Layout
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.testing import peer
from sparse_mla.testing.compare import HOPPER_BODY, assert_matches_oracle

TOKENS = (1, 32, 64, 128, 512)
RECORDS = ((MXFP8, MXFP8), (MXFP8, NVFP4), (V4, V4))


def check(case: Case) -> None:
    """The oracle on a ragged problem of the same kind, several rows a CTA and a rest if the case has that many."""
    problem = ragged_problem(case, 300)
    call, out = problem.call(), problem.allocate_out(fp8=True, layout=Layout.CHUNK_INTERLEAVED)
    hopper.attend(call, out)
    assert_matches_oracle(call, out, HOPPER_BODY)


def measure(case: Case) -> str:
    """One line: records, heads, tokens, of each launch blocks and their heads and splits, time."""
    check(case)
    problem, calls = build(case, case.window, case.compressed)
    out = problem.allocate_out(
        fp8=True, layout=Layout.CHUNK_INTERLEAVED, lse=False, max_logits=False
    )
    micro = common.time_launches([lambda call=call: hopper.attend(call, out) for call in calls])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    launches = " + ".join(
        f"{len(part.tokens):4} in blocks {-(-case.heads // part.block):2} of {part.block:2} splits {part.splits}"
        for part in hopper.launches_of(calls[0], sms)
    )
    return (
        f"{case.window.name:6} {case.compressed.name:6} heads {case.heads:3} tokens {case.tokens:4} "
        f"{launches} {micro:8.2f} us"
    )


def measure_peer(tokens: int) -> str:
    """The peer's attention alone; it pads 8 heads to 64."""
    problem, calls = build(Case(tokens, 8, V4, V4), V4, V4)
    body = peer.PeerDecode(
        problem.q, calls[0].window, calls[0].compressed, problem.sink, problem.scale
    )
    micro = common.time_launches(
        [lambda call=call: body(call.window, call.compressed) for call in calls]
    )
    return f"peer, attention alone, tokens {tokens:4} {micro:8.2f} us"


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description="Hopper bodies by number of heads.")
    parser.add_argument("--peer", type=Path, help="path of _flashmla_C.abi3.so")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 24, 32, 64])
    options = parser.parse_args()
    for window, compressed in RECORDS:
        for heads in options.heads:
            for tokens in TOKENS:
                print(measure(Case(tokens, heads, window, compressed)), flush=True)
    if options.peer is not None:
        peer.load_peer(options.peer)
        for tokens in TOKENS:
            print(measure_peer(tokens), flush=True)


if __name__ == "__main__":
    main()
