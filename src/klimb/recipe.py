"""Everything the maths reads, resolved from the config: no `auto` is left here."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """What an answer's length costs. buffer None: `penalty` when cut off; else it grows over the last tokens."""

    penalty: float
    buffer: int | None


@dataclass(frozen=True, kw_only=True)
class Reject:
    """Rows outside lo and hi by the criterion leave the update; None: no bound."""

    criterion: str
    lo: float | None
    hi: float | None


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Rollout correction: weights of the token losses, and rows to reject."""

    weights: str = "none"
    cap: float = 2.0
    low: float | None = None
    normalize: bool = False
    reject: Reject | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """See config/algorithm.py for what each means. whiten: raw advantages are whitened over the trained tokens.

    bootstrap: a cut-off episode goes on with the critic's value; exclude: none of its tokens is trained on;
    filtration: a strategy, or none; may_skip_old: see config/counts.py.
    """

    explicit: bool
    temperature: float
    dtype: torch.dtype
    adv_estimator: str
    whiten: bool
    norm_by_std: bool
    gamma: float
    lam: float
    policy_loss: str
    loss_args: dict[str, float | None]
    loss_agg: str
    max_tokens: int
    entropy_coef: float
    value_clip: float | None
    kl_in_reward: bool
    kl_in_loss: bool
    kl_reward_estimator: str
    kl_loss_estimator: str
    max_grad_norm: float
    filter_groups: bool = False
    bootstrap: bool = False
    exclude: bool = False
    overlong: Overlong | None = None
    correction: Correction = Correction()
    filtration: str = "none"
    filtration_power: float = 2.0
    may_skip_old: bool = False
