"""The record of a comparison: what the terminal, the picture and the page show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klimb.comparison.table import FIRST, KL, REWARD, WINDOW, ArmRows, TableRow

FORMS = {KL: ("KL", ".4f"), REWARD: ("reward", ".3f")}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """folder of the files; arms with the rows of the seeds that are compared; implied: a line for each key that differs
    beside the varied ones; rows of the table; sentences the numbers support; notes: what is not finished or was left
    out."""

    folder: Path
    title: str
    arms: Sequence[ArmRows]
    varied: Sequence[str]
    implied: Sequence[str]
    every: int
    rows: Sequence[TableRow]
    sentences: Sequence[str]
    notes: Sequence[str]
    finished: bool

    @property
    def seeds(self) -> int:
        return max(len(arm.runs) for arm in self.arms)

    def cells(self) -> list[list[str]]:
        """The table as text, its header first: KL of every arm, then reward of every arm."""
        columns = [(metric, arm.label) for metric in FORMS for arm in self.arms]
        head = ["step", *(f"{FORMS[metric][0]}, {label}" for metric, label in columns)]
        texts = [[row.values[label][metric].shown(FORMS[metric][1]) for metric, label in columns] for row in self.rows]
        steps = ["start" if row.step == 0 else str(row.step) for row in self.rows]
        return [head, *([step, *cells] for step, cells in zip(steps, texts, strict=True))]

    def caption(self) -> str:
        """What the rows of the table are."""
        spread = f"; mean ± standard deviation over {self.seeds} seeds" if self.seeds > 1 else ""
        rows = f"rows are means of the {min(WINDOW, self.every)} steps before, the start of the first {FIRST}"
        return f"KL: nats per token (k3); {rows}{spread}"
