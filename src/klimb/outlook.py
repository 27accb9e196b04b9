"""What was estimated of a run beside what it measured, with the lengths that really occurred."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klimb.clock import WATCHED, memory_limit
from klimb.estimate.forecast import Forecast, Machine, bounded, forecast, read_models
from klimb.estimate.setup import Lengths
from klimb.run import Run

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """forecast: of peaks and seconds; peaks: largest measured bytes by phase; seconds: median by phase, the first step
    left out where there are others."""

    forecast: Forecast
    peaks: Mapping[str, float]
    seconds: Mapping[str, float]


def look_back(run: Run, rows: Rows) -> Outlook | None:
    """rows: of the run's log. None where there is no step, or the model's sizes are not known."""
    steps = [row for row in rows if "time/update" in row]
    found = expect(run, steps)
    if found is None or not steps:
        return None
    later = steps[1:] or steps
    phases = [p for p in ("rollout", "reward", "score", "update") if f"time/{p}" in later[0]]
    return Outlook(
        forecast=found,
        peaks=largest_peaks(rows),
        seconds={p: statistics.median(float(row[f"time/{p}"]) for row in later) for p in phases},
    )


def largest_peaks(rows: Rows) -> dict[str, float]:
    """By phase, in bytes, over the steps that measured them."""
    names = {part: f"memory/{part}_peak" for part in WATCHED}
    found = {
        part: [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
        for part, name in names.items()
    }
    return {part: max(sizes) for part, sizes in found.items() if sizes}


def expect(run: Run, steps: Rows) -> Forecast | None:
    """With the lengths of these steps, or all at their limits before there is one."""
    models = read_models(run.config)
    if models is None:
        return None
    prompts, device = run.prompts.lengths, run.roles.actor.device
    limit = run.config.actor_rollout_ref.max_tokens
    longest = int(max((row["length/max"] for row in steps), default=limit))
    means = Lengths(
        prompt=statistics.mean(prompts),
        longest_prompt=max(prompts),
        response=statistics.mean(row["length/mean"] for row in steps) if steps else float(limit),
        longest_response=longest,
        early=1.0 - statistics.mean(row["length/truncated"] for row in steps) if steps else 1.0,
    )
    machine = Machine(
        gpu_bytes=memory_limit(device) if device.type == "cuda" else None,
        pace=run.floor.pace,  # measured while the other ranks used the same cores
    )
    return forecast(run.config, models, means if steps else bounded(means), means, machine)
