"""Continuous batching: which rows of which requests run in the next step, and on which pages.

    waiting --admit--> running --(every row computed)--> finished
       ^                  |
       +---- preempt -----+        pages ran out: the youngest request starts again later

A step holds at most `max_batched_tokens` rows. Running requests come first, oldest first: one row each
while they generate, a chunk while their prompt lasts. What is left of the budget admits waiting requests
in order of arrival. Since an older prompt always takes the budget before a younger one, a step is some
decodes followed by one or more prefill chunks.

Pages come from four groups. "c1" and "c2" (the compressed caches) grow with the request and may be
shared by prefix. "window" pages are given back as soon as no later row can see them. "ring" (the
compressor's carried state) is one block for each request.

Prefix reuse: after a hit of `hit` tokens the compressed rows are shared, but the window rows are not
kept, so the last `replay_tokens` of the hit are computed again to refill the window only. Their windows
end at `replay_start`, which makes layers above the first see a little less than a fresh run would. Pages
computed after a replay are therefore not offered to others: the approximation never compounds. With
128 tokens for each layer of the stack a replay is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparse_mla._checks import check_at_least
from sparse_mla.cache.pages import PageAllocator
from sparse_mla.engine.prefix import PrefixCache, page_digests
from sparse_mla.errors import ArgumentError, OutOfPagesError

WINDOW = "window"
RING = "ring"
FREED = -1
"""Entry of a block table whose page no row can see any more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the running set may hold."""

    max_batched_tokens: int
    max_requests: int
    window: int  # tokens that a row sees, itself included
    replay_tokens: int = 128  # recomputed before the end of a prefix hit
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batched_tokens", "max_requests", "window", "replay_tokens"):
            check_at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Pages that the scheduler may hand out."""

    name: str
    page_tokens: int  # tokens that one page covers; unused for "ring"
    num_pages: int
    first: int = 0  # smallest page id; 1 where page 0 is the null page


@dataclass(slots=True, eq=False)
class Request:
    """One request and how far it is."""

    request_id: int
    prompt_tokens: int
    rows: int  # rows to compute in all: the prompt and every generated token but the last
    stream: int  # names the request's own content
    shared_stream: int = 0  # names the content of the first `shared_tokens` tokens
    shared_tokens: int = 0
    known: int = 0  # rows whose content exists by now
    computed: int = 0  # rows that are in the caches
    hit: int = 0  # tokens of the prefix that were found in the caches
    replay_start: int = 0  # lowest position with window rows of this request
    preemptions: int = 0
    digests: list[bytes] = field(default_factory=list)  # one for each full page of the request
    pages: dict[str, list[int]] = field(default_factory=dict)  # block table of each group

    def __post_init__(self) -> None:
        self.known = self.prompt_tokens

    def stream_at(self, position: int) -> int:
        """Which content a token belongs to."""
        return self.shared_stream if position < self.shared_tokens else self.stream


@dataclass(frozen=True, slots=True)
class Work:
    """Consecutive rows of one request in one step."""

    request: Request
    start: int  # first position
    count: int  # rows

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.count

    @property
    def replayed(self) -> int:
        """Rows that only refill the window."""
        return max(0, min(self.end, self.request.hit) - self.start)


