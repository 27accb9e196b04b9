"""What each estimator and each policy loss needs and reads. The functions are in klimb.algos, under the same names.

Facts stand here because `klimb plan` must not import torch; a test holds the names of both sides together.
"""

from __future__ import annotations

from dataclasses import dataclass

from klimb.config.base import PositiveFloat, Section


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """compares_group: of several answers to one prompt, so rollouts_per_prompt must be above 1. needs_greedy: asks for
    one greedy answer per prompt. whitened: its advantages are whitened over the phase's tokens. reads: keys of
    `algorithm` that it reads."""

    needs_critic: bool = False
    compares_group: bool = False
    needs_greedy: bool = False
    whitened: bool = False
    reads: tuple[str, ...] = ()


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(needs_critic=True, whitened=True, reads=("gamma", "lam")),
    "grpo": Estimator(compares_group=True, reads=("norm_by_std",)),
    "rloo": Estimator(compares_group=True),
    "reinforce_pp": Estimator(whitened=True, reads=("gamma",)),
    "reinforce_pp_baseline": Estimator(compares_group=True, whitened=True),
    "remax": Estimator(needs_greedy=True),
    "opo": Estimator(compares_group=True),
    "grpo_passk": Estimator(compares_group=True),
    "maxrl": Estimator(compares_group=True),
}


class NoArgs(Section):
    """A loss without settings of its own."""


class SapoArgs(Section):
    tau_positive: PositiveFloat = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """Where it is not; larger closes sooner."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """reads: keys of `algorithm` it takes as they are; args: the type of its `loss_args`; args_need_ratio: these act on
    nothing while every ratio is 1."""

    reads: tuple[str, ...] = ()
    args: type[Section] = NoArgs
    args_need_ratio: bool = False


_BOUNDS = ("clip_ratio_low", "clip_ratio_high")

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": PolicyLoss(reads=(*_BOUNDS, "dual_clip")),
    "gspo": PolicyLoss(reads=(*_BOUNDS, "dual_clip")),
    "cispo": PolicyLoss(reads=_BOUNDS),
    "gmpo": PolicyLoss(reads=_BOUNDS),
    "sapo": PolicyLoss(args=SapoArgs, args_need_ratio=True),
    "reinforce": PolicyLoss(),
}

CLIPPING_KEYS = (*_BOUNDS, "dual_clip")
"""Settings that act on the ratio alone, so on nothing while it is 1."""
