"""Cases of `sparse-mla check` for the codec, the writers, the compressor and the indexer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparse_mla.backends.problem import Problem
from sparse_mla.cache.codec import decode_rows, encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import INDEX_RECORDS, KV_RECORDS, RECORDS, record_named
from sparse_mla.kernels.index_contract import CompressCall, IndexTopkOut, Ring
from sparse_mla.kernels.reference import compress as reference_compress
from sparse_mla.kernels.reference import write_compressed as reference_compressed
from sparse_mla.kernels.reference import write_window as reference_window
from sparse_mla.kernels.write_contract import WriteCompressedCall, WriteWindowCall
from sparse_mla.ops.merge import merge_lse
from sparse_mla.testing.check import Fault, first_wrong, kernel_on
from sparse_mla.testing.index_inputs import IndexSizes, make_index_call, selection_faults
from sparse_mla.testing.inputs import plain_rope_table, poisoned_cache


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a case of this file may shrink."""

    rows: int = 41
    record: str = ""
    ratio: int = 0  # 0 = window
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """One comparison with plain loops, or with the CPU's bytes."""

    op: str
    check: Callable[[Sizes, str, torch.device], Fault | None]
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def name(self) -> str:
        """From the op and its sizes."""
        return " ".join(str(part) for part in (self.op, *asdict(self.sizes).values()))

    def fields(self) -> dict[str, Any]:
        """The sizes."""
        return asdict(self.sizes)

    def run(self, backend: str, device: torch.device) -> Fault | None:
        """Compute and compare."""
        return self.check(self.sizes, backend, device)

    def smaller(self) -> Iterator[CacheCheck]:
        """Fewer rows."""
        rows = self.sizes.rows
        for less in dict.fromkeys((1, rows // 2, rows - 1)):
            if 0 < less < rows:
                yield replace(self, sizes=replace(self.sizes, rows=less))


def cache_checks(seed: int = 0) -> list[CacheCheck]:
    """Every case of this file."""
    checks = [CacheCheck("codec", check_codec, Sizes(record=name, seed=seed)) for name in RECORDS]
    for record in KV_RECORDS:
        checks += [
            CacheCheck("write_window", check_writer, Sizes(record=record.name, seed=seed)),
            CacheCheck("write_compressed", check_writer, Sizes(record=record.name, ratio=1)),
            CacheCheck("write_compressed", check_writer, Sizes(record=record.name, ratio=2)),
        ]
    checks += [CacheCheck("compress", check_compress, Sizes(ratio=ratio)) for ratio in (1, 2)]
    for record in INDEX_RECORDS:
        checks.append(CacheCheck("index_topk", check_topk, Sizes(record=record.name, seed=seed)))
    checks.append(CacheCheck("merge_lse", check_merge, Sizes(rows=7, seed=seed)))
    return checks


def check_codec(sizes: Sizes, backend: str, device: torch.device) -> Fault | None:
    """Bytes and values of the quantiser equal the CPU's, whatever the values."""
    del backend
    record = record_named(sizes.record)
    values = awkward_values(sizes.rows, record.dim, sizes.seed)
    wanted = encode_rows(record, values)
    got = encode_rows(record, values.to(device))
    for name, one, two in zip(("data", "scales"), got, wanted, strict=True):
        fault = first_wrong(f"{name} bytes", one.cpu(), two)
        if fault is not None:
            return fault
    back = decode_rows(record, *got).cpu()
    return first_wrong("decoded values", back, decode_rows(record, *wanted))


def check_writer(sizes: Sizes, backend: str, device: torch.device) -> Fault | None:
    """Every byte of the storage equals what plain loops write; nothing else is touched."""
    record = record_named(sizes.record)
    generator = torch.Generator().manual_seed(sizes.seed)
    latents = awkward_values(sizes.rows, 512, sizes.seed).to(torch.bfloat16)
    slots = torch.randperm(9 * 7, generator=generator)[: sizes.rows]
    slots[::7] = -1
    positions = torch.randint(4096, (sizes.rows,), generator=generator)
    rope = plain_rope_table(4096)
    stored: list[Tensor] = []
    for place in (device, torch.device("cpu")):
        cache = poisoned_cache(record, num_pages=9, page_rows=7, page_padding_bytes=96,
                               offset_rows=2, device=place)  # fmt: skip
        window = WriteWindowCall(latents.to(place), cache, slots.to(place), positions.to(place),
                                 rope.to(place))  # fmt: skip
        call: WriteWindowCall | WriteCompressedCall = window
        if sizes.ratio:
            call = WriteCompressedCall(window.latents, cache, window.slots, window.positions,
                                       window.rope, sizes.ratio)  # fmt: skip
        if len(stored):
            if isinstance(call, WriteWindowCall):
                reference_window.write_window(call)
            else:
                reference_compressed.write_compressed(call)
        else:
            kernel_on(backend, writer_problem(sizes), device)(call)
        stored.append(whole_storage(cache))
    return first_wrong("byte of the storage", stored[0], stored[1])


def writer_problem(sizes: Sizes) -> Problem:
    """What a backend is asked."""
    if sizes.ratio:
        return Problem("write_compressed", sizes.rows, 1, compressed_record=sizes.record)
    return Problem("write_window", sizes.rows, 1, window_record=sizes.record)


def check_compress(sizes: Sizes, backend: str, device: torch.device) -> Fault | None:
    """Latents within two bf16 steps of plain loops (pooling and norm may each flip one); ring rows equal."""
    generator = torch.Generator().manual_seed(sizes.seed)
    rows, ratio = sizes.rows, sizes.ratio
    projected = torch.randn(rows, 512 * ratio, generator=generator)
    weight = torch.rand(512, generator=generator) + 0.5
    first = rows // 3  # two requests; the second begins at an odd position, its group half stored
    positions = torch.cat((torch.arange(4, 4 + first), torch.arange(7, 7 + rows - first)))
    results: list[tuple[Tensor, Tensor | None]] = []
    for place in (device, torch.device("cpu")):
        ring = None
        if ratio == 2:
            state = torch.randn(4, 4, 1024, generator=torch.Generator().manual_seed(1)).to(place)
            block = torch.where(torch.arange(rows) < first, 1, 3)
            ring = Ring(
                rows=state,
                slots=(block * 4 + positions % 4).to(place),
                request_ids=torch.where(torch.arange(rows) < first, 0, 1).int().to(place),
                query_start_loc=torch.tensor([0, first, rows], dtype=torch.int32).to(place),
            )
        given = projected.to(torch.bfloat16) if ratio == 1 else projected
        call = CompressCall(given.to(place), ratio, positions.to(place), weight.to(place), 1e-20,
                            ring)  # fmt: skip
        if len(results):
            latents = reference_compress.compress(call)
        else:
            latents = kernel_on(backend, Problem("compress", rows, 1), device)(call)
        results.append((latents.cpu(), None if ring is None else ring.rows.cpu()))
    (latents, kept), (wanted, wanted_kept) = results
    fault = first_wrong("latent", latents, wanted, wanted.double().abs() * 2.0**-6 + 2.0**-20)
    if fault is None and kept is not None and wanted_kept is not None:
        fault = first_wrong("ring", kept[1:], wanted_kept[1:])
    return fault


def check_topk(sizes: Sizes, backend: str, device: torch.device) -> Fault | None:
    """Lists hold the best visible positions, ascending, ties to either side of float64 rounding."""
    call = make_index_call(
        [50, 9, 0, 12, 33 + sizes.rows],
        [5, 2, 0, 1, 3],
        IndexSizes(record_named(sizes.record)),
        padding=2,
        seed=sizes.seed,
        device=device,
    )
    tokens = call.queries.num_tokens
    lists = torch.full((tokens, call.topk), 77, dtype=torch.int32, device=device)
    problem = Problem("index_topk", tokens, call.queries.num_heads, index_record=sizes.record)
    kernel_on(backend, problem, device)(call, IndexTopkOut(lists))
    for row in range(tokens):
        faults = selection_faults(call, row, lists[row])
        if faults:
            return Fault("index list", (row,), faults[0], "the best visible positions")
    return None


def check_merge(sizes: Sizes, backend: str, device: torch.device) -> Fault | None:
    """Three shards of the keys, one of them empty, give what all keys give."""
    del backend
    generator = torch.Generator().manual_seed(sizes.seed)
    logits = torch.randn(sizes.rows, 4, 12, generator=generator) * 3
    values = torch.randn(12, 16, generator=generator)
    sink = torch.randn(4, generator=generator)

    def shard(some: slice) -> tuple[Tensor, Tensor]:
        part = logits[..., some]
        if part.shape[-1] == 0:
            nothing = torch.full(part.shape[:2], torch.inf)
            return torch.full((*part.shape[:2], 16), torch.nan), nothing
        return part.softmax(-1) @ values[some], part.logsumexp(-1)

    shards = [shard(some) for some in (slice(0, 5), slice(5, 5), slice(5, 12))]
    outs, lses = zip(*[(out.to(device), lse.to(device)) for out, lse in shards], strict=True)
    got, lse = merge_lse(outs, lses, sink.to(device))
    whole, whole_lse = shard(slice(0, 12))
    wanted = whole * torch.sigmoid(whole_lse - sink)[..., None]
    return first_wrong("merged output", got.cpu(), wanted, 1e-5) or first_wrong(
        "merged lse", lse.cpu(), whole_lse, 1e-5
    )


def awkward_values(rows: int, dim: int, seed: int) -> Tensor:
    """float32 rows of very different sizes, with blocks of zeros and of powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    values *= torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator).float())
    values[0, :64] = 0.0
    values[-1, 64:] = torch.exp2(torch.randint(-9, 9, (dim - 64,), generator=generator).float())
    return values


def whole_storage(cache: PagedCache) -> Tensor:
    """Every byte on the CPU: before, between and after the pages too."""
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return storage.set_(cache.pages.untyped_storage()).cpu()
