"""Rows of the log to plotly figures, as plain dicts. No HTML, no plotly import.

Each trace says in `meta` which colour of the page's theme it takes; the colours written here are the light ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from klimb.report.panels import COLORS, PANELS, Axis, Line, Panel
from klimb.report.series import SMOOTH_FROM, Curve, buckets, curve, plain, smooth, thin

Row = dict[str, float]
Figure = dict[str, Any]
Severity = Literal["info", "warning", "error", "action"]
FEW_DECADES = 4
"""A log axis of more gets a tick at every other power of ten."""
MARKED = 60
"""Evaluations up to which each gets a dot."""
WIDTH_OF_BAND = 0.5
"""The target band is the target plus and minus this share."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened: from `step` to `end`, or at `step` alone where end is None."""

    step: int
    label: str
    severity: Severity
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A panel with its figure."""

    panel: Panel
    figure: Figure


def build_charts(
    rows: Sequence[Row], marks: Sequence[Mark] = (), panels: Sequence[Panel] = PANELS
) -> tuple[list[Chart], list[str]]:
    """The panels that have data, and the titles of those that have none."""
    charts: list[Chart] = []
    missing: list[str] = []
    for panel in panels:
        traces = _stack(rows) if panel.stack else _traces(panel, rows)
        if traces:
            charts.append(Chart(panel=panel, figure={"data": traces, "layout": _layout(panel, traces, rows, marks)}))
        else:
            missing.append(panel.title)
    return charts, missing


def time_parts(rows: Sequence[Row]) -> list[str]:
    """Keys of the parts of a step, in the order in which they first appear; at most one per colour."""
    found = dict.fromkeys(key for row in rows for key in row if key.startswith("time/") and key != "time/step")
    return list(found)[: len(COLORS)]


def _traces(panel: Panel, rows: Sequence[Row]) -> list[Figure]:
    out: list[Figure] = []
    for line in panel.lines:
        full = curve(rows, line.key, line.scale)
        if full.steps:
            out += _line(line, full, panel.axes[line.axis])
    return (_band(rows) + out) if panel.band and out else out


def _line(line: Line, full: Curve, axis: Axis) -> list[Figure]:
    place = "y" if line.axis == 0 else f"y{line.axis + 1}"
    base: Figure = {"type": "scatter", "x": full.steps, "yaxis": place, "legendgroup": line.key, "name": line.name}
    base |= {"meta": f"c{line.color}", "connectgaps": False, "hovertemplate": f"%{{y:{axis.form}}}"}
    stroke: Figure = {"color": COLORS[line.color], "width": 1.25 if line.faint else 2, "dash": line.dash}
    drawn, out = thin(full), list[Figure]()
    trace = base | {"x": drawn.steps, "y": plain(drawn.values), "mode": "lines", "line": stroke}
    if len(full.steps) == 1 or (line.markers and len(full.steps) <= MARKED):
        trace |= {"mode": "lines+markers", "cliponaxis": False, "marker": {"size": 6, "color": COLORS[line.color]}}
    if len(full.steps) > SMOOTH_FROM and not line.markers:
        over = thin(smooth(full))
        faint = {"opacity": 0.15 if line.faint else 0.3, "showlegend": False, "line": stroke | {"width": 1}}
        out.append(trace | faint)
        out.append(trace | {"x": over.steps, "y": plain(over.values), "hoverinfo": "skip"})
        out[-1].pop("hovertemplate")
    else:
        out.append(trace | ({"opacity": 0.75} if line.faint else {}))
    return out + _not_finite(line, thin(full), place)


def _not_finite(line: Line, full: Curve, place: str) -> list[Figure]:
    """Crosses where a value is nan or inf, at the height of the value before."""
    steps, heights, texts = list[int](), list[float](), list[str]()
    height = next(iter(full.finite), 0.0)
    for step, value in zip(full.steps, full.values, strict=True):
        if math.isfinite(value):
            height = value
        else:
            steps.append(step)
            heights.append(height)
            texts.append(str(value))
    if not steps:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": steps,
            "y": plain(heights),
            "yaxis": place,
            "name": f"{line.name}: not finite",
            "meta": "bad",
            "marker": {"symbol": "x", "size": 8, "color": "#c0262d"},
            "text": texts,
            "hovertemplate": "%{text}",
        }
    ]


def _band(rows: Sequence[Row]) -> list[Figure]:
    target = thin(curve(rows, "kl/target"))
    if not target.finite:
        return []
    edge: Figure = {"type": "scatter", "x": target.steps, "mode": "lines", "hoverinfo": "skip", "meta": "band"}
    edge |= {"line": {"width": 0}, "legendgroup": "band"}
    low = edge | {"y": plain([v * (1 - WIDTH_OF_BAND) for v in target.values]), "showlegend": False}
    high = edge | {"y": plain([v * (1 + WIDTH_OF_BAND) for v in target.values]), "name": "target ±50%"}
    high |= {"fill": "tonexty", "fillcolor": "rgba(11,133,101,0.13)"}
    middle = edge | {"y": plain(target.values), "name": "target", "showlegend": False, "meta": "c2"}
    middle |= {"line": {"width": 1, "dash": "dash", "color": COLORS[2]}}
    return [low, high, middle]


def _stack(rows: Sequence[Row]) -> list[Figure]:
    shown = [row for row in rows if row["step"] > 0]  # the evaluation before training is no step
    parts = time_parts(shown)
    if not parts:
        return []
    return [
        {
            "type": "scatter",
            "x": band.steps,
            "y": plain(band.values),
            "name": key.removeprefix("time/"),
            "mode": "lines",
            "line": {"width": 0.5, "color": COLORS[i], "shape": "vh"},
            "stackgroup": "time",
            "meta": f"c{i}",
            "hovertemplate": "%{y:.3~g} s",
        }
        for i, (key, band) in enumerate(buckets(shown, parts).items())
    ]


def _layout(panel: Panel, traces: Sequence[Figure], rows: Sequence[Row], marks: Sequence[Mark]) -> Figure:
    """Axes one above the other on the same steps; a vertical line per mark."""
    places = [place for i, place in enumerate(("y", "y2")) if i < len(panel.axes) and _used(traces, place)]
    domains = [[0.0, 1.0]] if len(places) == 1 else [[0.42, 1.0], [0.0, 0.28]]
    first, last = (int(rows[0]["step"]), int(rows[-1]["step"])) if rows else (0, 1)
    layout: Figure = {
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "xaxis": {
            "anchor": places[-1],
            "range": [first, max(last, first + 1)],
            "unifiedhovertitle": {"text": "step %{x:,d}"},
            "tickformat": ",d",
        },
        "showlegend": False,  # the page writes its own, which a keyboard can reach
        "shapes": [shape for mark in marks for shape in _shapes(mark)],
        "annotations": _numbers(marks),
    }
    for place, domain in zip(places, domains, strict=True):
        axis = panel.axes[0 if place == "y" else 1]
        layout["yaxis" + place[1:]] = _y(axis, [trace for trace in traces if trace.get("yaxis", "y") == place], domain)
        layout["annotations"].append(_unit(axis.unit, domain[1]))
    return layout


def _y(axis: Axis, traces: Sequence[Figure], domain: list[float]) -> Figure:
    out: Figure = {"domain": domain, "tickformat": axis.form, "rangemode": "tozero" if axis.zero else "normal"}
    if axis.share is not None:
        # A share that never moves would else be drawn from -100% to 100%.
        out["range"] = [0, 1.08 * max([axis.share, *(v for trace in traces for v in trace["y"] if v is not None)])]
    if axis.log:
        positive = [v for trace in traces for v in trace["y"] if v is not None and v > 0] or [1.0]
        wide = math.log10(max(positive) / min(positive)) > FEW_DECADES
        out |= {"type": "log", "dtick": 2 if wide else 1}
    return out


def _used(traces: Sequence[Figure], place: str) -> bool:
    return any(trace.get("yaxis", "y") == place for trace in traces)


def _unit(text: str, top: float) -> Figure:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    place["yshift"] = 16 if top == 1 else 3  # above the numbers of the marks, which may stand at the left edge
    return place | {"text": text, "showarrow": False, "name": "unit"}


def _shapes(mark: Mark) -> list[Figure]:
    base: Figure = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "name": mark.severity, "layer": "below"}
    line = base | {"type": "line", "x0": mark.step, "x1": mark.step, "line": {"width": 1.5, "dash": "dot"}}
    if mark.end is None or mark.end <= mark.step:
        return [line]
    return [base | {"type": "rect", "x0": mark.step, "x1": mark.end, "line": {"width": 0}, "opacity": 0.12}, line]


def _numbers(marks: Sequence[Mark]) -> list[Figure]:
    """The numbers under which the page lists the marks; those of one step beside each other, in the colour of the
    first."""
    at: dict[int, list[int]] = {}
    for position, mark in enumerate(marks, start=1):
        at.setdefault(mark.step, []).append(position)
    place: Figure = {"xref": "x", "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": 3, "showarrow": False}
    return [
        place | {"x": step, "text": ", ".join(map(str, numbers)), "name": marks[numbers[0] - 1].severity}
        for step, numbers in at.items()
    ]
