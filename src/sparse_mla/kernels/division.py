"""Division of a slot by a page's rows as one multiplication, for every kernel that does it."""

from __future__ import annotations

import functools


@functools.cache
def magic_division(divisor: int) -> tuple[int, int]:
    """(magic, shift) with `n // divisor == umulhi(2 * n, magic) >> shift` for every 0 <= n < 2**31.

    With `2**(shift - 1) < divisor <= 2**shift` and magic the quotient `2**(31 + shift) / divisor`, rounded
    up by e < 1: the product is too large by n * e * divisor < 2**(31 + shift), too little to count.
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift
