"""Linear maps whose rows do not depend on each other.

A matrix product of a CPU library may sum a row in another order when the number of rows changes;
measured here, one row alone differs from the same row among others in 0.1 % of bf16 results and
almost all float32 results. A serving step must not: the same token has to get the same cache bytes
in a decode step and in a prefill chunk. On a CPU every product therefore has exactly `TILE` rows (the
last tile is filled with zeros), so the library runs the same code for every row of every step. Other
tiles are faster, `WIDE` ones for many rows (1.3 times) and `FEW` ones for few (twice); they are used for
a matrix if the library has shown, on random rows, that they give the bits that `TILE` rows give. On a
GPU the product is one call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

TILE = 32
WIDE = 128
FEW = 8
PROBE_ROWS = 128
PROBE_VALUES = 1 << 16
"""Results that must agree. Sums in another order differ in about one of 10,000 bf16 results, so this many
miss such a tile once in a thousand; smaller products are not worth the question."""

Product = Callable[[Tensor], Tensor]


class RowTiles:
    """Cuts the rows of one matrix's products into tiles that give every row its own bits."""

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, int], bool] = {}  # by tile and number of threads

    def apply(self, x: Tensor, product: Product) -> Tensor:
        """`product` over the rows of x [T, ...]."""
        rows = x.shape[0]
        if x.device.type != "cpu" or rows == 0:
            return product(x)
        tiles: list[Tensor] = []
        first = 0
        while first < rows:
            size, left = TILE, rows - first
            if left >= WIDE and self._agrees(WIDE, x, product):
                size = WIDE
            elif left <= FEW and self._agrees(FEW, x, product):
                size = FEW
            tiles.append(_tile(x, first, size, product))
            first += size
        return tiles[0][:rows] if len(tiles) == 1 else torch.cat(tiles)[:rows]

    def _agrees(self, size: int, x: Tensor, product: Product) -> bool:
        key = (size, torch.get_num_threads())
        if key not in self._agreed:
            # The rows at hand may hold NaN or zeros, which prove nothing.
            shape = (PROBE_ROWS, *x.shape[1:])
            probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
            wanted, got = _in_tiles(probe, TILE, product), _in_tiles(probe, size, product)
            self._agreed[key] = wanted.numel() >= PROBE_VALUES and torch.equal(wanted, got)
        return self._agreed[key]


def _tile(x: Tensor, first: int, size: int, product: Product) -> Tensor:
    tile = x[first : first + size]
    missing = size - tile.shape[0]
    if missing:
        tile = torch.cat([tile, tile.new_zeros(missing, *tile.shape[1:])])
    return product(tile)


def _in_tiles(x: Tensor, size: int, product: Product) -> Tensor:
    return torch.cat([_tile(x, first, size, product) for first in range(0, x.shape[0], size)])


def _empty(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x @ weight^T, accumulated in float32, in the weight's dtype or in `out_dtype`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = _empty(out_features, in_features, device=device, dtype=dtype)
        self.out_dtype = out_dtype or dtype
        self.tiles = RowTiles()

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]; x is cast to the weight's dtype first."""
        return self.tiles.apply(x.to(self.weight.dtype), self._product)

    def _product(self, rows: Tensor) -> Tensor:
        if self.weight.dtype == self.out_dtype:
            return functional.linear(rows, self.weight)
        return torch.mm(rows, self.weight.t(), out_dtype=self.out_dtype)


class GroupedLinear(nn.Module):
    """y_g = x_g @ weight_g^T for each output group g."""

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.weight = _empty(groups, out_features, in_features, device=device, dtype=dtype)
        self.tiles = RowTiles()

    def forward(self, x: Tensor) -> Tensor:
        """[T, groups, in_features] -> [T, groups, out_features]."""
        transposed = self.weight.transpose(1, 2)
        return self.tiles.apply(
            x, lambda tile: torch.bmm(tile.transpose(0, 1), transposed).transpose(0, 1)
        )


class RMSNorm(nn.Module):
    """The gain of a root-mean-square norm; the norm itself is `kernels.torch.rms_norm`."""

    def __init__(self, dim: int, eps: float, *, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty(dim, device=device, dtype=torch.float32)
