"""Every threshold of the rules, with where it comes from. docs/doctor.md prints this table."""

from __future__ import annotations

from dataclasses import dataclass

BENCH = "benchmarks/doctor, seeds for choosing"
VERL = "verl, docs on rollout correction: levels that call for a look"
ANSWER = "published RLHF runs end at 5 to 20 nats per answer"
PRACTICE = "common practice: early stopping of PPO epochs"


@dataclass(frozen=True, kw_only=True)
class Limit:
    value: float
    unit: str
    source: str


LIMITS: dict[str, Limit] = {
    "kl_target_warning": Limit(value=4.0, unit="x target", source=BENCH),
    "kl_target_alarm": Limit(value=8.0, unit="x target", source=BENCH),
    "kl_warning": Limit(value=0.15, unit="nats per token, no target", source=BENCH),
    "kl_alarm": Limit(value=0.4, unit="nats per token, no target", source=BENCH),
    "reward_lost": Limit(value=0.6, unit="x spread of rewards at the start, while KL is at a warning", source=BENCH),
    "kl_answer_warning": Limit(value=20.0, unit="nats per answer of unknown length", source=ANSWER),
    "kl_answer_alarm": Limit(value=60.0, unit="nats per answer of unknown length", source=ANSWER),
    "kl_first": Limit(value=0.05, unit="nats per token at the first step of a klimb run", source="0 by definition"),
    "kl_vanished": Limit(value=0.05, unit="x target", source=BENCH),
    "kl_vanished_absolute": Limit(value=1e-5, unit="nats per token, no target", source=BENCH),
    "pinned_steps": Limit(value=12, unit="steps at the clamp", source=BENCH),
    "pinned_over": Limit(value=1.5, unit="x target at the upper clamp", source="the controller's band"),
    "pinned_under": Limit(value=0.5, unit="x target at the lower clamp", source="the controller's band"),
    "spread_absolute": Limit(value=1e-5, unit="standard deviation of rewards", source=BENCH),
    "spread_relative": Limit(value=1e-4, unit="x mean reward", source=BENCH),
    "zero_groups_warning": Limit(value=0.7, unit="share of prompts without spread", source=BENCH),
    "zero_groups_alarm": Limit(value=0.97, unit="share of prompts without spread", source=BENCH),
    "volatile": Limit(value=4.0, unit="x what sampling explains", source=BENCH),
    "hacking_rise": Limit(value=0.5, unit="x spread of rewards at the start", source=BENCH),
    "hacking_p": Limit(value=0.01, unit="p of the trend", source="usual level"),
    "hacking_fall": Limit(value=0.25, unit="of the held-out value at the start", source=BENCH),
    "ratio_warning": Limit(value=0.05, unit="mean |r - 1|", source=BENCH),
    "ratio_alarm": Limit(value=0.15, unit="mean |r - 1|", source=BENCH),
    "approx_kl_warning": Limit(value=0.03, unit="nats, new policy to old", source=PRACTICE),
    "approx_kl_alarm": Limit(value=0.1, unit="nats, new policy to old", source=BENCH),
    "clipped_warning": Limit(value=0.2, unit="share of tokens", source=BENCH),
    "clipped_alarm": Limit(value=0.4, unit="share of tokens", source=BENCH),
    "engine_kl": Limit(value=0.02, unit="|mean log-prob difference|, nats", source=VERL + " (0.1), tighter"),
    "engine_k3": Limit(value=0.005, unit="nats", source=BENCH),
    "engine_probs": Limit(value=0.01, unit="mean |p - q|", source=VERL),
    "engine_logprobs": Limit(value=0.1, unit="mean |log-prob difference|, nats", source=VERL + ", of |kl|"),
    "engine_ess": Limit(value=0.3, unit="effective share of tokens", source=VERL),
    "entropy_fall": Limit(value=0.1, unit="x entropy at the start", source=BENCH),
    "entropy_low": Limit(value=0.005, unit="nats per token", source=BENCH),
    "entropy_rise": Limit(value=4.0, unit="x entropy at the start", source=BENCH),
    "entropy_risen": Limit(value=1.0, unit="nats per token, risen to", source=BENCH),
    "entropy_high": Limit(value=1.8, unit="nats per token", source=BENCH),
    "length_change": Limit(value=2.0, unit="x or 1/x length at the start", source=BENCH),
    "truncated_warning": Limit(value=0.25, unit="share of answers cut off", source=BENCH),
    "truncated_alarm": Limit(value=0.6, unit="share of answers cut off", source=BENCH),
    "repetition_warning": Limit(value=0.35, unit="share of repeated 4-grams", source=BENCH),
    "repetition_alarm": Limit(value=0.6, unit="share of repeated 4-grams", source=BENCH),
    "critic_variance": Limit(value=-0.2, unit="explained variance", source="0 is what a constant explains"),
    "critic_bias": Limit(value=0.4, unit="x spread of advantages, their mean", source=BENCH),
    "critic_patience": Limit(value=25, unit="steps", source=BENCH),
    "memory_warning": Limit(value=0.9, unit="of the device's memory", source="headroom of an allocator"),
    "memory_alarm": Limit(value=0.97, unit="of the device's memory", source="headroom of an allocator"),
}


def limit(name: str) -> float:
    return LIMITS[name].value
