"""The critic and the machine: values that explain nothing, memory that runs out."""

from __future__ import annotations

import numpy as np

from klimb.doctor.finding import Facts, Seen, Severity
from klimb.doctor.limits import limit
from klimb.doctor.policy import first_of, seen
from klimb.doctor.stats import Span, spans, trend
from klimb.doctor.table import Curve, Table


def critic_failing(table: Table, facts: Facts) -> Seen | None:
    """Explained variance stays under 0, or values stay off by more than advantages are spread."""
    patience = int(limit("critic_patience"))
    candidates = (_bias(table), _variance(table))
    for found in candidates:
        if found is None:
            continue
        curve, flags, series, words = found
        over = [s for s in spans(flags, patience - 5, patience) if s.last >= len(curve) - 5]
        if not over:
            continue
        span = over[-1]
        level = float(np.median(curve.values[span.first : span.last + 1]))
        text = words.format(level) + f" (steps {int(curve.steps[span.first])} to {int(curve.steps[span.last])})"
        return seen("alarm", curve, span, text, series)
    return None


Candidate = tuple[Curve, np.ndarray, str, str]


def _variance(table: Table) -> Candidate | None:
    curve = table.curve("value/explained_variance")
    if curve is None:
        return None
    finite = curve.finite
    words = "values explain {:.2g} of the returns' variance: worse than a constant would"
    return finite, finite.values < limit("critic_variance"), "value/explained_variance", words


def _bias(table: Table) -> Candidate | None:
    mean, std = table.curve("advantage/mean"), table.curve("advantage/std")
    if table.curve("value/loss") is None or mean is None or std is None or len(mean) != len(std):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(mean.values) / std.values
    ratio = np.where(np.isfinite(ratio), ratio, 0.0)
    curve = Curve(steps=mean.steps, values=ratio)
    words = "values are off by {:.2g} times the spread of the advantages, always in the same direction"
    one_sided = np.sign(mean.values) == np.sign(np.nanmedian(mean.values))
    return curve, (ratio > limit("critic_bias")) & one_sided, "advantage/mean", words


PEAKS = ("memory/rollout_peak", "memory/score_peak", "memory/update_peak")


def memory_pressure(table: Table, facts: Facts) -> Seen | None:
    """A phase's peak comes near the limit, or grows without end towards it."""
    total = table.curve("memory/limit")
    if total is None or not len(total.finite):
        return None
    size = float(total.finite.values[-1])
    worst: Seen | None = None
    for name in PEAKS:
        curve = table.curve(name)
        if curve is None or size <= 0:
            continue
        share = curve.values / size
        part = name.removeprefix("memory/").removesuffix("_peak")
        levels: dict[Severity, list[Span]] = {
            "alarm": spans(share > limit("memory_alarm"), 1, 1),
            "warning": spans(share > limit("memory_warning"), 1, 1),
        }
        found = first_of(levels)
        if found is not None and (worst is None or found[0] == "alarm"):
            peak = float(np.nanmax(curve.values))
            text = f"{part} peaked at {peak / 2**30:.3g} of {size / 2**30:.3g} GiB ({peak / size:.0%})"
            worst = seen(found[0], curve, found[1], text, name, part)
        worst = worst or _growth(curve, name, part, size)
    return worst


def _growth(curve: Curve, name: str, part: str, size: float) -> Seen | None:
    """A leak: the peak rises all the time, and at this pace reaches the limit within as many steps again. klimb's own
    runs on a CPU measure it in every fifth step."""
    later = curve.between(int(curve.steps[0]) + 10, int(curve.steps[-1])).finite
    steps = int(later.steps[-1] - later.steps[0]) + 1 if len(later) else 0
    moved = trend(later) if steps >= 40 and len(later) >= 10 else None
    if moved is None or moved.p > 1e-3 or moved.change <= 0.1 * size or float(later.values[-1]) + moved.change < size:
        return None
    text = f"{part}'s peak grew by {moved.change / 2**30:.2g} GiB in {steps} steps and meets the limit in as many"
    return seen("warning", later, Span(first=0, named=len(later) - 1, last=len(later) - 1, since=0), text, name, part)
