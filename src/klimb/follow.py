"""Whether the KL follows its target: a controller that lags, or sits at its clamp, is said so once each time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 20
"""Phases outside the band before it is said: a controller that tracks is back sooner."""
BAND = 0.5
SMOOTHING = 0.3


@dataclass(frozen=True, kw_only=True)
class Target:
    """kind of controller; target_kl in nats per token; clamps of the coefficient."""

    kind: str
    target_kl: float
    min_kl_coef: float
    max_kl_coef: float


class Follow:
    """Counts phases in a row in which the smoothed KL was more than 50% off its target.

    A run starts at the reference, so nothing counts before the KL first reached the band. target None: nothing is
    steered, and nothing is said.
    """

    def __init__(self, target: Target | None) -> None:
        self._target = target
        self._smoothed = 0.0
        self._reached = False
        self._outside = 0
        self._coef_before = 0.0

    def update(self, kl: float, coef: float) -> tuple[dict[str, float], str | None]:
        """kl/outside_phases, and a message in the phase that makes PATIENCE of them. coef: what this phase used."""
        t = self._target
        if t is None or not math.isfinite(kl):
            return {}, None
        self._smoothed += (SMOOTHING if self._smoothed else 1.0) * (kl - self._smoothed)
        ratio = self._smoothed / t.target_kl
        self._reached = self._reached or ratio >= 1 - BAND
        outside = self._reached and not 1 - BAND <= ratio <= 1 + BAND
        if not outside or self._outside == 0:
            self._coef_before = coef
        self._outside = self._outside + 1 if outside else 0
        text = self._say(t, coef) if self._outside == PATIENCE else None
        return {"kl/outside_phases": float(self._outside)}, text

    def _say(self, t: Target, coef: float) -> str:
        high = self._smoothed > t.target_kl
        where = f"KL {self._smoothed:.3g} has been {'above' if high else 'below'} {1.5 if high else 0.5:g} x target "
        where += f"{t.target_kl:g} for {PATIENCE} phases"
        if high and coef >= t.max_kl_coef:
            return (
                f"{where} with the coefficient at its upper clamp {t.max_kl_coef:g}: it cannot follow. "
                "Lower training.lr, or raise algorithm.kl_ctrl.max_kl_coef"
            )
        if not high and coef <= t.min_kl_coef:
            return (
                f"{where} with the coefficient at its lower clamp {t.min_kl_coef:g}: the KL is not what holds the "
                "policy back. Nothing is wrong unless the reward stands still; then raise training.lr"
            )
        moved = f"the coefficient went from {self._coef_before:.3g} to {coef:.3g} meanwhile"
        remedy = (
            "Lower training.lr"
            if t.kind == "pi"
            else "algorithm.kl_ctrl.type=pi follows without the lag; or shorten horizon, or start init_kl_coef "
            "near its answer"
        )
        return f"{where}; {moved}: the {t.kind} controller lags behind. {remedy}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "smoothed": self._smoothed,
            "reached": self._reached,
            "outside": self._outside,
            "coef_before": self._coef_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._smoothed, self._reached = float(state["smoothed"]), bool(state["reached"])
        self._outside, self._coef_before = int(state["outside"]), float(state["coef_before"])
