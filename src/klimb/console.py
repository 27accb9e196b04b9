"""What a user sees while a run goes on: a live panel on a terminal, plain lines on a pipe.

Everything a model wrote is shown as plain text, never as markup.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from klimb.rollout.base import Progress

BARS = " ▁▂▃▄▅▆▇█"
LISTED = 3
"""Failed episodes shown per phase; all are counted."""


def duration(seconds: float) -> str:
    """5s, 3m07s, 2h05m."""
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def plain(text: str) -> str:
    """Text that a terminal only shows: control, direction and surrogate characters become their escapes.

    Without this a model's answer in a message could clear the screen or rewrite what stands above it.
    """

    def safe(character: str) -> bool:
        return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")

    return "".join(c if safe(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last values as bars from their lowest to their highest; a gap where a value is not finite."""
    shown = list(values)[-width:]
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return BARS[0] * len(shown)
    low, high = min(finite), max(finite)
    span = high / 2 - low / 2  # halves: the difference of two huge numbers is no number

    def height(value: float) -> int:
        return round((value / 2 - low / 2) / span * (len(BARS) - 2)) if span > 0 else 0

    return "".join(BARS[1 + height(v)] if math.isfinite(v) else BARS[0] for v in shown)


class Screen:
    """The display of one process's part of a run. Use as a context manager."""

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live_wanted = self.console.is_terminal if live is None else live
        self._live: Live | None = None
        self._title, self._episodes, self._first = "", 0, 0
        self._started = time.perf_counter()
        self._history: dict[str, deque[float]] = {}
        self._last: dict[str, Any] = {}
        self._task: tuple[str, int, int] | None = None

    def __enter__(self) -> Screen:
        if self._live_wanted:
            self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def begin(self, title: str, episodes: int, first: int) -> None:
        """title of the run; episodes in all and already done."""
        self._title, self._episodes, self._first = plain(title), episodes, first
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        self.console.print(Text(plain(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(Text(plain(f"warning: {text}"), style="yellow"), soft_wrap=True)

    def failures(self, messages: Sequence[str]) -> None:
        """Episodes whose reward failed; the first few by name."""
        for message in messages[:LISTED]:
            self.warn(message)
        if len(messages) > LISTED:
            self.warn(f"and {len(messages) - LISTED} more failed episodes in this phase")

    def progress(self, label: str) -> Progress:
        """A bar for a part of a turn; nothing on a pipe, where each turn prints its line."""

        def advance(done: int, total: int) -> None:
            self._task = (label, done, total)

        return advance

    @contextmanager
    def busy(self, label: str) -> Generator[None]:
        self._task = (label, 0, 0)
        try:
            yield
        finally:
            self._task = None

    def row(self, row: Mapping[str, Any]) -> None:
        """A finished phase (or the evaluation before training)."""
        self._last.update(row)
        self._task = None
        for key in ("reward/mean", "eval/reward", "eval/accuracy", "kl/k3", "policy/entropy", "length/mean"):
            if key in row:
                self._history.setdefault(key, deque(maxlen=512)).append(float(row[key]))
        if self._live is None:
            self.console.print(Text(line(row, self._episodes, self._left())), soft_wrap=True)

    def _left(self) -> float | None:
        done = int(self._last.get("episodes", 0)) - self._first
        if done <= 0:
            return None
        return (time.perf_counter() - self._started) / done * (self._episodes - self._first - done)

    def _render(self) -> RenderableType:
        done = int(self._last.get("episodes", 0))
        left = self._left()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right")
        tail = f"{done:,} / {self._episodes:,} episodes" + (f", {duration(left)} left" if left is not None else "")
        head.add_row(ProgressBar(total=max(1, self._episodes), completed=done), Text(tail))
        body = Table.grid(padding=(0, 2))
        for label, value, key in _cells(self._last):
            body.add_row(
                Text(label, style="dim"), Text(value), Text(sparkline(self._history.get(key, ())), style="cyan")
            )
        parts: list[RenderableType] = [head, body]
        if self._task is not None:
            label, at, total = self._task
            parts.append(Text(label + (f"  {at}/{total}" if total else ""), style="dim"))
        return Panel(Group(*parts), title=Text(self._title), title_align="left")


def line(row: Mapping[str, Any], episodes: int, left: float | None) -> str:
    """One phase in one plain line."""
    parts = [f"step {row['step']}", f"{int(row['episodes']):,}/{episodes:,} episodes"]
    parts += [f"{label} {value}" for label, value, _ in _cells(row)]
    if left is not None and int(row["episodes"]) < episodes:
        parts.append(f"{duration(left)} left")
    return " | ".join(parts)


def _cells(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """label, text, key of the history; what the row lacks is left out."""

    def number(key: str, form: str) -> str:
        return format(float(row[key]), form)

    cells: list[tuple[str, str, str]] = []
    if "reward/mean" in row:
        cells.append(("reward", number("reward/mean", ".3f"), "reward/mean"))
    if "eval/accuracy" in row:
        cells.append(("held-out accuracy", number("eval/accuracy", ".1%"), "eval/accuracy"))
    if "eval/reward" in row:
        cells.append(("held-out reward", number("eval/reward", ".3f"), "eval/reward"))
    if "kl/k3" in row:
        coef = f" (coefficient {number('kl/coef', '.3g')})" if "kl/coef" in row else ""
        cells.append(("KL", number("kl/k3", ".4f") + coef, "kl/k3"))
    if "policy/clip_fraction_high" in row:
        clipped = float(row["policy/clip_fraction_high"]) + float(row["policy/clip_fraction_low"])
        cells.append(("clipped", f"{clipped:.1%}", ""))
    if "length/mean" in row:
        cells.append(("length", number("length/mean", ".1f"), "length/mean"))
    if row.get("policy/skipped_steps"):
        cells.append(("SKIPPED STEPS (not finite)", number("policy/skipped_steps", ".0f"), ""))
    if row.get("reward/failed"):
        cells.append(("failed", number("reward/failed", ".0f"), ""))
    if "perf/episodes_per_s" in row:
        cells.append(("episodes/s", number("perf/episodes_per_s", ".1f"), ""))
    return cells
