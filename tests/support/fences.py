"""Memory with a page on either side that nobody may touch: an access outside of it ends the process.

Triton's interpreter takes the storages of a launch's tensors by `UntypedStorage.cpu` and copies them back afterwards; with
`between_fences` in its place no interpreted kernel reads or writes beyond what it was given without being noticed. The
emulated Hopper kernels get their tensors from `Fences`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap

import torch

PAGE = mmap.PAGESIZE
_at_end = itertools.cycle((True, False))


def between_fences(storage: torch.UntypedStorage, alignment: int = 1) -> torch.UntypedStorage:
    """A copy whose last byte, and the next time whose first byte, is next to a fence.

    It begins at a multiple of `alignment` bytes, so that up to so many may lie between its end and the fence.
    """
    size = storage.nbytes()
    if size == 0:
        return storage
    room = -(-size // PAGE) * PAGE
    region = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for fence in (address, address + PAGE + room):
        if protect(fence, PAGE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = PAGE + ((room - size) // alignment * alignment if next(_at_end) else 0)
    copy = torch.frombuffer(region, dtype=torch.uint8, count=size, offset=first).untyped_storage()
    copy.copy_(storage, False)  # it begins at `first` and keeps the region
    return copy


class Fences:
    """Copies of tensors between fences; what shares memory still does."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, with the same strides and the same bytes around it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = storage, between_fences(storage, self.alignment)
        copy = self.storages[storage.data_ptr()][1]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]

    def copy_back(self) -> None:
        """Everything that was written goes to the originals."""
        for storage, copy in self.storages.values():
            storage.copy_(copy, False)
