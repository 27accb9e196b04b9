# ruff: noqa: F722
"""Per-token estimates of KL(policy || reference) on sampled tokens, and the controllers of its coefficient.

Unit: nats per token. The controllers are fed the divergence from the reference, never the one between new
and old policy.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from klimb.algos.ops import clamp_log_ratio, pick, replace, token_weights
from klimb.errors import CheckpointError

K3_MAX = 10.0
MAX_RELATIVE_ERROR = 0.2


def estimate(name: str, logprobs: Float[Tensor, "*s"], ref_logprobs: Float[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """KL estimate of every token, in nats, d = logprobs - ref_logprobs; same shape as the inputs, [B, T].

    `k1` d; `abs` |d|; `k2` d^2 / 2; `k3` exp(-d) - 1 + d, -d clamped to +-20, the result to 10 (Schulman
    2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html). `k1+`, `abs+`, `k3+` have the value
    of the plain one and the gradient of k2, the only one whose expected gradient is the KL's (Tang and Munos
    2025, arXiv 2506.09477). Gradients flow to logprobs only. There is no mask: call it on replaced inputs.
    Raises ConfigError for an unknown name.
    """
    value = pick("algorithm.kl_estimator", name, ESTIMATORS)
    return value(logprobs.float() - ref_logprobs.detach().float())


def episode_mean(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float32[Tensor, ""]:
    """Mean over the rows that have a token of the row's masked mean: how `kl/k1` and `kl/k3` are logged.

    A scalar tensor, 0 when no row has a token.
    """
    return (replace(per_token, mask) * token_weights(mask, "seq-mean-token-mean")).sum()


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    x = clamp_log_ratio(-d)
    # expm1, for near d = 0 exp(x) - 1 keeps nothing but rounding; the lower bound holds where a device's expm1
    # is off by a bit.
    return (torch.expm1(x) - x).clamp(0.0, K3_MAX)


def _with_gradient_of_k2(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def straight_through(d: Tensor) -> Tensor:
        k2 = _k2(d)
        return value(d).detach() + (k2 - k2.detach())

    return straight_through


def _k1(d: Tensor) -> Tensor:
    return d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "k3": _k3,
    "k1+": _with_gradient_of_k2(_k1),
    "abs+": _with_gradient_of_k2(torch.abs),
    "k3+": _with_gradient_of_k2(_k3),
}


class KLController(Protocol):
    """What sets the KL coefficient. A step uses `coef`, then calls `update` with what it saw."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, num_episodes: int) -> None:
        """kl: nats per token from the reference; num_episodes: those of the rollout batch with a token."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, d: Mapping[str, float]) -> None:
        """Raises CheckpointError when d does not hold a finite coefficient."""
        ...


class FixedKLController:
    """The coefficient stays as set, whatever is observed."""

    def __init__(self, init_kl_coef: float) -> None:
        self.coef = init_kl_coef

    def update(self, kl: float, num_episodes: int) -> None:
        """Changes nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, d: Mapping[str, float]) -> None:
        self.coef = _coef_of(d)


class AdaptiveKLController:
    """coef <- clip(coef (1 + e n / horizon), min, max), e = clip(kl / target - 1, -0.2, 0.2).

    n = episodes of the rollout batch that have a token; target_kl in nats per token, above 0; horizon in
    episodes. Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """

    def __init__(
        self,
        init_kl_coef: float,
        target_kl: float,
        horizon: float,
        min_kl_coef: float,
        max_kl_coef: float,
    ) -> None:
        self.coef = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon
        self.min_kl_coef = min_kl_coef
        self.max_kl_coef = max_kl_coef

    def update(self, kl: float, num_episodes: int) -> None:
        """One step of the rule above. A kl that is NaN or infinite leaves the coefficient as it is."""
        if not math.isfinite(kl):
            return
        error = kl / self.target_kl - 1.0
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef = self._clip(self.coef * (1.0 + error * num_episodes / self.horizon))

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, d: Mapping[str, float]) -> None:
        """The coefficient of d, within this controller's clamps."""
        self.coef = self._clip(_coef_of(d))

    def _clip(self, coef: float) -> float:
        return min(max(coef, self.min_kl_coef), self.max_kl_coef)


