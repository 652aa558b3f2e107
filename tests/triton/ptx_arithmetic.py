"""What PTX instructions without memory compute, on one value per thread.

A register is an array of one unsigned number per thread, as wide as the register, or of booleans if it is a
predicate. `typed` gives it the type that an instruction names, `raw` takes the type away again. A fused
multiply-add is computed in float64, which rounds a product exactly and a sum almost always as the GPU does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from ptx_program import PtxError

Values = np.ndarray[Any, np.dtype[Any]]  # [threads]
Function = Callable[..., Values]
Parts = tuple[str, ...]  # an opcode split at its dots

TYPES: dict[str, type] = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32,
}  # fmt: skip
MODIFIERS = {"approx", "ftz", "full", "lo", "relu", "rn"}  # of what is computed element by element
SMALLEST_NORMAL = 2.0**-126


def bits_of(name: str) -> int:
    """Width of a type."""
    if name not in TYPES:
        raise PtxError(f"the type {name} is not known here")
    return np.dtype(TYPES[name]).itemsize * 8


def raw(values: Values) -> Values:
    """The bits of typed values; a predicate stays one."""
    values = np.ascontiguousarray(values)
    return values if values.dtype == np.bool_ else values.view(f"u{values.dtype.itemsize}")


def typed(values: Values, name: str) -> Values:
    """A register's value as a PTX type; what does not fit is cut off."""
    if name == "pred":
        return values if values.dtype == np.bool_ else values != 0
    if name == "bf16":
        return (typed(values, "u16").astype(np.uint32) << np.uint32(16)).view(np.float32)
    bits: Values = values.astype(f"u{bits_of(name) // 8}")
    return bits.view(TYPES[name])


def round_to_bf16(numbers: Values) -> Values:  # float32 -> uint16
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits.astype(np.uint64) + np.uint64(0x7FFF) + odd) >> np.uint64(16)
    return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)


def round_to_e4m3(numbers: Values) -> Values:  # float32 -> uint8, saturated
    clipped = torch.from_numpy(np.clip(numbers, -448.0, 448.0).astype(np.float32))
    codes: Values = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def halves(words: Values) -> tuple[Values, Values]:
    """float32 values of the two bf16 numbers in each word, the low one first."""
    return typed(words, "bf16"), typed(typed(words, "u32") >> np.uint32(16), "bf16")


def joined(low: Values, high: Values) -> Values:
    """One number from two halves."""
    width = 8 * low.dtype.itemsize
    wide = TYPES[f"u{2 * width}"]
    result: Values = low.astype(wide) | (high.astype(wide) << wide(width))
    return result


def flushed(numbers: Values) -> Values:  # float32, subnormal numbers made zero
    small = np.abs(numbers) < SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), numbers), numbers)


def _refuse(parts: Parts) -> NoReturn:
    raise PtxError(f"this form of {parts[0]} is not known here")


def elementwise(integers: Function | None, floats: Function | None = None) -> Function:
    """An instruction whose sources and result have the type that it ends with, for each kind of type."""

    def compute(parts: Parts, *sources: Values) -> Values:
        *modifiers, name = parts[1:]
        if name == "f32x2":
            pairs = [typed(source, "u64").view(np.uint32).reshape(-1, 2) for source in sources]
            single = (parts[0], *modifiers, "f32")
            return joined(*(compute(single, *(pair[:, i] for pair in pairs)) for i in range(2)))
        function = floats if name == "f32" else integers
        if function is None or not MODIFIERS.issuperset(modifiers):
            _refuse(parts)
        if len(sources) != getattr(function, "nin", len(sources)):
            _refuse(parts)  # NumPy would take one more source for the place of the result
        inputs = [typed(source, name) for source in sources]
        if "ftz" in modifiers:
            return raw(flushed(function(*map(flushed, inputs))).astype(np.float32))
        result: Values = function(*inputs).astype(inputs[0].dtype)
        return raw(np.maximum(result, 0) if "relu" in modifiers else result)

    return compute


def of_two_or_three(function: Function) -> Function:
    """min and max of float32, which take a third source on newer GPUs."""
    return lambda *sources: functools.reduce(function, sources)


def fused(a: Values, b: Values, c: Values) -> Values:  # float32 a * b + c, rounded once
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def fused_multiply_add(parts: Parts, a: Values, b: Values, c: Values) -> Values:
    """fma.rn of float32 or of pairs of bf16."""
    if parts[-1] == "bf16x2":
        pairs = zip(halves(a), halves(b), halves(c), strict=True)
        return joined(*(round_to_bf16(fused(*sources)) for sources in pairs))
    return elementwise(None, fused)(parts, a, b, c)


def multiply(parts: Parts, a: Values, b: Values, *addend: Values) -> Values:
    """mul and mad: the low half, the high half or the whole product."""
    name, product = parts[-1], np.empty(0)
    if name in ("f32", "f32x2"):
        return elementwise(None, np.multiply)(parts, a, b)
    whole = f"{name[0]}{2 * bits_of(name)}"
    if "wide" in parts or "hi" in parts:
        bits_of(whole)
        product = typed(a, name).astype(TYPES[whole]) * typed(b, name).astype(TYPES[whole])
        if "hi" in parts:
            product = (product >> TYPES[whole](bits_of(name))).astype(TYPES[name])
        else:
            name = whole
    else:
        product = typed(a, name) * typed(b, name)
    return raw(product + typed(addend[0], name) if addend else product)


