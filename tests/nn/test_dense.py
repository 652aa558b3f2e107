"""The dense check itself: what it accepts, and that it notices what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparse_mla.testing.dense import DenseStack, Selection, quantised_error

Spoil = Callable[[Tensor, Tensor], None]  # (lists [L, K], last row [K])


def test_its_own_lists_are_accepted_and_change_nothing(lab) -> None:
    hidden = lab.hidden(90)
    dense = lab.dense(lab.server())
    first = dense.run(hidden)
    again = dense.run(hidden, first.selections)
    assert first.checks == ()
    assert again.faults == []
    assert [check.differing for check in again.checks] == [0, 0, 0, 0]
    assert torch.equal(first.hidden, again.hidden)
    assert first.error(first.hidden) == 0
    for selection in first.selections.values():
        counts = (selection.positions >= 0).sum(1)
        assert int(counts[-1]) == 12
        assert bool((selection.positions.max(1).values < torch.arange(1, 91)).all())


def test_it_is_causal(lab) -> None:
    """The first rows do not depend on the later ones."""
    hidden = lab.hidden(80)
    dense = lab.dense(lab.server())
    whole = dense.run(hidden)
    told = {
        layer_id: Selection(
            lists.positions[:50], None if lists.candidates is None else lists.candidates[:50]
        )
        for layer_id, lists in whole.selections.items()
    }
    part = dense.run(hidden[:50], told)
    assert part.faults == []
    assert part.error(whole.hidden[:50]) < part.tolerance


def _worst_unchosen(lists: Tensor, last: Tensor) -> None:
    """Replace an entry by one that was not chosen, keeping the list ascending."""
    chosen = set(last.tolist())
    gap = next(i for i in range(1, len(last)) if int(last[i]) - int(last[i - 1]) > 1)
    entry = int(last[gap]) - 1
    assert entry not in chosen
    last[gap] = entry


def _drop_one(lists: Tensor, last: Tensor) -> None:
    last[:-1] = last[1:].clone()
    last[-1] = -1


def _repeat_one(lists: Tensor, last: Tensor) -> None:
    last[1] = last[0]


def _unsorted(lists: Tensor, last: Tensor) -> None:
    last[:2] = last[:2].flip(0)


def _invisible(lists: Tensor, last: Tensor) -> None:
    lists[50, 11] = 60


def _out_of_range(lists: Tensor, last: Tensor) -> None:
    last[-1] = 9999


def _shifted(lists: Tensor, last: Tensor) -> None:
    """Every row attends the list of the row before it."""
    lists[40:] = lists[39:-1].clone()


def _newest(lists: Tensor, last: Tensor) -> None:
    """The newest twelve entries instead of the best."""
    for row in range(12, len(lists)):
        lists[row] = torch.arange(row - 11, row + 1)


@pytest.mark.parametrize(
    "spoil",
    [_drop_one, _repeat_one, _unsorted, _invisible, _out_of_range, _shifted, _newest],
    ids=lambda spoil: spoil.__name__.strip("_"),
)
def test_wrong_lists_are_refused(lab, spoil: Spoil) -> None:
    hidden = lab.hidden(90)
    dense = lab.dense(lab.server(layer_ids=(3,)))
    right = dense.run(hidden).selections[3]
    lists = right.positions.clone()
    spoil(lists, lists[-1])
    assert not torch.equal(lists, right.positions)
    result = dense.run(hidden, {3: Selection(lists, right.candidates)})
    assert len(result.faults) >= 1
    assert result.faults[0].startswith("layer 3")


def test_one_entry_far_from_the_cut_is_refused(lab) -> None:
    hidden = lab.hidden(90)
    dense = lab.dense(lab.server(layer_ids=(3,)))
    right = dense.run(hidden).selections[3]
    refused = 0
    for row in range(60, 90):
        lists = right.positions.clone()
        _worst_unchosen(lists, lists[row])
        faults = dense.run(hidden, {3: Selection(lists, right.candidates)}).faults
        assert all(f"position {row}:" in fault for fault in faults)
        refused += bool(faults)
    assert refused >= 20  # now and then the swapped entry does lie near the cut


def test_wrong_candidates_are_refused(lab) -> None:
    hidden = lab.hidden(90)
    dense = lab.dense(lab.server(layer_ids=(3, 5)))
    right = dense.run(hidden).selections
    blocks = right[3].candidates.clone()
    assert int(blocks[-1, -1]) == 89 // 4  # the newest block is pinned
    blocks[-1] = torch.arange(5)
    spoilt = {**right, 3: Selection(right[3].positions, blocks)}
    faults = dense.run(hidden, spoilt).faults
    assert any("layer 3, position 89" in fault for fault in faults)


@pytest.mark.parametrize(
    ("layer_ids", "fields"),
    [
        ((0,), {"sliding_window": 31}),
        ((0,), {"rope_theta": 20000.0}),
        ((1,), {"compress_rope_theta": 16000.0}),
        ((1,), {"rms_norm_eps": 1e-2}),
        ((3,), {"sliding_window": 33}),
    ],
)
def test_a_slightly_different_model_is_noticed(
    lab, layer_ids: tuple[int, ...], fields: dict[str, float]
) -> None:
    """Serving one model and checking it against the other fails by a wide margin."""
    hidden = lab.hidden(120)
    server = lab.server(lab.records("fp8_ds_mla"), layer_ids=layer_ids)
    served = server.serve(hidden, 60)
    right = lab.dense(server).run(hidden, served.selections)
    assert right.faults == []
    assert right.error(served.outputs) < right.tolerance
    other = lab.shrunken(**fields)
    weights = lab.dense(server).weights_of
    wrong = DenseStack(other, layer_ids, weights, server.caches.records)
    result = wrong.run(hidden, served.selections)
    assert result.faults or result.error(served.outputs) > 2 * result.tolerance


def test_rounding_rule() -> None:
    """RMS difference of two values rounded to a grid, against an experiment."""
    values = (
        torch.rand(4_000_000, dtype=torch.float64) * 100
    )  # 320 of them move by the smallest error
    for error in (1e-4, 1e-2, 0.3):
        near = values + error * torch.randn_like(values)
        moved = (values.round() - near.round()).square().mean().sqrt()
        assert 0.7 < float(moved) / quantised_error(error, 1.0) < 1.1
    assert quantised_error(0.5, 0.1) == 0.5
