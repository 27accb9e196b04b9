"""compare.png: reward and KL of every arm, the mean over seeds with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klimb.comparison.table import KL, REWARD, WINDOW, ArmRows, series
from klimb.errors import MissingExtra

if TYPE_CHECKING:
    from klimb.comparison.compare import Comparison

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Told apart by people who are colour-blind (Okabe and Ito)."""


def draw(done: Comparison, path: Path) -> None:
    """Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "report", "compare.png") from None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _panel(left, done.arms, KL, "KL to the reference, nats per token")
    _panel(right, done.arms, REWARD, "training reward")
    targets = {arm.target for arm in done.arms} - {None}
    for target in targets:
        left.axhline(target, color="0.4", linewidth=0.8, linestyle="--")
        left.annotate("target", (0, target), xytext=(3, 2), textcoords="offset points", fontsize=8, color="0.4")
    right.legend(frameon=False, loc="lower right")
    seeds = max(len(arm.runs) for arm in done.arms)
    note = f"means of {WINDOW} steps" + (f"; bands: standard deviation over {seeds} seeds" if seeds > 1 else "")
    figure.suptitle(f"{done.title}: {note}", fontsize=10)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, arms: Sequence[ArmRows], metric: str, title: str) -> None:
    for arm, colour in zip(arms, _cycle(len(arms)), strict=True):
        steps, mean, spread = smoothed(arm, metric)
        axes.plot(steps, mean, color=colour, linewidth=1.8, label=arm.label)
        if len(arm.runs) > 1:
            axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def smoothed(arm: ArmRows, metric: str) -> tuple[Any, Any, Any]:
    """Steps, mean and spread over seeds of the window before each step; the window grows at the beginning."""
    runs = np.array([series(rows, metric)[: arm.phases()] for rows in arm.runs.values()], dtype=float)
    filled = np.nan_to_num(runs)
    sums = np.cumsum(np.pad(filled, ((0, 0), (1, 0))), axis=1)
    known = np.cumsum(np.pad(np.isfinite(runs), ((0, 0), (1, 0))), axis=1)
    end = np.arange(1, runs.shape[1] + 1)
    begin = np.maximum(0, end - WINDOW)
    counts = known[:, end] - known[:, begin]
    means = np.where(counts > 0, (sums[:, end] - sums[:, begin]) / np.maximum(counts, 1), np.nan)
    spread = means.std(axis=0, ddof=1) if len(means) > 1 else np.zeros(means.shape[1])
    return end, means.mean(axis=0), spread
