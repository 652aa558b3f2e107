"""Tensor parallel: each rank holds some heads, and one sum after `wo_b` makes the layer's output.

Projections down to the query bottleneck and the latent, compressor, indexer and all caches are the same
on every rank: each computes the same lists from the same hidden states, so nothing about positions is
ever sent. What a rank owns are its heads' columns of `wq_b`, its sinks, and its part of `wo_a`, `wo_b`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_mla.config.model import HeadShard, ModelConfig
from sparse_mla.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place in a group of `torch.distributed`."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None  # None = the default group

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The place in a group that is already initialised.

        Raises:
            ArgumentError: no process group, or this process is not in it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "group", "no process group", "torch.distributed.init_process_group called before"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ArgumentError("group", "a group without this process", "one with it")
        return cls(rank, dist.get_world_size(group), group)

    def shard(self, cfg: ModelConfig) -> HeadShard:
        """The heads of this rank."""
        return cfg.shard(self.rank, self.size)

    def add(self, share: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(share, group=self.group)
        return share

    def agree(self, digest: bytes) -> bool:
        """Whether every rank passed the same bytes; every rank has to call it, with as many."""
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        if self.size == 1:
            return True
        if dist.get_backend(self.group) == "nccl":
            mine = mine.to(torch.device("cuda", torch.cuda.current_device()))
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self.group)
        return all(torch.equal(mine, other) for other in theirs)
