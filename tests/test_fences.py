"""Copies between fences are what they are copies of; tests/triton/test_fences.py asks whether the fences hold."""

import fences
import torch


def test_copies_keep_strides_and_shared_memory_and_go_back() -> None:
    whole = torch.arange(5000, dtype=torch.int32)
    view, same = whole[17:].as_strided((40, 7), (100, 3)), whole[:10]
    for _ in range(2):  # next to the one fence, then to the other
        made = fences.Fences(alignment=16)
        copy, other = made.around(view), made.around(same)
        assert copy.stride() == view.stride()
        assert copy.storage_offset() == 17
        assert torch.equal(copy, view)
        assert copy.untyped_storage().data_ptr() % 16 == 0
        assert copy.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert copy.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        copy[3, 2] = -1
        assert view[3, 2] != -1
        made.copy_back()
        assert view[3, 2] == -1
        view[3, 2] = 5


def test_nothing_stays_nothing() -> None:
    made = fences.Fences(alignment=16)
    assert made.around(torch.empty(0, 3)).shape == (0, 3)
    made.copy_back()
