"""The first half of a turn: prompts, answers, rewards, and the batch they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from klimb.batch import collate
from klimb.clock import Clock
from klimb.learn import group_metrics
from klimb.reward.combine import score_samples
from klimb.rollout.base import Request, Sampling
from klimb.run import Run
from klimb.seeds import derive_seed
from klimb.selection import Metrics, shape_rewards, with_greedy
from klimb.types import Batch, Sample, Scored


@dataclass(frozen=True, kw_only=True)
class Phase:
    """samples as the engine gave them; scored, with their rewards; batch of all rows; with_token: episodes that have
    one; metrics of rewards and groups."""

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
    batch, metrics = shape_rewards(collate(scored, run.pad_id), run.recipe)
    if run.greedy_sampling is not None:
        greedy, mean = _greedy(run, samples, run.greedy_sampling, step, clock)
        batch, greedy_metrics = with_greedy(batch, shape_rewards(greedy, run.recipe)[0])
        metrics |= greedy_metrics | mean
    run.sampler.sleep()
    metrics = report.metrics | metrics | group_metrics(batch)
    with_token = int(batch.mask.any(dim=1).sum())
    return Phase(samples=samples, scored=scored, batch=batch, with_token=with_token, metrics=metrics)


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


def _greedy(run: Run, samples: Sequence[Sample], sampling: Sampling, step: int, clock: Clock) -> tuple[Batch, Metrics]:
    """One greedy answer per prompt of the phase, scored after the samples and by the same moments; `reward/greedy`, the
    mean of their scores. A failed one costs its prompt's rows and stops nothing: it is no episode."""
    prompts = {s.prompt.row: s.prompt for s in samples}
    requests = [Request(prompt=prompt, index=i, seed=0) for i, prompt in enumerate(prompts.values())]
    with clock("rollout"):
        answers = run.sampler.generate(requests, sampling, run.screen.progress(f"step {step}: greedy"))
    with clock("reward"):
        settings = replace(run.reward_settings, max_failed_fraction=1.0)
        scored, report = score_samples(answers, run.components, settings, run.moments, learn_moments=False)
    run.screen.failures([f"greedy answer, {message}" for message in report.messages])
    mean = {"reward/greedy": report.metrics["reward/mean"]} if "reward/mean" in report.metrics else {}
    return collate(scored, run.pad_id), mean
