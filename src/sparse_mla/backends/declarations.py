"""What every backend supports, as data, and the class contract that engines know.

A refusal is a sentence that names the field, what it got and what is allowed. The same sentences raise,
choose, print in the command line and answer an engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from sparse_mla.backends.problem import OPS, OUTPUTS, DeviceInfo, Problem
from sparse_mla.cache.records import ATTEND_RECORDS, INDEX_RECORDS, KV_RECORDS
from sparse_mla.errors import UnsupportedError

if TYPE_CHECKING:
    from sparse_mla.metadata.compressed import SparseMLAMetadataBuilder

_KERNELS = Path(__file__).parents[1] / "kernels"
_KV = tuple(record.name for record in KV_RECORDS)
_WITH_BF16 = tuple(record.name for record in ATTEND_RECORDS)
_INDEX = tuple(record.name for record in INDEX_RECORDS)


@dataclass(frozen=True, slots=True)
class Support:
    """What one backend takes; the empty tuple means none."""

    ops: tuple[str, ...] = OPS
    window_records: tuple[str, ...] = _KV
    compressed_records: tuple[str, ...] = _KV
    index_records: tuple[str, ...] = _INDEX
    outputs: tuple[str, ...] = OUTPUTS
    dtypes: tuple[str, ...] = ("bfloat16",)
    max_heads: int = 128
    query_norm: bool = False  # logits scaled per head and token


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """One folder of kernels and where it runs."""

    name: str
    reason: str  # why `auto` takes it where it fits
    devices: tuple[str, ...] | None = None  # kinds of `DeviceInfo`; None = all
    min_capability: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None  # the only one, if there is only one
    needs: tuple[str, ...] = ()  # libraries
    automatic: bool = True
    supports: Support = field(default_factory=Support)

    def has_kernel(self, op: str) -> bool:
        """Whether the folder has a kernel of this op."""
        return _has_kernel(self.name, op)

    def refusals(self, problem: Problem, device: DeviceInfo) -> list[str]:
        """Every reason why this backend cannot run the problem there; empty = it can."""
        return [*self.device_refusals(device), *self._problem_refusals(problem)]

    def device_refusals(self, device: DeviceInfo) -> list[str]:
        """The reasons that hold for every problem."""
        reasons = []
        interpreted = self._interpreted(device)
        if self.devices is not None and device.kind not in self.devices and not interpreted:
            reasons.append(f"device: got {device.describe()}; allowed: {' or '.join(self.devices)}")
        elif self.capability is not None and device.capability != self.capability:
            reasons.append(
                f"compute capability: got {_dotted(device.capability)}; "
                f"allowed: {_dotted(self.capability)} only"
            )
        elif (
            self.min_capability is not None
            and device.capability is not None
            and device.capability < self.min_capability
        ):
            reasons.append(
                f"compute capability: got {_dotted(device.capability)}; "
                f"allowed: {_dotted(self.min_capability)} and up"
            )
        missing = (library for library in self.needs if library not in device.libraries)
        reasons += [
            f"library {library}: not installed; install sparse-mla[gpu]" for library in missing
        ]
        return reasons

    def automatic_on(self, device: DeviceInfo) -> bool:
        """Whether `auto` may take it there: not the oracle, not Triton's interpreter."""
        return self.automatic and not self._interpreted(device)

    def _interpreted(self, device: DeviceInfo) -> bool:
        return device.triton_interpreter and self.needs == ("triton",)

    def _problem_refusals(self, problem: Problem) -> list[str]:
        table = self.supports
        reasons = []
        if problem.op not in table.ops or not self.has_kernel(problem.op):
            there = [op for op in table.ops if self.has_kernel(op)]
            reasons.append(f"op: got {problem.op}; {self.name} has {_listed(there)}")
        chosen: tuple[tuple[str, str | None, Sequence[str]], ...] = (
            ("window record", problem.window_record, table.window_records),
            ("compressed record", problem.compressed_record, table.compressed_records),
            ("index record", problem.index_record, table.index_records),
            ("output", problem.output, table.outputs),
            ("dtype", problem.dtype, table.dtypes),
        )
        for name, got, allowed in chosen:
            if got is not None and got not in allowed:
                reasons.append(f"{name}: got {got}; allowed: {_listed(allowed)}")
        if problem.query_norm and not table.query_norm:
            reasons.append("query norm: got one; allowed: none (norm the query beforehand)")
        if not 1 <= problem.num_heads <= table.max_heads:
            reasons.append(f"heads: got {problem.num_heads}; allowed: 1 to {table.max_heads}")
        return reasons


HOPPER = KernelBackend(
    name="hopper",
    reason="tuned for SM90",
    devices=("cuda",),
    capability=(9, 0),
    needs=("cuda.bindings",),
    supports=Support(ops=("attend",)),
)
TRITON = KernelBackend(
    name="triton",
    reason="portable to every GPU from SM80 on",
    devices=("cuda",),
    min_capability=(8, 0),
    needs=("triton",),
)
_EVERYTHING = Support(window_records=_WITH_BF16, compressed_records=_WITH_BF16, query_norm=True)
TORCH = KernelBackend(
    name="torch", reason="plain PyTorch, runs on every device", supports=_EVERYTHING
)
REFERENCE = KernelBackend(
    name="reference",
    reason="float64 oracle",
    devices=("cpu",),
    automatic=False,
    supports=_EVERYTHING,
)
KERNEL_BACKENDS = (HOPPER, TRITON, TORCH, REFERENCE)
"""In the order in which `auto` tries them."""


