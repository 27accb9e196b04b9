"""What the numbers of a comparison support, in sentences; never a winner inside the noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from klimb.comparison.effects import main_effects, sentence
from klimb.comparison.table import (
    FIRST,
    KL,
    REWARD,
    WINDOW,
    ArmRows,
    over_seeds,
    running_mean,
    series,
    shown,
    window_mean,
)
from klimb.report.charts import WIDTH_OF_BAND

SURE = 0.95
"""Confidence of every interval and test here."""
BLOCKS = 5
"""A trend is looked for among at least so many means of WINDOW steps."""
SAME_COST = 0.05
"""Times and memory peaks closer than this are called the same."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second minus first, with half of its confidence interval."""

    mean: float
    half: float

    @property
    def is_sure(self) -> bool:
        return abs(self.mean) > self.half


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Of the means over two or more seeds, the same in both: Student's interval of their paired differences."""
    gaps = np.subtract(second, first)
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    return Difference(mean=float(gaps.mean()), half=float(stats.t.ppf((1 + SURE) / 2, len(gaps) - 1)) * error)


def trend(values: Sequence[float]) -> tuple[int, float]:
    """+1 rising, -1 falling, 0 neither, and the p-value: Kendall's test on means of WINDOW steps after the first third.

    KL begins at 0 in every run, so that the first third rises whatever comes after it. 0 for fewer than BLOCKS means.
    """
    part = values[len(values) // 3 :]
    blocks = [window_mean(part[i : i + WINDOW], WINDOW) for i in range(0, len(part) - WINDOW + 1, WINDOW)]
    blocks = [v for v in blocks if math.isfinite(v)]
    if len(blocks) < BLOCKS:
        return 0, 1.0
    found: Any = stats.kendalltau(range(len(blocks)), blocks)
    p = float(found.pvalue)
    return (int(math.copysign(1, found.statistic)) if p < 1 - SURE else 0), p


def held_from(arm: ArmRows, end: int) -> int | None:
    """The step from which KL, as a mean over seeds and a window, stays within half of its target up to `end`."""
    if arm.target is None or end < WINDOW:
        return None
    means = np.nanmean([running_mean(series(rows, KL)[:end]) for rows in arm.runs.values()], axis=0)
    outside = np.flatnonzero(~(np.abs(means - arm.target) <= WIDTH_OF_BAND * arm.target))
    start = int(outside[-1]) + 2 if len(outside) else 1
    return max(start, WINDOW) if start <= end else None


def verdict(arms: Sequence[ArmRows], width: int = WINDOW) -> list[str]:
    """One sentence each on KL, reward, time and memory; every other arm against the first. width: of the last window.

    The arms have the same seeds.
    """
    end = min((arm.steps() for arm in arms), default=0)
    if end < 2 * FIRST:
        return [f"{end} steps in every arm are too few to say anything; nothing is concluded"]
    first, lines = arms[0], list[str]()
    lines += [_kl_alone(arm, end, width) for arm in arms if _has(arm, KL, end)]
    for other in arms[1:]:
        for metric, name, form in ((KL, "KL", ".4f"), (REWARD, "reward", ".3f")):
            if _has(first, metric, end) or _has(other, metric, end):
                lines.append(_against(first, other, metric, name, end, width, form))
        lines += _cost("time of a step, as it was measured", first, other, seconds(first), seconds(other), "s")
        lines += _cost("memory peak", first, other, peak(first), peak(other), "MiB")
    for metric, name, form in ((KL, "KL", ".4f"), (REWARD, "reward", ".3f")):
        if found := main_effects(arms, metric, end, width):
            lines.append(sentence(found, name, form, len(first.runs)))
    if all(len(arm.runs) == 1 for arm in arms):
        lines.append("One seed: what another seed would show is not known, so no difference is called one")
    return lines


def _kl_alone(arm: ArmRows, end: int, width: int) -> str:
    now = over_seeds(arm.windows(KL, end, width))
    if math.isnan(now.mean):
        return f"{arm.label}: no finite KL in the last {width} steps"
    text = f"{arm.label}: KL ends at {now.shown('.4f')}"
    if arm.target is not None and end >= WINDOW:
        start = held_from(arm, end)
        where = "not held at the end" if start is None else f"within half of it from step {start} on"
        text += f", target {arm.target:g}, {where}"
    curves = [series(rows, KL)[:end] for rows in arm.runs.values()]
    return text + _kl_trend(curves)


def _kl_trend(curves: Sequence[Sequence[float]]) -> str:
    """Of all seeds by themselves, else of their mean, which has less noise."""
    found = [trend(curve) for curve in curves]
    mean, p_of_mean = trend(list(np.mean(curves, axis=0)))
    for sign, word in ((1, "rises"), (-1, "falls")):
        count = sum(direction == sign for direction, _ in found)
        if count == len(found):
            p = max(p for _, p in found)
            every = "in every seed, " if len(found) > 1 else ""
            return f"; it {word} after the first third ({every}Kendall's test, p at most {p:.2g})"
        if mean == sign:
            alone = f"by itself in {count} of {len(found)}"
            return (
                f"; it {word} after the first third as a mean over seeds (Kendall's test, p {p_of_mean:.2g}; {alone})"
            )
    return ""


def _against(first: ArmRows, other: ArmRows, metric: str, name: str, end: int, width: int, form: str) -> str:
    one, two = first.windows(metric, end, width), other.windows(metric, end, width)
    a, b = over_seeds(one).mean, over_seeds(two).mean
    both = f"{shown(a, form)} ({first.label}) and {shown(b, form)} ({other.label})"
    if not all(math.isfinite(v) for v in (*one, *two)):
        return f"{name}: {both}; some seeds have no finite value in the last {width} steps, so nothing is compared"
    ratio = f"{b / a:.2g} times the first's" if metric == KL and a > 0 else ""
    if len(one) < 2:
        return f"{name}: {both}" + (f", {ratio}" if ratio else "")
    found = difference(one, two)
    size = f"{found.mean:+{form}} ± {found.half:{form}} over {len(one)} seeds"
    if not found.is_sure:
        return f"{name}: {both}; the difference, {size}, is inside the noise"
    more = f"; {ratio}" if ratio else ""
    return f"{name}: {'higher' if found.mean > 0 else 'lower'} with {other.label}: {both}, {size}{more}"


def _cost(name: str, first: ArmRows, other: ArmRows, a: float, b: float, unit: str) -> list[str]:
    if not (math.isfinite(a) and math.isfinite(b)) or a <= 0:
        return []
    if abs(b / a - 1) < SAME_COST:
        return [f"{name}: the same within {SAME_COST:.0%} ({a:.3g} and {b:.3g} {unit})"]
    return [f"{name}: {a:.3g} {unit} ({first.label}) and {b:.3g} {unit} ({other.label}), {b / a:.2g} times the first's"]


def seconds(arm: ArmRows) -> float:
    """Median of a step without evaluations; what else the machine did is part of it."""
    rows = [row for run in arm.runs.values() for row in run if row["step"] > 0 and "time/step" in row]
    return float(np.median([row["time/step"] - row.get("time/eval", 0.0) for row in rows])) if rows else math.nan


def peak(arm: ArmRows) -> float:
    """The largest of the logged memory peaks, in MiB."""
    rows = [row for run in arm.runs.values() for row in run]
    peaks = [v for row in rows for k, v in row.items() if k.startswith("memory/") and k.endswith("_peak")]
    return max(peaks, default=math.nan) / 2**20


def _has(arm: ArmRows, metric: str, end: int) -> bool:
    return any(math.isfinite(v) for rows in arm.runs.values() for v in series(rows, metric)[:end])
