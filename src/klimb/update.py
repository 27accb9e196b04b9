"""TrainBatch to optimizer steps.

The loss of a train batch is the sum of weight x token loss with weights made from the whole train batch's mask,
so its gradient does not depend on how it is cut into micro-batches. A non-finite loss or gradient skips the
step and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from transformers import PreTrainedModel

from klimb.algos import kl
from klimb.algos.loss import OF_SINGLE_TOKENS, LossStats, policy_loss, value_loss
from klimb.algos.ops import token_weights
from klimb.batch import Minibatch, trimmed
from klimb.fallback import Fallback, kept
from klimb.learn import policy_metrics
from klimb.models.forward import TokenScores, backward_scores, can_fuse, packed_head, token_scores, token_values
from klimb.models.load import Critic
from klimb.models.sharded import whole
from klimb.offload import at_work, states_at_work
from klimb.ranks import ALONE, Ranks, Turn
from klimb.recipe import Recipe
from klimb.selection import Metrics
from klimb.types import TrainBatch


@dataclass(kw_only=True)
class Trainable:
    """A model with what steps it. The rate is a function of `steps`, so no scheduler has a state to lose."""

    module: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    steps: int = 0
    place: torch.device | None = None
    """Where the module goes for the update, out of the host's memory; None: it is there."""
    states_wait: bool = False
    """Whether the optimizer's states are in the host's memory between its steps."""

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        return self.schedule.lr(self.steps)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """peak rate; kind: constant, linear or cosine down to 0; num_steps and warmup in optimizer steps."""

    peak: float
    kind: str
    num_steps: int
    warmup: int

    def lr(self, step: int) -> float:
        """Rate of optimizer step `step`, from 0; after the last one 0 for linear and cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        progress = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        if self.kind == "constant":
            return self.peak
        return self.peak * (1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass
class Tally:
    """Sums and maxima over micro-batches, turned into metrics once: a mean of means would depend on the cut."""

    sums: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    maxima: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, name: str, numerator: float, denominator: float) -> None:
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += numerator
        entry[1] += denominator

    def add_stats(self, prefix: str, stats: LossStats) -> None:
        for name, (numerator, denominator) in stats.sums.items():
            self.add(f"{prefix}/{name}", float(numerator), float(denominator))
        for name, value in stats.maxima.items():
            self.maxima[f"{prefix}/{name}"] = max(self.maxima.get(f"{prefix}/{name}", 0.0), float(value))

    def over(self, ranks: Ranks) -> Tally:
        """One tally of all ranks'. Counts are the same on each; a rank that only kept in step has no sums."""
        if ranks.size == 1:
            return self
        out = Tally(counts=self.counts)
        for part in ranks.everywhere(lambda: [self]):
            for name, (numerator, denominator) in part.sums.items():
                out.add(name, numerator, denominator)
            for name, value in part.maxima.items():
                out.maxima[name] = max(out.maxima.get(name, 0.0), value)
        return out

    def metrics(self) -> Metrics:
        means = {name: top / bottom for name, (top, bottom) in self.sums.items() if bottom > 0}
        return {**means, **self.maxima, **self.counts}


