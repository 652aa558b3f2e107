"""The environment variables that this library reads, all of them, typed."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparse_mla.errors import ArgumentError

BACKEND_NAMES = ("auto", "hopper", "triton", "torch", "reference")
"""What `backend=` and SPARSE_MLA_BACKEND accept."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a process, read once.

    SPARSE_MLA_BACKEND     the backend of every call that does not name one; default `auto`
    SPARSE_MLA_CACHE_DIR   where compiled kernels are kept; default `~/.cache/sparse_mla`
    TRITON_INTERPRET       Triton's own switch: its kernels then run on a CPU, slowly
    """

    backend: str
    cache_dir: Path
    triton_interpreter: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables of this process, or of a mapping.

        Raises:
            ArgumentError: SPARSE_MLA_BACKEND names no backend.
        """
        variables = os.environ if environment is None else environment
        backend = variables.get("SPARSE_MLA_BACKEND", "auto").strip().lower() or "auto"
        if backend not in BACKEND_NAMES:
            raise ArgumentError(
                "environment variable SPARSE_MLA_BACKEND",
                repr(backend),
                ", ".join(BACKEND_NAMES),
                "correct or unset it",
            )
        cache = variables.get("SPARSE_MLA_CACHE_DIR") or "~/.cache/sparse_mla"
        return cls(
            backend=backend,
            cache_dir=Path(cache).expanduser(),
            triton_interpreter=variables.get("TRITON_INTERPRET", "0") not in ("", "0"),
        )


@functools.cache
def settings() -> Settings:
    """The settings of this process. `settings.cache_clear()` reads them again."""
    return Settings.from_environment()
