"""Page ids of one cache group: handed out, shared and given back. Host side, no tensor."""

from __future__ import annotations

from collections.abc import Iterable

from sparse_mla._checks import check_at_least
from sparse_mla.errors import ArgumentError, IndexRangeError, OutOfPagesError


class PageAllocator:
    """Hands out the ids `first .. first + num_pages - 1`, each to one owner until it is shared.

    A page is free when its last reference is given back; freed pages are reused last in, first out.
    Every call checks all ids before it changes anything.
    """

    def __init__(self, num_pages: int, first: int = 0, name: str = "pages") -> None:
        check_at_least("num_pages", num_pages, 0)
        check_at_least("first", first, 0)
        self.num_pages = num_pages
        self.first = first
        self.name = name  # the group, for messages
        self.peak = 0  # most pages that were ever in use at once
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def references(self, page: int) -> int:
        """How many times the page is held; 0 = free.

        Raises:
            IndexRangeError: not a page of this group.
        """
        return self._references[self._offset(page)]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, held once each; all or none.

        Raises:
            OutOfPagesError: fewer are free.
            ArgumentError: a negative count.
        """
        check_at_least("count", count, 0)
        if count > len(self._free):
            raise OutOfPagesError(
                f"group {self.name!r}: wanted {count} pages, {len(self._free)} of {self.num_pages} "
                "are free; finish or preempt a request, or allocate a larger pool"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page - self.first] = 1
        self.peak = max(self.peak, self.num_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold these pages once more each (an id may repeat).

        Raises:
            ArgumentError: a page that is free, so that its bytes may belong to someone else soon.
            IndexRangeError: not a page of this group.
        """
        offsets = [self._offset(page) for page in pages]
        for offset in offsets:
            if self._references[offset] == 0:
                raise ArgumentError(
                    "pages", f"page {offset + self.first}, which is free", "pages in use",
                    f"allocate it from group {self.name!r} first",
                )  # fmt: skip
        for offset in offsets:
            self._references[offset] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Give back one reference to each of these pages (an id may repeat as often as it is held).

        Raises:
            ArgumentError: a page given back more often than it is held.
            IndexRangeError: not a page of this group.
        """
        counts: dict[int, int] = {}
        for page in pages:
            offset = self._offset(page)
            counts[offset] = counts.get(offset, 0) + 1
        for offset, count in counts.items():
            held = self._references[offset]
            if count > held:
                raise ArgumentError(
                    "pages", f"page {offset + self.first} given back {count} times",
                    f"at most {held} times, as often as it is held",
                    f"a page of group {self.name!r} was freed twice",
                )  # fmt: skip
        for offset, count in counts.items():
            self._references[offset] -= count
            if self._references[offset] == 0:
                self._free.append(offset + self.first)

    def _offset(self, page: int) -> int:
        offset = page - self.first
        if not 0 <= offset < self.num_pages:
            allowed = f"{self.first}..{self.first + self.num_pages - 1} of group {self.name!r}"
            raise IndexRangeError("pages", page, allowed)
        return offset
