"""How far a step filled buffers that stay, so that what lies past it can be put back to padding."""

from __future__ import annotations

import torch
from torch import Tensor


class Extent:
    """How many leading entries of some buffers a step may have written.

    A step that is shorter than the last one puts the entries between the two back to padding, so that
    past a step's rows every slot is -1 and every length 0: a graph captured for more rows, replayed
    then, attends nothing and stores nothing there. Steps of equal length cost nothing.

    A replayed graph writes its rows without this object's knowledge. Hence entries that a step wrote
    while it was captured count as written from then on.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._end = 0
        self._captured = 0

    def stale(self, end: int) -> slice:
        """Entries past `end`, the length of the step that begins, that an earlier step may have written."""
        stale = slice(end, max(self._end, end))
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            self._captured = max(self._captured, end)
        self._end = max(end, self._captured)
        return stale


def clear(stale: slice, *fillings: tuple[Tensor, int]) -> None:
    """Fill the stale entries of each buffer with its padding value; no launch if there are none."""
    if stale.start < stale.stop:
        for buffer, value in fillings:
            buffer[stale].fill_(value)
