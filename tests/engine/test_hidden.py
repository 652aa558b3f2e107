"""Hidden states depend on (seed, stream, position) and on nothing else."""

import torch

from sparse_mla.engine.hidden import hidden_states


def rows(streams: list[int], positions: list[int], width: int = 257, seed: int = 0) -> torch.Tensor:
    return hidden_states(torch.tensor(streams), torch.tensor(positions), width, seed)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    together = rows([3, 4, 3, -7], [0, 0, 9, 2**40])
    for index, (stream, position) in enumerate([(3, 0), (4, 0), (3, 9), (-7, 2**40)]):
        assert torch.equal(together[index : index + 1], rows([stream], [position]))


def test_other_stream_position_or_seed_gives_other_content() -> None:
    base = rows([1], [5])
    for other in (rows([2], [5]), rows([1], [6]), rows([1], [5], seed=1), rows([5], [1])):
        assert (base == other).double().mean() < 0.01


def test_values_are_nearly_normal_and_rows_independent() -> None:
    x = hidden_states(torch.zeros(64, dtype=torch.int64), torch.arange(64), 4096).double()
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.var()) - 1.0) < 0.01
    assert 2.5 < float((x**4).mean()) < 3.0  # 2.7 for a sum of four uniforms, 3 for a normal
    assert float(x.abs().max()) <= 3.4642
    correlation = torch.corrcoef(x) - torch.eye(64)
    assert float(correlation.abs().max()) < 6 / 4096**0.5


def test_known_values_stay() -> None:
    """The same arithmetic in Python integers."""
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    base = mix((7 * golden + 11) & mask)
    row = mix((base + 13 * golden) & mask)
    bits = mix((row + 3 * golden) & mask)
    total = sum(bits >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    wanted = (total - 2 * 0xFFFF) * 3**0.5 / 2**16
    assert abs(float(rows([11], [13], seed=7)[0, 2]) - wanted) < 1e-6
