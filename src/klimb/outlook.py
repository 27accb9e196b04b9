"""What was estimated of a run beside what it measured, with the lengths that really occurred."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from klimb import host
from klimb.clock import WATCHED, memory_limit
from klimb.estimate.forecast import Forecast, Machine, bounded, forecast, read_models
from klimb.estimate.setup import Lengths
from klimb.ranks import Ranks
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
    steps = [row for row in rows if "memory/update_peak" in row]
    found = expect(run, steps)
    if found is None or not steps:
        return None
    later = steps[1:] or steps
    phases = [p for p in ("rollout", "reward", "score", "update") if f"time/{p}" in later[0]]
    return Outlook(
        forecast=found,
        peaks={p: max(float(row[f"memory/{p}_peak"]) for row in steps) for p in WATCHED},
        seconds={p: statistics.median(float(row[f"time/{p}"]) for row in later) for p in phases},
    )


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
        # One rank's, which it measured while the others used the same cores.
        rate=run.floor.rate / run.ranks.size if device.type == "cpu" else None,
        cores=cores_of(run.ranks),
    )
    return forecast(run.config, models, means if steps else bounded(means), means, machine)


def cores_of(ranks: Ranks) -> float:
    """Cores that this rank works with beside the others of its machine, as `klimb plan` counts them. How many there are
    says who started them; all where nobody does."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)) if ranks.size > 1 else 1
    return max(1.0, host.cores_each(here, torch.get_num_threads()))
