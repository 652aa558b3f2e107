"""The environment variables that this library reads or sets, all of them, typed."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparse_mla.errors import ArgumentError

BACKEND_NAMES = ("auto", "hopper", "triton", "torch", "reference")
"""What `backend=` and SPARSE_MLA_BACKEND accept."""
HOPPER_NUMBERS = ("f16", "bf16")
"""What SPARSE_MLA_HOPPER_NUMBERS accepts."""
SWITCH = ("on", "off")
"""What SPARSE_MLA_OVERLAP accepts."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a process, read once.

    SPARSE_MLA_BACKEND     the backend of every call that does not name one; default `auto`
    SPARSE_MLA_CACHE_DIR   where compiled kernels are kept; default `~/.cache/sparse_mla`
    SPARSE_MLA_HOPPER_NUMBERS  what query, keys and weights are for Hopper's tensor cores: `f16` (default; values beyond
                           its range saturate) or `bf16` (none do, weights keep 8 bits, the kernel is slower)
    SPARSE_MLA_OVERLAP     whether a launch of a Hopper kernel may get ready while the launch ahead of it in the stream ends
                           (programmatic dependent launch; it touches no tensor before that): `on` (default) or `off`
    TRITON_INTERPRET       Triton's own switch: its kernels then run on a CPU, slowly
    """

    backend: str
    cache_dir: Path
    triton_interpreter: bool
    hopper_numbers: str = "f16"
    overlap: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables of this process, or of a mapping.

        Raises:
            ArgumentError: SPARSE_MLA_BACKEND names no backend, SPARSE_MLA_HOPPER_NUMBERS no format, or
                SPARSE_MLA_OVERLAP is neither on nor off.
        """
        variables = os.environ if environment is None else environment
        backend = _one_of(variables, "SPARSE_MLA_BACKEND", BACKEND_NAMES)
        cache = variables.get("SPARSE_MLA_CACHE_DIR") or "~/.cache/sparse_mla"
        return cls(
            backend=backend,
            cache_dir=Path(cache).expanduser(),
            triton_interpreter=variables.get("TRITON_INTERPRET", "0") not in ("", "0"),
            hopper_numbers=_one_of(variables, "SPARSE_MLA_HOPPER_NUMBERS", HOPPER_NUMBERS),
            overlap=_one_of(variables, "SPARSE_MLA_OVERLAP", SWITCH) == "on",
        )


def _one_of(variables: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The value of a variable, the first of `allowed` if it is not set or empty."""
    value = variables.get(name, allowed[0]).strip().lower() or allowed[0]
    if value not in allowed:
        raise ArgumentError(
            f"environment variable {name}", repr(value), ", ".join(allowed), "correct or unset it"
        )
    return value


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that `torchrun` started together."""

    rank: int  # RANK
    size: int  # WORLD_SIZE, processes in all
    local_rank: int  # LOCAL_RANK, on this machine
    local_size: int  # LOCAL_WORLD_SIZE, processes on this machine

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch | None:
        """Read what `torchrun` sets; None in a process that it did not start.

        Raises:
            ArgumentError: only some of the variables are there, or one is no such number.
        """
        variables = os.environ if environment is None else environment
        found = {name: variables.get(name) for name in _TORCHRUN}
        if all(value is None for value in found.values()):
            return None
        numbers = []
        for name, value in found.items():
            if value is None or not (value.isascii() and value.isdigit()):
                raise ArgumentError(
                    f"environment variable {name}",
                    repr(value),
                    f"a number, as torchrun sets it with {', '.join(_TORCHRUN)}",
                    "start with torchrun, or unset them all",
                )
            numbers.append(int(value))
        return cls(*numbers)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@functools.cache
def settings() -> Settings:
    """The settings of this process. `settings.cache_clear()` reads them again."""
    return Settings.from_environment()


def leave_nvlink_multicast_off() -> None:
    """Set NCCL_NVLS_ENABLE=0 for this process, unless the caller has set it; before NCCL's first use."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
