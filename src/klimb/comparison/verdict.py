"""What the numbers of a comparison support, in sentences; never a winner inside the noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from klimb.comparison.table import FIRST, KL, REWARD, WINDOW, ArmRows, series, turns, window_mean

SURE = 0.95
"""Confidence of every interval and test here."""
NEAR_TARGET = 0.5
"""KL is held where it lies within this share of its target."""
SAME_COST = 0.05
"""Times and memory peaks closer than this are called the same: a machine's speed moves by more."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second minus first, with half of its confidence interval; seeds that both arms have."""

    mean: float
    half: float
    seeds: int

    @property
    def is_sure(self) -> bool:
        return abs(self.mean) > self.half


def difference(first: ArmRows, second: ArmRows, metric: str, end: int) -> Difference:
    """Of the window before phase `end`: with several seeds from their paired differences (t), with one from the
    noise of the phases in the window."""
    seeds, window = sorted(first.runs.keys() & second.runs.keys()), slice(max(0, end - WINDOW), end)
    pairs = [(series(first.runs[s], metric)[window], series(second.runs[s], metric)[window]) for s in seeds]
    gaps = np.array([_mean(b) - _mean(a) for a, b in pairs])
    if len(gaps) > 1:
        spread = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
        half = float(stats.t.ppf((1 + SURE) / 2, len(gaps) - 1)) * spread
    else:
        half = float(stats.norm.ppf((1 + SURE) / 2)) * math.hypot(*(standard_error(part) for part in pairs[0]))
    return Difference(mean=float(gaps.mean()), half=half, seeds=len(gaps))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of neighbours in a run, which are alike: the first autocorrelation widens it."""
    x = np.array([v for v in values if math.isfinite(v)])
    if len(x) < 3:
        return math.inf
    centred = x - x.mean()
    power = float(centred @ centred)
    rho = max(0.0, float(centred[1:] @ centred[:-1]) / power) if power > 0 else 0.0
    return math.sqrt(power / (len(x) - 1) / len(x) * (1 + rho) / (1 - min(rho, 0.9)))


def rises(values: Sequence[float]) -> tuple[bool, float]:
    """Whether a series has a rising trend, and the p-value: Kendall's test on means of 20 phases, which are nearly
    independent where single phases are not. False for fewer than 5 such means."""
    blocks = [_mean(values[i : i + WINDOW]) for i in range(0, len(values) - WINDOW + 1, WINDOW)]
    blocks = [v for v in blocks if math.isfinite(v)]
    if len(blocks) < 5:
        return False, 1.0
    found: Any = stats.kendalltau(range(len(blocks)), blocks, alternative="greater")
    p = float(found.pvalue)
    return p < 1 - SURE, p


def held_from(arm: ArmRows) -> int | None:
    """The phase from which KL, as a mean over seeds and a window, stays within half of the target to the end."""
    if arm.target is None:
        return None
    means = _mean_window(arm, KL)
    good = [abs(v - arm.target) <= NEAR_TARGET * arm.target for v in means]
    if not good or not good[-1]:
        return None
    out = next((i for i in range(len(good) - 1, -1, -1) if not good[i]), -1) + 1
    return out + WINDOW


def verdict(arms: Sequence[ArmRows]) -> list[str]:
    """One sentence each on KL, reward, time and memory; every other arm against the first."""
    end = min((arm.phases() for arm in arms), default=0)
    if end < 2 * FIRST:
        return [f"{end} phases are too few to say anything; nothing is concluded"]
    first, lines = arms[0], list[str]()
    lines += [_kl_alone(arm, end) for arm in arms if _known(arm, KL)]
    for other in arms[1:]:
        if _known(first, KL) and _known(other, KL):
            lines.append(_against(first, other, KL, "KL", end, ".4f"))
        lines.append(_against(first, other, REWARD, "reward", end, ".3f"))
        lines.append(_cost(first, other, "time/step", "time of a step", "s"))
        lines.append(_cost(first, other, "memory/peak", "memory peak", "MiB"))
    if max(len(arm.runs) for arm in arms) == 1:
        lines.append("One seed: another seed may differ by more than the phases of this one do; --seeds 3 tells")
    return [line for line in lines if line]


def _kl_alone(arm: ArmRows, end: int) -> str:
    now = _over_seeds(arm, KL, end)
    text = f"{arm.label}: KL ends at {now:.4f}"
    if arm.target is not None:
        start = held_from(arm)
        where = "not held at the end" if start is None else f"within half of it from step {start} on"
        text += f", target {arm.target:g}, {where}"
    tests = [rises(series(rows, KL)[:end]) for rows in arm.runs.values()]
    if all(found for found, _ in tests):
        text += f"; it rises (Kendall's test, p at most {max(p for _, p in tests):.2g})"
    return text


def _against(first: ArmRows, other: ArmRows, metric: str, name: str, end: int, form: str) -> str:
    found = difference(first, other, metric, end)
    a, b = _over_seeds(first, metric, end), _over_seeds(other, metric, end)
    size = f"{found.mean:+{form}} ± {found.half:{form}}"
    if not found.is_sure:
        both = f"{a:{form}} ({first.label}) and {b:{form}} ({other.label})"
        return f"{name}: {both}, {size}: inside the noise, no difference shown"
    times = f", {b / a:.1f} times as high" if metric == KL and a > 0 else ""
    return f"{name}: {b:{form}} with {other.label} against {a:{form}} with {first.label} ({size}{times})"


def _cost(first: ArmRows, other: ArmRows, metric: str, name: str, unit: str) -> str:
    a, b = cost(first, metric), cost(other, metric)
    if not (math.isfinite(a) and math.isfinite(b)) or a <= 0:
        return ""
    if abs(b / a - 1) < SAME_COST:
        return f"{name}: the same within {SAME_COST:.0%} ({a:.3g} and {b:.3g} {unit})"
    return f"{name}: {other.label} takes {b / a:.2f} times {first.label}'s ({b:.3g} against {a:.3g} {unit})"


def cost(arm: ArmRows, metric: str) -> float:
    """Median seconds of a phase without evaluations and saves, or the largest memory peak in MiB."""
    rows = [row for run in arm.runs.values() for row in turns(run)]
    if metric == "memory/peak":
        peaks = [v for row in rows for k, v in row.items() if k.startswith("memory/") and k.endswith("_peak")]
        return max(peaks, default=math.nan) / 2**20
    seconds = [row["time/step"] - row.get("time/eval", 0.0) for row in rows if "time/step" in row]
    return float(np.median(seconds)) if seconds else math.nan


def _known(arm: ArmRows, metric: str) -> bool:
    return any(math.isfinite(v) for rows in arm.runs.values() for v in series(rows, metric))


def _over_seeds(arm: ArmRows, metric: str, end: int) -> float:
    return float(np.mean([window_mean(series(rows, metric), end, WINDOW) for rows in arm.runs.values()]))


def _mean_window(arm: ArmRows, metric: str) -> list[float]:
    """The window's mean, over seeds, at every phase that has a whole window."""
    runs = np.array([series(rows, metric)[: arm.phases()] for rows in arm.runs.values()])
    if runs.shape[1] < WINDOW:
        return []
    return np.lib.stride_tricks.sliding_window_view(runs.mean(axis=0), WINDOW).mean(axis=1).tolist()


def _mean(values: Sequence[float]) -> float:
    return window_mean(values, len(values), len(values))
