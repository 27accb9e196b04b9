"""From a collated phase to what the update pulls towards: passes before any update, KL, advantages.

Batch -> ScoredBatch (`score_tokens`) -> TrainBatch (`estimate_advantages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from klimb.algos import advantage, correction, kl
from klimb.algos.ops import whiten
from klimb.batch import Minibatch, trimmed
from klimb.models.forward import token_scores, token_values
from klimb.models.load import Critic
from klimb.types import Batch, ScoredBatch, TrainBatch

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The models by role; None where the config needs none."""

    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the maths reads, resolved: no `auto` is left here."""

    explicit: bool
    temperature: float
    dtype: torch.dtype
    adv_estimator: str
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


def score_tokens(
    batch: Batch, micros: Sequence[Minibatch], roles: Roles, recipe: Recipe
) -> tuple[ScoredBatch, Metrics]:
    """The passes before any update, over the first epoch's own micro-batches.

    Explicit: old log-probs by a forward of the actor. Cached: the sampler's, no forward of the actor. Reference and
    critic passes where their roles exist. Adds `policy/old_forwards`, the number of actor forwards made here.
    """

    def over_micros(per_part: Callable[[Batch], Tensor]) -> Tensor:
        out = torch.zeros_like(batch.sampler_logprobs)
        for rows in (rows for minibatch in micros for rows in minibatch):
            part = trimmed(batch, rows).to(roles.actor.device)
            out[rows, : part.tokens.shape[1]] = per_part(part).to(out.device)
        return out

    def logprobs_of(model: PreTrainedModel) -> Callable[[Batch], Tensor]:
        return lambda b: token_scores(model, b.tokens, b.attention, b.mask, recipe.temperature, recipe.dtype).logprobs

    critic = roles.critic
    with torch.no_grad():
        old = over_micros(logprobs_of(roles.actor)) if recipe.explicit else batch.sampler_logprobs
        ref = None if roles.reference is None else over_micros(logprobs_of(roles.reference))
        values = (
            None
            if critic is None
            else over_micros(lambda b: token_values(critic, b.tokens, b.attention, b.mask, recipe.dtype))
        )
    scored = ScoredBatch(**_fields(batch), old_logprobs=old, ref_logprobs=ref, values=values)
    forwards = sum(len(minibatch) for minibatch in micros) if recipe.explicit else 0
    metrics: Metrics = {"policy/old_forwards": forwards, **kl_metrics(scored)}
    if recipe.explicit:
        mismatch = correction.mismatch(old, batch.sampler_logprobs, batch.mask)
        metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
    return scored, metrics


def kl_metrics(scored: ScoredBatch) -> Metrics:
    """`kl/k1`, `kl/k3`: mean over episodes of the per-token mean, policy at batch start against the reference."""
    if scored.ref_logprobs is None or not bool(scored.mask.any()):
        return {}
    return {
        f"kl/{name}": float(kl.episode_mean(kl.estimate(name, scored.old_logprobs, scored.ref_logprobs), scored.mask))
        for name in ("k1", "k3")
    }


def estimate_advantages(scored: ScoredBatch, recipe: Recipe, kl_coef: float) -> tuple[TrainBatch, Metrics]:
    """Advantages [B, T] and, with a critic, returns [B, T]. KL enters the token rewards in that placement.

    Metrics are those of the advantages before whitening: after it mean and spread say nothing.
    """
    penalty = None
    if recipe.kl_in_reward:
        assert scored.ref_logprobs is not None
        penalty = kl.estimate(recipe.kl_reward_estimator, scored.old_logprobs, scored.ref_logprobs)
    rewards = advantage.token_rewards(scored.rewards, scored.mask, penalty, kl_coef)
    returns = None
    if recipe.adv_estimator == "gae":
        assert scored.values is not None
        raw, returns = advantage.gae(rewards, scored.values, scored.mask, recipe.gamma, recipe.lam)
        advantages = whiten(raw, scored.mask)
    else:
        raw = advantages = _group_advantages(rewards.sum(dim=1), scored, recipe)
    train = TrainBatch(**_fields(scored), advantages=advantages, returns=returns)
    metrics = _advantage_metrics(raw[scored.mask])
    if returns is not None and scored.values is not None:
        metrics |= explained_variance(scored.values[scored.mask], returns[scored.mask])
    return train, metrics


def _group_advantages(totals: Tensor, scored: ScoredBatch, recipe: Recipe) -> Tensor:
    """One number per episode, on each of its tokens. A failed episode is in nobody's baseline."""
    valid = scored.mask.any(dim=1)
    if recipe.adv_estimator == "grpo":
        per_row = advantage.grpo(totals, scored.group, recipe.norm_by_std, valid=valid)
    else:
        per_row = advantage.rloo(totals, scored.group, valid=valid)
    return per_row.unsqueeze(1) * scored.mask


def group_metrics(batch: Batch) -> Metrics:
    """`reward/frac_zero_std`: share of prompts whose answers all got the same reward, and so teach nothing."""
    alive = batch.mask.any(dim=1)
    groups, inverse = batch.group[alive].unique(return_inverse=True)
    if len(groups) == 0 or len(groups) == int(alive.sum()):
        return {}
    spread = torch.zeros(len(groups))
    high = spread.scatter_reduce(0, inverse, batch.rewards[alive], "amax", include_self=False)
    low = spread.scatter_reduce(0, inverse, batch.rewards[alive], "amin", include_self=False)
    return {"reward/frac_zero_std": float((high == low).float().mean())}


def _advantage_metrics(values: Tensor) -> Metrics:
    if len(values) == 0:
        return {}
    std = float(values.std()) if len(values) > 1 else 0.0
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": std,
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


def explained_variance(values: Tensor, returns: Tensor) -> Metrics:
    """`value/explained_variance`: 1 - Var(returns - values) / Var(returns); absent when returns do not vary."""
    if len(returns) < 2 or float(returns.var()) == 0:
        return {}
    return {"value/explained_variance": float(1 - (returns - values).var() / returns.var())}


def _fields(record: Batch) -> dict[str, Tensor]:
    return {f.name: getattr(record, f.name) for f in fields(record)}
