"""Scheduler invariants: pages, limits, and every row computed once or replayed as allowed."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.engine.scheduler import FREED, Limits, PageGroup, Request, Scheduler, Work
from sparse_mla.errors import ArgumentError, OutOfPagesError

PAGE, WINDOW_PAGE, WINDOW = 64, 32, 128


def make_scheduler(
    *,
    budget: int = 512,
    requests: int = 8,
    pages: int = 64,
    window_pages: int = 256,
    rings: int = 8,
    replay: int = 128,
    reuse: bool = True,
) -> Scheduler:
    groups = [
        PageGroup("window", WINDOW_PAGE, window_pages),
        PageGroup("c1", PAGE, pages),
        PageGroup("c2", PAGE, pages),
        PageGroup("ring", 1, rings, first=1),
    ]
    limits = Limits(budget, requests, WINDOW, replay_tokens=replay, prefix_reuse=reuse)
    return Scheduler(groups, limits)


def make_request(index: int, prompt: int, generated: int = 1, shared: int = 0) -> Request:
    return Request(
        index, prompt, prompt + generated - 1, stream=100 + index, shared_stream=1,
        shared_tokens=min(shared, prompt),
    )  # fmt: skip


class Watcher:
    """Checks each step from outside and remembers what was computed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rows: dict[int, Counter[int]] = {}  # since the request's last start
        self.steps: list[list[tuple[int, int, int]]] = []

    def run(self, most_steps: int = 10_000) -> None:
        scheduler = self.scheduler
        for _ in range(most_steps):
            if not scheduler.has_work:
                break
            works = scheduler.schedule()
            assert works, "no progress"
            self.check_step(works)
            scheduler.complete(works)
        assert not scheduler.has_work, "too many steps"

    def check_step(self, works: Sequence[Work]) -> None:
        scheduler, limits = self.scheduler, self.scheduler.limits
        assert sum(work.count for work in works) <= limits.max_batched_tokens
        assert len(scheduler.running) <= limits.max_requests
        assert len({work.request.request_id for work in works}) == len(works)
        assert [work.count for work in works] == sorted(work.count for work in works)
        self.steps.append([(w.request.request_id, w.start, w.count) for w in works])
        for work in works:
            self.check_rows(work)
        self.check_pages()

    def check_rows(self, work: Work) -> None:
        request = work.request
        assert work.count >= 1
        assert work.end <= request.known <= request.rows
        if work.start == request.replay_start:  # a (new) start
            self.rows[request.request_id] = Counter()
        seen = self.rows[request.request_id]
        seen.update(range(work.start, work.end))
        assert max(seen.values()) == 1, "a row was computed twice"
        first_seen = max(0, work.start - WINDOW + 1, request.replay_start)
        table = request.pages["window"]
        assert FREED not in table[first_seen // WINDOW_PAGE :]
        assert len(table) == -(-work.end // WINDOW_PAGE)
        for group in ("c1", "c2"):
            assert len(request.pages[group]) == -(-max(work.end, request.hit) // PAGE)

    def check_pages(self) -> None:
        """Rows that are written lie in pages of one request only; free and used pages add up."""
        scheduler = self.scheduler
        for name, group in scheduler.groups.items():
            owners: dict[int, list[Request]] = {}
            for request in scheduler.running:
                for page in request.pages[name]:
                    if page != FREED:
                        owners.setdefault(page, []).append(request)
            cached = set()
            if name in ("c1", "c2"):
                cached = {pages[name] for pages in scheduler.prefix._pages.values()}
            used = owners.keys() | cached
            assert all(group.first <= page < group.first + group.num_pages for page in used)
            assert len(used) == scheduler.pages_in_use()[name]
            for page, sharers in owners.items():
                if len(sharers) > 1:
                    assert name in ("c1", "c2")
                    assert page in cached or all(
                        request.pages[name].index(page) * PAGE < request.hit
                        for request in sharers[1:]
                    )

    def check_end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            wanted = set(range(request.replay_start, request.rows))
            assert set(self.rows[request.request_id]) == wanted
            assert request.computed == request.rows
            assert request.pages == {}
        self.scheduler.prefix.clear()
        assert set(self.scheduler.pages_in_use().values()) == {0}


def serve(scheduler: Scheduler, requests: Sequence[Request]) -> Watcher:
    watcher = Watcher(scheduler)
    for request in requests:
        scheduler.submit(request)
    watcher.run()
    return watcher


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 20), st.sampled_from([0, 100, 300, 640])),
        min_size=1, max_size=6,
    ),
    budget=st.sampled_from([33, 64, 200, 512, 4096]),
    most=st.integers(1, 6),
    pages=st.integers(12, 40),
    replay=st.sampled_from([128, 256]),
    reuse=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_row_once_every_page_once(
    lengths: list[tuple[int, int, int]],
    budget: int,
    most: int,
    pages: int,
    replay: int,
    reuse: bool,
) -> None:
    requests = [make_request(i, *length) for i, length in enumerate(lengths)]
    scheduler = make_scheduler(
        budget=budget, requests=most, pages=pages, replay=replay, reuse=reuse
    )
    serve(scheduler, requests).check_end(requests)


@given(
    prompts=st.lists(st.integers(1, 300), min_size=2, max_size=6),
    window_pages=st.integers(15, 24),
    pages=st.integers(6, 9),
)
@settings(max_examples=25, deadline=None)
def test_tight_pools_preempt_and_still_finish(
    prompts: list[int], window_pages: int, pages: int
) -> None:
    requests = [make_request(i, prompt, 60, shared=192) for i, prompt in enumerate(prompts)]
    scheduler = make_scheduler(budget=256, pages=pages, window_pages=window_pages)
    serve(scheduler, requests).check_end(requests)


