"""One estimate of a run: peaks and seconds, for given lengths and a given machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from klimb.config.counts import Counts, count
from klimb.config.paths import model_folder
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError
from klimb.estimate.duration import Pace, cpu_speed, seconds
from klimb.estimate.gpus import gpu_speed
from klimb.estimate.memory import Peak, peaks
from klimb.estimate.setup import Lengths, Models, Setup, make_setup
from klimb.estimate.shapes import Shape, read


@dataclass(frozen=True, kw_only=True)
class Machine:
    """gpu_bytes: memory of each GPU, None for a CPU; gpu_peak: its published operations per second, None: gpus.PEAK;
    pace: of one rank on a CPU while the others work too."""

    gpu_bytes: float | None = None
    gpu_peak: float | None = None
    pace: Pace | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """peaks by phase, and seconds of a step by phase."""

    peaks: tuple[Peak, ...]
    seconds: Mapping[str, float]

    @property
    def highest(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.total)


def forecast(config: RunConfig, models: Models, bounds: Lengths, means: Lengths, machine: Machine) -> Forecast:
    """bounds: the lengths that memory must hold; means: those that time is spent on."""
    return Forecast(
        peaks=peaks(setup_of(config, models, bounds, machine)),
        seconds=step_seconds(setup_of(config, models, means, machine), machine),
    )


def setup_of(config: RunConfig, models: Models, lengths: Lengths, machine: Machine) -> Setup:
    posture = resolve(config)
    return make_setup(config, posture, counts_of(config), models, lengths, machine.gpu_bytes)


def counts_of(config: RunConfig) -> Counts:
    return count(config, resolve(config))


def step_seconds(setup: Setup, machine: Machine) -> dict[str, float]:
    if machine.gpu_bytes is not None:
        return seconds(setup, gpu_speed(machine.gpu_peak, setup.engine is not None))
    assert machine.pace is not None, "a CPU's pace is measured or the kept one"
    return seconds(setup, cpu_speed(machine.pace))


def read_models(config: RunConfig) -> Models | None:
    """From the config.json of every role's folder; a role whose folder is not here has the actor's shape, None when the
    actor's is not."""
    actor = _shape(config.actor_rollout_ref.model_path)
    if actor is None:
        return None
    return Models(
        actor=actor,
        reference=_shape(config.actor_rollout_ref.ref_model_path),
        critic=_shape(config.critic.model_path),
        scorer=_shape(config.reward_model.model_path),
    )


def _shape(path: str | None) -> Shape | None:
    if path is None or not (Path(model_folder(path)) / "config.json").is_file():
        return None
    try:
        return read(model_folder(path))
    except ConfigError:  # an architecture with other names for its sizes: no estimate, and no reason to stop
        return None


def bounded(means: Lengths) -> Lengths:
    """Every row as long as the longest."""
    return replace(means, prompt=float(means.longest_prompt), response=float(means.longest_response))
