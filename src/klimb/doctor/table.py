"""Metrics of a run as named series over steps, whoever wrote them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Flags = NDArray[np.bool_]

HEAD, TAIL = 32, 256
"""Values of a series that a bounded recorder keeps: the first ones, from which a run started, and the newest."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One series where it was logged. steps [N] increasing; values [N], which may be nan or inf."""

    steps: Steps
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Curve:
        keep = np.isfinite(self.values)
        return Curve(steps=self.steps[keep], values=self.values[keep])

    def between(self, first: int, last: int) -> Curve:
        """Values of steps first to last, both included."""
        keep = (self.steps >= first) & (self.steps <= last)
        return Curve(steps=self.steps[keep], values=self.values[keep])


@dataclass(frozen=True, kw_only=True)
class Table:
    """curves by klimb's name of the metric; last: the newest step; episodes: in one step, None when unknown."""

    curves: Mapping[str, Curve]
    last: int
    episodes: float | None = None

    def curve(self, *names: str) -> Curve | None:
        """The first of these series that holds a finite value, or else the first that is there."""
        there = [self.curves[name] for name in names if name in self.curves]
        return next((curve for curve in there if np.isfinite(curve.values).any()), there[0] if there else None)

    @staticmethod
    def of(rows: Iterable[Mapping[str, float]]) -> Table:
        """From rows with a step each, in the order in which they were written."""
        recorder = Recorder()
        for row in rows:
            recorder.add(row)
        return recorder.table()


@dataclass
class Recorder:
    """Collects rows. A step that was logged before starts anew from there: the run went back, and so does the table.

    bounded: keep only HEAD first and TAIL last values of each series, so that a long run costs what a short one does.
    """

    bounded: bool = False
    last: int = -1
    _steps: dict[str, array[int]] = field(default_factory=dict[str, "array[int]"])
    _values: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])

    def add(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        if step <= self.last:
            self.cut(step)
        self.last = step
        for name, value in row.items():
            if name != "step":
                self._put(name, step, value)

    def _put(self, name: str, step: int, value: float) -> None:
        steps = self._steps.setdefault(name, array("q"))
        values = self._values.setdefault(name, array("d"))
        steps.append(step)
        values.append(value)
        if self.bounded and len(steps) > HEAD + 2 * TAIL:
            del steps[HEAD:-TAIL], values[HEAD:-TAIL]

    def cut(self, step: int) -> None:
        """Forget everything from `step` on."""
        for name, steps in self._steps.items():
            at = bisect_left(steps, step)
            del steps[at:], self._values[name][at:]
        self.last = max((steps[-1] for steps in self._steps.values() if steps), default=-1)

    def table(self) -> Table:
        curves = {
            name: Curve(steps=np.array(steps), values=np.array(self._values[name]))
            for name, steps in self._steps.items()
            if steps
        }
        return Table(curves=curves, last=self.last, episodes=episodes_of(curves.get("episodes")))


def episodes_of(counted: Curve | None) -> float | None:
    """Median growth of the episode count from one step to the next."""
    if counted is None or len(counted) < 2:
        return None
    with np.errstate(all="ignore"):
        grown = np.diff(counted.values) / np.diff(counted.steps)
    grown = grown[np.isfinite(grown) & (grown > 0)]
    return float(np.median(grown)) if len(grown) else None
