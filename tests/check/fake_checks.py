"""Checks that are right, wrong, or end their process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparse_mla.testing.check import CheckCase, Fault


@dataclass(frozen=True)
class Fake:
    size: int
    least_wrong: int = 3
    op: str = "fake"
    name: str = "fake"

    def fields(self) -> dict[str, Any]:
        return {"size": self.size}

    def run(self, backend: str, device: torch.device) -> Fault | None:
        return Fault("x", (), 1.0, 2.0) if self.size >= self.least_wrong else None

    def smaller(self) -> Iterator[CheckCase]:
        for size in (self.size // 2, self.size - 1):
            if size >= 1:
                yield replace(self, size=size)


@dataclass(frozen=True)
class Leaves:
    """Ends its process."""

    op: str = "fake"
    name: str = "leaves"

    def fields(self) -> dict[str, Any]:
        return {}

    def run(self, backend: str, device: torch.device) -> Fault | None:
        os._exit(3)

    def smaller(self) -> Iterator[CheckCase]:
        return iter(())