@dataclass(frozen=True, kw_only=True)
class PIGains:
    """proportional, integral: per rollout phase. slack: error that the integral part bears without a move, so that it
    gives back a coefficient that KL does not need. fall: the most it gives back in a phase (of log coef) before KL has
    first reached its target: what is given away while KL is still on its way is missed when it arrives. smoothing:
    share of the new observation in the smoothed KL. low, high: observations are clipped to these multiples of the
    target, so that one outlier is soon forgotten. The defaults were chosen in benchmarks/controller.
    """

    proportional: float = 1.2
    integral: float = 0.03
    slack: float = 0.1
    fall: float = 0.02
    smoothing: float = 0.2
    low: float = 0.23
    high: float = 3.0


class PIKLController:
    """log coef <- clip(log coef + P (e - e before) + I (e - slack)), e = log(smoothed KL / target).

    A proportional-integral rule in velocity form. KL and coefficient are scales, so both are taken in logs: the
    same gains serve whatever target and coefficient. The proportional part answers a rising KL before it reaches its
    target. What the clamps min and max cut off is forgotten, so no integral is left to unwind. target_kl in nats
    per token, above 0. Source: after Stooke et al. 2020, arXiv 2007.03964.
    """

    def __init__(
        self,
        init_kl_coef: float,
        target_kl: float,
        min_kl_coef: float,
        max_kl_coef: float,
        gains: PIGains | None = None,
    ) -> None:
        self.coef = init_kl_coef
        self.target_kl = target_kl
        self.min_kl_coef = min_kl_coef
        self.max_kl_coef = max_kl_coef
        self.gains = gains or PIGains()
        self._smoothed: float | None = None
        self._reached = False

    def update(self, kl: float, num_episodes: int) -> None:
        """One step of the rule above. Without an episode, or with a kl that is not finite, nothing changes."""
        if not math.isfinite(kl) or num_episodes == 0:
            return
        g, before = self.gains, self._smoothed
        kl = min(max(kl, g.low * self.target_kl), g.high * self.target_kl)
        now = kl if before is None else before + g.smoothing * (kl - before)
        change = 0.0 if before is None else g.proportional * math.log(now / before)
        self._reached = self._reached or now >= self.target_kl
        integral = g.integral * (math.log(now / self.target_kl) - g.slack)
        change += integral if self._reached else max(integral, -g.fall)
        self._smoothed = now
        self.coef = self._clip(self.coef * math.exp(change))

    def state_dict(self) -> dict[str, float]:
        """coef, and once something was observed the smoothed KL and whether it has reached the target (0 or 1)."""
        if self._smoothed is None:
            return {"coef": self.coef}
        return {"coef": self.coef, "smoothed_kl": self._smoothed, "reached": float(self._reached)}

    def load_state_dict(self, d: Mapping[str, float]) -> None:
        """The coefficient of d, within this controller's clamps, and the smoothed KL, finite and above 0."""
        coef, smoothed = _coef_of(d), d.get("smoothed_kl")
        if smoothed is not None and not 0 < smoothed < math.inf:
            raise _damaged("'smoothed_kl': a finite number above 0", d)
        self.coef, self._smoothed = self._clip(coef), smoothed
        self._reached = d.get("reached", 0.0) == 1.0

    def _clip(self, coef: float) -> float:
        return min(max(coef, self.min_kl_coef), self.max_kl_coef)


def _coef_of(d: Mapping[str, float]) -> float:
    coef = d.get("coef", math.nan)
    if not math.isfinite(coef):
        raise _damaged("'coef': a finite number", d)
    return coef


def _damaged(expected: str, d: Mapping[str, float]) -> CheckpointError:
    return CheckpointError(
        f"KL controller state: expected {{{expected}}}, found {dict(d)}. "
        "The checkpoint is damaged: resume from another one."
    )
