"""Facts about the device and the compiler that the launches here need."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a launch is shaped by."""

    capability: tuple[int, int]
    num_sms: int


INTERPRETED = DeviceFacts(capability=(8, 0), num_sms=4)
"""What CPU tensors are given: they only reach a kernel through Triton's interpreter."""


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts((properties.major, properties.minor), properties.multi_processor_count)


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a tensor's device, read once per device."""
    if device.type != "cuda":
        return INTERPRETED
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def compile_mode(kernel: object) -> str:
    """How a kernel is going to run: a compile-time constant of every kernel here.

    "ptx" for NVIDIA GPUs (packed widening in PTX), "generic" for other compilers, "interpreted" for
    Triton's interpreter, whose bf16 casts and products are wrong.
    """
    if not isinstance(kernel, JITFunction):
        return "interpreted"
    return "generic" if torch.version.hip else "ptx"


@functools.cache
def gluon_available() -> bool:
    """Whether this Triton has Gluon, its language with explicit layouts."""
    return importlib.util.find_spec("triton.experimental.gluon") is not None
