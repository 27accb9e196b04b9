"""`klimb.diagnose`: a log of klimb, verl, TRL or OpenRLHF to findings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klimb.doctor.finding import Finding
from klimb.doctor.rules import Examination, examine
from klimb.readers.log import Log, require_log
from klimb.readers.settings import setting


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    log: Log
    examination: Examination

    def as_dict(self) -> dict[str, Any]:
        """For JSON: nothing in it is not finite."""
        log = self.log
        return {
            "path": str(log.path),
            "source": log.source,
            "steps": log.table.last,
            "series": len(log.table.curves),
            "findings": [self._finding(finding) for finding in self.examination.findings],
            "not_looked_at": {m.code: [list(group) for group in m.needs] for m in self.examination.missing},
            "mapping": log.mapping,
            "unmapped": list(log.unmapped),
            "notes": list(log.notes),
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        out = finding.as_dict()
        for remedy, given in zip(out["remedies"], finding.remedies, strict=True):
            if self.log.source != "klimb":
                remedy["setting"] = setting(self.log.source, given)
        return out


def look(path: Path, source: str | None = None) -> Diagnosis:
    """Read and judge. source: the framework that wrote the log, None to tell it from the names."""
    log = require_log(path, source)
    return Diagnosis(log=log, examination=examine(log.table, log.facts))


def diagnose(path: str | Path, source: str | None = None) -> list[Finding]:
    """What goes wrong in a run, worst and earliest first; empty when nothing does.

    path: a klimb run folder, TensorBoard event files, a trainer_state.json, or metrics as jsonl, json or csv. source:
    klimb, verl, trl or openrlhf; None: told from the names. Raises KlimbError for what is no log.
    """
    return list(look(Path(path), source).examination.findings)