def make_trainable(
    module: nn.Module,
    schedule: Schedule,
    weight_decay: float,
    place: torch.device | None = None,
    states_wait: bool = False,
) -> Trainable:
    """AdamW with decay on matrices only. place, states_wait: as in Trainable."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.peak, fused=True)
    return Trainable(module=module, optimizer=optimizer, schedule=schedule, place=place, states_wait=states_wait)


def update(
    actor: Trainable | None,
    critic: Trainable | None,
    batch: TrainBatch,
    epochs: Sequence[Sequence[Minibatch]],
    recipe: Recipe,
    kl_coef: float,
    ranks: Ranks = ALONE,
    fallback: Fallback | None = None,
) -> Metrics:
    """All optimizer steps of a phase. actor None: the critic warms up alone. fallback: what to do when memory runs out.

    Adds `policy/*`, `value/*`, and what the first train batch's forward, made before any step, says of the old
    log-probs: `policy/first_ratio_dev_mean` and `_max` (|r - 1|), and in the cached posture the mismatch with the
    engine and `kl/k3_trainer`.
    """
    tally, first = Tally(), torch.zeros_like(batch.sampler_logprobs)
    fallback = fallback or Fallback()
    minibatches = [micros for epoch in epochs for micros in epoch]
    # One model after the other, so that only one of them has to be at work.
    if actor is not None:
        for number, micros in enumerate(minibatches):
            work = Work.of(batch, micros, recipe, ranks)
            _actor_step(actor, work, kl_coef, tally, None if number else first, fallback)
    if critic is not None:
        with at_work(critic.module, critic.place):
            for micros in minibatches:
                _critic_step(critic, Work.of(batch, micros, recipe, ranks), tally, fallback)
    metrics, first = tally.over(ranks).metrics() | fallback.metrics(), ranks.sum(first)
    if actor is None or not epochs[0][0]:
        return metrics
    # All rows, and in their own order, where they stand for the old pass: sums are rounded as it rounds them.
    rows = torch.arange(batch.num_rows) if batch.old_logprobs is None else torch.cat(epochs[0][0])
    return {**metrics, **_first_metrics(first[rows], batch.select(rows), recipe)}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step's share of a phase: its micro-batches, the weight of every token's loss [B, T], and the ranks
    that it is divided among."""

    batch: TrainBatch
    micros: Minibatch
    weights: Tensor
    recipe: Recipe
    ranks: Ranks

    @staticmethod
    def of(batch: TrainBatch, micros: Minibatch, recipe: Recipe, ranks: Ranks) -> Work:
        weights = _weights(batch, micros, recipe)
        return Work(batch=batch, micros=micros, weights=weights, recipe=recipe, ranks=ranks)

    @property
    def tokens(self) -> int:
        """Masked-in ones."""
        return int(self.batch.mask[torch.cat(self.micros)].sum()) if self.micros else 0

    @property
    def is_empty(self) -> bool:
        """No token left: every row failed. There is nothing to step on, not even with old momentum."""
        return self.tokens == 0

    def parts(self, device: torch.device) -> Iterator[tuple[Turn, TrainBatch, Tensor]]:
        """This rank's turns, what their rows are made of, and the weights [rows, T] of their token losses: 0 in a
        filler, which so goes through the same layers, backward too, as what it keeps in step with."""
        for turn in self.ranks.turns(self.micros):
            part = trimmed(self.batch, turn.rows).to(device)
            weight = self.weights[turn.rows, : part.tokens.shape[1]].to(device)
            yield turn, part, torch.zeros_like(weight) if turn.is_filler else weight


def _weights(batch: TrainBatch, micros: Minibatch, recipe: Recipe) -> Tensor:
    """From the whole train batch's mask, so that no gradient depends on how it is cut."""
    weights = torch.zeros_like(batch.advantages)
    if not micros:
        return weights
    rows = torch.cat(micros)
    weights[rows] = token_weights(batch.mask[rows], recipe.loss_agg, recipe.max_tokens)
    return weights


@dataclass(frozen=True, kw_only=True)
class View:
    """What the policy's loss reads of some tokens beside their log-probs, all [., .]: of a micro-batch [B, T], or of a
    slice of its masked-in tokens [1, n]. old None: the new log-probs are the old ones. weight: of each token's loss."""

    old: Tensor | None
    ref: Tensor | None
    advantages: Tensor
    correction: Tensor | None
    mask: Tensor
    weight: Tensor

    @staticmethod
    def of(part: TrainBatch, weight: Tensor) -> View:
        return View(
            old=part.old_logprobs,
            ref=part.ref_logprobs,
            advantages=part.advantages,
            correction=part.correction,
            mask=part.mask,
            weight=weight,
        )

    def flat(self) -> View:
        """The masked-in tokens in one row."""
        return self._map(lambda x: x[self.mask][None])

    def at(self, tokens: slice) -> View:
        return self._map(lambda x: x[:, tokens])

    def _map(self, change: Callable[[Tensor], Tensor]) -> View:
        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return View(
            old=maybe(self.old),
            ref=maybe(self.ref),
            advantages=change(self.advantages),
            correction=maybe(self.correction),
            mask=change(self.mask),
            weight=change(self.weight),
        )


