"""Figures: every panel, gaps, marks, bands."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from klimb.report.charts import Chart, Mark, build_charts, time_parts
from klimb.report.panels import PANELS
from tests.report.folders import rows_of


def charts_of(rows: list[dict[str, Any]], *marks: Mark) -> dict[str, Chart]:
    return {chart.panel.id: chart for chart in build_charts(rows, marks)[0]}


def traces(chart: Chart, name: str) -> list[dict[str, Any]]:
    return [trace for trace in chart.figure["data"] if trace.get("name") == name]


def test_a_whole_run_has_every_panel_and_is_json() -> None:
    charts, missing = build_charts(rows_of(20))
    assert [chart.panel.id for chart in charts] == [panel.id for panel in PANELS]
    assert missing == []
    json.dumps([chart.figure for chart in charts], allow_nan=False)


def test_panels_without_data_are_named() -> None:
    charts, missing = build_charts([{"step": 1.0, "reward/mean": 0.5, "kl/target": 0.02}])
    assert [chart.panel.id for chart in charts] == ["reward"]
    assert "KL to the reference" in missing
    assert len(missing) == len(PANELS) - 1
    assert build_charts([]) == ([], [panel.title for panel in PANELS])


def test_reward_and_held_out_share_one_axis() -> None:
    chart = charts_of(rows_of(20))["reward"]
    assert {trace["yaxis"] for trace in chart.figure["data"]} == {"y"}
    assert [trace["name"] for trace in chart.figure["data"]] == [
        "training reward",
        "held-out reward",
        "held-out accuracy",
    ]


def test_the_kl_has_its_band_and_the_coefficient_below_on_the_same_steps() -> None:
    chart = charts_of(rows_of(20))["kl"]
    band = traces(chart, "target ±50%")[0]
    low = chart.figure["data"][0]
    assert set(low["y"]) == {0.01}
    assert set(band["y"]) == {0.03}
    assert band["fill"] == "tonexty"
    assert traces(chart, "coefficient")[0]["yaxis"] == "y2"
    layout = chart.figure["layout"]
    assert layout["yaxis2"]["domain"][1] < layout["yaxis"]["domain"][0]
    assert "xaxis2" not in layout
    fixed = charts_of([{k: v for k, v in row.items() if k != "kl/target"} for row in rows_of(20)])["kl"]
    assert traces(fixed, "target ±50%") == []


def test_long_curves_are_faint_under_their_running_mean() -> None:
    short, long = (traces(charts_of(rows_of(n))["entropy"], "entropy") for n in (100, 101))
    assert len(short) == 1
    assert [trace.get("opacity", 1) for trace in long] == [0.3, 1]
    assert long[1]["hoverinfo"] == "skip"


def test_what_is_not_finite_is_a_gap_and_a_cross() -> None:
    rows = rows_of(10)
    rows[4]["policy/entropy"], rows[5]["policy/entropy"] = math.nan, math.inf
    chart = charts_of(rows)["entropy"]
    drawn, cross = chart.figure["data"]
    assert drawn["y"][3:5] == [None, None]
    assert drawn["connectgaps"] is False
    assert (cross["name"], cross["x"], cross["text"]) == ("entropy: not finite", [4, 5], ["nan", "inf"])
    assert cross["y"] == [drawn["y"][2]] * 2


def test_marks_stand_on_every_panel() -> None:
    marks = (Mark(step=3, label="kl_explosion", severity="error"), Mark(step=5, end=8, label="x", severity="warning"))
    for chart in charts_of(rows_of(10), *marks).values():
        shapes = [(s["type"], s["x0"], s["x1"], s["name"]) for s in chart.figure["layout"]["shapes"]]
        assert shapes == [("line", 3, 3, "error"), ("rect", 5, 8, "warning"), ("line", 5, 5, "warning")]
        numbers = [a["text"] for a in chart.figure["layout"]["annotations"] if a["name"] != "unit"]
        assert numbers == ["1", "2"]


def test_marks_of_one_step_share_a_place() -> None:
    marks = [Mark(step=0, label="a", severity="action"), Mark(step=4, label="b", severity="info")]
    marks.append(Mark(step=0, label="c", severity="error"))
    found = charts_of(rows_of(10), *marks)["kl"].figure["layout"]["annotations"]
    assert [(a["x"], a["text"], a["name"]) for a in found if a["name"] != "unit"] == [
        (0, "1, 3", "action"),
        (4, "2", "info"),
    ]
    top, below = (a for a in found if a["name"] == "unit")
    assert top["yshift"] > found[0]["yshift"] + 12 > below["yshift"], "a unit stands above the numbers, 12 pixels high"


def test_time_is_stacked_by_part_and_leaves_out_the_evaluation_before_training() -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "time/eval": 9.0, "time/step": 9.0}]
    rows += [{"step": i, "time/rollout": 1.0, "time/update": 2.0, "time/step": 3.0} for i in (1, 2)]
    rows[2]["time/eval"] = 5.0
    assert time_parts(rows[1:]) == ["time/rollout", "time/update", "time/eval"]
    chart = charts_of(rows)["time"]
    assert [(t["name"], t["y"]) for t in chart.figure["data"]] == [
        ("rollout", [1, 1, 1]),
        ("update", [2, 2, 2]),
        ("eval", [0, 0, 5]),
    ]
    assert {trace["stackgroup"] for trace in chart.figure["data"]} == {"time"}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_is_drawn_from_zero(share: float) -> None:
    rows = [{"step": float(i), "length/mean": 5.0, "length/truncated": share} for i in range(3)]
    assert charts_of(rows)["length"].figure["layout"]["yaxis2"]["range"] == [0, pytest.approx(1.08 * max(share, 0.02))]


def test_memory_is_in_gib() -> None:
    rows = [{"step": float(i), "memory/update_peak": 2.0**31} for i in range(3)]
    assert charts_of(rows)["memory"].figure["data"][0]["y"] == [2, 2, 2]
