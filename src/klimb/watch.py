"""The doctor looking on: the rules over the steps so far, after every step of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klimb.doctor import kl
from klimb.doctor.finding import RANK, Facts, Finding
from klimb.doctor.rules import examine
from klimb.doctor.table import Recorder
from klimb.ladder import is_curable

RECENT = 2
"""An alarm whose state ended longer ago than so many steps is history."""


@dataclass
class Watch:
    """Its memory is the log: a run that resumes shows it the rows again. stopped: the alarms that ended the run."""

    facts: Facts
    recorder: Recorder = field(default_factory=lambda: Recorder(bounded=True))
    stopped: tuple[Finding, ...] = ()
    _said: dict[str, int] = field(default_factory=dict[str, int])

    def remember(self, rows: Sequence[Mapping[str, Any]], facts: Facts) -> None:
        """Start from these rows of the log, and forget what was said of others."""
        self.facts, self.recorder = facts, Recorder(bounded=True)
        self._said.clear()
        for row in rows:
            self.recorder.add(_numbers(row))

    def see(self, row: Mapping[str, Any]) -> tuple[Finding, ...]:
        """Everything found so far, with this step's row."""
        self.recorder.add(_numbers(row))
        return examine(self.recorder.table(), self.facts).findings

    def news(self, findings: Sequence[Finding]) -> list[Finding]:
        """Warnings and alarms that were not said before, or not as badly."""
        new = [f for f in findings if f.severity != "note" and RANK[f.severity] < self._said.get(f.code, 9)]
        self._said |= {f.code: RANK[f.severity] for f in new}
        return new

    def is_calm(self, findings: Sequence[Finding]) -> bool:
        """Nothing that a rollback could cure is in sight, nor a KL on its way up: a state worth going back to."""
        now = self.recorder.last - RECENT
        if any(is_curable(f) and f.severity != "note" and f.last >= now for f in findings):
            return False
        return kl.is_calm(self.recorder.table(), self.facts)

    def current_alarms(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Alarms that hold now."""
        return tuple(f for f in findings if f.severity == "alarm" and f.last >= self.recorder.last - RECENT)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row of the log, where a value that is not finite stands as its name."""
    out: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            out[key] = float(value)
    return out


def sentence(finding: Finding) -> str:
    """One finding in one line of a running job's screen."""
    advice = "" if finding.first_override is None else f". First to try: {finding.first_override}"
    return f"{finding.severity.upper()} {finding.code}: {finding.evidence}{advice}"
