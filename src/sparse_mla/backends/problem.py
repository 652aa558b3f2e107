"""What is to be computed and where: the two things that a choice of backend depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from sparse_mla._checks import check_choice
from sparse_mla.errors import ArgumentError
from sparse_mla.settings import settings

OPS = (
    "attend",
    "write_window",
    "write_compressed",
    "compress",
    "write_index_keys",
    "prepare_index_queries",
    "index_topk",
)
"""The kernel ops; each is a file of this name in the folder of every backend that has it."""
OUTPUTS = ("bf16", "fp8")
LIBRARIES = frozenset({"triton", "cuda.bindings"})
"""What kernels need beside PyTorch; found without being imported."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, described by what a backend may refuse. Fields that an op does not use stay None or 0."""

    op: str = "attend"
    num_tokens: int = 1
    num_heads: int = 64  # local query heads; for index ops the indexer's
    window_record: str | None = None  # names of `cache.records`
    compressed_record: str | None = None
    index_record: str | None = None
    window_keys: int = 0  # list width of the window set
    compressed_keys: int = 0
    output: str = "bf16"
    dtype: str = "bfloat16"  # of the query
    batch_invariant: bool = False
    query_norm: bool = False  # each head's logits are divided by its query's root mean square

    def __post_init__(self) -> None:
        """Refuse ops and outputs that do not exist."""
        check_choice("op", self.op, OPS)
        check_choice("output", self.output, OUTPUTS)

    def describe(self) -> str:
        """One line for errors and tables."""
        parts = [f"{self.op} with {self.num_heads} heads"]
        records = [
            f"{name} {record}"
            for name, record in (
                ("window", self.window_record),
                ("compressed", self.compressed_record),
                ("index", self.index_record),
            )
            if record is not None
        ]
        parts += [" + ".join(records)] if records else []
        if self.op == "attend":
            parts.append(f"{self.output} output")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A machine, there or not: everything that a backend asks of it."""

    kind: str  # "cpu", "cuda" (NVIDIA) or another torch device type; "hip" for AMD
    capability: tuple[int, int] | None = None  # NVIDIA compute capability
    name: str = ""
    num_sms: int = 0
    libraries: frozenset[str] = frozenset()  # of `LIBRARIES`, those that can be imported
    triton_interpreter: bool = False  # Triton kernels run on the CPU, for tests

    @property
    def triton_available(self) -> bool:
        """Whether Triton can be imported."""
        return "triton" in self.libraries

    @classmethod
    def detect(cls, device: torch.device | str = "cpu") -> DeviceInfo:
        """Describe a device of this process without importing any kernel library."""
        place = torch.device(device)
        index = place.index
        if place.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        return _detect(place.type, index)

    @classmethod
    def from_capability(cls, capability: str, *, triton: bool = True) -> DeviceInfo:
        """A machine that need not be here: "cpu", or a compute capability such as "9.0" or "sm90".

        Args:
            capability: which.
            triton: whether Triton is installed there; everything else is.

        Raises:
            ArgumentError: neither.
        """
        libraries = frozenset(LIBRARIES if triton else LIBRARIES - {"triton"})
        if capability.lower() == "cpu":
            return cls("cpu", name="CPU", libraries=libraries)
        major, minor = _parse_capability(capability)
        name, num_sms = _KNOWN.get((major, minor), (f"an SM{major}{minor} GPU", 0))
        return cls("cuda", (major, minor), name, num_sms, libraries)

    def describe(self) -> str:
        """`NVIDIA H200 (SM90)`, `CPU`."""
        if self.capability is None:
            return self.name or self.kind
        return f"{self.name} (SM{self.capability[0]}{self.capability[1]})"


_KNOWN = {  # capability: (a machine that has it, its multiprocessors)
    (8, 0): ("A100", 108),
    (8, 6): ("RTX 3090", 82),
    (8, 9): ("L40S", 142),
    (9, 0): ("H200", 132),
    (10, 0): ("B200", 148),
    (12, 0): ("RTX 5090", 170),
    (12, 1): ("DGX Spark", 48),
}
KNOWN_MACHINES = ("cpu", *(f"{major}.{minor}" for major, minor in _KNOWN))
"""Machines of the support matrix, as `DeviceInfo.from_capability` takes them."""


@functools.lru_cache(maxsize=64)
def _detect(kind: str, index: int | None) -> DeviceInfo:
    libraries = frozenset(name for name in LIBRARIES if _importable(name))
    if kind != "cuda":
        interpreter = kind == "cpu" and settings().triton_interpreter
        name = "CPU" if kind == "cpu" else kind
        return DeviceInfo(kind, None, name, 0, libraries, interpreter)
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        count = properties.multi_processor_count
        return DeviceInfo("hip", None, properties.name, count, libraries)
    capability = (properties.major, properties.minor)
    return DeviceInfo(
        "cuda", capability, properties.name, properties.multi_processor_count, libraries
    )


def _importable(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _importable(parent)) and find_spec(name) is not None


def _parse_capability(text: str) -> tuple[int, int]:
    digits = text.lower().removeprefix("sm").removeprefix("_")
    major, dot, minor = digits.partition(".") if "." in digits else (digits[:-1], ".", digits[-1:])
    if not (dot and major.isascii() and major.isdecimal() and minor.isdecimal()):
        raise ArgumentError(
            "capability", repr(text), '"cpu", or a capability such as "9.0", "sm90"'
        )
    return int(major), int(minor)
