"""From a collated phase to what the update pulls towards: passes before any update, KL, advantages.

Batch -> ScoredBatch (`score_tokens`) -> TrainBatch (`estimate_advantages`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from klimb.algos import advantage, correction, kl
from klimb.algos.groups import Groups
from klimb.algos.ops import replace as replace_masked
from klimb.algos.ops import whiten
from klimb.algos.table import ADVANTAGES, Phase
from klimb.batch import Minibatch, trimmed
from klimb.models.forward import packed_head, token_logprobs, values_and_end
from klimb.models.load import Critic
from klimb.models.lora import adapter_off
from klimb.models.sharded import release
from klimb.offload import at_work
from klimb.ranks import ALONE, Ranks
from klimb.recipe import Recipe
from klimb.selection import Metrics, columns, correction_weights, draw_rows, trained_tokens
from klimb.types import Batch, ScoredBatch, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The models by role; None where the config needs none. With LoRA the reference is the actor itself, whose adapter
    is off while it plays that role."""

    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    place: torch.device | None = None
    """Where reference and critic go for a pass, out of the host's memory; None: they are where they work."""

    @contextmanager
    def as_reference(self) -> Generator[PreTrainedModel | None]:
        """The reference, ready for a pass inside."""
        shared = self.reference is self.actor
        with adapter_off(self.actor) if shared else at_work(self.reference, self.place):
            yield self.reference


def is_on_policy(epochs: Sequence[Sequence[Minibatch]], recipe: Recipe) -> bool:
    """Whether the update's own forward can stand for the old policy's: its log-probs are the same to the last bit.

    So when the settings allow it (config.counts.may_skip_old) and the phase makes exactly one optimizer step.
    """
    return recipe.may_skip_old and len(epochs) == 1 and len(epochs[0]) == 1


def score_tokens(
    batch: Batch,
    micros: Sequence[Minibatch],
    roles: Roles,
    recipe: Recipe,
    skip_old: bool = False,
    value_parts: Minibatch | None = None,
    ranks: Ranks = ALONE,
) -> tuple[ScoredBatch, Metrics]:
    """The passes before any update, over the first epoch's own micro-batches.

    Explicit: old log-probs by a forward of the actor, unless skip_old (`is_on_policy`) leaves it to the update. Cached:
    the sampler's, no forward of the actor. Reference and critic passes where their roles exist, the critic's over
    value_parts when given: nothing ties its values to those of the update to the last bit. Adds
    `policy/old_forwards`, the number of actor forwards made here, and `policy/old_pass_skipped`.
    """
    parts = [rows for minibatch in micros for rows in minibatch]
    old = batch.sampler_logprobs if not recipe.explicit else None
    values = last_values = None
    with torch.no_grad():
        if recipe.explicit and not skip_old:
            old = _logprob_pass(roles.actor, batch, parts, recipe, ranks)
        with roles.as_reference() as reference:
            ref = None if reference is None else _logprob_pass(reference, batch, parts, recipe, ranks)
        if roles.critic is not None:
            with at_work(roles.critic, roles.place):
                values, ends = _value_pass(roles.critic, batch, value_parts or parts, recipe, ranks)
            last_values = torch.where(batch.cut_off, ends, 0.0) if recipe.bootstrap else None
    scored = ScoredBatch(**columns(batch), old_logprobs=old, ref_logprobs=ref, values=values, last_values=last_values)
    forwards = len(parts) if recipe.explicit and not skip_old else 0
    metrics: Metrics = {"policy/old_forwards": forwards, "policy/old_pass_skipped": float(skip_old)}
    if old is not None:
        metrics |= policy_metrics(scored, old, engine=recipe.explicit)
    return scored, metrics


def _logprob_pass(
    model: PreTrainedModel, batch: Batch, parts: Sequence[Tensor], recipe: Recipe, ranks: Ranks
) -> Tensor:
    out = torch.zeros_like(batch.sampler_logprobs)
    packed = packed_head(model, int(batch.mask.sum()), recipe.dtype)
    for turn in ranks.turns(parts):
        b = trimmed(batch, turn.rows).to(model.device)
        logprobs = token_logprobs(model, b.tokens, b.attention, b.mask, recipe.temperature, recipe.dtype, packed)
        if not turn.is_filler:
            out[turn.rows, : b.tokens.shape[1]] = logprobs.to(out.device)
    release(model)
    return ranks.sum(out)