def divide_integers(a: Values, b: Values) -> Values:
    """Quotients rounded towards zero."""
    if a.dtype.itemsize > 4:
        raise PtxError("a division of 64-bit numbers is not known here")
    return np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(a.dtype)


def shift_left(parts: Parts, values: Values, by: Values) -> Values:
    bits, name = bits_of(parts[-1]), parts[-1]
    amount = typed(by, "u32")
    moved = typed(values, name) << np.minimum(amount, bits - 1).astype(TYPES[name])
    return raw(np.where(amount < bits, moved, TYPES[name](0)))


def shift_right(parts: Parts, values: Values, by: Values) -> Values:
    """Of a signed number the sign moves in."""
    bits, name = bits_of(parts[-1]), parts[-1]
    amount = typed(by, "u32")
    moved = typed(values, name) >> np.minimum(amount, bits - 1).astype(TYPES[name])
    return raw(moved if name[0] == "s" else np.where(amount < bits, moved, TYPES[name](0)))


def logic(parts: Parts, *sources: Values) -> Values:
    """lop3: any function of three bits, given as a table."""
    a, b, c, table = (typed(source, "u32") for source in sources)
    result = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def permute_bytes(parts: Parts, *sources: Values) -> Values:
    """prmt: each byte of the result is one of eight, or its sign eight times."""
    if len(parts) != 2:
        _refuse(parts)
    low, high, choices = (typed(source, "u32") for source in sources)
    pool = joined(low, high)
    result = np.zeros_like(low)
    for byte in range(4):
        choice = (choices >> np.uint32(4 * byte)) & np.uint32(15)
        picked = (pool >> (np.uint64(8) * (choice & np.uint32(7)))).astype(np.uint8)
        sign = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
        chosen = np.where(choice & 8, sign, picked).astype(np.uint32)
        result |= chosen << np.uint32(8 * byte)
    return result


def extract_bits(parts: Parts, values: Values, first: Values, count: Values) -> Values:
    """bfe of constant places inside the word."""
    position, length = int(first[0]), int(count[0])
    if not (length > 0 and position + length <= 32) or parts[-1] not in ("u32", "s32"):
        _refuse(parts)
    top = typed(values, "u32") << np.uint32(32 - position - length)
    return raw(top.view(TYPES[parts[-1]]) >> TYPES[parts[-1]](32 - length))


def select(parts: Parts, a: Values, b: Values, condition: Values) -> Values:
    return raw(np.where(typed(condition, "pred"), typed(a, parts[-1]), typed(b, parts[-1])))


COMPARISONS: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": lambda a, b: (a != b) & (a == a) & (b == b), "neu": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "num": lambda a, b: (a == a) & (b == b),
}  # fmt: skip


def compare(parts: Parts, a: Values, b: Values) -> Values:
    if len(parts) != 3 or parts[1] not in COMPARISONS:
        _refuse(parts)
    return COMPARISONS[parts[1]](typed(a, parts[-1]), typed(b, parts[-1]))


def convert(parts: Parts, *sources: Values) -> Values:
    """cvt; of two sources the first becomes the high half."""
    target, source = parts[-2:]
    if not {"rn", "satfinite"}.issuperset(parts[1:-2]):
        _refuse(parts)
    numbers = [typed(values, source) for values in sources]
    if source == "f32" and target == "bf16":
        return round_to_bf16(numbers[0])
    if source == "f32" and target == "bf16x2":
        return joined(round_to_bf16(numbers[1]), round_to_bf16(numbers[0]))
    if source == "f32" and target == "e4m3x2":
        return joined(round_to_e4m3(numbers[1]), round_to_e4m3(numbers[0]))
    if target not in TYPES or (source in ("f32", "bf16") and target != "f32"):
        _refuse(parts)
    return raw(numbers[0].astype(TYPES[target]))


ARITHMETIC: dict[str, Function] = {
    "abs": elementwise(np.abs, np.abs),
    "add": elementwise(np.add, np.add),
    "and": elementwise(np.bitwise_and),
    "bfe": extract_bits,
    "cvt": convert,
    "div": elementwise(divide_integers, np.divide),
    "ex2": elementwise(None, np.exp2),
    "fma": fused_multiply_add,
    "lop3": logic,
    "mad": multiply,
    "max": elementwise(np.maximum, of_two_or_three(np.fmax)),
    "min": elementwise(np.minimum, of_two_or_three(np.fmin)),
    "mul": multiply,
    "neg": elementwise(np.negative, np.negative),
    "not": elementwise(np.invert),
    "or": elementwise(np.bitwise_or),
    "prmt": permute_bytes,
    "selp": select,
    "setp": compare,
    "shl": shift_left,
    "shr": shift_right,
    "sub": elementwise(np.subtract, np.subtract),
    "xor": elementwise(np.bitwise_xor),
}
"""From the first part of an opcode to `function(parts, *sources)`."""
