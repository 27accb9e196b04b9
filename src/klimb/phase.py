"""The first half of a turn: prompts, answers, rewards, and the batch they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klimb.batch import collate
from klimb.clock import Clock
from klimb.learn import group_metrics
from klimb.reward.combine import score_samples
from klimb.rollout.base import Request
from klimb.run import Run
from klimb.seeds import derive_seed
from klimb.selection import Metrics, drop_alike_groups, shape_rewards, with_greedy
from klimb.types import Batch, Sample, Scored


@dataclass(frozen=True, kw_only=True)
class Phase:
    """samples as the engine gave them; scored, with their rewards; batch of all rows, where what the update must not
    read has no mask; with_token: episodes that have one; metrics of rewards, groups and filtering."""

    samples: Sequence[Sample]
    scored: Sequence[Scored]
    batch: Batch
    with_token: int
    metrics: Metrics


def play(run: Run, episodes: int, step: int, seed: int, clock: Clock) -> Phase:
    """Sample and score one rollout phase."""
    with clock("rollout"):
        samples = _rollout(run, episodes, step, seed)
    with clock("reward"):
        scored, report = score_samples(samples, run.components, run.reward_settings, run.moments)
    run.screen.failures(report.messages)
    greedy = _greedy(run, samples, step, clock)
    batch, reward_metrics = shape_rewards(collate(scored, run.pad_id), run.recipe)
    if greedy is not None:
        batch, greedy_metrics = with_greedy(batch, shape_rewards(greedy, run.recipe)[0])
        reward_metrics |= greedy_metrics
    with_token, metrics = int(batch.mask.any(dim=1).sum()), report.metrics | reward_metrics | group_metrics(batch)
    batch, filter_metrics = drop_alike_groups(batch, run.recipe)
    return Phase(samples=samples, scored=scored, batch=batch, with_token=with_token, metrics=metrics | filter_metrics)


def _rollout(run: Run, episodes: int, step: int, seed: int) -> list[Sample]:
    """Prompts from the stream, each asked for rollouts_per_prompt times; a request's seed is f(seed, step, row)."""
    group = run.config.actor_rollout_ref.rollouts_per_prompt
    prompts = run.prompts.take(episodes // group)
    requests = [
        Request(prompt=prompt, index=i * group + g, seed=derive_seed(seed, "rollout", i * group + g))
        for i, prompt in enumerate(prompts)
        for g in range(group)
    ]
    return run.sampler.generate(requests, run.sampling, run.screen.progress(f"step {step}: rollout"))


def _greedy(run: Run, samples: Sequence[Sample], step: int, clock: Clock) -> Batch | None:
    """One greedy answer per prompt of the phase, scored after the samples and by the same moments; None unless the
    estimator asks for them."""
    if run.greedy_sampling is None:
        return None
    prompts = {s.prompt.row: s.prompt for s in samples}
    requests = [Request(prompt=prompt, index=i, seed=0) for i, prompt in enumerate(prompts.values())]
    with clock("rollout"):
        answers = run.sampler.generate(requests, run.greedy_sampling, run.screen.progress(f"step {step}: greedy"))
    with clock("reward"):
        scored, report = score_samples(answers, run.components, run.reward_settings, run.moments, learn_moments=False)
    run.screen.failures(report.messages)
    return collate(scored, run.pad_id)
