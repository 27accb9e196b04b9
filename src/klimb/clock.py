"""Seconds by part of a turn, and the rates they make."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds by part of a turn."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, part: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: dict[str, int] | None = None, episodes: int = 0) -> dict[str, float]:
        """time/* in seconds; perf/* per second. tokens: how many each part worked on."""
        total = sum(self.seconds.values())
        out = {f"time/{part}": seconds for part, seconds in self.seconds.items()} | {"time/step": total}
        for part, count in (tokens or {}).items():
            out[f"perf/{part}_tokens_per_s"] = count / max(self.seconds[part], 1e-9)
        work = total - self.seconds.get("eval", 0.0)
        return out | ({"perf/episodes_per_s": episodes / max(work, 1e-9)} if episodes else {})
