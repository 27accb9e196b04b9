"""What the rules ask of a series: does it hold, does it move, and is that more than its noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from klimb.doctor.table import Curve, Flags, Floats

BLOCKS = 12
"""A trend is tested on at most so many block medians: neighbouring steps of a run are not independent."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Indices into a series: where a state first began, where it had lasted long enough to be named, where it ended,
    and where the last stretch of it began."""

    first: int
    named: int
    last: int
    since: int


def spans(flags: Flags, need: int, of: int) -> list[Span]:
    """Stretches in which at least `need` of the last `of` values are flagged, so that one odd value says nothing."""
    if len(flags) == 0:
        return []
    counts = np.convolve(flags.astype(np.int64), np.ones(of, dtype=np.int64))[: len(flags)]
    active = counts >= need
    edges = np.flatnonzero(np.diff(np.concatenate(([False], active, [False])).astype(np.int8)))
    out: list[Span] = []
    for named, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        begin = max(0, named - of + 1)
        first = begin + int(np.argmax(flags[begin : named + 1]))
        last = int(np.flatnonzero(flags[:end])[-1])
        out.append(Span(first=first, named=named, last=max(last, named), since=first))
    return out


def joined(found: list[Span]) -> Span:
    """All stretches as one, from the first to the last."""
    return Span(first=found[0].first, named=found[0].named, last=found[-1].last, since=found[-1].since)


def rolling_median(values: Floats, width: int) -> Floats:
    """Median of each value and the width - 1 before it; shorter at the start."""
    if len(values) == 0:
        return values
    padded = np.concatenate((np.full(width - 1, np.nan), values))
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    out = np.median(windows, axis=1)
    for i in range(min(width - 1, len(values))):
        out[i] = np.median(values[: i + 1])
    return out


@dataclass(frozen=True, kw_only=True)
class Trend:
    """change: from the first block's median to the last one's; p: two-sided, Mann and Kendall's test on the blocks'
    medians (Mann 1945; Kendall 1975)."""

    change: float
    p: float


def trend(curve: Curve) -> Trend | None:
    """None with fewer than five values, which prove nothing in either direction."""
    values = curve.finite.values
    if len(values) < 5:
        return None
    from scipy.stats import kendalltau

    blocks = np.array([np.median(block) for block in np.array_split(values, min(BLOCKS, len(values)))])
    if np.ptp(blocks) == 0:
        return Trend(change=0.0, p=1.0)
    p = cast(Any, kendalltau(np.arange(len(blocks)), blocks)).pvalue
    return Trend(change=float(blocks[-1] - blocks[0]), p=float(p))


def risen(curve: Curve, head: int) -> Trend | None:
    """The newest third against the first `head` values, by the one-sided test of Mann and Whitney (1947)."""
    values = curve.finite.values
    if len(values) < head + 4:
        return None
    from scipy.stats import mannwhitneyu

    before, after = values[:head], values[max(head, len(values) * 2 // 3) :]
    p = cast(Any, mannwhitneyu(after, before, alternative="greater")).pvalue
    return Trend(change=float(np.median(after) - np.median(before)), p=float(p))


def noise(values: Floats) -> float:
    """Standard deviation of a series around whatever it follows, from its successive differences (von Neumann 1941),
    by their median so that single jumps do not count."""
    if len(values) < 3:
        return 0.0
    return float(1.4826 * np.median(np.abs(np.diff(values))) / np.sqrt(2))
