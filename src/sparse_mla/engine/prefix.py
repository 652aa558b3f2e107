"""Prefix reuse: full pages of the global groups, found again by the hash of everything before them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sparse_mla.cache.pages import PageAllocator


def page_digests(contents: Iterable[int], page_tokens: int) -> list[bytes]:
    """One digest for each full page; it covers the page and all pages before it.

    `contents` names each token's content (in a language model: its token id).
    """
    digests: list[bytes] = []
    tokens = array("q", contents)
    parent = b""
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[start : start + page_tokens].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=16).digest()
        digests.append(parent)
    return digests


class PrefixCache:
    """Finished pages that later requests may share. It holds a reference to each page it offers."""

    def __init__(self, allocators: Mapping[str, PageAllocator]) -> None:
        self._allocators = allocators
        self._pages: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, digests: Sequence[bytes]) -> list[dict[str, int]]:
        """Pages (by group) of the longest known prefix; nothing is shared or reordered yet."""
        found: list[dict[str, int]] = []
        for digest in digests:
            if digest not in self._pages:
                break
            found.append(self._pages[digest])
        return found

    def share(self, digests: Sequence[bytes]) -> None:
        """Take one more reference to every page of these (known) digests; they become recent."""
        for group, allocator in self._allocators.items():
            allocator.share([self._pages[digest][group] for digest in digests])
        for digest in reversed(digests):  # the tail of a prefix is dropped before its head
            self._pages.move_to_end(digest)

    def offer(self, digest: bytes, pages: Mapping[str, int]) -> None:
        """Keep a finished page; a digest that is known already keeps its first page."""
        if digest in self._pages:
            return
        for group, allocator in self._allocators.items():
            allocator.share([pages[group]])
        self._pages[digest] = dict(pages)

    def evict(self, wanted: Mapping[str, int]) -> None:
        """Drop idle pages, least recent first, until `wanted` pages are free in each group (or none is left)."""
        for digest in list(self._pages):
            if all(self._allocators[group].num_free >= n for group, n in wanted.items()):
                return
            if self._is_idle(digest):
                self._drop(digest)

    def num_idle(self) -> int:
        """Pages of each group that eviction can free."""
        return sum(self._is_idle(digest) for digest in self._pages)

    def clear(self) -> None:
        """Give every reference back."""
        for digest in list(self._pages):
            self._drop(digest)

    def _is_idle(self, digest: bytes) -> bool:
        pages = self._pages[digest]
        return all(self._allocators[group].references(page) == 1 for group, page in pages.items())

    def _drop(self, digest: bytes) -> None:
        for group, page in self._pages.pop(digest).items():
            self._allocators[group].free([page])
