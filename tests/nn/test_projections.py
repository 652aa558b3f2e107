"""Linear maps: values, and rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.nn.projections import FEW, TILE, WIDE, GroupedLinear, Linear, RowTiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 160), (5120, 64)])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear = Linear(*shape, device="cpu", dtype=dtype)
    linear.weight.data.normal_(std=shape[0] ** -0.5)
    x = torch.randn(300, shape[0]).to(torch.bfloat16)
    whole = linear(x)
    for rows in (1, 2, 7, 31, 32, 33, 64, 129, 299):
        parts = [linear(x[start : start + rows]) for start in range(0, 300, rows)]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(300)
    assert torch.equal(linear(x[order]), whole[order])
    exact = x.double() @ linear.weight.double().T
    # A float32 sum of n products errs by at most sqrt(n) roundings of its absolute sum (very likely).
    absolute = x.double().abs() @ linear.weight.double().abs().T
    bound = 2.0**-24 * shape[0] ** 0.5 * absolute
    if dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * exact.abs()
    assert bool(((whole.double() - exact).abs() <= bound).all())


def test_groups_are_independent_and_rows_too() -> None:
    grouped = GroupedLinear(3, 64, 20, device="cpu")
    grouped.weight.data.normal_(std=0.125)
    x = torch.randn(70, 3, 64).to(torch.bfloat16)
    whole = grouped(x)
    assert whole.shape == (70, 3, 20)
    exact = torch.einsum("tgi,goi->tgo", x.double(), grouped.weight.double())
    assert bool(((whole.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all())
    for rows in (1, 9, 32):
        parts = [grouped(x[start : start + rows]) for start in range(0, 70, rows)]
        assert torch.equal(torch.cat(parts), whole)


def test_padding_stays_out_of_real_rows_and_no_rows_work() -> None:
    linear = Linear(64, 8, device="cpu")
    linear.weight.data.fill_(1.0)
    x = torch.ones(TILE + 1, 64, dtype=torch.bfloat16)
    x[3] = torch.nan
    out = linear(x)
    assert bool(out[3].isnan().all())
    kept = torch.arange(TILE + 1) != 3
    assert bool((out[kept] == 64).all())
    assert linear(x[:0]).shape == (0, 8)


@pytest.mark.parametrize("odd", [None, WIDE, FEW])
def test_other_tiles_are_used_only_where_they_agree(odd: int | None) -> None:
    sizes: list[int] = []

    def product(tile: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tile))
        return tile * (2 if len(tile) != odd else 2 + 2**-20)

    x = torch.randn(WIDE + TILE + 1, 512)
    tiles = RowTiles()
    tiles.apply(x, product)
    sizes.clear()
    assert torch.equal(tiles.apply(x, product), x * 2)
    wide = [TILE] * 4 if odd == WIDE else [WIDE]
    assert sizes == [*wide, TILE, TILE if odd == FEW else FEW]


def test_small_products_keep_one_tile() -> None:
    sizes: list[int] = []
    x = torch.randn(300, 64)
    tiles = RowTiles()
    tiles.apply(x, lambda tile: tile)
    tiles.apply(x, lambda tile: (sizes.append(len(tile)), tile)[1])
    assert sizes == [TILE] * 10
