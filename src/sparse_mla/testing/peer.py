"""The peer: FlashMLA as vLLM ships it (`_flashmla_C.abi3.so` of its 0.33.0 wheel, torch >= 2.11).

    pip download vllm==0.33.0 --no-deps -d .peer
    unzip -j .peer/vllm-*.whl vllm/_flashmla_C.abi3.so -d .peer

On SM90 it reads 584-byte rows and multiplies 64 or 128 heads; fewer are padded. It does attention alone:
query RoPE, inverse RoPE and the FP8 cast are launches of their own there and are not counted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.errors import ArgumentError, UnsupportedError
from sparse_mla.kernels.contract import HEAD_DIM, KeySet

NAME = "flashmla-vllm-0.33.0"
TILE_KEYS = 64
"""List widths must be multiples of it."""


def load_peer(path: Path) -> None:
    """Load the library's ops.

    Raises:
        ArgumentError: no such file.
        UnsupportedError: it does not load here; the message says why.
    """
    if not path.is_file():
        raise ArgumentError("--peer", str(path), "the path of _flashmla_C.abi3.so")
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(f"peer library {path.name}", [str(error).splitlines()[0]]) from error


def byte_view(cache: PagedCache) -> Tensor:
    """int8 [pages, page_rows, 1, row_bytes] view of a cache, as the peer takes it."""
    rows, width = cache.page_rows, cache.record.row_bytes
    strides = (cache.page_stride_bytes, width, width, 1)
    return cache.pages.as_strided((cache.num_pages, rows, 1, width), strides).view(torch.int8)


class PeerDecode:
    """Split-KV decode and combine, planned once; heads are padded to 64 or 128."""

    def __init__(
        self,
        q: Tensor,  # bf16 [T, H, 512]
        window: KeySet,
        compressed: KeySet | None,
        sink: Tensor | None,
        scale: float,
    ) -> None:
        """Plan with the sizes of these lists."""
        tokens, heads, _ = q.shape
        padded = 64 if heads <= 64 else 128
        self.q = torch.zeros(tokens, 1, padded, HEAD_DIM, dtype=torch.bfloat16, device=q.device)
        self.q[:, 0, :heads] = q
        self.sink = torch.full((padded,), -torch.inf, device=q.device)
        if sink is not None:
            self.sink[:heads] = sink
        self.scale = scale
        self.plan: tuple[Tensor | None, Tensor | None] = (None, None)
        self(window, compressed)

    def __call__(self, window: KeySet, compressed: KeySet | None) -> Tensor:
        """bf16 [T, 1, padded heads, 512]."""
        extra: tuple[Tensor | None, ...] = (None, None, None)
        if compressed is not None:
            extra = (byte_view(compressed.cache), compressed.indices[:, None], compressed.lengths)
        out, _, *plan = torch.ops._flashmla_C.sparse_decode_fwd(
            self.q, byte_view(window.cache), window.indices[:, None], window.lengths, self.sink,
            *self.plan, *extra, HEAD_DIM, self.scale, None, False,
        )  # fmt: skip
        self.plan = (plan[0], plan[1])
        result: Tensor = out
        return result


def peer_prefill(
    q: Tensor,  # bf16 [T, H, 512]
    kv: Tensor,  # bf16 [rows, 1, 512], gathered before
    indices: Tensor,  # int32 [T, 1, K]
    sink: Tensor | None,
    scale: float,
) -> Tensor:
    """bf16 [T, H, 512] over plain rows."""
    out: Tensor = torch.ops._flashmla_C.sparse_prefill_fwd(
        q, kv, indices, scale, HEAD_DIM, sink, None, None
    )[0]
    return out
