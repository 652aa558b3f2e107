"""Caches as vLLM's planner lays them out, for tests without vLLM on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparse_mla.cache.codec import encode_rows
from sparse_mla.cache.paged import PagedCache
from sparse_mla.cache.records import MXFP8, NVFP4, RecordFormat

GEOMETRY = {  # pair: (compressed record, bytes of a block, offset of the ratio-1 cache in its block)
    "nvfp4": (NVFP4, 41184, 13824),
    "fp8": (MXFP8, 64416, 22528),
}
"""A five-layer model at block size 64: all cache groups overlay the same blocks of so many bytes."""
BLOCKS = 80


@dataclass(frozen=True)
class Host:
    """Blocks of an engine, and the views of them that it binds to layers."""

    arena: Tensor  # uint8 [blocks, block_bytes]
    record: RecordFormat  # of compressed rows
    ratio_1_offset: int

    def window(self) -> Tensor:
        """Pages of 32 rows at the start of a block."""
        return self._view(MXFP8, 32, 0)

    def compressed(self, ratio: int) -> Tensor:
        """Ratio 2: 32 rows at the start of a block; ratio 1: 64 rows behind other layers' pages."""
        return self._view(self.record, 64 // ratio, self.ratio_1_offset if ratio == 1 else 0)

    def fill(self, view: Tensor, record: RecordFormat, blocks: Tensor, seed: int) -> None:
        """Random rows on some pages, the same on every device; other bytes stay."""
        cache = PagedCache.from_view(view, record)
        rows = torch.arange(cache.page_rows)
        slots = (blocks[:, None] * cache.page_rows + rows).view(-1)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(len(slots), 512, generator=generator).to(torch.bfloat16)
        device = cache.device
        data, scales = (part.to(device) for part in encode_rows(record, values))
        cache.write_rows(slots.to(device), data, scales)

    def _view(self, record: RecordFormat, page_rows: int, offset: int) -> Tensor:
        shape = (self.arena.shape[0], page_rows, record.row_bytes)
        strides = (self.arena.stride(0), record.row_bytes, 1)
        return self.arena.as_strided(shape, strides, self.arena.storage_offset() + offset)


@pytest.fixture
def make_host() -> Callable[[str, str], Host]:
    """Blocks full of NaN bytes: of a pair of records, on a device."""

    def make(pair: str, device: str) -> Host:
        record, block_bytes, offset = GEOMETRY[pair]
        arena = torch.full((BLOCKS, block_bytes), 0xFF, dtype=torch.uint8, device=device)
        return Host(arena, record, offset)

    return make


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture(params=GEOMETRY)
def pair(request: pytest.FixtureRequest) -> str:
    """Which records the caches hold."""
    return str(request.param)
