"""Every error that a caller of this library can meet.

    SparseMLAError
    ├── ConfigError (ValueError)             a model configuration that the attention cannot follow
    ├── ArgumentError (ValueError)           an argument with the wrong value
    │   ├── ShapeError                       wrong rank or size
    │   ├── DTypeError (TypeError)           wrong tensor dtype
    │   ├── DeviceError                      tensor on another device than its companions
    │   ├── StrideError                      memory order, stride or alignment that no kernel can read
    │   ├── IndexRangeError (IndexError)     a slot, page, position or length out of range
    │   └── CacheFormatError                 bytes that are not the record they are said to be
    ├── TraceError (ValueError)              a request list that cannot be read: file, line, reason
    ├── OutOfPagesError (RuntimeError)       the pool has no page left
    ├── PlanMismatchError (RuntimeError)     a plan used for another shape than it was built for
    └── UnsupportedError (NotImplementedError)  no backend can run this; carries every reason

Messages answer four questions: which argument, what it got, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SparseMLAError(Exception):
    """Base of every error raised on purpose by this library."""


class ConfigError(SparseMLAError, ValueError):
    """A model configuration that the attention cannot follow."""

    def __init__(self, field: str, got: Any, allowed: str, remedy: str = "") -> None:
        super().__init__(_sentence(f"config field {field!r}", got, allowed, remedy))
        self.field = field
        self.got = got


class ArgumentError(SparseMLAError, ValueError):
    """An argument with the wrong value."""

    def __init__(self, argument: str, got: Any, allowed: str, remedy: str = "") -> None:
        super().__init__(_sentence(argument, got, allowed, remedy))
        self.argument = argument
        self.got = got


class ShapeError(ArgumentError):
    """Wrong rank or size."""


class DTypeError(ArgumentError, TypeError):
    """Wrong tensor dtype."""


class DeviceError(ArgumentError):
    """A tensor on another device than its companions."""


class StrideError(ArgumentError):
    """A memory order, stride or alignment that no kernel can read."""


class IndexRangeError(ArgumentError, IndexError):
    """A slot, page, position or length out of range."""


class CacheFormatError(ArgumentError):
    """Bytes that are not the record they are said to be."""


class TraceError(SparseMLAError, ValueError):
    """A request list that cannot be read."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class OutOfPagesError(SparseMLAError, RuntimeError):
    """The pool has no page left for a request."""


class PlanMismatchError(SparseMLAError, RuntimeError):
    """A plan used for another shape, device or format than it was built for."""


class UnsupportedError(SparseMLAError, NotImplementedError):
    """No backend can run the problem; `reasons` holds one sentence for each refusal."""

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        super().__init__(f"{what} is not supported here:{lines}")
        self.reasons = tuple(reasons)


def _sentence(subject: str, got: Any, allowed: str, remedy: str) -> str:
    text = f"{subject}: got {got}; allowed: {allowed}"
    return f"{text}; {remedy}" if remedy else text