@dataclass(kw_only=True)
class Losses:
    """The policy's loss over the pieces of one optimizer step, and the sums its metrics are made of. scale: the number
    of ranks, whose gradients are averaged where the loss is a sum."""

    recipe: Recipe
    kl_coef: float
    tally: Tally
    scale: int = 1
    finite: bool = True
    sums: dict[str, float] = field(default_factory=dict[str, float])

    def of_rows(self, scores: TokenScores, view: View) -> Tensor:
        """`add` for whole rows [B, T]."""
        return self.add(scores.logprobs, lambda: scores.entropy, view)

    def of_slice(self, flat: View, logprobs: Tensor, entropy: Callable[[], Tensor], at: slice) -> Tensor:
        """`add` for a slice [n] of a micro-batch's masked-in tokens."""
        return self.add(logprobs[None], entropy, flat.at(at))

    def add(self, logprobs: Tensor, entropy: Callable[[], Tensor], view: View) -> Tensor:
        """Loss of these tokens, weighted: policy loss + coef KL - entropy bonus."""
        r = self.recipe
        old = logprobs.detach() if view.old is None else view.old
        token_loss, stats = policy_loss(r.policy_loss, logprobs, old, view.advantages, view.mask, **r.loss_args)
        if view.correction is not None:
            token_loss = token_loss * view.correction
        losses = {"policy/loss": (token_loss * view.weight).sum()}
        if r.kl_in_loss:
            assert view.ref is not None
            losses["policy/kl_loss"] = (kl.estimate(r.kl_loss_estimator, logprobs, view.ref) * view.weight).sum()
        total = losses["policy/loss"] + self.kl_coef * losses.get("policy/kl_loss", 0.0)
        if r.entropy_coef > 0:
            total = total - r.entropy_coef * (entropy() * view.weight).sum()
        self.finite = self.finite and bool(torch.isfinite(total))
        for name, value in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach())
        self.tally.add_stats("policy", stats)
        return total * self.scale


def _actor_step(
    actor: Trainable, work: Work, kl_coef: float, tally: Tally, first: Tensor | None, fallback: Fallback
) -> None:
    """first [B, T]: filled with the log-probs of this step's forward, in this rank's rows."""

    def gradient(micros: Minibatch) -> Losses:
        losses = Losses(recipe=work.recipe, kl_coef=kl_coef, tally=tally, scale=work.ranks.size)
        _actor_gradient(cast(PreTrainedModel, actor.module), replace(work, micros=micros), losses, first)
        return losses

    losses = fallback.attempt(work.micros, gradient, _undoing(actor, tally))
    _step(actor, losses.finite, "policy", losses.sums, tally, work)


def _actor_gradient(model: PreTrainedModel, work: Work, losses: Losses, first: Tensor | None) -> None:
    recipe, tally = work.recipe, losses.tally
    fuse = recipe.policy_loss in OF_SINGLE_TOKENS and can_fuse(model)
    packed = packed_head(model, work.tokens, recipe.dtype, trains=True) if fuse else None
    for turn, part, weight in work.parts(model.device):
        losses.tally = Tally() if turn.is_filler else tally
        view = View.of(part, weight)
        inputs = (model, part.tokens, part.attention, part.mask, recipe.temperature)
        if fuse:
            loss_of = partial(losses.of_slice, view.flat())
            scores = backward_scores(*inputs, loss_of, recipe.dtype, packed=packed)
        else:
            scores = token_scores(*inputs, recipe.dtype)
            losses.of_rows(scores, view).backward()
        if first is not None and not turn.is_filler:
            first[turn.rows, : part.tokens.shape[1]] = scores.logprobs.detach().to(first.device)
        losses.tally.add("policy/entropy", float(scores.entropy.detach().sum()), float(part.mask.sum()))