def _value_pass(
    critic: Critic, batch: Batch, parts: Sequence[Tensor], recipe: Recipe, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    values, ends = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.rewards)
    for turn in ranks.turns(parts):
        b = trimmed(batch, turn.rows).to(critic.device)
        of_part, ends_of_part = values_and_end(critic, b.tokens, b.attention, b.mask, recipe.dtype)
        if not turn.is_filler:
            values[turn.rows, : b.tokens.shape[1]] = of_part.to(values.device)
            ends[turn.rows] = ends_of_part.to(ends.device)
    release(critic)
    return ranks.sum(values), ranks.sum(ends)


def policy_metrics(batch: ScoredBatch, logprobs: Tensor, engine: bool) -> Metrics:
    """Where the policy at batch start, logprobs [B, T], stands: `kl/k1` and `kl/k3` to the reference, means over
    episodes of the per-token mean, and, when asked, `mismatch/*` to the engine that sampled."""
    if not bool(batch.mask.any()):
        return {}
    metrics: Metrics = {}
    if batch.ref_logprobs is not None:
        for name in ("k1", "k3"):
            per_token = kl.estimate(name, logprobs, batch.ref_logprobs)
            metrics[f"kl/{name}"] = float(kl.episode_mean(per_token, batch.mask))
    if engine:
        mismatch = correction.mismatch(logprobs, batch.sampler_logprobs, batch.mask)
        metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
    return metrics


def estimate_advantages(
    scored: ScoredBatch, recipe: Recipe, kl_coef: float, generator: torch.Generator | None = None
) -> tuple[TrainBatch, Metrics]:
    """Advantages [B, T] and, with a critic, returns [B, T]. KL enters the token rewards in that placement.

    Rows that are rejected or excluded lose their tokens but stay in baselines. generator: draws the rows of policy
    filtration. Metrics are those of the advantages before whitening: after it mean and spread say nothing.
    """
    penalty = None
    if recipe.kl_in_reward:
        assert scored.ref_logprobs is not None and scored.old_logprobs is not None
        penalty = kl.estimate(recipe.kl_reward_estimator, scored.old_logprobs, scored.ref_logprobs)
    rewards = advantage.token_rewards(scored.rewards, scored.mask, penalty, kl_coef)
    mask, row_metrics = trained_tokens(scored, recipe)
    weights, weight_metrics = correction_weights(scored, mask, recipe)
    phase = Phase(
        rewards=rewards,
        mask=mask,
        alive=scored.mask.any(dim=1),
        groups=scored.group,
        lengths=scored.mask.sum(dim=1),
        values=scored.values,
        last_values=scored.last_values,
        greedy_totals=scored.greedy_totals,
        gamma=recipe.gamma,
        lam=recipe.lam,
        norm_by_std=recipe.norm_by_std,
    )
    raw = ADVANTAGES[recipe.adv_estimator](phase)
    returns = None if scored.values is None else raw + replace_masked(scored.values, mask)
    train = TrainBatch(**{**columns(scored), "mask": mask}, advantages=raw, returns=returns, correction=weights)
    metrics = _advantage_metrics(raw[mask])
    if returns is not None and scored.values is not None:
        metrics |= explained_variance(scored.values[mask], returns[mask])
    if recipe.filtration != "none":
        assert generator is not None, "policy filtration draws"
        train, drawn_metrics = draw_rows(train, recipe, generator)
        metrics |= drawn_metrics
    if recipe.whiten:
        metrics["advantage/not_whitened"] = float(train.mask.sum() < 2)
        train = replace(train, advantages=whiten(train.advantages, train.mask))
    return train, metrics | row_metrics | weight_metrics


def group_metrics(batch: Batch) -> Metrics:
    """`reward/frac_zero_std`: share of prompts whose answers all got the same reward, and so teach nothing."""
    groups = Groups(batch.group, batch.mask.any(dim=1))
    if not bool((groups.count > 1).any()):
        return {}
    alike = ~groups.has_spread(batch.rewards)[groups.count > 0]
    return {"reward/frac_zero_std": float(alike.float().mean())}


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
