"""Attention cases of `sparse-mla check`: random ones, the named corners, addresses past 2**31."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import BF16, KV_RECORDS, MXFP8, NVFP4, V4, RecordFormat
from sparse_mla.errors import UnsupportedError
from sparse_mla.kernels.contract import AttendCall, AttendOut, KeySet, Layout
from sparse_mla.kernels.reference.attend import Attended, attend_exact
from sparse_mla.testing.cases import Case, attend_cases, attend_with, body_of
from sparse_mla.testing.check import Fault, first_wrong
from sparse_mla.testing.compare import (
    Precision,
    compare_with_oracle,
    logit_bound,
    output_bound,
    output_values,
    precision_of,
)
from sparse_mla.testing.inputs import AttendProblem, ProblemSpec, make_problem

FAR_PAGE_BYTES = 2**30 + 2**20 + 96 * 11
"""Distance of the pages of a case whose last page lies past 2**31 (a multiple of 16 and 32)."""
MODEL_RECORDS: tuple[tuple[RecordFormat, RecordFormat], ...] = (
    (MXFP8, NVFP4),
    (MXFP8, MXFP8),
    (V4, V4),
)
"""Pairs that a pool of ours or of an engine holds."""


@dataclass(frozen=True, slots=True)
class AttendCheck:
    """One attention problem: against the oracle, then once more, bit for bit."""

    case: Case
    far_pages: bool = False

    @property
    def op(self) -> str:
        """Always attention."""
        return "attend"

    @property
    def name(self) -> str:
        """Of the case."""
        return self.case.name

    def fields(self) -> dict[str, Any]:
        """Fields of the problem that are not defaults, and the switches."""
        spec = asdict(self.case.spec)
        plain = asdict(ProblemSpec(tokens=0, heads=0))
        del spec["device"]
        chosen = {name: value for name, value in spec.items() if value != plain[name]}
        for name in ("window_record", "compressed_record", "positions_dtype"):
            if name in chosen:
                value = getattr(self.case.spec, name)
                chosen[name] = getattr(value, "name", str(value))
        return {
            **chosen,
            "fp8": self.case.fp8,
            "layout": self.case.layout.value,
            "rotate": self.case.rotate,
            "far_pages": self.far_pages,
        }

    def run(self, backend: str, device: torch.device) -> Fault | None:
        """Compare with the oracle, then repeat."""
        case = self.case
        problem = make_problem(case.spec, device=device)
        if self.far_pages:
            problem = _far(problem)
        call = problem.call(
            rotate_query=case.rotate, unrotate_output=case.rotate, query_layout=case.layout
        )
        out = problem.allocate_out(fp8=case.fp8, layout=case.layout)
        if call.num_tokens == 0:
            return None
        attend_with(backend, call, out)
        precision = precision_of(body_of(backend, call, out), device)
        fault = attend_fault(call, out, precision)
        if fault is not None:
            return fault
        again = problem.allocate_out(fp8=case.fp8, layout=case.layout)
        attend_with(backend, call, again)
        return repeat_fault(out, again)

    def smaller(self) -> Iterator[AttendCheck]:
        """Fewer tokens, heads and keys first; then one trap or switch less at a time."""
        spec = self.case.spec
        keys = spec.compressed_keys
        simpler: list[dict[str, Any]] = []
        if keys is not None:
            simpler.append({"compressed_keys": None})
        for name in ("tokens", "heads", "window_keys", "compressed_keys"):
            size = getattr(spec, name)
            if size is not None and size > 1:
                simpler += [{name: less} for less in dict.fromkeys((1, size // 2, size - 1))]
        plain = ProblemSpec(tokens=1, heads=1)
        for name in (
            "hole_probability", "beyond_probability", "lengths", "page_padding_bytes", "offset_rows",
            "outlier_dims", "key_scale", "strided", "positions_dtype", "max_position",
            "window_record", "compressed_record", "window_page_rows", "compressed_page_rows",
        ):  # fmt: skip
            if getattr(spec, name) != getattr(plain, name):
                simpler.append({name: getattr(plain, name)})
        if spec.sink is not None:
            simpler.append({"sink": None})
        for change in simpler:
            yield replace(self, case=replace(self.case, spec=replace(spec, **change)))
        if self.far_pages:
            yield replace(self, far_pages=False)
        if self.case.fp8:
            yield replace(self, case=replace(self.case, fp8=False))
        if self.case.layout is not Layout.STANDARD:
            yield replace(self, case=replace(self.case, layout=Layout.STANDARD))
        if self.case.rotate:
            yield replace(self, case=replace(self.case, rotate=False))


def attend_fault(
    call: AttendCall, out: AttendOut, precision: Precision, exact: Attended | None = None
) -> Fault | None:
    """The first wrong coordinate of output [T, H, 512], lse [T, H] or max_logits [T, H]."""
    exact = attend_exact(call) if exact is None else exact
    got = output_values(out)
    fault = first_wrong("output", got, exact.output, output_bound(call, exact, precision, out))
    if fault is not None:
        return fault
    fault = first_wrong("output of a row without keys",
                        torch.where(_keyless(exact, got), got, 0.0), torch.zeros_like(got))  # fmt: skip
    shift = logit_bound(call, exact, precision)
    for name, rows, wanted in (
        ("lse", out.lse, exact.lse),
        ("max_logits", out.max_logits, exact.max_logits),
    ):
        if fault is None and rows is not None:
            size = torch.where(wanted.isinf(), 0.0, wanted.abs())
            fault = first_wrong(name, rows, wanted, shift + 2.0**-22 * (1 + size))
    if fault is not None:
        return fault
    compared = compare_with_oracle(call, out, precision, exact)
    if compared.passed:
        return None
    return Fault(
        "share of FP8 codes that differ",
        (),
        compared.differing_codes,
        0.0,
        precision.max_code_share,
    )


def repeat_fault(first: AttendOut, again: AttendOut) -> Fault | None:
    """The first coordinate where a second run gave other bits."""
    pairs = [("data", first.data, again.data), ("lse", first.lse, again.lse),
             ("scales", first.scales, again.scales)]  # fmt: skip
    for name, one, two in pairs:
        if one is not None and two is not None:
            words = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
            bits = [x if x.dtype is torch.uint8 else x.contiguous().view(words) for x in (two, one)]
            fault = first_wrong(f"{name} of the second run", *bits)
            if fault is not None:
                return fault
    return None


def quick_attend() -> list[AttendCheck]:
    """The model's own calls: one launch with everything, each pair of records, few and many heads."""
    checks = []
    for number, (window, compressed) in enumerate(MODEL_RECORDS):
        for heads in (64, 8):
            spec = ProblemSpec(
                tokens=3,
                heads=heads,
                window_keys=128,
                compressed_keys=200,
                window_record=window,
                compressed_record=compressed,
                hole_probability=0.1,
                lengths="random" if heads == 64 else "full",
                page_padding_bytes=96,
                seed=number,
            )
            fp8 = number < 2
            layout = Layout.CHUNK_INTERLEAVED if fp8 else Layout.STANDARD
            name = f"{window.name} + {compressed.name}, {heads} heads"
            checks.append(AttendCheck(Case(name, spec, fp8=fp8, layout=layout)))
    return checks


