"""Attention cases, by name: the sizes and corners in which such kernels fail.

The tests, `check` and the GPU runs share them. A case is a problem, what is asked of the kernel, and
nothing about devices; `run_case` takes the backend and the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_mla.backends.select import DeviceInfo, Problem, load_kernel, select
from sparse_mla.cache.records import KV_RECORDS, MXFP8, NVFP4, V4
from sparse_mla.kernels.contract import AttendCall, AttendOut, Layout
from sparse_mla.testing.compare import Comparison, compare_with_oracle, precision_of
from sparse_mla.testing.inputs import ProblemSpec, make_problem

HEADS = (1, 2, 4, 8, 12, 16, 32, 48, 64, 96, 128)
KEYS = (0, 1, 63, 64, 65, 128, 133, 192, 256, 512, 640, 1024, 1152, 2048)
TOKENS = (0, 1, 2, 15, 16, 17)
PAGE_ROWS = (1, 2, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and what is asked of the kernel."""

    name: str
    spec: ProblemSpec
    fp8: bool = False
    layout: Layout = Layout.STANDARD  # of query and output
    rotate: bool = True  # both rotations


def run_case(case: Case, backend: str, device: torch.device | str) -> Comparison:
    """Build the problem, run the kernel of a backend, compare with the oracle.

    Arguments are not validated here: kernels also get what the ops would refuse, such as indices past a
    cache.

    Raises:
        UnsupportedError: the backend declares that it cannot run the case.
    """
    problem = make_problem(case.spec, device=device)
    call = problem.call(
        rotate_query=case.rotate, unrotate_output=case.rotate, query_layout=case.layout
    )
    out = problem.allocate_out(fp8=case.fp8, layout=case.layout)
    if case.spec.tokens:
        attend_with(backend, call, out)
    precision = precision_of(body_of(backend, call, out), call.q.device)
    return compare_with_oracle(call, out, precision)


def attend_with(backend: str, call: AttendCall, out: AttendOut) -> None:
    """Run the attention kernel of a backend (or "auto"), if its declaration allows the call.

    Raises:
        UnsupportedError: it does not; carries the reasons.
    """
    load_kernel(body_of(backend, call, out), "attend")(call, out)


def body_of(backend: str, call: AttendCall, out: AttendOut) -> str:
    """The name of the backend that runs a call: the one asked for, or the choice of "auto".

    Raises:
        UnsupportedError: its declaration does not allow the call; carries the reasons.
    """
    problem = Problem(
        op="attend",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        window_record=call.window.cache.record.name,
        compressed_record=None if call.compressed is None else call.compressed.cache.record.name,
        window_keys=call.window.width,
        compressed_keys=0 if call.compressed is None else call.compressed.width,
        output="fp8" if out.is_fp8 else "bf16",
        batch_invariant=call.batch_invariant,
    )
    return select(problem, DeviceInfo.detect(call.q.device), backend).name


def attend_cases() -> tuple[Case, ...]:
    """Every case, small enough for a CPU: about 120 problems of a few tokens."""
    return (
        *_heads(),
        *_keys(),
        *_tokens(),
        *_records(),
        *_pages(),
        *_corners(),
    )


def _heads() -> list[Case]:
    cases = []
    for number, heads in enumerate(HEADS):
        spec = ProblemSpec(3, heads, 40, 70, hole_probability=0.1, seed=heads)
        layout = (Layout.STANDARD, Layout.CHUNK_INTERLEAVED)[number % 2]
        cases.append(Case(f"heads {heads} bf16", spec, layout=layout))
        cases.append(Case(f"heads {heads} fp8", spec, fp8=True, layout=layout))
    return cases


def _keys() -> list[Case]:
    cases = []
    for keys in KEYS:
        window = min(keys, 128)
        two = ProblemSpec(2, 4, window, keys - window, compressed_record=NVFP4, seed=keys)
        one = ProblemSpec(2, 16, keys, lengths="random", seed=keys)
        cases += [Case(f"keys {keys} in two sets", two), Case(f"keys {keys} in one set", one)]
    return cases


def _tokens() -> list[Case]:
    return [
        Case(f"tokens {tokens}", ProblemSpec(tokens, 8, 33, 31, seed=tokens), fp8=tokens % 2 == 1)
        for tokens in TOKENS
    ]


def _records() -> list[Case]:
    cases = []
    for window in KV_RECORDS:
        for compressed in KV_RECORDS:
            spec = ProblemSpec(
                tokens=3,
                heads=8,
                window_keys=37,
                compressed_keys=29,
                window_record=window,
                compressed_record=compressed,
                window_page_rows=32,
                compressed_page_rows=16,
                hole_probability=0.2,
                lengths="random",
                page_padding_bytes=500,
                offset_rows=3,
            )
            cases.append(Case(f"records {window.name} + {compressed.name}", spec))
    return cases


def _pages() -> list[Case]:
    cases = []
    for number, rows in enumerate(PAGE_ROWS):
        other = PAGE_ROWS[-1 - number]
        for record in (MXFP8, NVFP4, V4):
            spec = ProblemSpec(
                tokens=2,
                heads=4,
                window_keys=21,
                compressed_keys=45,
                window_record=MXFP8,
                compressed_record=record,
                window_page_rows=rows,
                compressed_page_rows=other,
                page_padding_bytes=64 * number,
                offset_rows=number,
                strided=True,
            )
            cases.append(Case(f"pages {rows} + {other} {record.name}", spec, fp8=number % 2 == 0))
    return cases


def _corners() -> list[Case]:
    base = {"tokens": 4, "heads": 8, "window_keys": 128, "compressed_keys": 64}

    def case(name: str, *, fp8: bool = False, rotate: bool = True, **fields: object) -> Case:
        return Case(name, ProblemSpec(**{**base, **fields}), fp8=fp8, rotate=rotate)  # type: ignore[arg-type]

    return [
        case("no rotation", rotate=False),
        case("no compressed set", compressed_keys=None),
        case("empty compressed list", compressed_keys=0),
        case("every row empty", lengths="zero"),
        case("every row empty, fp8", lengths="zero", fp8=True),
        case("every lane a hole", hole_probability=1.0),
        case("every lane past the cache", beyond_probability=1.0),
        case("holes and lanes past the cache", hole_probability=0.4, beyond_probability=0.2),
        case("mostly holes", hole_probability=0.97, fp8=True),
        case("no sink", sink=None),
        case("sink +20", sink=20.0),
        case("sink +inf", sink=float("inf")),
        case("sink +inf, no keys", sink=float("inf"), lengths="zero"),
        case("sink -inf", sink=float("-inf")),
        case("sink -inf, fp8", sink=float("-inf"), fp8=True),
        case("outlier channels", outlier_dims=4, key_scale=0.25),
        case("large keys", key_scale=8.0),
        case("tiny keys", key_scale=1e-4),
        case("int32 positions", positions_dtype=torch.int32),
    ]
