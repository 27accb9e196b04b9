"""An estimate as lines of text, the same for `klimb plan`, the end of a run and a run that ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from klimb.estimate.memory import PARTS, Peak

GIB, MIB = 2**30, 2**20
SMALL = 8 * GIB
"""Below it sizes are shown in MiB."""


def size(number: float, unit: int) -> str:
    return f"{number / unit:,.0f}" if unit == MIB or number / unit >= 100 else f"{number / unit:,.1f}"


def unit_of(peaks: Sequence[Peak]) -> tuple[int, str]:
    return (MIB, "MiB") if max(peak.total for peak in peaks) < SMALL else (GIB, "GiB")


def memory_lines(peaks: Sequence[Peak], mark: str, note: str) -> list[str]:
    """One row a phase, one column a part that occurs; the row of the phase `mark` ends with the note."""
    unit, name = unit_of(peaks)
    parts = [part for part in PARTS if any(part in peak.parts for peak in peaks)]
    width = max(len(part) for part in parts)
    lines = [f"{name:<9}" + "".join(f"{part:>{width + 1}}" for part in (*parts, "together"))]
    for peak in peaks:
        cells = [size(peak.parts[part], unit) if part in peak.parts else "" for part in parts]
        row = f"{peak.phase:<9}" + "".join(f"{cell:>{width + 1}}" for cell in (*cells, size(peak.total, unit)))
        lines.append(row + (f"   <- {note}" if peak.phase == mark else ""))
    return lines


def time_line(seconds: Mapping[str, float]) -> str:
    """Seconds by phase and together."""
    parts = ", ".join(f"{phase} {duration(value)}" for phase, value in seconds.items())
    return f"{duration(sum(seconds.values()))} a step: {parts}"


def duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s"


def beside_lines(
    measured: Mapping[str, float],
    expected: Sequence[Peak],
    spent: Mapping[str, float],
    expected_seconds: Mapping[str, float],
) -> list[str]:
    """Peaks and seconds of a step, measured beside estimated, of the phases that were measured."""
    by_phase = {peak.phase: peak.total for peak in expected}
    rows = [p for p in by_phase if p in measured or p in spent]
    unit, name = (MIB, "MiB") if max(measured.values(), default=0) < SMALL else (GIB, "GiB")
    lines = [f"{'':<9}{'peak ' + name:>14}{'estimated':>12}{'':>7}{'s a step':>12}{'estimated':>12}"]
    for phase in rows:
        peak, guess = measured.get(phase), by_phase[phase]
        text = f"{phase:<9}"
        text += f"{size(peak, unit):>14}{size(guess, unit):>12}{guess / peak - 1:>+7.0%}" if peak else " " * 33
        if phase in spent and phase in expected_seconds:
            time, forecast = spent[phase], expected_seconds[phase]
            text += f"{time:>12.3g}{forecast:>12.3g}{forecast / max(time, 1e-9) - 1:>+7.0%}"
        lines.append(text.rstrip())
    return lines
