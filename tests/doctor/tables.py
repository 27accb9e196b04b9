"""Tables of runs that never were: a healthy one with noise, and series put in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from klimb.doctor.table import Table


def healthy(steps: int = 60, seed: int = 0, **changed: Sequence[float]) -> Table:
    """PPO with a critic that learns as the playground's does; `changed` by name with __ for the slash."""
    rng = np.random.default_rng(seed)
    at = np.arange(1, steps + 1)
    rise = 1 - np.exp(-at / 20)

    def noisy(values: np.ndarray, by: float) -> list[float]:
        return (values * (1 + by * rng.standard_normal(steps))).tolist()

    series: dict[str, Sequence[float]] = {
        "episodes": (24 * at).tolist(),
        "reward/mean": noisy(0.5 + 0.3 * rise, 0.1),
        "reward/std": noisy(np.full(steps, 0.3), 0.1),
        "reward/max": [1.0] * steps,
        "kl/k3": noisy(0.02 * rise, 0.4),
        "kl/coef": [0.15] * steps,
        "kl/target": [0.02] * steps,
        "kl/at_clamp": [0.0] * steps,
        "policy/entropy": noisy(0.09 - 0.05 * rise, 0.1),
        "policy/ratio_abs_dev": noisy(0.003 * np.exp(-at / 20), 0.3),
        "policy/approx_kl": [1e-4] * steps,
        "policy/skipped_steps": [0.0] * steps,
        "policy/loss": noisy(np.full(steps, 1e-3), 1.0),
        "policy/grad_norm": noisy(np.full(steps, 0.5), 0.3),
        "value/loss": noisy(np.full(steps, 0.05), 0.2),
        "value/explained_variance": noisy(np.full(steps, 0.02), 2.0),
        "advantage/mean": (0.03 * rng.standard_normal(steps)).tolist(),
        "advantage/std": [0.15] * steps,
        "mismatch/kl": [1e-7] * steps,
        "mismatch/k3": [1e-9] * steps,
        "mismatch/ess": [1.0] * steps,
        "mismatch/probs_diff_mean": [1e-8] * steps,
        "length/mean": noisy(np.full(steps, 44.0), 0.02),
        "length/truncated": [0.0] * steps,
        "text/repetition": noisy(np.full(steps, 0.05), 0.1),
        "memory/limit": [8e9] * steps,
        "memory/update_peak": noisy(np.full(steps, 1e9), 0.01),
    }
    series |= {name.replace("__", "/"): values for name, values in changed.items()}
    return Table.of(rows_of(series, steps))


def rows_of(series: Mapping[str, Sequence[float]], steps: int) -> list[dict[str, float]]:
    """Row by row; a series that is shorter than the run is left out where it has ended."""
    return [
        {"step": float(i + 1)} | {name: values[i] for name, values in series.items() if i < len(values)}
        for i in range(steps)
    ]


def ramp(before: float, after: float, at: int, steps: int = 60) -> list[float]:
    """One level, then another."""
    return [before] * at + [after] * (steps - at)
