"""compare.html: the report's page, with arms in the place of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klimb.comparison.side_by_side import Comparison
from klimb.comparison.table import KL, REWARD, ArmRows, running_mean, series
from klimb.report.charts import build_charts
from klimb.report.page import render
from klimb.report.panels import COLORS, GIB, Axis, Line, Panel


@dataclass(frozen=True, kw_only=True)
class Shown:
    """metric of the log, in `unit` after times `scale`; form: d3 format."""

    metric: str
    unit: str
    form: str = ".3~g"
    scale: float = 1.0


PANELS: tuple[tuple[str, str, str, tuple[Shown, ...]], ...] = (
    (
        "kl",
        "KL to the reference",
        "And the coefficient that was in force.",
        (Shown(metric=KL, unit="nats per token"), Shown(metric="kl/coef", unit="coefficient")),
    ),
    ("reward", "Training reward", "What the arms are trained on.", (Shown(metric=REWARD, unit="reward"),)),
    (
        "eval",
        "Held-out prompts",
        "Training reward that rises while this stays flat is reward hacking.",
        (Shown(metric="eval/reward", unit="reward"), Shown(metric="eval/accuracy", unit="share correct", form=".2~%")),
    ),
    (
        "entropy",
        "Entropy",
        "A fall to zero ends exploration.",
        (Shown(metric="policy/entropy", unit="nats per token"),),
    ),
    (
        "length",
        "Length of responses",
        "Truncated ones never reached their end.",
        (Shown(metric="length/mean", unit="tokens"), Shown(metric="length/truncated", unit="truncated", form=".2~%")),
    ),
    (
        "ratio",
        "Ratio",
        "How far a phase moves the policy, on average over its tokens.",
        (Shown(metric="policy/ratio_abs_dev", unit="distance from 1", form=".1~e"),),
    ),
    (
        "value",
        "Value fit",
        "Explained variance near 1 is a critic that knows what is coming.",
        (Shown(metric="value/explained_variance", unit="explained variance"),),
    ),
    ("time", "Time per step", "With evaluations.", (Shown(metric="time/step", unit="seconds"),)),
    (
        "memory",
        "Memory",
        "The update's peak.",
        (Shown(metric="memory/update_peak", unit="GiB", scale=GIB),),
    ),
)
"""Id, title, what it shows, and one or two curves, each with an axis of its own."""


def build_page(done: Comparison) -> str:
    return render(build_data(done))


def build_data(done: Comparison) -> dict[str, Any]:
    """All that the page shows, in the report's fields, and `table`."""
    charts, missing = build_charts(joint_rows(done.arms), (), [_panel(done.arms, *spec) for spec in PANELS])
    steps = min(arm.steps() for arm in done.arms)
    return {
        "name": done.title,
        "state": "finished" if done.finished else "stopped",
        "state_words": "finished" if done.finished else "not all runs are finished",
        "posture": f"{len(done.arms)} arms; they differ in {' and '.join(done.varied)} and in what the end lists.",
        "facts": [
            ("arms", "; ".join(arm.label for arm in done.arms)),
            ("seeds", str(done.seeds)),
            ("steps", f"{steps:,}"),
            ("table", done.caption()),
        ],
        "tiles": [],
        "notes": list(done.notes),
        "sentences": list(done.sentences),
        "marks": [],
        "charts": [
            {"id": c.panel.id, "title": c.panel.title, "about": c.panel.about, "figure": c.figure} for c in charts
        ],
        "missing": missing,
        "samples": None,
        "table": done.cells(),
        "config_title": "What differs beside the varied key",
        "config": "\n".join(done.implied),
    }


def _panel(arms: Sequence[ArmRows], name: str, title: str, about: str, curves: Sequence[Shown]) -> Panel:
    return Panel(
        id=name,
        title=title,
        about=about,
        axes=tuple(Axis(unit=curve.unit, form=curve.form) for curve in curves),
        lines=tuple(line for axis, curve in enumerate(curves) for line in _lines(arms, axis, curve)),
        band=name == "kl",
    )


def _lines(arms: Sequence[ArmRows], axis: int, curve: Shown) -> Iterator[Line]:
    """One for each arm; faint ones for its seeds, where there are several, on the first axis."""
    for i, arm in enumerate(arms):
        color, markers = i % len(COLORS), curve.metric.startswith("eval/")
        if len(arm.runs) > 1 and axis == 0 and not markers:
            for seed in arm.runs:
                yield Line(key=_key(curve.metric, i, seed), name=f"{arm.label}, seed {seed}", color=color, faint=True)
        name = arm.label if axis == 0 else f"{arm.label}: {curve.unit}"
        dash = "solid" if axis == 0 or not markers else "dash"
        yield Line(
            key=_key(curve.metric, i), name=name, color=color, axis=axis, scale=curve.scale, markers=markers, dash=dash
        )


def _key(metric: str, arm: int, seed: int | None = None) -> str:
    return f"{metric}|{arm}" if seed is None else f"{metric}|{arm}|{seed}"


def joint_rows(arms: Sequence[ArmRows]) -> list[dict[str, float]]:
    """One row a step: every arm's mean over seeds, and of each seed the mean of the window before."""
    rows: list[dict[str, float]] = [{"step": step + 1.0} for step in range(max(arm.steps() for arm in arms))]
    for i, arm in enumerate(arms):
        for metric in (curve.metric for *_, curves in PANELS for curve in curves):
            runs = {seed: series(run, metric)[: arm.steps()] for seed, run in arm.runs.items()}
            _put(rows, _key(metric, i), np.mean(list(runs.values()), axis=0))
            for seed, values in runs.items() if len(runs) > 1 else ():
                _put(rows, _key(metric, i, seed), running_mean(values))
    targets = {arm.target for arm in arms if arm.target is not None}
    return [row | {"kl/target": target} for row in rows for target in targets] if len(targets) == 1 else rows


def _put(rows: list[dict[str, float]], key: str, values: NDArray[np.float64]) -> None:
    for row, value in zip(rows, values, strict=False):
        if np.isfinite(value):
            row[key] = float(value)
