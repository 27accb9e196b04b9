"""How a long build tells where it is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SECONDS_BETWEEN_LINES = 15.0


class Report(Protocol):
    """Called with a stage's name, the steps done, the steps there are, and a few words such as the loss."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """Reports nothing."""


@contextmanager
def console_report(console: Console) -> Generator[Report]:
    """A report to the console: one bar a stage on a terminal, a few lines a stage on a pipe."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield show


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""
        self.started = 0.0
        self.printed = 0.0

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.started, self.printed = stage, now, 0.0
        if done == total or not self.printed or now - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = now
            seconds = now - self.started
            left = f", {seconds / done * (total - done):.0f} s left" if 1 < done < total else ""
            self.console.print(f"{stage}: {done}/{total}, {seconds:.0f} s{left} {note}".rstrip(), highlight=False)


class TrainerReport(TrainerCallback):
    """Passes the Trainer's steps on to a report."""

    def __init__(self, stage: str, report: Report) -> None:
        self.stage = stage
        self.report = report
        self.note = ""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "loss" in logs:
            self.note = f"loss {float(logs['loss']):.3f}"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.report(self.stage, state.global_step, state.max_steps, self.note)
