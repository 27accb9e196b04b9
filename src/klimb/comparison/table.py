"""From the rows of finished or running arms to the numbers that are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

WINDOW = 20
"""Steps behind a value of the table: their mean. Fewer where rows of the table are closer."""
FIRST = 5
"""Steps whose mean is the start."""
KL, REWARD = "kl/k3", "reward/mean"
Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ArmRows:
    """label of the arm; its runs by seed, the logged rows of each; target KL, None without one; the varied keys' values
    as text."""

    label: str
    runs: Mapping[int, Sequence[Row]]
    target: float | None
    values: Mapping[str, str] = field(default_factory=dict[str, str])

    def steps(self) -> int:
        """Steps that every seed has made."""
        return min((last_step(rows) for rows in self.runs.values()), default=0)

    def windows(self, metric: str, end: int, width: int) -> list[float]:
        """Of each seed the mean of the `width` steps up to `end`; nan without a finite value."""
        return [window_mean(series(rows, metric)[:end], width) for rows in self.runs.values()]


@dataclass(frozen=True, kw_only=True)
class Value:
    """Mean over seeds; spread: their standard deviation, None with one seed."""

    mean: float
    spread: float | None

    def shown(self, form: str) -> str:
        return shown(self.mean, form) + ("" if self.spread is None else f" ± {shown(self.spread, form)}")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """step 0 is the start: the mean of the first steps. values: label -> metric -> value."""

    step: int
    values: Mapping[str, Mapping[str, Value]]


def shown(value: float, form: str) -> str:
    """With the given decimals, or three digits where those would show nothing."""
    if math.isnan(value):
        return "-"
    return format(value, ".2g" if 0 < abs(value) < 1e-3 else form)


def last_step(rows: Sequence[Row]) -> int:
    return int(max((row["step"] for row in rows), default=0))


def series(rows: Sequence[Row], metric: str) -> list[float]:
    """One value for each step from the first, nan where there is none; of a step that was made twice, the later."""
    by_step = {int(row["step"]): row.get(metric, math.nan) for row in rows}
    return [by_step.get(step, math.nan) for step in range(1, last_step(rows) + 1)]


def window_mean(values: Sequence[float], width: int) -> float:
    """Mean of the finite ones among the last `width`; nan without any."""
    part = [v for v in values[-width:] if math.isfinite(v)]
    return float(np.mean(part)) if part else math.nan


def running_mean(values: Sequence[float], width: int = WINDOW) -> NDArray[np.float64]:
    """`window_mean` at every step; the window grows at the beginning."""
    x = np.asarray(values, dtype=np.float64)
    known = np.isfinite(x)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, x, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    end = np.arange(1, len(x) + 1)
    begin = np.maximum(0, end - width)
    n = counts[end] - counts[begin]
    return np.where(n > 0, (sums[end] - sums[begin]) / np.maximum(n, 1), np.nan)


def over_seeds(values: Sequence[float]) -> Value:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return Value(mean=math.nan, spread=None)
    return Value(mean=float(np.mean(known)), spread=float(np.std(known, ddof=1)) if len(known) > 1 else None)


def whole_seeds(arms: Sequence[ArmRows]) -> tuple[list[ArmRows], list[int]]:
    """The arms with those seeds that every arm has, and of these the ones that came furthest; and the seeds left out.

    A seed that has only begun would cut the table, and one that an arm lacks would compare unequal things.
    """
    everywhere = sorted(set[int].intersection(*(set(arm.runs) for arm in arms))) if arms else []
    steps = {seed: min(last_step(arm.runs[seed]) for arm in arms) for seed in everywhere}
    kept = [seed for seed in everywhere if steps[seed] == max(steps.values())]
    left = sorted({seed for arm in arms for seed in arm.runs} - set(kept))
    return [replace(arm, runs={seed: arm.runs[seed] for seed in kept}) for arm in arms], left


def table(arms: Sequence[ArmRows], every: int, metrics: Sequence[str] = (KL, REWARD)) -> list[TableRow]:
    """The start and a row every so many steps, up to where every arm has come, and one at the end."""
    return [
        TableRow(
            step=step,
            values={
                arm.label: {metric: over_seeds(arm.windows(metric, end, width)) for metric in metrics} for arm in arms
            },
        )
        for step, end, width in _windows(arms, every)
    ]


def csv_rows(arms: Sequence[ArmRows], every: int, metrics: Sequence[str] = (KL, REWARD)) -> list[dict[str, object]]:
    """One line per row of the table, arm and seed, with the window's mean of every metric."""
    out: list[dict[str, object]] = []
    for step, end, width in _windows(arms, every):
        for arm in arms:
            means = {metric: arm.windows(metric, end, width) for metric in metrics}
            for i, seed in enumerate(arm.runs):
                values = {metric: of_seeds[i] for metric, of_seeds in means.items()}
                out.append({"step": step, "arm": arm.label, "seed": seed, **values})
    return out


def _windows(arms: Sequence[ArmRows], every: int) -> Iterator[tuple[int, int, int]]:
    """Step of a row, and end and width of its window."""
    last = min((arm.steps() for arm in arms), default=0)
    yield 0, FIRST, FIRST
    yield from ((step, step, min(WINDOW, every)) for step in range(every, last + 1, every))
    if last % every:
        yield last, last, min(WINDOW, every)
