"""`klimb diagnose`: findings on the terminal, or as JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from klimb import checkpoint
from klimb.cli.plan import open_console
from klimb.console import plain, sparkline
from klimb.doctor.finding import Finding
from klimb.doctor.table import Curve
from klimb.readers.diagnose import Diagnosis, look
from klimb.readers.settings import setting

if TYPE_CHECKING:
    from klimb.launch import RunResult

STYLE = {"alarm": "bold red", "warning": "yellow", "note": "cyan"}
WIDTH = 48
SHOWN = 12
ALARM = 3
"""Exit code when a finding is of alarm level."""


def run_and_show(path: Path, source: str | None, as_json: bool) -> int:
    """0 healthy (nothing, notes or warnings), 3 with an alarm."""
    found = look(path, source)
    console = open_console()
    if as_json:
        console.file.write(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    else:
        show(console, found)
    return ALARM if found.examination.has_alarm else 0


def show(console: Console, found: Diagnosis) -> None:
    log = found.log
    _say(console, f"{log.path}: {log.source}, {len(log.table.curves)} series up to step {log.table.last:,}")
    for note in log.notes:
        _say(console, f"note: {note}", "yellow")
    if not found.examination.findings:
        _say(console, "\nnothing wrong was found", "bold green")
    for finding in found.examination.findings:
        _show(console, finding, found)
    _rest(console, found)


def show_stopped(result: RunResult) -> None:
    """A run that an alarm has ended: its findings, where a healthy state is, and the report if it can be drawn."""
    console, folder = open_console(), result.folder
    show(console, look(folder))
    before = min((alarm.first for alarm in result.alarms), default=result.step)
    sound = [path for path in checkpoint.listed(folder / "checkpoints") if (checkpoint.step_of(path) or 0) < before]
    if sound:
        changed = result.alarms[0].first_override or ""
        _say(console, f"\nto go on from before the alarm: training.resume={sound[-1]} {changed}")
    if all(importlib.util.find_spec(package) for package in ("plotly", "matplotlib")):
        from klimb.cli.report import write_and_show

        write_and_show(folder, None)


def _show(console: Console, finding: Finding, found: Diagnosis) -> None:
    steps = f"step {finding.first:,}" if finding.first == finding.last else f"steps {finding.first:,}-{finding.last:,}"
    head = Text(f"\n{finding.severity.upper()} ", style=STYLE[finding.severity])
    head.append(finding.code, style="bold").append(f", {steps}", style="not bold")
    if finding.after is not None:
        head.append(f" (after {finding.after}, which may be its cause)", style="dim not bold")
    console.print(head, soft_wrap=True)
    _say(console, f"  {finding.evidence}")
    curve = found.log.table.curve(finding.series)
    if curve is not None:
        _say(console, f"  {chart(curve, finding)}", "cyan")
    _say(console, f"  {finding.mechanism}", "dim")
    _say(console, "  Try, in this order:")
    for number, remedy in enumerate(finding.remedies, start=1):
        how = setting(found.log.source, remedy)
        _say(console, f"   {number}. {remedy.text}" + (f":  {how}" if how is not None else ""))


def chart(curve: Curve, finding: Finding) -> str:
    """The series as bars of medians, and its name with lowest and highest value."""
    parts = np.array_split(curve.values, min(WIDTH, len(curve)))
    medians = [float(np.median(part[np.isfinite(part)])) if np.isfinite(part).any() else float("nan") for part in parts]
    finite = curve.finite.values
    span = f"{finite.min():.3g} to {finite.max():.3g}" if len(finite) else "not finite"
    return f"{sparkline(medians, WIDTH)}  {finding.series}, {span}"


def _rest(console: Console, found: Diagnosis) -> None:
    if found.examination.missing:
        _say(console, "\nnot looked at, for want of a series:", "dim")
    for missing in found.examination.missing:
        needs = ", and ".join(" or ".join(group) for group in missing.needs)
        _say(console, f"  {missing.code} needs {needs}", "dim")
    unmapped = found.log.unmapped
    if unmapped:
        more = f", and {len(unmapped) - SHOWN} more (--json has all)" if len(unmapped) > SHOWN else ""
        _say(console, f"series without a counterpart: {', '.join(unmapped[:SHOWN])}{more}", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(plain(text), style=style), soft_wrap=True)
