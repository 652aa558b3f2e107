"""What our backends declare, in vLLM's terms; the facts come from `backends.declarations`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekSparseSWAFlashMLABackend
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLABackend

from sparse_mla.backends.declarations import MegaAttentionBackend, SparseMLABackend
from sparse_mla.integrations.vllm.builders import WindowMetadataBuilder
from sparse_mla.integrations.vllm.names import MEGA, SPARSE
from sparse_mla.integrations.vllm.refusals import (
    CAPABILITY_MAJOR,
    KERNEL_BLOCK_TOKENS,
    kv_dtypes,
)


class WindowBackend(DeepseekSparseSWAFlashMLABackend):
    """The window caches: vLLM's own, with all rows of a step in one list."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """Queries and keys of a step are on one rank."""
        return False

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        """The builder of a step's window metadata."""
        return WindowMetadataBuilder


class SparseBackend(DeepseekV4FlashMLABackend):
    """`SPARSE_MLA_DSV41`: attention alone, over 528-byte rows."""

    declaration: ClassVar[type[SparseMLABackend]] = SparseMLABackend
    supported_dtypes: ClassVar[list[torch.dtype]] = SparseMLABackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(kv_dtypes(SPARSE))

    @staticmethod
    def get_name() -> str:
        """The name under `--attention-backend`."""
        return SPARSE

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a kernel block."""
        del kv_cache_spec
        return [KERNEL_BLOCK_TOKENS]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """One kernel block: a packed block that is larger cannot be split."""
        return block_size in (None, KERNEL_BLOCK_TOKENS)

    @classmethod
    def supports_pcp(cls) -> bool:
        """Queries and keys of a step are on one rank."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """DSpark's draft blocks: each row has its own list, so nothing else changes."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper."""
        return bool(capability.major == CAPABILITY_MAJOR)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Our own declaration's reasons, or None."""
        del use_mm_prefix
        return cls.declaration.supports_combination(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            (device_capability.major, device_capability.minor),
        )


class MegaBackend(SparseBackend):
    """`SPARSE_MLA_MEGA_DSV41`: both rotations in the launch; 288-byte compressed rows too."""

    declaration: ClassVar[type[SparseMLABackend]] = MegaAttentionBackend
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(kv_dtypes(MEGA))

    @staticmethod
    def get_name() -> str:
        """The name under `--attention-backend`."""
        return MEGA
