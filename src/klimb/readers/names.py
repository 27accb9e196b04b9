"""What other frameworks call the metrics, one table each.

Names are compared without a leading `train/`. A pattern may hold one `*`. A scale turns units into klimb's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

GIB = float(2**30)


@dataclass(frozen=True, kw_only=True)
class Name:
    """klimb's name; scale: klimb's value = scale x theirs."""

    ours: str
    scale: float = 1.0


def _same(*names: str) -> dict[str, Name]:
    return {name: Name(ours=name) for name in names}


VERL: dict[str, Name] = {
    "actor/kl_loss": Name(ours="kl/k3"),
    "actor/reward_kl_penalty": Name(ours="kl/k1"),
    "actor/kl_coef": Name(ours="kl/coef"),
    "actor/reward_kl_penalty_coeff": Name(ours="kl/coef"),
    "actor/ppo_kl": Name(ours="policy/approx_kl"),
    "actor/pg_loss": Name(ours="policy/loss"),
    "actor/pg_clipfrac": Name(ours="policy/clip_fraction"),
    "actor/entropy": Name(ours="policy/entropy"),
    "actor/entropy_loss": Name(ours="policy/entropy"),
    "actor/grad_norm": Name(ours="policy/grad_norm"),
    "actor/lr": Name(ours="lr"),
    "critic/score/mean": Name(ours="reward/mean"),
    "critic/score/max": Name(ours="reward/max"),
    "critic/score/min": Name(ours="reward/min"),
    "critic/vf_explained_var": Name(ours="value/explained_variance"),
    "critic/vf_loss": Name(ours="value/loss"),
    "critic/vf_clipfrac": Name(ours="value/clip_fraction"),
    "critic/grad_norm": Name(ours="value/grad_norm"),
    "response_length/mean": Name(ours="length/mean"),
    "response_length/max": Name(ours="length/max"),
    "response_length/clip_ratio": Name(ours="length/truncated"),
    "rollout_corr/kl": Name(ours="mismatch/kl"),
    "rollout_corr/k3_kl": Name(ours="mismatch/k3"),
    "rollout_corr/rollout_is_eff_sample_size": Name(ours="mismatch/ess"),
    "training/rollout_probs_diff_mean": Name(ours="mismatch/probs_diff_mean"),
    "training/rollout_probs_diff_max": Name(ours="mismatch/probs_diff_max"),
    "actor/perf/max_memory_allocated_gb": Name(ours="memory/update_peak", scale=GIB),
    "perf/max_memory_allocated_gb": Name(ours="memory/update_peak", scale=GIB),
    "timing_s/step": Name(ours="time/step"),
    "val-core/*/acc/mean@*": Name(ours="eval/accuracy"),
    "val-core/*/reward/mean@*": Name(ours="eval/reward"),
    "val/test_score/*": Name(ours="eval/reward"),
}
TRL: dict[str, Name] = {
    "reward": Name(ours="reward/mean"),
    "reward_std": Name(ours="reward/std"),
    "frac_reward_zero_std": Name(ours="reward/frac_zero_std"),
    "kl": Name(ours="kl/k3"),
    "entropy": Name(ours="policy/entropy"),
    "clip_ratio": Name(ours="policy/clip_fraction"),
    "clip_ratio/region_mean": Name(ours="policy/clip_fraction"),
    "clip_ratio/low_mean": Name(ours="policy/clip_fraction_low"),
    "clip_ratio/high_mean": Name(ours="policy/clip_fraction_high"),
    "completions/mean_length": Name(ours="length/mean"),
    "completions/max_length": Name(ours="length/max"),
    "completions/clipped_ratio": Name(ours="length/truncated"),
    "completion_length": Name(ours="length/mean"),
    "sampling/sampling_logp_difference/mean": Name(ours="mismatch/logprob_diff_mean"),
    "loss": Name(ours="policy/loss"),
    "grad_norm": Name(ours="policy/grad_norm"),
    "learning_rate": Name(ours="lr"),
    "eval_reward": Name(ours="eval/reward"),
    "eval/reward": Name(ours="eval/reward"),
    "objective/kl": Name(ours="kl/per_episode"),
    "objective/scores": Name(ours="reward/mean"),
    "policy/approxkl_avg": Name(ours="policy/approx_kl"),
    "policy/clipfrac_avg": Name(ours="policy/clip_fraction"),
    "policy/entropy_avg": Name(ours="policy/entropy"),
    "loss/policy_avg": Name(ours="policy/loss"),
    "loss/value_avg": Name(ours="value/loss"),
    "val/clipfrac_avg": Name(ours="value/clip_fraction"),
    "lr": Name(ours="lr"),
    "episode": Name(ours="episodes"),
}
OPENRLHF: dict[str, Name] = {
    "kl": Name(ours="kl/k1"),
    "reward": Name(ours="reward/mean"),
    "score": Name(ours="reward/mean"),
    "response_length": Name(ours="length/mean"),
    "truncated": Name(ours="length/truncated"),
    "policy_loss": Name(ours="policy/loss"),
    "actor_loss": Name(ours="policy/loss"),
    "kl_loss": Name(ours="policy/kl_loss"),
    "critic_loss": Name(ours="value/loss"),
    "entropy_loss": Name(ours="policy/entropy"),
    "entropy": Name(ours="policy/entropy"),
    "ppo_clip_ratio": Name(ours="policy/clip_fraction"),
    "ppo_kl": Name(ours="policy/approx_kl"),
    "vllm_kl": Name(ours="mismatch/kl"),
    "actor_grad_norm": Name(ours="policy/grad_norm"),
    "critic_grad_norm": Name(ours="value/grad_norm"),
    "actor_lr": Name(ours="lr"),
    "kl_coef": Name(ours="kl/coef"),
    "eval/*_pass1": Name(ours="eval/accuracy"),
    "eval_*_pass1": Name(ours="eval/accuracy"),
}
KLIMB: dict[str, Name] = _same(
    *("episodes", "lr", "reward/mean", "reward/std", "reward/min", "reward/max", "reward/frac_zero_std"),
    *("eval/reward", "eval/accuracy", "eval/pass_at_k", "kl/k1", "kl/k3", "kl/coef", "kl/target", "kl/at_clamp"),
    *("policy/loss", "policy/kl_loss", "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/approx_kl"),
    *("policy/ratio_max", "policy/ratio_abs_dev", "policy/entropy", "policy/grad_norm", "policy/skipped_steps"),
    *("value/loss", "value/explained_variance", "value/grad_norm", "value/skipped_steps"),
    *("advantage/mean", "advantage/std", "mismatch/kl", "mismatch/k3", "mismatch/ess", "mismatch/probs_diff_mean"),
    *("length/mean", "length/max", "length/truncated", "text/repetition", "time/step"),
    *("memory/rollout_peak", "memory/score_peak", "memory/update_peak", "memory/limit"),
)
FRAMEWORKS: dict[str, dict[str, Name]] = {"klimb": KLIMB, "verl": VERL, "trl": TRL, "openrlhf": OPENRLHF}
TELLING: dict[str, tuple[str, ...]] = {
    "klimb": ("kl/k3", "policy/ratio_abs_dev", "policy/first_ratio_dev_mean"),
    "verl": ("actor/pg_loss", "critic/score/mean", "response_length/mean"),
    "trl": ("completions/mean_length", "objective/kl", "policy/approxkl_avg", "frac_reward_zero_std", "reward_std"),
    "openrlhf": ("ppo_clip_ratio", "actor_lr", "response_length", "policy_loss"),
}
"""Names that only one framework uses."""
STEP_KEYS = (
    *("step", "_step", "Step", "global_step", "training/global_step", "train/global_step", "trainer/global_step"),
    *("iteration", "steps"),
)


def stripped(name: str) -> str:
    return name.removeprefix("train/") if name != "train/global_step" else name


def recognise(names: Iterable[str]) -> str | None:
    """The framework whose own names are among these; else the one that knows most of them; None when none does."""
    found = {stripped(name) for name in names}
    scores = {
        framework: (
            sum(name in found for name in TELLING[framework]),
            sum(_find(framework, n) is not None for n in found),
        )
        for framework in FRAMEWORKS
    }
    best = max(scores, key=lambda framework: scores[framework])
    return best if scores[best][1] else None


@lru_cache(maxsize=65536)
def _find(framework: str, name: str) -> Name | None:
    table = FRAMEWORKS[framework]
    if name in table:
        return table[name]
    for pattern, mapped in _patterns(framework):
        if pattern.fullmatch(name):
            return mapped
    return None


@lru_cache(maxsize=8)
def _patterns(framework: str) -> tuple[tuple[re.Pattern[str], Name], ...]:
    table = FRAMEWORKS[framework]
    return tuple(
        (re.compile(".+".join(map(re.escape, name.split("*")))), mapped)
        for name, mapped in table.items()
        if "*" in name
    )


def find(framework: str, name: str) -> Name | None:
    """What the framework's metric is here, None when it has no counterpart."""
    return _find(framework, stripped(name))