def named_attend() -> list[AttendCheck]:
    """Every named corner, plain bf16 rows, and pages past 2**31 bytes."""
    checks = [AttendCheck(case) for case in attend_cases()]
    base = ProblemSpec(tokens=3, heads=8, window_keys=40, compressed_keys=60, lengths="random")
    plain = replace(base, window_record=BF16, window_page_rows=1, compressed_keys=None)
    checks.append(AttendCheck(Case("plain bf16 rows", plain)))
    checks.append(AttendCheck(Case("page past 2**31 bytes", base), far_pages=True))
    return checks


def random_attend(seed: int, count: int, *, few_variants: bool) -> Iterator[AttendCheck]:
    """Random problems.

    Args:
        seed: of the choices and, with the number of the case, of its values.
        count: how many.
        few_variants: keep to combinations of records, output and switches that compile to few
            kernels; sizes, lists and traps stay random.
    """
    for number in range(count):
        choose = random.Random(f"{seed}/{number}")
        window, compressed = choose.choice(MODEL_RECORDS)
        fp8 = compressed is not V4
        rotate, layout = True, Layout.CHUNK_INTERLEAVED if fp8 else Layout.STANDARD
        heads = choose.choice((8, 16, 64, 128))
        if not few_variants:
            window, compressed = choose.choice(KV_RECORDS), choose.choice(KV_RECORDS)
            fp8, rotate = choose.random() < 0.5, choose.random() < 0.8
            layout = choose.choice(tuple(Layout))
            heads = choose.choice((1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128))
        spec = ProblemSpec(
            tokens=choose.choice((1, 2, 3, 5, 8)),
            heads=heads,
            window_keys=choose.choice((1, 16, 63, 64, 65, 128, 133, 192)),
            compressed_keys=choose.choice((1, 17, 64, 100, 256, 513)),
            window_record=window,
            compressed_record=compressed,
            seed=choose.randrange(2**31),
            window_page_rows=choose.choice((1, 2, 7, 32, 64, 256)),
            compressed_page_rows=choose.choice((1, 3, 32, 64, 128)),
            hole_probability=choose.choice((0.0, 0.1, 0.5, 0.95)),
            beyond_probability=choose.choice((0.0, 0.0, 0.1)),
            lengths="random" if few_variants else choose.choice(("full", "random", "zero")),
            page_padding_bytes=choose.choice((0, 32, 500, 4096)),
            offset_rows=choose.choice((0, 1, 5)),
            sink="random" if few_variants else choose.choice(("random", None, 20.0, float("inf"))),
            key_scale=choose.choice((0.1, 1.0, 3.0)),
            outlier_dims=choose.choice((0, 0, 4)),
            strided=not few_variants and choose.random() < 0.3,
        )
        yield AttendCheck(Case(f"random {seed}/{number}", spec, fp8, layout, rotate))


def _keyless(exact: Attended, like: Tensor) -> Tensor:
    return (exact.lse == torch.inf)[:, :, None].expand_as(like)


def _far(problem: AttendProblem) -> AttendProblem:
    """The same problem with the window's pages a gibibyte apart; memory between them is not touched.

    Raises:
        UnsupportedError: the memory is not there.
    """
    keys = problem.window
    cache, stride = keys.cache, FAR_PAGE_BYTES // 32 * 32
    pages = 3  # the last one begins past 2**31
    rows, width = cache.page_rows * pages, cache.pages.shape[1]
    size = (pages - 1) * stride + width
    try:
        storage = torch.empty(size, dtype=torch.uint8, device=cache.device)
    except RuntimeError as error:
        raise UnsupportedError("pages past 2**31 bytes", [str(error).splitlines()[0]]) from error
    far = PagedCache(storage.as_strided((pages, width), (stride, 1)), cache.record, cache.page_rows)
    far.pages.copy_(cache.pages[:pages])
    indices = torch.where(keys.indices >= rows, -1, keys.indices)
    return replace(problem, window=KeySet(far, indices, keys.lengths))
