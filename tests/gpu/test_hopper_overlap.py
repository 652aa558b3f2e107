"""Hopper launches that get ready while the launch ahead of them ends: none reads or writes too early.

Each chain of launches takes the output of one as the query of the next, in two buffers by turns, so that a launch which starts too
early reads old values or overwrites what another still reads. The same chain without overlap says what is right. Needs an SM90 GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparse_mla.kernels.contract import AttendCall, AttendOut
from sparse_mla.kernels.hopper import attend as hopper
from sparse_mla.settings import settings
from sparse_mla.testing.inputs import make_problem

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HOPPER, reason="needs a GPU of compute capability 9.0"),
]
LENGTH = 60
SHAPES = [(8, 1), (8, 40), (8, 300), (64, 20), (64, 64), (64, 300)]  # heads, tokens


@pytest.fixture(autouse=True)
def settings_read_again() -> Iterator[None]:
    yield
    settings.cache_clear()


class Chain:
    """Launches that depend on each other, over two buffers."""

    def __init__(self, heads: int, tokens: int) -> None:
        self.problem = make_problem(
            tokens=tokens,
            heads=heads,
            compressed_keys=512,
            lengths="random",
            sink=None,
            device="cuda",
        )
        self.start = self.problem.q.clone()
        self.outs = [self.output() for _ in range(2)]
        self.calls = [self.reads(self.outs[1]), self.reads(self.outs[0])]

    def output(self) -> AttendOut:
        """bf16, as queries are."""
        return self.problem.allocate_out(fp8=False, lse=False, max_logits=False)

    def reads(self, out: AttendOut) -> AttendCall:
        """A call whose query is what another launch writes."""
        return replace(self.problem.call(), q=out.data.view(self.start.shape))

    def begin(self) -> None:
        """The first query."""
        self.outs[1].data.view(self.start.shape).copy_(self.start)

    def link(self, number: int) -> None:
        """One launch."""
        hopper.attend(self.calls[number % 2], self.outs[number % 2])

    def run(self) -> None:
        """All of them."""
        self.begin()
        for number in range(LENGTH):
            self.link(number)

    def result(self) -> Tensor:
        """Bits of the last output."""
        torch.cuda.synchronize()
        return self.outs[(LENGTH - 1) % 2].data.clone().view(torch.int16)


def without_overlap(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the chain gives if every launch waits for the one ahead of it to end."""
    monkeypatch.setenv("SPARSE_MLA_OVERLAP", "off")
    settings.cache_clear()
    assert not settings().overlap
    chain.run()
    right = chain.result()
    monkeypatch.setenv("SPARSE_MLA_OVERLAP", "on")
    settings.cache_clear()
    assert settings().overlap
    return right


def captured(chain: Chain) -> torch.cuda.CUDAGraph:
    """The chain as a graph; compiled before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    return graph


@pytest.mark.parametrize(("heads", "tokens"), SHAPES)
def test_a_chain_of_launches(heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(heads, tokens)
    right = without_overlap(chain, monkeypatch)
    assert right.count_nonzero() > 0.9 * right.numel()
    for _ in range(5):
        chain.run()
        assert torch.equal(chain.result(), right)
    graph = captured(chain)
    for _ in range(5):
        graph.replay()
        assert torch.equal(chain.result(), right)


@pytest.mark.parametrize(("heads", "tokens"), SHAPES)
def test_other_launches_between(heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernels, a fill and a copy wait for a launch as before, and it waits for them; also on another stream."""
    chain = Chain(heads, tokens)
    side = torch.cuda.Stream()
    spare = torch.empty_like(chain.outs[0].data)

    def run() -> None:
        main = torch.cuda.current_stream()
        chain.begin()
        for number in range(LENGTH):
            chain.link(number)
            written = chain.outs[number % 2].data
            if number % 4 == 0:
                written.mul_(-1)
            elif number % 4 == 1:
                spare.copy_(written)
                written.zero_()
                written.copy_(spare)
            elif number % 4 == 2:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    written.neg_()
                main.wait_stream(side)

    monkeypatch.setattr(chain, "run", run)
    right = without_overlap(chain, monkeypatch)
    for _ in range(3):
        run()
        assert torch.equal(chain.result(), right)
    graph = captured(chain)
    for _ in range(3):
        graph.replay()
        assert torch.equal(chain.result(), right)


def test_streams_stay_independent() -> None:
    """Two chains on two streams at once."""
    chains = [Chain(8, 40), Chain(64, 20)]
    right = []
    for chain in chains:
        chain.run()
        right.append(chain.result())
    streams = [torch.cuda.Stream() for _ in chains]
    for _ in range(3):
        for chain, stream in zip(chains, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                chain.run()
        for chain, bits in zip(chains, right, strict=True):
            assert torch.equal(chain.result(), bits)
