"""Values as they come from a file, and the series they make: files hold restarts, and rows in no order."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from klimb.doctor.table import Curve, Floats, Steps, Table, episodes_of
from klimb.readers.names import FRAMEWORKS, find, recognise
from klimb.report.lines import LARGEST

SERIES = 2000
"""Names that are kept of a file at most."""
NAME = 300
"""Longest name, in characters."""
BACKWARDS = 0.1
"""Share of steps that may go back before a series counts as unordered rather than restarted."""


@dataclass
class Columns:
    """Collects (name, step, value); names stay the framework's until the end, when it is known which one wrote."""

    _steps: dict[str, array[int]] = field(default_factory=dict[str, "array[int]"])
    _values: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])
    dropped: int = 0

    def put(self, name: str, step: int, value: float) -> None:
        """Values beyond the limits are counted in `dropped` and left out."""
        if len(name) > NAME or abs(step) > LARGEST:
            self.dropped += 1
            return
        name = _printable(name)
        steps = self._steps.get(name)
        if steps is None:
            if len(self._steps) >= SERIES:
                self.dropped += 1
                return
            name = sys.intern(name)
            steps = self._steps[name] = array("q")
            self._values[name] = array("d")
        steps.append(step)
        self._values[name].append(value)

    @property
    def first(self) -> int:
        """Smallest step of all."""
        return min((min(steps) for steps in self._steps.values()), default=0)

    def append(self, later: Columns) -> None:
        """What another part of the same run logged, after this one."""
        for name in later.names:
            for step, value in zip(later._steps[name], later._values[name], strict=True):
                self.put(name, step, value)
        self.dropped += later.dropped

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._steps)

    def mapped(self, framework: str | None = None) -> Mapped:
        """Series by klimb's names. framework None: recognised by the names. Of two series with one meaning the first
        named in the framework's table is taken."""
        framework = framework or recognise(self._steps)
        if framework is None:
            return Mapped(framework=None, table=Table(curves={}, last=-1), mapping={}, unmapped=self.names, notes=())
        order = list(FRAMEWORKS[framework])
        chosen: dict[str, str] = {}
        unmapped: list[str] = []
        ranked = sorted(self._steps, key=lambda n: order.index(n) if n in order else len(order))
        for name in ranked:
            found = find(framework, name)
            if found is None:
                unmapped.append(name)
            elif found.ours in chosen:
                unmapped.append(f"{name} (as {chosen[found.ours]})")
            else:
                chosen[found.ours] = name
        curves: dict[str, Curve] = {}
        notes: Counter[str] = Counter()
        for ours, name in chosen.items():
            found = find(framework, name)
            assert found is not None
            with np.errstate(all="ignore"):
                values = np.array(self._values[name]) * found.scale
            curve, note = _series(np.array(self._steps[name]), values)
            curves[ours] = curve
            notes[note] += 1
        last = max((int(curve.steps[-1]) for curve in curves.values()), default=-1)
        return Mapped(
            framework=framework,
            table=Table(curves=curves, last=last, episodes=episodes_of(curves.get("episodes"))),
            mapping={name: ours for ours, name in chosen.items()},
            unmapped=tuple(sorted(unmapped)),
            notes=tuple(f"{note} ({count} series)" for note, count in notes.items() if note),
        )


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """table of what has a counterpart; mapping: their name to ours; unmapped: names without one."""

    framework: str | None
    table: Table
    mapping: dict[str, str]
    unmapped: tuple[str, ...]
    notes: tuple[str, ...]


def _printable(name: str) -> str:
    """A name that is one line wherever it is shown."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def _series(steps: Steps, values: Floats) -> tuple[Curve, str]:
    """Increasing steps. A few steps back are restarts: what was logged after that point before counts no more. Many
    are rows in no order: they are sorted, and of one step the last value stays."""
    back = int((np.diff(steps) < 0).sum())
    if back > max(3, BACKWARDS * len(steps)):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        keep = np.append(steps[1:] != steps[:-1], True)
        return Curve(steps=steps[keep], values=values[keep]), "steps are in no order and were sorted"
    later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.iinfo(np.int64).max)
    keep = steps < later
    note = "steps go back: the run was restarted, what it had logged beyond that point is left out" if back else ""
    return Curve(steps=steps[keep], values=values[keep]), note
