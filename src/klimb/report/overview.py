"""The top of the report: what the run is, and the numbers one looks at first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from klimb.console import duration
from klimb.report.charts import Mark, Row, Severity
from klimb.report.files import RunFiles
from klimb.report.lines import whole
from klimb.report.series import curve

if TYPE_CHECKING:
    from klimb.doctor.finding import Finding

STATES = {
    "finished": "finished",
    "running": "still running",
    "stopped": "stopped before its end",
    "ended": "no longer running; how long it was to be is not known",
    "empty": "no step finished yet",
}
TREND = 60
"""Points of a tile's small curve."""


def get(config: Mapping[str, Any], key: str) -> Any:
    """A dotted key, None where the config lacks it."""
    found: Any = config
    for word in key.split("."):
        found = found.get(word) if isinstance(found, dict) else None
    return found


def posture(config: Mapping[str, Any]) -> str:
    """Where the old log-probabilities come from and where the KL sits, in words."""
    explicit = get(config, "algorithm.use_pf_ppo")
    if not isinstance(explicit, bool):
        return ""
    name = (
        "Explicit posture: old log-probabilities are computed again after sampling"
        if explicit
        else "Cached posture: the sampler's log-probabilities are the old ones"
    )
    places = [word for word in ("reward", "loss") if get(config, f"algorithm.use_kl_{_in(word)}") is True]
    if not places:
        return f"{name}; no KL."
    ctrl = get(config, "algorithm.kl_ctrl.type")
    return f"{name}; KL in the {' and the '.join(places)} with a coefficient that is {ctrl}."


def _in(word: str) -> str:
    return "in_reward" if word == "reward" else "loss"


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """Name and text of what the header says; what is not known is left out."""
    last = run.rows[-1] if run.rows else {}
    steps, episodes = int(last.get("step", 0)), int(last.get("episodes", 0))
    total = whole(get(run.config, "training.total_episodes"))
    seconds = sum(v for row in run.rows if math.isfinite(v := row.get("time/step", 0.0)))
    estimator, loss = get(run.config, "algorithm.adv_estimator"), get(run.config, "algorithm.policy_loss")
    data = get(run.config, "data.train_files")
    found = [
        ("model", str(get(run.config, "actor_rollout_ref.model_path") or "")),
        ("data", ", ".join(map(str, data)) if isinstance(data, list) else ""),
        ("algorithm", f"{estimator}, {loss} loss" if estimator else ""),
        ("steps", f"{steps:,}" if run.rows else ""),
        ("episodes", f"{episodes:,}" + (f" of {total:,}" if total else "") if run.rows else ""),
        ("time", duration(seconds) if run.rows else ""),
        ("best checkpoint", _best(run)),
    ]
    return [(name, text) for name, text in found if text]


def _best(run: RunFiles) -> str:
    if run.best is None:
        return ""
    step, value, there = run.best
    metric = str(get(run.config, "eval.metric") or "held-out")
    shown = f"{value:.1%}" if metric in ("accuracy", "pass_at_k") else f"{value:.3f}"
    return f"step {step:,}, {metric} {shown}" + ("" if there else " (no longer there)")


def tiles(run: RunFiles) -> list[dict[str, Any]]:
    """label, value, detail, trend (a small curve), color and tone: good, warn, bad or empty."""
    out = [
        _before_after(run.rows, "eval/accuracy", "held-out accuracy", 2, percent=True),
        _before_after(run.rows, "eval/reward", "held-out reward", 1),
        _before_after(run.rows, "reward/mean", "training reward", 0),
        _kl(run),
        _coefficient(run.rows),
        _time(run.rows),
    ]
    return [tile for tile in out if tile is not None]


def _tile(label: str, value: str, detail: str, values: Sequence[float], color: int, tone: str = "") -> dict[str, Any]:
    step = max(1, len(values) / TREND)
    trend = [values[int(i * step)] for i in range(int(len(values) / step))]
    trend = [float(f"{v:.4g}") for v in [*trend[:-1], *values[-1:]]]
    return {"label": label, "value": value, "detail": detail, "trend": trend, "color": f"c{color}", "tone": tone}


