"""A paged cache: a strided byte view, the record in it, and rows reached by slot.

`slot = page * page_rows + row`. The view may start anywhere in its storage and its pages may lie any
distance apart (an engine packs the pages of many layers side by side), so nothing here ever reshapes,
copies or assumes that a page is as long as its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_mla._checks import check_at_least, check_tensor
from sparse_mla.cache.records import RECORDS, RecordFormat, round_up
from sparse_mla.errors import (
    CacheFormatError,
    DTypeError,
    IndexRangeError,
    ShapeError,
    StrideError,
)

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Pages of one record.

    Build one with `from_view` (any engine's tensor) or `allocate`; the constructor checks nothing.
    """

    pages: Tensor  # uint8 [num_pages, page_rows * row_bytes], strides (page_stride_bytes, 1)
    record: RecordFormat
    page_rows: int

    @classmethod
    def from_view(cls, view: Tensor, record: RecordFormat, name: str = "cache") -> PagedCache:
        """Wrap an engine's tensor without copying it.

        Args:
            view: uint8, int8 or float8_e4m3fn [num_pages, page_rows, row_bytes] or
                [num_pages, page_rows, 1, row_bytes]; stride 1 inside a row, `row_bytes` between
                rows, any multiple of the record's `row_alignment_bytes` between pages.
            record: what the bytes are; the width alone does not say it.
            name: how errors call the tensor.

        Raises:
            DTypeError, ShapeError, CacheFormatError, StrideError: as named.
        """
        if view.dtype not in _BYTE_DTYPES:
            raise DTypeError(name, f"dtype {view.dtype}", "uint8, int8 or float8_e4m3fn bytes")
        if view.dim() == 4 and view.shape[2] == 1:
            view = view.squeeze(2)
        if view.dim() != 3 or view.shape[1] < 1:
            raise ShapeError(
                name,
                f"shape {list(view.shape)}",
                "[num_pages, page_rows, row_bytes] or [num_pages, page_rows, 1, row_bytes]",
            )
        num_pages, page_rows, row_bytes = view.shape
        if row_bytes != record.row_bytes:
            known = ", ".join(f"{known.name} {known.row_bytes}" for known in RECORDS.values())
            raise CacheFormatError(
                name,
                f"a last dimension of {row_bytes} bytes",
                f"{record.row_bytes} bytes for record {record.name!r}",
                f"records and their bytes: {known}",
            )
        inner = (view.stride(1) if page_rows > 1 else row_bytes, view.stride(2))
        if inner != (row_bytes, 1):
            raise StrideError(
                name, f"row strides {inner}", f"({row_bytes}, 1)", "only pages may lie apart"
            )
        pages = view.view(torch.uint8).as_strided(
            (num_pages, page_rows * row_bytes),
            (view.stride(0) if num_pages > 1 else page_rows * row_bytes, 1),
        )
        cache = cls(pages, record, page_rows)
        cache.check_strides(name)
        return cache

    @classmethod
    def allocate(
        cls,
        record: RecordFormat,
        *,
        num_pages: int,
        page_rows: int,
        device: torch.device | str = "cpu",
    ) -> PagedCache:
        """A cache of its own, zero-filled, pages padded to the record's alignment and stride rule."""
        check_at_least("num_pages", num_pages, 0)
        check_at_least("page_rows", page_rows, 1)
        stride = round_up(record.page_bytes(page_rows), record.stride_multiple_bytes)
        storage = torch.zeros(num_pages, stride, dtype=torch.uint8, device=device)
        return cls(storage[:, : page_rows * record.row_bytes], record, page_rows)

    @property
    def num_pages(self) -> int:
        """Pages in the view."""
        return self.pages.shape[0]

    @property
    def num_slots(self) -> int:
        """Rows in the view; valid slots are `0 .. num_slots - 1`."""
        return self.num_pages * self.page_rows

    @property
    def page_stride_bytes(self) -> int:
        """Bytes between the first bytes of consecutive pages."""
        return self.pages.stride(0)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.pages.device

    def check_strides(self, name: str = "cache") -> None:
        """Raise `StrideError` if pages overlap or a row's data is not aligned."""
        stride, multiple = self.page_stride_bytes, self.record.row_alignment_bytes
        if self.num_pages > 1 and (stride < self.pages.shape[1] or stride % multiple):
            raise StrideError(
                name,
                f"{stride} bytes between pages",
                f"a multiple of {multiple}, at least {self.pages.shape[1]} "
                f"({self.page_rows} rows of {self.record.row_bytes})",
                "pad the page stride",
            )
        if self.pages.data_ptr() % self.record.row_alignment_bytes and self.num_pages:
            raise StrideError(
                name,
                f"a first byte at address {self.pages.data_ptr():#x}",
                f"an address that {self.record.row_alignment_bytes} divides",
                "move the view's storage offset",
            )

    def data_view(self) -> Tensor:
        """uint8 [num_pages, page_rows, data_bytes], a view of every row's data."""
        record = self.record
        return self.pages.as_strided(
            (self.num_pages, self.page_rows, record.data_bytes),
            (self.page_stride_bytes, record.data_stride, 1),
        )

    def scale_view(self) -> Tensor:
        """uint8 [num_pages, page_rows, scale_bytes], a view of every row's scales."""
        record = self.record
        return self.pages.as_strided(
            (self.num_pages, self.page_rows, record.scale_bytes),
            (self.page_stride_bytes, record.scale_stride, 1),
            self.pages.storage_offset() + record.scale_base(self.page_rows),
        )

    def check_slots(self, slots: Tensor, name: str = "slots") -> None:
        """Raise unless `slots` is int32 or int64 [n] on the cache's device.

        CPU slots are also looked at: one at or past `num_slots` is an `IndexRangeError`. Negative slots
        mean "none" and pass.
        """
        check_tensor(
            name, slots, shape=("n",), dtypes=(torch.int32, torch.int64), device=self.device
        )
        if self.device.type == "cpu" and slots.numel():
            highest = int(slots.max())
            if highest >= self.num_slots:
                raise IndexRangeError(
                    name,
                    f"slot {highest}",
                    f"below {self.num_slots} ({self.num_pages} pages of {self.page_rows} rows), "
                    "or negative for none",
                )

    def read_rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Raw bytes of rows: (uint8 [n, data_bytes], uint8 [n, scale_bytes]).

        Args:
            slots: int32 or int64 [n], each in `0 .. num_slots - 1`.

        Raises:
            IndexRangeError: another slot (looked at on a CPU only; elsewhere the caller must know).
        """
        self.check_slots(slots)
        if self.device.type == "cpu" and slots.numel() and int(slots.min()) < 0:
            raise IndexRangeError("slots", f"slot {int(slots.min())}", f"0..{self.num_slots - 1}")
        page, row = self._locate(slots)
        data, scales = _in_words(self.data_view()), _in_words(self.scale_view())
        return data[page, row].view(torch.uint8), scales[page, row].view(torch.uint8)

    def write_rows(self, slots: Tensor, data: Tensor, scales: Tensor) -> None:
        """Store raw rows; no byte outside them is touched. A negative slot stores nothing.

        Args:
            slots: int32 or int64 [n]; no slot twice, negative ones apart.
            data: uint8 [n, data_bytes].
            scales: uint8 [n, scale_bytes].

        Raises:
            ShapeError, DTypeError, DeviceError: arguments that do not fit each other or the record.
            IndexRangeError: a slot at or past the last row (CPU only; other devices skip it).
        """
        self.check_slots(slots)
        n, byte = slots.shape[0], (torch.uint8,)
        check_tensor(
            "data", data, shape=(n, self.record.data_bytes), dtypes=byte, device=self.device
        )
        check_tensor(
            "scales", scales, shape=(n, self.record.scale_bytes), dtypes=byte, device=self.device
        )
        if n == 0 or self.num_slots == 0:
            return
        if self.device.type == "cpu":
            keep = slots >= 0
            if not bool(keep.all()):
                slots, data, scales = slots[keep], data[keep], scales[keep]
        else:
            slots, data, scales = self._redirect_skipped(slots, data, scales)
        page, row = self._locate(slots)
        for view, rows in ((self.data_view(), data), (self.scale_view(), scales)):
            if rows.shape[1] == 0:  # a record without scales
                continue
            words = _in_words(view)
            words[page, row] = rows.clone(memory_format=torch.contiguous_format).view(words.dtype)

    def _redirect_skipped(
        self, slots: Tensor, data: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give every skipped row the slot and bytes of a stored one, so that no host sync is needed.

        The stand-in is the first row with a valid slot; without one it is slot 0 with its own bytes.
        """
        valid = (slots >= 0) & (slots < self.num_slots)
        first = valid.to(torch.int8).argmax().view(1)
        found = valid[first]
        target = torch.where(found, slots[first], 0)
        old_data, old_scales = self.read_rows(target)
        stand_in = torch.where(found.unsqueeze(-1), data[first], old_data)
        stand_in_scales = torch.where(found.unsqueeze(-1), scales[first], old_scales)
        column = valid.unsqueeze(-1)
        return (
            torch.where(valid, slots, target),
            torch.where(column, data, stand_in),
            torch.where(column, scales, stand_in_scales),
        )

    def _locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        wide = slots.long()
        page = torch.div(wide, self.page_rows, rounding_mode="floor")
        return page, wide - page * self.page_rows


def _in_words(view: Tensor) -> Tensor:
    """The same bytes in the widest integers that their addresses allow; rows move several times faster."""
    outer = (view.storage_offset(), view.data_ptr(), *view.stride()[:-1])
    return view.view(_WORDS[math.gcd(8, view.shape[-1], *outer)])
