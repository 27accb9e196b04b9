"""Metrics of a phase that need no model: lengths, repetition, where the KL stands."""

from __future__ import annotations

from collections.abc import Sequence

from klimb.config.algorithm import KLConfig
from klimb.config.posture import Posture
from klimb.types import Sample


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`length/{mean,max,truncated}` in tokens and as a share; `text/repetition`: share of 4-grams seen before in
    the same response."""
    lengths = [s.num_response_tokens for s in samples]
    repeated = [r for s in samples if (r := _repetition(_response_ids(s))) is not None]
    metrics = {
        "length/mean": sum(lengths) / len(lengths),
        "length/max": float(max(lengths)),
        "length/truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
    }
    return metrics | ({"text/repetition": sum(repeated) / len(repeated)} if repeated else {})


def describe(posture: Posture, ctrl: KLConfig, scores: dict[str, float], coef: float) -> dict[str, float]:
    """`kl/{coef,target,ratio_to_target,at_clamp}`: the coefficient this phase was trained with, and its clamps."""
    if not posture.needs_reference:
        return {}
    metrics = {"kl/coef": coef}
    if posture.kl_type == "fixed":
        return metrics
    metrics |= {"kl/target": ctrl.target_kl, "kl/at_clamp": float(coef in (ctrl.min_kl_coef, ctrl.max_kl_coef))}
    if "kl/k3" in scores:
        metrics["kl/ratio_to_target"] = scores["kl/k3"] / ctrl.target_kl
    return metrics


def _response_ids(sample: Sample) -> list[int]:
    return [token for token, sampled in zip(sample.token_ids, sample.mask, strict=True) if sampled]


def _repetition(ids: Sequence[int], n: int = 4) -> float | None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None
