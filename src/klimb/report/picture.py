"""The curves as one PNG: six panels for a message, a paper or a pull request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from klimb.errors import KlimbError, MissingExtra
from klimb.report.charts import WIDTH_OF_BAND, Mark, Row, time_parts
from klimb.report.files import RunFiles
from klimb.report.overview import STATES, all_marks
from klimb.report.panels import COLORS
from klimb.report.series import SMOOTH_FROM, buckets, curve, smooth, thin

SOFT = "#56616e"
LONGEST = 90
"""Characters of the run's name above the panels."""
Drawing = Callable[[Any, Sequence[Row]], None]


def write_picture(run: RunFiles, path: Path) -> None:
    """Raises MissingExtra without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "report", "klimb report") from None
    look: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e9ecf0"}
    look |= {"axes.edgecolor": "#c9d0d8", "xtick.color": SOFT, "ytick.color": SOFT, "font.size": 10}
    look |= {"text.parse_math": False}  # a run's name may hold dollar signs
    with mpl.rc_context(look):
        figure: Any = Figure(figsize=(17, 9.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(
            f"{run.name[:LONGEST]}: {STATES[run.state]}", x=0.012, ha="left", fontsize=16, fontweight="bold"
        )
        figure.get_layout_engine().set(hspace=0.06, wspace=0.04, h_pad=0.12, w_pad=0.1)
        marks = [mark for mark in all_marks(run) if mark.severity in ("error", "action")]
        panels = zip(figure.subplots(2, 3).flat, DRAWINGS.items(), strict=True)
        for axes, (title, draw) in panels:
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=26)
            draw(axes, run.rows)
            _finish(axes, marks, axes.has_data())
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
                figure.savefig(path, dpi=110)
        except OSError as error:
            raise KlimbError(f"{path}: cannot be written: {error.strerror}") from error


def _finish(axes: Any, marks: Sequence[Mark], drawn: bool) -> None:
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    if not drawn:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=SOFT)
        return
    for mark in marks:
        axes.axvline(
            mark.step, color="#c0262d" if mark.severity == "error" else "#9b3f86", linewidth=1.2, linestyle=":"
        )
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 0.995), "borderaxespad": 0.2}
        axes.legend(handles, labels, ncols=5, frameon=False, fontsize=9, handlelength=1.4, columnspacing=1.2, **place)


def _line(axes: Any, rows: Sequence[Row], key: str, name: str, color: int, style: str = "-") -> None:
    full = curve(rows, key)
    if not full.finite:
        return
    shade = COLORS[color]
    marker = "o" if key.startswith("eval/") or len(full.steps) == 1 else None
    drawn = thin(full)
    if len(full.steps) > SMOOTH_FROM and marker is None:
        axes.plot(drawn.steps, drawn.values, color=shade, linewidth=0.7, alpha=0.3)
        drawn = thin(smooth(full))
    axes.plot(drawn.steps, drawn.values, style, color=shade, linewidth=1.7, label=name, marker=marker, markersize=4)


def _reward(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "reward/mean", "training reward", 0)
    _line(axes, rows, "eval/reward", "held-out reward", 1)
    _line(axes, rows, "eval/accuracy", "held-out accuracy", 2, "--")


def _kl(axes: Any, rows: Sequence[Row]) -> None:
    target = thin(curve(rows, "kl/target"))
    if target.finite:
        edges = ([v * (1 + side * WIDTH_OF_BAND) for v in target.values] for side in (-1, 1))
        axes.fill_between(target.steps, *edges, color=COLORS[2], alpha=0.13, linewidth=0, label="target ±50%")
    _line(axes, rows, "kl/k3", "k3, nats per token", 0)
    if curve(rows, "kl/coef").finite:
        twin = axes.twinx()
        twin.grid(visible=False)
        _line(twin, rows, "kl/coef", "coefficient", 3, "--")
        twin.set_ylim(bottom=0)
        twin.tick_params(axis="y", colors=COLORS[3])
        axes.plot([], [], "--", color=COLORS[3], label="coefficient (right)")


def _ratio(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "policy/clip_fraction_high", "clipped above", 1)
    _line(axes, rows, "policy/clip_fraction_low", "clipped below", 2)
    _line(axes, rows, "policy/ratio_abs_dev", "mean distance from 1", 0)


def _entropy(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "policy/entropy", "nats per token", 0)
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _length(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "length/max", "longest, tokens", 5, ":")
    _line(axes, rows, "length/mean", "mean, tokens", 0)


def _time(axes: Any, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if row["step"] > 0]
    parts = time_parts(shown)
    if parts:
        bands = buckets(shown, parts)
        names = [key.removeprefix("time/") for key in parts]
        values = [bands[key].values for key in parts]
        axes.stackplot(bands[parts[0]].steps, *values, labels=names, colors=COLORS, alpha=0.75, step="pre")


DRAWINGS: dict[str, Drawing] = {
    "Reward": _reward,
    "KL to the reference": _kl,
    "Ratio and clipping": _ratio,
    "Entropy": _entropy,
    "Length of responses": _length,
    "Seconds per step": _time,
}
