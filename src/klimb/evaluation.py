"""Held-out score. Seeds come from (seed, "eval", prompt, sample), so nothing of the training's randomness is
touched and how often one evaluates cannot change a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from klimb.reward.base import RewardComponent, RewardSettings
from klimb.reward.combine import score_samples
from klimb.rollout.base import Progress, Request, Sampler, Sampling
from klimb.seeds import derive_seed
from klimb.types import Prompt, Scored


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """metrics: eval/reward, eval/accuracy and eval/pass_at_k where they exist, eval/failed the answers whose reward
    failed; scored: every answer; messages: a line per failed answer."""

    metrics: dict[str, float]
    scored: tuple[Scored, ...]
    messages: tuple[str, ...]


def run_eval(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    sampling: Sampling,
    components: Sequence[RewardComponent],
    settings: RewardSettings,
    seed: int,
    progress: Progress | None = None,
) -> EvalResult:
    """Sample and score. The reward is the plain weighted sum, without normalisation or clip.

    accuracy: share of right answers by the first verifier, whatever its weight; an answer that could not be
    judged counts as wrong. pass_at_k: share of prompts with a right answer among their k. Raises RewardError when
    more than max_failed_fraction of the answers fail.
    """
    requests = [
        Request(prompt=prompt, index=i * samples_per_prompt + k, seed=derive_seed(seed, "eval", i, k))
        for i, prompt in enumerate(prompts)
        for k in range(samples_per_prompt)
    ]
    samples = sampler.generate(requests, sampling, progress)
    plain = replace(settings, normalize="none", clip=None, on_failure="drop")
    scored, report = score_samples(samples, components, plain, None)
    return EvalResult(metrics=_metrics(scored, samples_per_prompt), scored=scored, messages=report.messages)


def _metrics(scored: Sequence[Scored], k: int) -> dict[str, float]:
    rewards = [s.total for s in scored if s.rewards]
    metrics: dict[str, float] = {"eval/reward": sum(rewards) / len(rewards)} if rewards else {}
    if any(s.correct is not None for s in scored):
        right = [s.correct is True for s in scored]
        metrics["eval/accuracy"] = sum(right) / len(right)
        if k > 1:
            solved = [any(right[i : i + k]) for i in range(0, len(right), k)]
            metrics["eval/pass_at_k"] = sum(solved) / len(solved)
    names = sorted({name for s in scored for name in s.parts})
    for name in names:
        values = [s.parts[name] for s in scored if name in s.parts]
        metrics[f"eval/part/{name}"] = sum(values) / len(values)
    metrics["eval/failed"] = float(sum(s.failure is not None for s in scored))
    lengths = [s.sample.num_response_tokens for s in scored]
    metrics["eval/length"] = sum(lengths) / len(lengths) if lengths else 0.0
    return metrics
