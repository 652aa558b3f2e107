"""Checks of arguments, one sentence each. Nothing here reads tensor *values* (no device sync)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_mla.errors import ArgumentError, DeviceError, DTypeError, ShapeError, StrideError

Size = int | str
"""An exact size, or a letter that stands for any size (and names it in the message)."""


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[Size],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    last_dim_contiguous: bool = True,
) -> None:
    """Raise the typed error that names `name` unless the tensor has this shape, dtype and device.

    `shape` mixes exact sizes and letters; a letter allows any size.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, type(tensor).__name__, "a torch.Tensor", "pass a tensor")
    wanted = "[" + ", ".join(str(size) for size in shape) + "]"
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == got for size, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ShapeError(name, f"shape {list(tensor.shape)}", f"shape {wanted}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise DTypeError(name, f"dtype {got}", f"dtype {names}", f"convert {name} first")
    if device is not None and tensor.device != device:
        raise DeviceError(
            name, f"device {tensor.device}", f"device {device}", "move it beside its companions"
        )
    if last_dim_contiguous and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise StrideError(
            name, f"last stride {tensor.stride(-1)}", "last stride 1", "call .contiguous()"
        )


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `ArgumentError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ArgumentError(name, repr(value), ", ".join(repr(choice) for choice in allowed))


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise `ArgumentError` unless `value >= least`."""
    if value < least:
        raise ArgumentError(name, value, f"an integer >= {least}")
