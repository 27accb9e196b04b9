"""What an episode is worth by its length, and which episodes the update reads.

Rows never go: what is not read loses its mask, so the number of optimizer steps stays. Only policy filtration
changes rows, and it draws as many as there were.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from klimb.algos import advantage, correction, filtration
from klimb.algos.groups import Groups
from klimb.recipe import Recipe
from klimb.types import Batch, ScoredBatch, TrainBatch

Metrics = dict[str, float]


def shape_rewards(batch: Batch, recipe: Recipe) -> tuple[Batch, Metrics]:
    """The overlong penalty taken off. Adds `reward/overlong_penalty`, its mean over the episodes that have a token."""
    if recipe.overlong is None:
        return batch, {}
    alive, o = batch.mask.any(dim=1), recipe.overlong
    penalty = advantage.overlong_penalty(
        batch.mask.sum(dim=1), batch.cut_off, o.penalty, recipe.max_tokens, buffer=o.buffer
    )
    metrics = {"reward/overlong_penalty": float(penalty[alive].mean())} if bool(alive.any()) else {}
    return replace(batch, rewards=batch.rewards - torch.where(alive, penalty, 0.0)), metrics


def with_greedy(batch: Batch, greedy: Batch) -> tuple[Batch, Metrics]:
    """The reward of each prompt's greedy answer, on all of its rows. greedy: one row per prompt.

    Where it failed there is no baseline, and the prompt's rows lose their mask. Adds `reward/greedy_failed`, the rows
    lost.
    """
    order = torch.argsort(greedy.group)
    at = order[torch.searchsorted(greedy.group[order], batch.group)]
    known = greedy.mask.any(dim=1)
    lost = batch.mask.any(dim=1) & ~known[at]
    totals = torch.where(known, greedy.rewards, 0.0)
    metrics: Metrics = {"reward/greedy_failed": float(lost.sum())}
    return replace(batch, greedy_totals=totals[at], mask=batch.mask & ~lost[:, None]), metrics


def trained_tokens(batch: ScoredBatch, recipe: Recipe) -> tuple[Tensor, Metrics]:
    """bool [B, T]: the mask without the rows that the update leaves out. They stay in their group's baseline.

    Those are, each where it is asked for and counted: answers of prompts whose answers all got one reward
    (`filter/dropped_groups`, prompts), cut-off ones (`filter/excluded`, rows), and rows too far from the engine that
    wrote them (`filter/rejected`, rows). Adds `filter/kept`, the share of episodes with a token that is left.
    """
    alive, metrics = batch.mask.any(dim=1), Metrics()
    keep = torch.ones_like(alive)
    if recipe.filter_groups:
        keep, metrics["filter/dropped_groups"] = _in_groups_with_spread(batch, alive)
    if recipe.exclude:
        keep = keep & ~batch.cut_off
        metrics["filter/excluded"] = float((alive & batch.cut_off).sum())
    reject = recipe.correction.reject
    if recipe.explicit and reject is not None:
        assert batch.old_logprobs is not None
        near = correction.keep_rows(
            batch.old_logprobs, batch.sampler_logprobs, batch.mask, reject.criterion, reject.lo, reject.hi
        )
        metrics["filter/rejected"] = float((alive & ~near).sum())
        keep = keep & near
    if metrics and bool(alive.any()):
        metrics["filter/kept"] = float((keep & alive).sum() / alive.sum())
    return batch.mask & keep[:, None], metrics


def _in_groups_with_spread(batch: Batch, alive: Tensor) -> tuple[Tensor, float]:
    """bool [B], and the number of groups that have an answer and no spread."""
    groups = Groups(batch.group, alive)
    spread = groups.has_spread(batch.rewards)
    return groups.rows(spread.expand_as(groups.present)), float((~spread & (groups.count > 0)).sum())


def correction_weights(batch: ScoredBatch, mask: Tensor, recipe: Recipe) -> tuple[Tensor | None, Metrics]:
    """float32 [B, T] for the policy's token losses, None when all are 1. Adds `mismatch/weight_mean` and `_zero`, the
    share of tokens without weight.

    In the cached posture the ratio starts from the sampler's log-probs and holds the correction already.
    """
    c = recipe.correction
    if c.weights == "none" or not recipe.explicit:
        return None, {}
    assert batch.old_logprobs is not None
    sampler = batch.sampler_logprobs
    w = correction.weights(batch.old_logprobs, sampler, mask, c.weights, c.cap, c.low, c.normalize)
    inside = w[mask]
    if len(inside) == 0:
        return w, {}
    return w, {
        "mismatch/weight_mean": float(inside.mean()),
        "mismatch/weight_zero": float((inside == 0).float().mean()),
    }


def draw_rows(batch: TrainBatch, recipe: Recipe, generator: torch.Generator) -> tuple[TrainBatch, Metrics]:
    """Policy filtration: of the rows that have a token as many again, drawn with replacement within each prompt.

    A drawn row has a row id of its own and the source row it is a copy of. Adds `filter/unique` (share of distinct
    rows among the drawn), `filter/ess` (rows), and where a verifier looked `filter/r2` and `filter/r2_before`: how
    much of the verdict's variance the reward explains, in the drawn rows and in all.
    """
    if recipe.filtration == "none":
        return batch, {}
    alive = batch.mask.any(dim=1).nonzero().flatten()
    if len(alive) == 0:
        return batch, {}
    rewards, groups = batch.rewards[alive], batch.group[alive]
    weights = filtration.weights(rewards, groups, recipe.filtration, recipe.filtration_power)
    drawn = alive[filtration.draw(weights, groups, generator)]
    source = torch.arange(batch.num_rows)
    source[alive] = drawn
    moved = batch.select(source)
    is_copy = torch.zeros_like(batch.cut_off)
    is_copy[alive] = True
    fresh = batch.row_id.max() + 1 + torch.arange(batch.num_rows)
    moved = replace(moved, row_id=torch.where(is_copy, fresh, batch.row_id))
    metrics = {
        "filter/unique": len(drawn.unique()) / len(alive),
        "filter/ess": filtration.effective_size(weights),
    }
    for name, rows in (("filter/r2", drawn), ("filter/r2_before", alive)):
        r2 = filtration.r_squared(batch.rewards[rows], batch.correct[rows].float(), batch.correct[rows] >= 0)
        if r2 is not None:
            metrics[name] = r2
    return moved, metrics


def columns(record: Batch) -> dict[str, Tensor]:
    """Its tensors by name, for building the next record from."""
    return {f.name: getattr(record, f.name) for f in fields(record)}
