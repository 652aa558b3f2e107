"""How `few_heads.cu` is launched: one CTA for each multiprocessor, or clusters that share a row."""

from __future__ import annotations

CLUSTERS_OF_132 = {8: 15, 4: 30, 3: 39, 2: 66}
"""Clusters of each size that are resident together on 132 multiprocessors (the driver's answer on an H200).

Rows beyond them start when others are done: 32 tokens of 8 heads take 13.6 us in clusters of 3, 23.3 us in clusters of 4.
"""


def choose_few_heads_splits(tokens: int, tiles: int, multiprocessors: int) -> int:
    """CTAs that share one row: the largest cluster of which all rows are resident at once.

    Args:
        tokens: rows of the call.
        tiles: 64-key tiles of the list widths; a CTA gets at least one of them.
        multiprocessors: of the device.
    """
    for splits, clusters in CLUSTERS_OF_132.items():
        if splits <= tiles and tokens * 132 <= clusters * multiprocessors:
            return splits
    return 1
