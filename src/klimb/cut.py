"""Rows in a given order to the forwards they go through the models in."""

from __future__ import annotations

from collections.abc import Sequence


def cut(lengths: Sequence[int], tokens: int | None, rows: int | None = None) -> list[int]:
    """Sizes of consecutive parts with at most so many tokens and rows each (None: no such limit). A row longer than
    the limit is a part of its own."""
    sizes, total = list[int](), 0
    for length in lengths:
        too_long = tokens is not None and total + length > tokens
        if not sizes or too_long or sizes[-1] == rows:
            sizes.append(0)
            total = 0
        sizes[-1] += 1
        total += length
    return sizes
