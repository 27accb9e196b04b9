"""What a user sees: plain lines on a pipe, a panel on a terminal, hostile text as text."""

from __future__ import annotations

import io
import math
import time
from typing import Any

import pytest
from rich.console import Console

from klimb.console import Screen, duration, line, plain, sparkline

ROW: dict[str, Any] = {
    "step": 3,
    "episodes": 3072,
    "reward/mean": 0.4256,
    "eval/accuracy": 0.3125,
    "eval/reward": 0.5,
    "kl/k3": 0.01837,
    "kl/coef": 0.0512,
    "policy/clip_fraction_high": 0.01,
    "policy/clip_fraction_low": 0.023,
    "length/mean": 41.26,
    "policy/skipped_steps": 0,
    "reward/failed": 0,
    "perf/episodes_per_s": 12.34,
}


def test_a_phase_is_one_plain_line() -> None:
    assert line(ROW, 20_000, 187.0) == (
        "step 3 | 3,072/20,000 episodes | reward 0.426 | held-out accuracy 31.2% | held-out reward 0.500 | "
        "KL 0.0184 (coefficient 0.0512) | clipped 3.3% | length 41.3 | episodes/s 12.3 | 3m07s left"
    )


def test_bad_news_is_in_the_line_only_when_there_is_some() -> None:
    bad = line(ROW | {"policy/skipped_steps": 2.0, "reward/failed": 5.0}, 20_000, None)
    assert "SKIPPED STEPS (not finite) 2" in bad
    assert "failed 5" in bad
    assert "left" not in bad
    assert "SKIPPED" not in line(ROW, 20_000, None)


def test_the_evaluation_before_training_is_a_line_too() -> None:
    row = {"step": 0, "episodes": 0, "eval/reward": 0.25}
    assert line(row, 100, None) == "step 0 | 0/100 episodes | held-out reward 0.250"


def test_the_last_line_promises_no_time() -> None:
    assert line(ROW | {"episodes": 20_000}, 20_000, 0.0).endswith("episodes/s 12.3")


def test_values_that_are_not_finite_are_shown() -> None:
    text = line(ROW | {"kl/k3": math.nan, "reward/mean": -math.inf}, 20_000, None)
    assert "KL nan" in text
    assert "reward -inf" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (187, "3m07s"), (3599, "59m59s"), (3600, "1h00m"), (90_061, "25h01m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([5.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0], "▁█"),
        ([float(n) for n in range(8)], "▁▂▃▄▅▆▇█"),
        ([0.0, math.nan, 7.0, math.inf], "▁ █ "),
        ([math.nan], " "),
    ],
)
def test_sparklines(values: list[float], text: str) -> None:
    assert sparkline(values) == text


def test_a_sparkline_shows_the_last_values() -> None:
    assert len(sparkline([float(n) for n in range(100)])) == 32
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"


def screen(live: bool) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=live, record=True, highlight=False, color_system=None)
    return Screen(console), out


def test_a_pipe_gets_lines_that_are_not_folded() -> None:
    shown, out = screen(False)
    with shown:
        shown.begin("run", 20_000, 0)
        shown.row(ROW)
        shown.progress("rollout")(3, 10)
        with shown.busy("saving"):
            shown.say("resuming from " + "/deep" * 40)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 3 | 3,072/20,000 episodes | ")
    assert lines[1] == "resuming from " + "/deep" * 40
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_panel() -> None:
    shown, out = screen(True)
    with shown:
        shown.begin("klimb: runs/[red]x", 20_000, 0)
        for reward in (0.1, 0.9, math.nan):
            shown.row(ROW | {"reward/mean": reward})
        shown.progress("rollout")(3, 10)
    assert "rollout  3/10" in out.getvalue(), "the live display itself has drawn it"
    assert "step 3 |" not in out.getvalue(), "no plain lines beside the panel"
    paper = Console(file=io.StringIO(), width=100, record=True)
    paper.print(shown._render())
    text = paper.export_text()
    assert "klimb: runs/[red]x" in text
    assert "3,072 / 20,000 episodes" in text
    assert "left" in text
    assert "▁█ " in text
    assert "KL" in text
    assert "0.0184 (coefficient 0.0512)" in text
    assert "rollout  3/10" in text
    assert max(len(row) for row in text.splitlines()) <= 100


def test_the_panel_draws_before_anything_happened() -> None:
    shown, _ = screen(True)
    shown.begin("run", 0, 0)
    shown.console.print(shown._render())
    assert "0 / 0 episodes" in shown.console.export_text()


def test_the_time_left_counts_only_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed at 1000 of 2000; 500 more took 10 s, so 500 are left in 10 s."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown, out = screen(False)
    shown.begin("run", 2000, 1000)
    now[0] = 110.0
    shown.row({"step": 3, "episodes": 1500})
    assert out.getvalue() == "step 3 | 1,500/2,000 episodes | 10s left\n"


def test_busy_ends_when_the_work_fails() -> None:
    shown, _ = screen(True)
    with pytest.raises(ValueError, match="broken"), shown.busy("saving"):
        raise ValueError("broken")
    shown.console.print(shown._render())
    assert "saving" not in shown.console.export_text()


HOSTILE = "[bold]x[/bold] [link=file:///etc]y[/] \x1b[2J\x9b1m \x07 \r \u202e \ud800 ok"
SHOWN = r"[bold]x[/bold] [link=file:///etc]y[/] \x1b[2J\x9b1m \x07 \r \u202e \ud800 ok"


@pytest.mark.parametrize("live", [True, False])
def test_hostile_text_is_shown_as_text(live: bool) -> None:
    shown, out = screen(live)
    shown.say(HOSTILE)
    shown.warn(HOSTILE)
    assert out.getvalue().splitlines() == [SHOWN, f"warning: {SHOWN}"]
    shown.begin(HOSTILE, 1, 0)
    shown.console.print(shown._render())
    assert "\x1b[2J" not in out.getvalue()
    out.getvalue().encode("utf-8")


def test_plain_leaves_languages_tabs_and_lines_alone() -> None:
    assert plain("é 世界 \U0001f600\t\n") == "é 世界 \U0001f600\t\n"


def test_only_some_failures_are_listed_and_all_are_counted() -> None:
    shown, out = screen(False)
    shown.failures([f"row {n}: timed out" for n in range(5)])
    assert out.getvalue().splitlines() == [
        "warning: row 0: timed out",
        "warning: row 1: timed out",
        "warning: row 2: timed out",
        "warning: and 2 more failed episodes in this phase",
    ]
    shown, out = screen(False)
    shown.failures([])
    assert out.getvalue() == ""
