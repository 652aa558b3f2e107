"""Rotary frequencies, tables and the rotation."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_mla.config.model import ModelConfig
from sparse_mla.config.rope import apply_rope, rope_frequencies, rope_table, yarn_range
from sparse_mla.config.topology import LayerKind
from sparse_mla.errors import ArgumentError, DTypeError, ShapeError

FLASH = ModelConfig.deepseek_v41_flash()
PLAIN = FLASH.replace(rope_scaling=None)
KINDS = list(LayerKind)


def exact(base: float) -> torch.Tensor:
    """The correctly rounded frequencies."""
    return torch.tensor([base ** (-2 * i / 64) for i in range(32)], dtype=torch.float64).float()


def test_yarn_range() -> None:
    assert FLASH.rope_scaling is not None
    turns = [64 * math.log(65536 / (n * 2 * math.pi)) / (2 * math.log(160000)) for n in (32, 1)]
    assert turns == pytest.approx([15.4533, 24.7084], abs=5e-5)
    assert yarn_range(FLASH.rope_scaling, 160000) == (15, 25)


@pytest.mark.parametrize("kind", [LayerKind.RATIO_1, LayerKind.RATIO_2])
def test_worked_frequencies(kind: LayerKind) -> None:
    scaled, plain = rope_frequencies(FLASH, kind), rope_frequencies(PLAIN, kind)
    assert scaled.dtype == torch.float32
    assert scaled[0] == 1.0
    assert torch.equal(scaled[:16], plain[:16])
    worked = {15: 3.635538584e-03, 16: 2.265625e-03, 20: 2.969777783e-04, 31: 5.680529e-07}
    for pair, value in worked.items():
        assert scaled[pair].item() == pytest.approx(value, rel=1e-7)
    assert plain[16].item() == pytest.approx(2.5e-3, rel=1e-7)
    assert torch.equal(scaled[25:], plain[25:] / 16)


def test_window_only_layers_have_another_base_and_no_scaling() -> None:
    window = rope_frequencies(FLASH, LayerKind.WINDOW_ONLY)
    assert torch.equal(window, rope_frequencies(PLAIN, LayerKind.WINDOW_ONLY))
    assert window.double() == pytest.approx(exact(10000.0).double(), rel=2e-7)


@pytest.mark.parametrize(
    ("base", "off_exact", "off_negative_power"), [(160000.0, 8, 7), (10000.0, 10, 12)]
)
def test_bits_are_power_then_reciprocal(
    base: float, off_exact: int, off_negative_power: int
) -> None:
    kind = LayerKind.RATIO_1 if base > 1e5 else LayerKind.WINDOW_ONLY
    ours = rope_frequencies(PLAIN, kind)
    negative = torch.pow(base, -torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    assert int((ours != exact(base)).sum()) == off_exact
    assert int((ours != negative).sum()) == off_negative_power
    assert ours.double() == pytest.approx(exact(base).double(), rel=2.0**-23)


@pytest.mark.parametrize("kind", KINDS)
def test_table_columns_and_bits(kind: LayerKind) -> None:
    table = rope_table(FLASH, kind, 5000)
    assert table.shape == (5000, 64)
    assert table.dtype == torch.float32
    angles = torch.arange(5000, dtype=torch.float32)[:, None] * rope_frequencies(FLASH, kind)
    assert torch.equal(table, torch.cat((angles.cos(), angles.sin()), dim=1))
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    assert torch.equal(rope_table(FLASH, kind, 777), table[:777])


def test_table_is_float32_maths_at_large_positions() -> None:
    cfg = FLASH.replace(max_position_embeddings=1048576)
    table = rope_table(cfg, LayerKind.RATIO_2)
    assert table.shape == (1048576, 64)
    frequencies = rope_frequencies(cfg, LayerKind.RATIO_2).double()
    for position in (127, 4095, 65535, 1048575):
        angle = (position * frequencies).float().double()  # exact product, one rounding
        wanted = torch.cat((angle.cos(), angle.sin()))
        assert (table[position].double() - wanted).abs().max() <= 2.0**-23


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        table = rope_table(FLASH, LayerKind.RATIO_1, 4)
    assert table.device.type == "cpu"
    assert table[1, 0].item() == pytest.approx(math.cos(1.0), abs=1e-7)


def test_no_position_is_refused() -> None:
    with pytest.raises(ArgumentError, match="num_positions: got 0"):
        rope_table(FLASH, LayerKind.RATIO_1, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_pairs_neighbours(kind: LayerKind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = rope_table(FLASH, kind, 64)
    x = torch.randn(3, 2, 512).to(dtype)
    positions = torch.tensor([0, 5, 63])
    out = apply_rope(x, positions, table)
    assert out.dtype == dtype
    assert torch.equal(out[..., :448], x[..., :448])
    assert torch.equal(out[0], x[0])
    for token, position in enumerate(positions.tolist()):
        for pair in range(32):
            a, b = x[token, :, 448 + 2 * pair].float(), x[token, :, 449 + 2 * pair].float()
            cos, sin = table[position, pair], table[position, 32 + pair]
            assert torch.equal(out[token, :, 448 + 2 * pair], (a * cos - b * sin).to(dtype))
            assert torch.equal(out[token, :, 449 + 2 * pair], (b * cos + a * sin).to(dtype))


def test_wrong_pairing_changes_the_result() -> None:
    table = rope_table(FLASH, LayerKind.RATIO_1, 8)
    x = torch.arange(64, dtype=torch.float32)[None]
    positions = torch.tensor([7])
    halves = x.view(1, 2, 32).transpose(1, 2).reshape(1, 64)
    assert not torch.allclose(apply_rope(x, positions, table), apply_rope(halves, positions, table))


@pytest.mark.parametrize("position", [0, 1, 127, 4095, 65535])
def test_turning_back_is_the_identity(position: int) -> None:
    torch.manual_seed(position)
    table = rope_table(FLASH, LayerKind.RATIO_2, 65536)
    x = torch.rand(4, 128) * 2 - 1
    positions = torch.full((4,), position)
    there = apply_rope(x, positions, table)
    back = apply_rope(there, positions, table, inverse=True)
    assert (back - x).abs().max() <= 1e-6
    assert position == 0 or not torch.equal(there, x)


def test_garbage_positions_are_clamped_and_int32_agrees() -> None:
    table = rope_table(FLASH, LayerKind.RATIO_1, 16)
    x = torch.randn(5, 64)
    positions = torch.tensor([3, -1, -(2**31), 2**31 - 1, 15], dtype=torch.int32)
    out = apply_rope(x, positions, table)
    assert torch.equal(out, apply_rope(x, torch.tensor([3, 0, 0, 15, 15]), table))


def test_no_rows() -> None:
    table = rope_table(FLASH, LayerKind.RATIO_1, 1)
    assert apply_rope(torch.empty(0, 4, 64), torch.empty(0, dtype=torch.int64), table).shape == (
        0,
        4,
        64,
    )


def test_bad_arguments_are_named() -> None:
    table = rope_table(FLASH, LayerKind.RATIO_1, 4)
    x, positions = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DTypeError, match="x: got dtype torch.int32"):
        apply_rope(x.int(), positions, table)
    with pytest.raises(ShapeError, match=r"x: got shape \[2, 32\]; allowed: .* D >= 64"):
        apply_rope(x[:, :32], positions, table)
    with pytest.raises(ShapeError, match=r"positions: got shape \[1\]; allowed: shape \[2\]"):
        apply_rope(x, positions[:1], table)
    with pytest.raises(DTypeError, match="positions: got dtype float32"):
        apply_rope(x, positions.float(), table)
    with pytest.raises(DTypeError, match="table: got dtype float64"):
        apply_rope(x, positions, table.double())
    with pytest.raises(ShapeError, match=r"table: got shape \[4, 32\]"):
        apply_rope(x, positions, table[:, :32])
