"""Memory with a page on either side that nobody may touch: an access outside of it ends the process.

Triton's interpreter takes the storages of a launch's tensors by `UntypedStorage.cpu` and copies them back afterwards. With
`between_fences` in its place no interpreted kernel reads or writes beyond what it was given without being noticed.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap

import torch

PAGE = mmap.PAGESIZE
_at_end = itertools.cycle((True, False))


def between_fences(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy whose last byte, and the next time whose first byte, is next to a fence."""
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
    first = PAGE + (room - size if next(_at_end) else 0)
    copy = torch.frombuffer(region, dtype=torch.uint8, count=size, offset=first).untyped_storage()
    copy.copy_(storage, False)  # it begins at `first` and keeps the region
    return copy
