"""Time of choosing 512 positions of 64K and 128K index keys, beside the memory's own speed.

    python benchmarks/index.py [--rows 1,128] [--keys 65536,131072] [--records index_fp8,index_mxfp4]

A case is timed only after lists of it passed their check against float64 scores. Bytes model: every key
once for each row (decoding rows belong to different requests), a score written and read once, and the
list. The limit is what a plain copy of 2 GiB reaches in the same run. `--consumer` times the layers that
choose among 2048 candidate blocks, `--prefill N` rows of one request that share its keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch
from common import input_sets, time_launches

from sparse_mla.cache.records import RecordFormat, record_named
from sparse_mla.kernels.index_contract import IndexTopkCall, IndexTopkOut
from sparse_mla.kernels.triton.index_topk import index_topk
from sparse_mla.testing.bench import copy_rate
from sparse_mla.testing.index_inputs import IndexSizes, make_large_call, selection_faults

TOPK, HEADS, BLOCK_SIZE, BLOCKS, DIM = 512, 32, 8, 2048, 128


def empty_out(call: IndexTopkCall, publish: bool) -> IndexTopkOut:
    """Lists to fill."""
    rows = call.queries.num_tokens
    empty = functools.partial(torch.empty, dtype=torch.int32, device="cuda")
    return IndexTopkOut(empty(rows, TOPK), empty(rows, BLOCKS) if publish else None)


def make_sets(
    rows: int, keys: int, record: RecordFormat, options: argparse.Namespace
) -> list[IndexTopkCall]:
    """Calls whose keys together exceed the cache."""
    sizes = IndexSizes(record, TOPK, HEADS, 64, BLOCK_SIZE)
    contexts, each = ([keys], options.prefill) if options.prefill else ([keys] * rows, 1)
    one = sum(contexts) * record.row_bytes
    calls = []
    for seed in range(input_sets(one, most=16)):
        call = make_large_call(contexts, sizes, rows_each=each, seed=seed, device="cuda")
        if options.consumer:
            source = empty_out(call, publish=True)
            index_topk(call, source)
            other = make_large_call(contexts, sizes, rows_each=each, seed=99 + seed, device="cuda")
            call = dataclasses.replace(call, queries=other.queries, candidates=source.candidates)
        calls.append(call)
    return calls


def bytes_of(call: IndexTopkCall, options: argparse.Namespace) -> int:
    """The bytes model of one call."""
    rows, keys = call.queries.num_tokens, call.max_visible
    if options.consumer:
        keys = min(keys, BLOCKS * BLOCK_SIZE)
    readers = 1 if options.prefill and not options.consumer else rows
    return readers * keys * call.keys.record.row_bytes + rows * (keys * 8 + TOPK * 4)


def measure(
    rows: int, keys: int, record: RecordFormat, options: argparse.Namespace, limit: float
) -> None:
    """Check, time and print one case."""
    calls = make_sets(rows, keys, record, options)
    outs = [empty_out(call, options.publish) for call in calls]
    index_topk(calls[0], outs[0])
    count = calls[0].queries.num_tokens
    for row in {0, count // 2, count - 1}:
        faults = selection_faults(calls[0], row, outs[0].positions[row])
        if faults:
            raise SystemExit(f"row {row} of {rows} rows x {keys} keys is wrong: {faults}")
    launches = [
        functools.partial(index_topk, call, out) for call, out in zip(calls, outs, strict=True)
    ]
    micro = time_launches(launches)
    moved = bytes_of(calls[0], options)
    scored = min(keys, BLOCKS * BLOCK_SIZE) if options.consumer else keys
    flops = 2 * count * HEADS * DIM * scored
    speed = moved / (micro * 1e-6)
    print(
        f"{record.name:12} rows {count:5} keys {keys:7} {micro:9.1f} us  "
        f"model {moved / 2**20:8.1f} MiB = {speed / 1e12:5.2f} TB/s, {speed / limit:4.0%} of the copy"
        f"  {flops / micro / 1e6:6.1f} TFLOP/s",
        flush=True,
    )


def main() -> None:
    """Print one line for a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,128")
    parser.add_argument("--keys", default="65536,131072")
    parser.add_argument("--records", default="index_fp8,index_mxfp4")
    parser.add_argument("--consumer", action="store_true")
    parser.add_argument("--publish", action="store_true", help="fill candidate blocks too")
    parser.add_argument("--prefill", type=int, default=0)
    options = parser.parse_args()
    limit = copy_rate(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: a copy moves {limit / 1e12:.2f} TB/s")
    for rows in [1] if options.prefill else [int(text) for text in options.rows.split(",")]:
        for keys in [int(text) for text in options.keys.split(",")]:
            for name in options.records.split(","):
                measure(rows, keys, record_named(name), options, limit)


if __name__ == "__main__":
    main()
