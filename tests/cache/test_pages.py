"""The page allocator: never two owners, all or nothing, references, refusals."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparse_mla.cache.pages import PageAllocator
from sparse_mla.errors import ArgumentError, IndexRangeError, OutOfPagesError


class Allocation(RuleBasedStateMachine):
    """Any sequence of calls against a plain dictionary of reference counts."""

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(7, first=3, name="c2")
        self.held: dict[int, int] = {}
        self.peak = 0

    @rule(count=st.integers(0, 8))
    def allocate(self, count):
        if count > 7 - len(self.held):
            with pytest.raises(OutOfPagesError, match=f"group 'c2': wanted {count} pages"):
                self.pages.allocate(count)
            return
        got = self.pages.allocate(count)
        assert len(set(got)) == count
        assert not set(got) & set(self.held)
        assert all(3 <= page < 10 for page in got)
        self.held |= dict.fromkeys(got, 1)
        self.peak = max(self.peak, len(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.pages.share(pages)
        for page in pages:
            self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        if any(pages.count(page) > self.held[page] for page in pages):
            with pytest.raises(ArgumentError, match="given back"):
                self.pages.free(pages)
            return
        self.pages.free(pages)
        for page in pages:
            self.held[page] -= 1
        self.held = {page: count for page, count in self.held.items() if count}

    @rule(data=st.data())
    def misuse(self, data):
        free = sorted(set(range(3, 10)) - set(self.held))
        used = sorted(self.held)
        if free:
            page = data.draw(st.sampled_from(free))
            with pytest.raises(ArgumentError, match=f"page {page}, which is free"):
                self.pages.share([*used, page])
            with pytest.raises(ArgumentError, match=f"page {page} given back 1 times"):
                self.pages.free([*used, page])
        with pytest.raises(IndexRangeError, match=r"allowed: 3\.\.9 of group 'c2'"):
            self.pages.free([*used, data.draw(st.sampled_from([-1, 2, 10]))])

    @invariant()
    def counts(self):
        assert self.pages.num_free == 7 - len(self.held)
        assert self.pages.num_used == len(self.held)
        assert self.pages.peak == self.peak
        assert [self.pages.references(p) for p in range(3, 10)] == [
            self.held.get(p, 0) for p in range(3, 10)
        ]


Allocation.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAllocation = Allocation.TestCase


def test_pages_are_handed_out_in_order_and_reused_last_in_first_out():
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    pages.free([1])
    pages.free([0])
    assert pages.allocate(2) == [0, 1]
    assert pages.peak == 3


def test_out_of_pages_names_group_wanted_and_free_and_takes_nothing():
    pages = PageAllocator(3, name="window")
    pages.allocate(1)
    with pytest.raises(
        OutOfPagesError, match=r"group 'window': wanted 3 pages, 2 of 3 are free; finish or preempt"
    ):
        pages.allocate(3)
    assert pages.num_free == 2


def test_bad_sizes_are_refused():
    with pytest.raises(ArgumentError, match="num_pages: got -1"):
        PageAllocator(-1)
    with pytest.raises(ArgumentError, match="first: got -1"):
        PageAllocator(1, first=-1)
    with pytest.raises(ArgumentError, match="count: got -1"):
        PageAllocator(1).allocate(-1)
    with pytest.raises(IndexRangeError, match="pages: got 5"):
        PageAllocator(1).references(5)


def test_an_empty_allocator_has_nothing_to_give():
    pages = PageAllocator(0)
    assert pages.allocate(0) == []
    with pytest.raises(OutOfPagesError, match="wanted 1 pages, 0 of 0 are free"):
        pages.allocate(1)
