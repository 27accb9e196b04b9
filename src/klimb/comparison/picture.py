"""compare.png: KL and reward of every arm, the mean over seeds with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klimb.comparison.side_by_side import Comparison
from klimb.comparison.table import KL, REWARD, WINDOW, ArmRows, running_mean, series
from klimb.errors import MissingExtra
from klimb.report.panels import COLORS


def draw(done: Comparison, path: Path) -> None:
    """Raises MissingExtra without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "report", "compare.png") from None
    look: Any = {"text.parse_math": False}  # a value of a key may hold dollar signs
    with mpl.rc_context(look):
        figure: Any = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _panel(left, done.arms, KL, "KL to the reference, nats per token")
        _panel(right, done.arms, REWARD, "training reward")
        for arm, color in _colored(done.arms):
            if arm.target is not None:
                left.axhline(arm.target, color=color, linewidth=0.9, linestyle="--", label="target")
        left.set_ylim(bottom=0)
        right.legend(frameon=False, loc="best")
        bands = f"; bands: standard deviation over {done.seeds} seeds" if done.seeds > 1 else ""
        figure.suptitle(f"{done.title}: means of {WINDOW} steps{bands}; dashed: target", fontsize=10)
        figure.savefig(path, dpi=130)


def _panel(axes: Any, arms: Sequence[ArmRows], metric: str, title: str) -> None:
    for arm, color in _colored(arms):
        runs = np.array([running_mean(series(rows, metric)[: arm.steps()]) for rows in arm.runs.values()])
        steps, mean = np.arange(1, runs.shape[1] + 1), runs.mean(axis=0)
        axes.plot(steps, mean, color=color, linewidth=1.8, label=arm.label)
        if len(runs) > 1:
            spread = runs.std(axis=0, ddof=1)
            axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _colored(arms: Sequence[ArmRows]) -> list[tuple[ArmRows, str]]:
    return [(arm, COLORS[i % len(COLORS)]) for i, arm in enumerate(arms)]
