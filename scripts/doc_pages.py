"""The generated parts of docs/: byte maps, the support matrix, the differences from FlashMLA.

A page holds one or more blocks between the lines `<!-- begin NAME: written by scripts/docs -->` and
`<!-- end NAME -->`; `fresh` puts what the code says between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparse_mla.backends.declarations import KERNEL_BACKENDS
from sparse_mla.backends.matrix import support_matrix
from sparse_mla.backends.problem import OPS
from sparse_mla.cache.records import (
    ATTEND_RECORDS,
    INDEX_RECORDS,
    KV_RECORDS,
    Placement,
    RecordFormat,
    ScaleFormat,
    ValueFormat,
)
from sparse_mla.compat.flash_mla.differences import DIFFERENCES

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 74
"""Characters of a drawn row."""
PAGE_ROWS = 64
"""Rows of the pages in tables and examples."""


@dataclass(frozen=True)
class Segment:
    """Some bytes of a row or a page."""

    first: int
    size: int
    text: str


def fresh(text: str) -> str:
    """A page with every generated block replaced by what the code says now."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise KeyError(f"no generator named {name!r}; there are {', '.join(BLOCKS)}")
        return f"{match[0].splitlines()[0]}\n\n{BLOCKS[name]()}\n\n<!-- end {name} -->"

    pattern = r"<!-- begin ([a-z_]+): written by scripts/docs -->.*?<!-- end \1 -->"
    return re.sub(pattern, block, text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page with generated blocks, as it should be."""
    found = {}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if "written by scripts/docs -->" in text:
            found[path] = fresh(text)
    return found


# ------------------------------------------------------------------------------------------- records


def record_table() -> str:
    """One line for each record."""
    lines = [
        "| record | bytes of a row | values | bf16 values | scales | placement | page of 64 rows, bytes | a page begins at a multiple of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in (*ATTEND_RECORDS, *INDEX_RECORDS):
        quantised = (
            f"{record.quantised_dims} {record.value_format.value}" if record.quantised_dims else "-"
        )
        scales = "-"
        if record.scales_per_row:
            scales = f"{record.scales_per_row} {_scale(record)}, one for {record.scale_block}"
        placement = record.placement.value if record.scale_bytes else "-"
        lines.append(
            f"| `{record.name}` | {record.row_bytes} | {quantised} | {record.tail_dims or '-'} "
            f"| {scales} | {placement} | {record.page_bytes(PAGE_ROWS):,} | {record.row_alignment_bytes} |"
        )
    return "\n".join(lines)


def byte_maps() -> str:
    """Every record drawn: a row if its scales lie behind its data, a page if they do not."""
    parts = []
    for record in (*ATTEND_RECORDS, *INDEX_RECORDS):
        interleaved = record.placement is Placement.INTERLEAVED
        title = f"`{record.name}`: {'a row' if interleaved else 'a page of P rows'}"
        segments = row_segments(record) if interleaved else page_segments(record)
        drawn = draw(segments, planar=not interleaved)
        parts.append(f"**{title}**\n\n```\n{drawn}\n```\n\n{formulas(record)}")
    return "\n\n".join(parts)


def row_segments(record: RecordFormat) -> list[Segment]:
    """Bytes of one row, data and scales side by side."""
    segments = []
    if record.quantised_dims:
        text = f"{record.quantised_dims} {record.value_format.value}"
        segments.append(Segment(0, record.quantised_bytes, text))
    if record.tail_dims:
        text = f"{record.tail_dims} bf16"
        segments.append(Segment(record.quantised_bytes, 2 * record.tail_dims, text))
    if record.scale_bytes:
        segments.append(Segment(record.data_bytes, record.scale_bytes, _scales_text(record)))
    return segments


def page_segments(record: RecordFormat) -> list[Segment]:
    """Regions of a planar page: the data of all rows, then the scales of all rows."""
    inside = f"{record.quantised_dims} {record.value_format.value}"
    if record.tail_dims:
        inside += f", then {record.tail_dims} bf16"
    data = f"P x {record.data_bytes} data ({inside})"
    scales = f"P x {record.scale_bytes} scales ({_scales_text(record)})"
    return [
        Segment(0, record.data_bytes, data),
        Segment(record.data_bytes, record.scale_bytes, scales),
    ]


def draw(segments: list[Segment], *, planar: bool) -> str:
    """Boxes with their texts; the first byte of each box stands above its left edge."""
    total = sum(segment.size for segment in segments)
    least = [len(segment.text) + 2 for segment in segments]
    spare = max(0, WIDTH - sum(least) - len(segments) - 1)
    widths = [
        width + round(spare * segment.size / total)
        for width, segment in zip(least, segments, strict=True)
    ]
    heads, edge, middle = "", "+", "|"
    for segment, width in zip(segments, widths, strict=True):
        first = f"P x {segment.first}" if planar and segment.first else str(segment.first)
        heads += first.ljust(width + 1)
        edge += "-" * width + "+"
        middle += segment.text.center(width) + "|"
    end = f"P x {total}" if planar else str(total)
    return f"{heads}{end}\n{edge}\n{middle}\n{edge}"


def formulas(record: RecordFormat) -> str:
    """Where value d and its scale lie, with one worked address."""
    bits = record.value_bits
    lines = []
    if record.quantised_dims:
        value = "d" if bits == 8 else "d//2"
        nibble = "" if bits == 8 else " (even d in the low nibble)"
        upto = f"d < {record.quantised_dims}: " if record.tail_dims else ""
        lines.append(f"- value {upto}byte `o*{record.data_stride} + {value}`{nibble}")
    if record.tail_dims:
        at = (
            f"{record.quantised_bytes} + 2*(d - {record.quantised_dims})"
            if record.quantised_dims
            else "2*d"
        )
        lines.append(f"- bf16 value: byte `o*{record.data_stride} + {at}`")
    if record.scale_bytes:
        base = (
            f"o*{record.row_bytes} + {record.data_bytes}"
            if record.placement is Placement.INTERLEAVED
            else f"P*{record.data_bytes} + o*{record.scale_bytes}"
        )
        step = "" if record.scales_per_row == 1 else f" + d//{record.scale_block}"
        lines.append(f"- scale: byte `{base}{step}`")
    dim = record.dim - 10
    example = f"byte {record.value_offset(3, dim, 32)}"
    if record.scales_per_row and dim < record.quantised_dims:
        example += f", its scale at {record.scale_offset(3, dim, 32)}"
    lines.append(f"- example, P = 32, row 3, d = {dim}: {example}")
    return "\n".join(lines)


def _scale(record: RecordFormat) -> str:
    return "float32" if record.scale_format is ScaleFormat.F32 else record.scale_format.value


def _scales_text(record: RecordFormat) -> str:
    padding = record.scale_bytes - record.scales_per_row * (
        4 if record.scale_format is ScaleFormat.F32 else 1
    )
    return f"{record.scales_per_row} {_scale(record)}" + (f" + {padding} zero" if padding else "")


def value_table() -> str:
    """Every magnitude of e2m1, and the landmarks of e4m3."""
    import torch

    from sparse_mla.cache.codec import decode_e2m1, decode_e4m3

    small = decode_e2m1(torch.arange(8, dtype=torch.uint8)).tolist()
    codes = (0x01, 0x07, 0x08, 0x38, 0x7E, 0x7F)
    large = decode_e4m3(torch.tensor(codes, dtype=torch.uint8)).tolist()
    assert ValueFormat.E2M1.value == "e2m1"
    first = "| e2m1 code | " + " | ".join(str(code) for code in range(8)) + " |"
    rows = [first, "|" + "---|" * 9, "| value | " + " | ".join(f"{v:g}" for v in small) + " |", ""]
    rows += ["| e4m3 code | " + " | ".join(f"0x{code:02X}" for code in codes) + " |"]
    rows += [
        "|" + "---|" * (len(codes) + 1),
        "| value | " + " | ".join(f"{v:g}" for v in large) + " |",
    ]
    return "\n".join(rows)


# ------------------------------------------------------------------------------------------- support


def op_matrix() -> str:
    """Which backend has a kernel of which op."""
    names = [body.name for body in KERNEL_BACKENDS]
    lines = [
        "| op | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for op in OPS:
        cells = [
            "yes" if op in body.supports.ops and body.has_kernel(op) else "-"
            for body in KERNEL_BACKENDS
        ]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record_matrix() -> str:
    """Which backend's attention reads which record."""
    names = [body.name for body in KERNEL_BACKENDS]
    lines = [
        "| record | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for record in ATTEND_RECORDS:
        cells = []
        for body in KERNEL_BACKENDS:
            sides = [
                side
                for side, held in (
                    ("window", body.supports.window_records),
                    ("compressed", body.supports.compressed_records),
                )
                if record.name in held
            ]
            cells.append(" + ".join(sides) or "-")
        note = "" if record in KV_RECORDS else " (no pool holds it)"
        lines.append(f"| `{record.name}`{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference_table() -> str:
    """What is not the same as in FlashMLA."""
    lines = ["| what | FlashMLA | here |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.flash_mla} | {row.here} |" for row in DIFFERENCES]
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "record_table": record_table,
    "byte_maps": byte_maps,
    "value_table": value_table,
    "machines": support_matrix,
    "op_matrix": op_matrix,
    "record_matrix": record_matrix,
    "differences": difference_table,
}