def _before_after(
    rows: Sequence[Row], key: str, label: str, color: int, percent: bool = False
) -> dict[str, Any] | None:
    values = curve(rows, key).finite
    if not values:
        return None
    form = ".1%" if percent else ".3f"
    after = format(values[-1], form)
    if len(values) == 1:
        return _tile(label, after, "one measurement so far", values, color)
    change = values[-1] - values[0]
    shown = f"{100 * change:+.1f} points" if percent else f"{change:+.3f}"
    tone = "good" if change > 0 else "bad" if change < 0 else ""
    return _tile(label, f"{format(values[0], form)} → {after}", shown, values, color, tone)


def _kl(run: RunFiles) -> dict[str, Any] | None:
    """Mean of the second half of the phases, as `klimb train` says it at its end."""
    full = curve(run.rows, "kl/k3")
    half = [v for v in full.values[len(full.values) // 2 :] if math.isfinite(v)]
    if not half:
        return None
    mean = fmean(half)
    target = curve(run.rows, "kl/target").finite
    detail, tone = "second half, nats per token", ""
    if target and target[-1] > 0:
        share = mean / target[-1]
        detail = f"second half, {share:.0%} of the target {target[-1]:g}"
        tone = "good" if 0.5 <= share <= 1.5 else "warn" if share < 0.5 else "bad"
    return _tile("KL", f"{mean:.4f}", detail, full.finite, 0, tone)


def _coefficient(rows: Sequence[Row]) -> dict[str, Any] | None:
    values = curve(rows, "kl/coef").finite
    if not values:
        return None
    moved = "fixed" if len(set(values)) == 1 else f"began at {values[0]:.3g}"
    return _tile("KL coefficient", f"{values[-1]:.3g}", moved, values, 3)


def _time(rows: Sequence[Row]) -> dict[str, Any] | None:
    values = curve([row for row in rows if row["step"] > 0], "time/step").finite
    if not values:
        return None
    speed = curve(rows, "perf/episodes_per_s").finite
    detail = f"median; {median(speed):.3g} episodes per second" if speed else "median"
    shown = f"{median(values):.3g} s" if median(values) < 100 else duration(median(values))
    return _tile("time per step", shown, detail, values, 5)


SEVERITIES: dict[str, Severity] = {"alarm": "error", "warning": "warning", "note": "info"}


def all_marks(run: RunFiles) -> list[Mark]:
    """What the doctor finds in the log, and what the run did about it, along the steps."""
    return sorted([*finding_marks(run), *intervention_marks(run.interventions)], key=lambda mark: mark.step)


def finding_marks(run: RunFiles) -> list[Mark]:
    """The doctor's findings, from the first step at which they hold to the last."""
    from klimb.doctor.finding import Facts
    from klimb.doctor.rules import examine
    from klimb.doctor.table import Table

    found = examine(Table.of(run.rows), Facts.of(run.settings))
    return [_mark(finding) for finding in found.findings]


def _mark(finding: Finding) -> Mark:
    advice = "" if finding.first_override is None else f" First to try: {finding.first_override}"
    label = f"{finding.severity} {finding.code}: {finding.evidence}.{advice}"
    return Mark(step=finding.first, end=finding.last, label=label, severity=SEVERITIES[finding.severity])


def intervention_marks(interventions: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """What the run did about its findings, at the step from which it went on."""
    marks: list[Mark] = []
    for row in interventions:
        broke, step = whole(row.get("step")), whole(row.get("back_to"))
        if step is None or broke is None:
            continue
        overrides = row.get("overrides")
        changed = " ".join(map(str, overrides)) if isinstance(overrides, list) else ""
        label = f"rolled back from step {broke:,} for {row.get('finding')}: {changed}"
        marks.append(Mark(step=step, label=label, severity="action"))
    return marks
