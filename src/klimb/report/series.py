"""A metric over the steps, thinned so that a browser can draw it and no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DRAWN = 1500
"""Points per curve at most, its two ends not counted."""
STACKED = 300
"""Points per band of a stack: means over neighbouring steps, since a spike of one part would bend all above it."""
SMOOTH_FROM = 100
"""A curve with more points than this is drawn faintly, with its running mean over it."""


@dataclass(frozen=True)
class Curve:
    """values may hold nan and inf: a gap in the drawing."""

    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[float]:
        return [v for v in self.values if math.isfinite(v)]


def curve(rows: Sequence[dict[str, float]], key: str, scale: float = 1.0) -> Curve:
    """The steps that have the metric."""
    found = [(int(row["step"]), row[key] * scale) for row in rows if key in row]
    return Curve([step for step, _ in found], [value for _, value in found])


def thin(full: Curve, limit: int = DRAWN) -> Curve:
    """Of each bucket of neighbouring steps the lowest, the highest and the first that is not finite."""
    n = len(full.values)
    if n <= limit:
        return full
    kept = {0, n - 1}
    buckets = limit // 3
    for b in range(buckets):
        span = range(b * n // buckets, (b + 1) * n // buckets)
        finite = [i for i in span if math.isfinite(full.values[i])]
        if finite:
            kept.add(min(finite, key=full.values.__getitem__))
            kept.add(max(finite, key=full.values.__getitem__))
        if len(finite) < len(span):
            kept.add(next(i for i in span if not math.isfinite(full.values[i])))
    order = sorted(kept)
    return Curve([full.steps[i] for i in order], [full.values[i] for i in order])


def smooth(full: Curve) -> Curve:
    """Exponential mean with its start corrected, so that the first value counts no more than any other."""
    span = max(10.0, len(full.values) / 40)
    decay, weight, total = 1 - 2 / (span + 1), 0.0, 0.0
    values: list[float] = []
    for value in full.values:
        if not math.isfinite(value):
            values.append(math.nan)
            continue
        total, weight = decay * total + value, decay * weight + 1
        values.append(total / weight)
    return Curve(full.steps, values)


def buckets(rows: Sequence[dict[str, float]], keys: Sequence[str], limit: int = STACKED) -> dict[str, Curve]:
    """Means of the keys over the same buckets of steps; a key that a row lacks or that is not finite counts 0.

    Each value stands at its bucket's last step and reaches back to the one before, so the first stands twice."""
    count = min(limit, len(rows))
    spans = [rows[b * len(rows) // count : (b + 1) * len(rows) // count] for b in range(count)]
    steps = [int(span[-1]["step"]) for span in spans]

    def mean(span: Sequence[dict[str, float]], key: str) -> float:
        return sum(v for row in span if math.isfinite(v := row.get(key, 0.0))) / len(span)

    steps = [int(spans[0][0]["step"]) - 1, *steps]
    means = {key: [mean(span, key) for span in spans] for key in keys}
    return {key: Curve(steps, [values[0], *values]) for key, values in means.items()}


def plain(values: Sequence[float]) -> list[float | None]:
    """For JSON: six digits, None where not finite."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]