class Scheduler:
    """Requests in, steps out. `schedule` hands out work, `complete` takes it back as done."""

    def __init__(self, groups: Sequence[PageGroup], limits: Limits) -> None:
        self.limits = limits
        self.groups = {group.name: group for group in groups}
        self.allocators = {
            group.name: PageAllocator(group.num_pages, group.first, group.name) for group in groups
        }
        shared = [name for name in self.groups if name not in (WINDOW, RING)]
        sizes = {self.groups[name].page_tokens for name in shared}
        if len(sizes) > 1:
            raise ArgumentError("groups", f"page sizes {sorted(sizes)}", "one size for c1 and c2")
        self._global = tuple(shared)
        self._page_tokens = sizes.pop() if sizes else 0
        self.prefix = PrefixCache({name: self.allocators[name] for name in shared})
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OutOfPagesError: the pools are too small for it even alone.
        """
        chunk = min(request.rows, self.limits.max_batched_tokens)
        for name, group in self.groups.items():
            needed = 1
            if name == WINDOW:
                span = min(request.rows, chunk + self.limits.window - 1)
                needed = (span + group.page_tokens - 2) // group.page_tokens + 1
            elif name != RING:
                needed = -(-request.rows // group.page_tokens)
            if needed > group.num_pages:
                raise OutOfPagesError(
                    f"request {request.request_id} ({request.rows} tokens) needs {needed} pages of "
                    f"group {name!r}, which has {group.num_pages}; allocate more pages"
                    + (" or lower max_batched_tokens" if name == WINDOW else "")
                )
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def pages_in_use(self) -> dict[str, int]:
        """Pages of each group that requests or the prefix cache hold."""
        return {
            name: self.groups[name].num_pages - allocator.num_free
            for name, allocator in self.allocators.items()
        }

    def schedule(self) -> tuple[Work, ...]:
        """The next step's work, fewest rows first; empty only when nothing is left to do."""
        works: list[Work] = []
        budget = self.limits.max_batched_tokens
        preempted = False
        for request in tuple(self.running):
            count = min(request.known - request.computed, budget)
            if request not in self.running or count == 0:
                break
            while not self._reserve(request, request.computed + count):
                preempted = True
                if self._preempt_youngest() is request:
                    break
            if request not in self.running:
                break
            works.append(Work(request, request.computed, count))
            budget -= count
        while self.waiting and budget and not preempted:
            if len(self.running) == self.limits.max_requests or not self._admit(budget):
                break
            request = self.running[-1]
            count = min(request.known - request.computed, budget)
            works.append(Work(request, request.computed, count))
            budget -= count
        return tuple(sorted(works, key=lambda work: work.count))

    def complete(self, works: Sequence[Work]) -> list[Request]:
        """Take a step's rows as computed; give back what is not needed any more.

        Returns:
            The requests that finished; their pages are free again (shared ones live on).
        """
        finished = []
        for work in works:
            request = work.request
            request.computed = work.end
            if request.computed == request.known < request.rows:
                request.known += 1  # the last row gave one more token
            self._offer(work)
            if request.computed == request.rows:
                self.running.remove(request)
                self._release(request)
                finished.append(request)
            else:
                self._slide_window(request)
        return finished

    @property
    def _reuses(self) -> bool:
        return self.limits.prefix_reuse and bool(self._global)

    def _admit(self, budget: int) -> bool:
        """Move the first waiting request to the running ones if its whole known part fits."""
        request = self.waiting[0]
        request.pages = {name: [] for name in self.groups}
        if self._reuses:
            self._reuse_prefix(request)
        chunk_end = request.computed + min(request.known - request.computed, budget)
        idle = self.prefix.num_idle()
        fits = all(
            self._missing(request, chunk_end if name == WINDOW else request.known, name)
            <= self.allocators[name].num_free + (idle if name in self._global else 0)
            for name in self.groups
        )
        if not fits:
            self._release(request)
            return False
        reserved = self._reserve(request, chunk_end)
        assert reserved, "free and idle pages were counted just before"
        self.running.append(self.waiting.popleft())
        return True

    def _reuse_prefix(self, request: Request) -> None:
        """Share the pages of the longest known prefix, if that saves anything."""
        if not request.digests:
            contents = map(request.stream_at, range(request.rows))
            request.digests = page_digests(contents, self._page_tokens)
        usable = (request.known - 1) // self._page_tokens
        found = self.prefix.match(request.digests[:usable])
        hit = len(found) * self._page_tokens
        if hit <= self.limits.replay_tokens:
            return
        self.prefix.share(request.digests[: len(found)])
        for name in self._global:
            request.pages[name] = [pages[name] for pages in found]
        request.hit = hit
        request.computed = request.replay_start = hit - self.limits.replay_tokens
        if WINDOW in self.groups:
            below = request.replay_start // self.groups[WINDOW].page_tokens
            request.pages[WINDOW] = [FREED] * below

    def _missing(self, request: Request, end: int, name: str) -> int:
        """Pages of a group to allocate before the rows below `end` can be written."""
        wanted = 1 if name == RING else -(-end // self.groups[name].page_tokens)
        return max(0, wanted - len(request.pages[name]))

    def _reserve(self, request: Request, end: int) -> bool:
        """Allocate all pages for the rows below `end`, or none."""
        missing = {name: self._missing(request, end, name) for name in self.groups}
        self.prefix.evict({name: missing[name] for name in self._global})
        if any(count > self.allocators[name].num_free for name, count in missing.items()):
            return False
        for name, count in missing.items():
            request.pages[name] += self.allocators[name].allocate(count)
        return True

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self._release(request)
        request.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _release(self, request: Request) -> None:
        """Give all pages back; what was generated stays known."""
        for name, pages in request.pages.items():
            self.allocators[name].free([page for page in pages if page != FREED])
        finished = request.computed == request.rows
        request.pages = {}
        if not finished:
            request.computed = request.hit = request.replay_start = 0

    def _offer(self, work: Work) -> None:
        """Offer the pages that this work filled, unless the request began with a replay."""
        request = work.request
        if not self._reuses or request.hit:
            return
        for index in range(work.start // self._page_tokens, work.end // self._page_tokens):
            pages: Mapping[str, int] = {name: request.pages[name][index] for name in self._global}
            self.prefix.offer(request.digests[index], pages)

    def _slide_window(self, request: Request) -> None:
        """Free window pages whose last token is out of sight of the next row."""
        if WINDOW not in self.groups:
            return
        first_seen = max(0, request.computed - self.limits.window + 1)
        table = request.pages[WINDOW]
        index = first_seen // self.groups[WINDOW].page_tokens - 1
        while index >= 0 and table[index] != FREED:
            self.allocators[WINDOW].free([table[index]])
            table[index] = FREED
            index -= 1
