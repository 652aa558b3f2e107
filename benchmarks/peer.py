"""The peer: FlashMLA as vLLM 0.33.0 ships it (`_flashmla_C.abi3.so` of its wheel, torch >= 2.11).

Put the library into `.peer/` (ignored by git):

    pip download vllm==0.33.0 --no-deps -d /tmp/peer
    unzip -j /tmp/peer/vllm-*.whl vllm/_flashmla_C.abi3.so -d .peer
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparse_mla.cache.paged import PagedCache
from sparse_mla.kernels.contract import KeySet

LIBRARY = Path(__file__).parents[1] / ".peer" / "_flashmla_C.abi3.so"
NAME = "flashmla-vllm-0.33.0"


def load_peer() -> bool:
    """Load the library; False if it is not there."""
    if not LIBRARY.exists():
        return False
    torch.ops.load_library(str(LIBRARY))
    return True


def as_fp8_view(cache: PagedCache) -> Tensor:
    """int8 [pages, page_rows, 1, row_bytes] view of a cache, as the peer takes it."""
    rows, width = cache.page_rows, cache.record.row_bytes
    strides = (cache.page_stride_bytes, width, width, 1)
    return cache.pages.as_strided((cache.num_pages, rows, 1, width), strides).view(torch.int8)


class PeerDecode:
    """Split-KV decode and combine of the peer, planned once; heads are padded to 64 or 128."""

    def __init__(
        self,
        q: Tensor,
        window: KeySet,
        compressed: KeySet | None,
        sink: Tensor | None,
        scale: float,
    ):
        tokens, heads, _ = q.shape
        padded = 64 if heads <= 64 else 128
        self.q = torch.zeros(tokens, 1, padded, 512, dtype=torch.bfloat16, device=q.device)
        self.q[:, 0, :heads] = q
        self.sink = torch.full((padded,), -torch.inf, device=q.device)
        if sink is not None:
            self.sink[:heads] = sink
        self.scale = scale
        self.plan: tuple[Tensor | None, Tensor | None] = (None, None)
        self(window, compressed)

    def __call__(self, window: KeySet, compressed: KeySet | None) -> Tensor:
        """bf16 [T, 1, padded heads, 512]."""
        extra = (None, None, None)
        if compressed is not None:
            extra = (as_fp8_view(compressed.cache), compressed.indices[:, None], compressed.lengths)
        out, _, *plan = torch.ops._flashmla_C.sparse_decode_fwd(
            self.q, as_fp8_view(window.cache), window.indices[:, None], window.lengths, self.sink,
            *self.plan, *extra, 512, self.scale, None, False,
        )  # fmt: skip
        self.plan = (plan[0], plan[1])
        return out