def _critic_step(critic: Trainable, work: Work, tally: Tally, fallback: Fallback) -> None:
    def gradient(micros: Minibatch) -> tuple[bool, float]:
        return _critic_gradient(cast(Critic, critic.module), replace(work, micros=micros), tally)

    finite, total_loss = fallback.attempt(work.micros, gradient, _undoing(critic, tally))
    _step(critic, finite, "value", {"value/loss": total_loss}, tally, work)


def _critic_gradient(module: Critic, work: Work, tally: Tally) -> tuple[bool, float]:
    """Whether all of this rank's losses were finite, and their sum."""
    finite, total_loss = True, 0.0
    for turn, part, weight in work.parts(module.device):
        assert part.values is not None and part.returns is not None
        values = token_values(module, part.tokens, part.attention, part.mask, work.recipe.dtype)
        token_loss, stats = value_loss(values, part.values, part.returns, work.recipe.value_clip, part.mask)
        loss = (token_loss * weight).sum()
        finite = finite and bool(torch.isfinite(loss))
        (loss * work.ranks.size).backward()
        total_loss += float(loss.detach())
        if not turn.is_filler:
            tally.add_stats("value", stats)
    return finite, total_loss


def _undoing(trainable: Trainable, tally: Tally) -> Callable[[], None]:
    """Drops what an attempt accumulates from here on: gradients and sums."""
    tally_as_now = kept(tally)

    def undo() -> None:
        trainable.optimizer.zero_grad(set_to_none=True)
        tally_as_now()

    return undo


def _step(
    trainable: Trainable, finite: bool, room: str, own_sums: Mapping[str, float], tally: Tally, work: Work
) -> None:
    """Clip once on the accumulated gradient and step, or skip, which all ranks do alike. The schedule goes on either
    way: its length is fixed."""
    norm = whole(nn.utils.clip_grad_norm_(trainable.module.parameters(), work.recipe.max_grad_norm))
    done = not work.ranks.any(not finite or not bool(torch.isfinite(norm)))
    sums = work.ranks.totals(own_sums)
    if done and not work.is_empty:
        for group in trainable.optimizer.param_groups:
            group["lr"] = trainable.lr
        with states_at_work(trainable.optimizer, trainable.states_wait):
            trainable.optimizer.step()
        for name, value in {f"{room}/grad_norm": float(norm), **sums}.items():
            tally.add(name, value, 1.0)
    tally.counts[f"{room}/skipped_steps"] = tally.counts.get(f"{room}/skipped_steps", 0) + (not done)
    trainable.optimizer.zero_grad(set_to_none=True)
    trainable.steps += 1


def _first_metrics(first: Tensor, batch: TrainBatch, recipe: Recipe) -> Metrics:
    """What the forward of the first train batch [B, T], made before any step, says of the old log-probs."""
    if not bool(batch.mask.any()):
        return {}
    old = first if batch.old_logprobs is None else batch.old_logprobs
    deviation = ((first - old)[batch.mask].exp() - 1).abs()
    metrics = {
        "policy/first_ratio_dev_mean": float(deviation.mean()),
        "policy/first_ratio_dev_max": float(deviation.max()),
    }
    if batch.old_logprobs is None:
        return metrics | policy_metrics(batch, first, engine=True)
    if recipe.explicit:
        return metrics
    seen = policy_metrics(batch, first, engine=True)
    metrics |= {name: value for name, value in seen.items() if name.startswith("mismatch/")}
    return metrics | ({"kl/k3_trainer": seen["kl/k3"]} if "kl/k3" in seen else {})
