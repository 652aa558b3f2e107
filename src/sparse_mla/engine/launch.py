"""How the ranks of a tensor-parallel run find each other: one process each, started by `torchrun`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sparse_mla.errors import ArgumentError
from sparse_mla.nn.parallel import Ranks
from sparse_mla.settings import Launch, leave_nvlink_multicast_off


@contextmanager
def joined(size: int, device: torch.device, launch: Launch | None) -> Iterator[Ranks]:
    """The ranks that `torchrun` started, as the default group: gloo on CPUs, NCCL on GPUs.

    NCCL runs one process a GPU, with NVLink multicast off unless NCCL_NVLS_ENABLE says otherwise. Graphs that hold
    an all-reduce must be gone when the context ends: NCCL waits for them. After an exception the group is
    left as it is, since the other ranks may be waiting in a sum; `torchrun` ends them.

    Args:
        size: ranks; 1 needs no group and no `torchrun`.
        device: from `device_of_rank`, which has checked all three.
        launch: this process's place.
    """
    if size == 1 or launch is None:
        yield Ranks(0, 1)
        return
    if device.type == "cuda":
        leave_nvlink_multicast_off()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield Ranks.of_group()
    dist.destroy_process_group()


def device_of_rank(size: int, device: str, launch: Launch | None) -> torch.device:
    """The device of this process among `size` ranks, one GPU each; any device if there is one rank.

    Raises:
        ArgumentError: not started by `torchrun`, by one with another number of processes, a numbered
            GPU for several ranks, or fewer GPUs than ranks on this machine. Nothing has been joined then.
    """
    started = 1 if launch is None else launch.size
    if size < 1:
        raise ArgumentError("--tp", size, "1 or more ranks")
    if started != size:
        raise ArgumentError(
            "--tp",
            f"{size} with " + ("no torchrun" if launch is None else f"{started} processes"),
            "as many ranks as torchrun has started processes",
            f"start with `torchrun --nproc-per-node {size} -m sparse_mla run --tp {size}`"
            if size > 1
            else f"pass --tp {started}, or start without torchrun",
        )
    place = torch.device(device)
    if launch is None or size == 1 or place.type != "cuda":
        return place
    if place.index is not None:
        raise ArgumentError(
            "--device", repr(device), "cpu or cuda", "each rank takes the GPU of its own number"
        )
    there = torch.cuda.device_count()
    if launch.local_size > there:
        raise ArgumentError(
            "--tp",
            f"{launch.local_size} ranks on a machine with {there} GPU{'' if there == 1 else 's'}",
            "one rank a GPU",
            "start fewer ranks here, or pass --device cpu",
        )
    return torch.device("cuda", launch.local_rank)
