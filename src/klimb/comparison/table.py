"""From the rows of finished or running arms to the numbers that are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 20
"""Phases behind a value of the table: their mean."""
FIRST = 5
"""Phases whose mean is the start."""
KL, REWARD = "kl/k3", "reward/mean"
Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ArmRows:
    """label of the arm; its runs by seed, the logged rows of each in order; target KL, None without one."""

    label: str
    runs: Mapping[int, Sequence[Row]]
    target: float | None

    def phases(self) -> int:
        """Phases that every seed has."""
        return min((len(turns(rows)) for rows in self.runs.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Value:
    """Mean over seeds; spread: their standard deviation, None with one seed."""

    mean: float
    spread: float | None

    def shown(self, form: str) -> str:
        return format(self.mean, form) + ("" if self.spread is None else f" ± {format(self.spread, form)}")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """step 0 is the start: the mean of the first phases. values: label -> metric -> value."""

    step: int
    values: Mapping[str, Mapping[str, Value]]


def turns(rows: Sequence[Row]) -> list[Row]:
    """The rows of training phases: not the evaluation before training."""
    return [row for row in rows if row["step"] > 0]


def series(rows: Sequence[Row], metric: str) -> list[float]:
    """One value per phase, nan where it is missing."""
    return [row.get(metric, math.nan) for row in turns(rows)]


def window_mean(values: Sequence[float], end: int, width: int) -> float:
    """Mean of the `width` values before position `end`; nan without any."""
    part = [v for v in values[max(0, end - width) : end] if math.isfinite(v)]
    return float(np.mean(part)) if part else math.nan


def over_seeds(values: Sequence[float]) -> Value:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return Value(mean=math.nan, spread=None)
    return Value(mean=float(np.mean(known)), spread=float(np.std(known, ddof=1)) if len(known) > 1 else None)


def table(arms: Sequence[ArmRows], every: int, metrics: Sequence[str] = (KL, REWARD)) -> list[TableRow]:
    """The start and a row every so many steps, up to where every arm has come, and one at the end."""
    last = min((arm.phases() for arm in arms), default=0)
    steps = [*range(every, last + 1, every)]
    if last and (not steps or steps[-1] != last):
        steps.append(last)
    return [TableRow(step=step, values=dict(_values(arms, step, every, metrics))) for step in (0, *steps)]


def _values(
    arms: Sequence[ArmRows], step: int, every: int, metrics: Sequence[str]
) -> Iterator[tuple[str, dict[str, Value]]]:
    end, width = (step, min(WINDOW, every)) if step else (FIRST, FIRST)
    for arm in arms:
        found = {
            metric: over_seeds([window_mean(series(rows, metric), end, width) for rows in arm.runs.values()])
            for metric in metrics
        }
        yield arm.label, found


def csv_rows(arms: Sequence[ArmRows], every: int, metrics: Sequence[str] = (KL, REWARD)) -> list[dict[str, object]]:
    """One line per arm, seed and row of the table, with the window's mean of every metric."""
    out: list[dict[str, object]] = []
    for row in table(arms, every, metrics):
        end, width = (row.step, min(WINDOW, every)) if row.step else (FIRST, FIRST)
        for arm in arms:
            for seed, rows in arm.runs.items():
                means = {metric: window_mean(series(rows, metric), end, width) for metric in metrics}
                out.append({"step": row.step, "arm": arm.label, "seed": seed, **means})
    return out