@pytest.mark.parametrize("budget", [1, 7])
def test_tiny_budgets(budget: int) -> None:
    requests = [make_request(i, prompt, 3, shared=200) for i, prompt in enumerate([260, 1, 250])]
    serve(make_scheduler(budget=budget), requests).check_end(requests)


def test_no_more_requests_run_than_allowed() -> None:
    watcher = serve(make_scheduler(requests=2), [make_request(i, 10, 5) for i in range(5)])
    assert max(len(step) for step in watcher.steps) == 2


def test_chunks_and_decodes_share_a_step() -> None:
    requests = [make_request(0, 5, 4), make_request(1, 10, 2)]
    watcher = serve(make_scheduler(budget=8), requests)
    assert watcher.steps == [
        [(1, 0, 3), (0, 0, 5)],
        [(0, 5, 1), (1, 3, 7)],
        [(0, 6, 1), (1, 10, 1)],
        [(0, 7, 1)],
    ]


def test_window_pages_are_freed_as_the_window_slides() -> None:
    request = make_request(0, 1000, 1)
    scheduler = make_scheduler(budget=100)
    scheduler.submit(request)
    peak = 0
    while scheduler.has_work:
        works = scheduler.schedule()
        peak = max(peak, scheduler.pages_in_use()["window"])
        scheduler.complete(works)
    assert peak == 8  # 100 new rows and 127 before them span at most 8 pages of 32
    assert request.computed == 1000


def test_prefix_hit_shares_pages_and_replays_the_window() -> None:
    first, second = (make_request(i, 400, 2, shared=330) for i in range(2))
    scheduler = make_scheduler(budget=4096)
    serve(scheduler, [first])
    before = scheduler.pages_in_use()
    assert before == {"window": 0, "c1": 6, "c2": 6, "ring": 0}
    scheduler.submit(second)
    (work,) = scheduler.schedule()
    assert (second.hit, second.replay_start) == (320, 192)
    assert (work.start, work.count, work.replayed) == (192, 208, 128)
    assert second.pages["window"][:7] == [FREED] * 6 + [second.pages["window"][6]]
    assert scheduler.pages_in_use()["c1"] == 6 + 2  # five shared, two of its own
    scheduler.complete([work])
    assert len(scheduler.prefix) == 6, "a request that began with a replay offers nothing"


@pytest.mark.parametrize(
    ("prompt", "shared", "replay", "hit"),
    [
        (128, 128, 128, 0),  # one token must be left to compute, so one page is usable
        (129, 129, 128, 0),  # a hit of 128 saves nothing
        (192, 192, 128, 0),
        (193, 193, 128, 192),
        (500, 255, 128, 192),
        (500, 256, 128, 256),
        (500, 256, 256, 0),
        (500, 320, 256, 320),
    ],
)
def test_hits_that_save_nothing_are_not_taken(
    prompt: int, shared: int, replay: int, hit: int
) -> None:
    scheduler = make_scheduler(replay=replay)
    serve(scheduler, [make_request(0, 500, shared=shared)])
    request = make_request(1, prompt, shared=shared)
    serve(scheduler, [request])
    assert request.hit == hit
    assert request.replay_start == max(0, hit - replay)


def test_reuse_can_be_switched_off() -> None:
    scheduler = make_scheduler(reuse=False)
    requests = [make_request(i, 400, shared=400) for i in range(3)]
    serve(scheduler, requests)
    assert [request.hit for request in requests] == [0, 0, 0]
    assert scheduler.pages_in_use()["c1"] == 0


def test_idle_prefix_pages_make_room() -> None:
    scheduler = make_scheduler(pages=8)
    serve(scheduler, [make_request(0, 512)])
    assert scheduler.pages_in_use()["c1"] == 8
    second = make_request(1, 500)
    watcher = serve(scheduler, [second])
    watcher.check_end([second])


def test_the_youngest_is_preempted_and_starts_again() -> None:
    old, young = make_request(0, 250, 200), make_request(1, 120, 100)
    scheduler = make_scheduler(pages=8, reuse=False)
    watcher = serve(scheduler, [old, young])
    assert (old.preemptions, young.preemptions) == (0, 1)
    watcher.check_end([old, young])


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(OutOfPagesError, match=r"request 3 \(641 tokens\) needs 11 pages.*'c1'"):
        make_scheduler(pages=10).submit(make_request(3, 641))
    with pytest.raises(OutOfPagesError, match=r"'window'.*lower max_batched_tokens"):
        make_scheduler(window_pages=8).submit(make_request(0, 600))
    with pytest.raises(OutOfPagesError, match="'ring'"):
        make_scheduler(rings=0).submit(make_request(0, 5))


def test_bad_limits_and_groups() -> None:
    with pytest.raises(ArgumentError, match="max_batched_tokens: got 0"):
        Limits(0, 1, 128)
    with pytest.raises(ArgumentError, match="one size for c1 and c2"):
        Scheduler([PageGroup("c1", 64, 1), PageGroup("c2", 32, 1)], Limits(1, 1, 128))


def test_window_only_layers_never_reuse() -> None:
    scheduler = Scheduler([PageGroup("window", 32, 64)], Limits(512, 4, 128))
    requests = [make_request(i, 400, shared=400) for i in range(2)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.complete(scheduler.schedule())
    assert [request.hit for request in requests] == [0, 0]
    assert scheduler.pages_in_use() == {"window": 0}