class Capability(NamedTuple):
    """How attention runs on a device."""

    level: str  # "tuned", "portable", "torch" or "refused"
    reason: str


class SparseMLABackend:
    """`FLASHMLA_SPARSE_DSV41`: sparse MLA attention with a bf16 output, as engines declare it.

    Upstream runs it on SM90 and SM100; ours runs wherever `capability` says, with any head count.
    """

    name: ClassVar[str] = "FLASHMLA_SPARSE_DSV41"
    output: ClassVar[str] = "bf16"
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8_ds_mla", "fp8"]

    @classmethod
    def get_name(cls) -> str:
        """The name under which engines know this backend."""
        return cls.name

    @classmethod
    def get_builder_cls(cls) -> type[SparseMLAMetadataBuilder]:
        """The builder of a step's metadata."""
        from sparse_mla.metadata.compressed import SparseMLAMetadataBuilder

        return SparseMLAMetadataBuilder

    @classmethod
    def get_impl_cls(cls) -> type:
        """There is none: the layer calls the op itself.

        Raises:
            UnsupportedError: a `NotImplementedError`, always.
        """
        raise UnsupportedError(
            f"{cls.name}.get_impl_cls",
            ["the layer calls sparse_mla.mega_attention or sparse_attention; no impl class exists"],
        )

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, device_capability: tuple[int, int] | None = None
    ) -> list[int]:
        """Tokens of a kernel block: 64 on SM90, 128 elsewhere.

        Args:
            device_capability: (major, minor); None = the current CUDA device, if there is one.
        """
        if device_capability is None and torch.cuda.is_available():
            device_capability = torch.cuda.get_device_capability()
        return [64] if device_capability is not None and device_capability[0] == 9 else [128]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Width of a query head."""
        return [512]

    @classmethod
    def is_mla(cls) -> bool:
        """One latent is key and value of all heads."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Queries attend listed rows only."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """A head may have an attention sink."""
        return True

    @classmethod
    def capability(cls, device_capability: tuple[int, int] | None) -> Capability:
        """What runs on a device: tuned, portable, plain PyTorch (a CPU), or refused and why.

        Args:
            device_capability: (major, minor) of an NVIDIA GPU; None = a CPU.
        """
        problem = Problem(op="attend", output=cls.output)
        if device_capability is None:
            return Capability("torch", TORCH.reason)
        major, minor = device_capability
        device = DeviceInfo.from_capability(f"{major}.{minor}")
        for backend, level in ((HOPPER, "tuned"), (TRITON, "portable")):
            if not backend.refusals(problem, device):
                return Capability(level, backend.reason)
        return Capability("refused", "; ".join(TRITON.refusals(problem, device)))

    @classmethod
    def supports_compute_capability(cls, device_capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability has a kernel, tuned or portable."""
        return cls.capability(device_capability).level in ("tuned", "portable")

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
        device_capability: tuple[int, int] | None,
    ) -> str | None:
        """Why this combination cannot run, all reasons in one text, or None if it can.

        Args:
            head_size: width of a query head.
            dtype: of the query.
            kv_cache_dtype: an engine's name of the cache format; None = auto.
            block_size: tokens of a cache block; any multiple of a kernel block size fits.
            use_mla: whether the model is MLA.
            has_sink: whether heads have an attention sink; both fit.
            use_sparse: whether queries attend listed rows.
            device_capability: (major, minor) of an NVIDIA GPU; None = a CPU.
        """
        del has_sink
        reasons = []
        sizes = cls.get_supported_kernel_block_sizes(device_capability or (0, 0))
        if head_size not in cls.get_supported_head_sizes():
            reasons.append(f"head size: got {head_size}; allowed: 512")
        if dtype not in cls.supported_dtypes:
            reasons.append(f"dtype: got {str(dtype).removeprefix('torch.')}; allowed: bfloat16")
        if kv_cache_dtype is not None and kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            allowed = _listed(cls.supported_kv_cache_dtypes)
            reasons.append(f"KV cache dtype: got {kv_cache_dtype}; allowed: {allowed}")
        if block_size is not None and (block_size < 1 or all(block_size % size for size in sizes)):
            allowed = _listed([str(size) for size in sizes])
            reasons.append(f"block size: got {block_size}; allowed: multiples of {allowed}")
        if not use_mla:
            reasons.append("MLA: got a model without it; allowed: MLA only")
        if not use_sparse:
            reasons.append("sparse: got dense attention; allowed: sparse only")
        capability = cls.capability(device_capability)
        if capability.level == "refused":
            reasons.append(capability.reason)
        return "; ".join(reasons) or None


class MegaAttentionBackend(SparseMLABackend):
    """`FLASHMLA_MEGA_ATTN_DSV41`: query RoPE, attention, inverse RoPE and FP8 cast in one launch.

    Upstream runs it on SM100 with 64 or 128 padded heads and blocks of 128 tokens only.
    """

    name: ClassVar[str] = "FLASHMLA_MEGA_ATTN_DSV41"
    output: ClassVar[str] = "fp8"
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *SparseMLABackend.supported_kv_cache_dtypes,
        "nvfp4_ds_mla",
    ]


@functools.cache
def _has_kernel(backend: str, op: str) -> bool:
    return (_KERNELS / backend / f"{op}.py").is_file()


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else f"{capability[0]}.{capability[1]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing yet"
