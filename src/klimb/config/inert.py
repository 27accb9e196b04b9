"""Keys that are set although nothing reads them in this combination: whoever set one expects an effect."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from klimb.config.counts import Counts
from klimb.config.facts import CLIPPING_KEYS, ESTIMATORS, POLICY_LOSSES
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig

Why = Iterator[tuple[str, str]]
"""Dotted key and the reason that nothing reads it."""

STEERED = ("horizon", "target_kl", "min_kl_coef", "max_kl_coef")
EVAL_KEYS = (
    *("before_training", "every_episodes", "max_prompts", "temperature"),
    *("top_p", "top_k", "samples_per_prompt", "metric"),
)


def inert(config: RunConfig, posture: Posture, counts: Counts) -> list[tuple[str, str]]:
    """Every inert key that the user set, with the reason, once each."""
    rooms = (
        _estimator(config),
        _loss(config, posture, counts),
        _kl(config, posture),
        _rows(config, posture),
        _engine(config),
        _elsewhere(config),
        _offload(config, posture),
        _cluster(config),
    )
    reasons: dict[str, str] = {}
    for key, why in (found for room in rooms for found in room):
        reasons.setdefault(key, why)
    return [(key, why) for key, why in reasons.items() if _is_set(config, key)]


def _is_set(config: RunConfig, key: str) -> bool:
    *sections, name = key.split(".")
    owner: object = config
    for part in sections:
        owner = getattr(owner, part)
    return isinstance(owner, BaseModel) and name in owner.model_fields_set


def _estimator(config: RunConfig) -> Why:
    a = config.algorithm
    for key in ("gamma", "lam", "norm_by_std"):
        if key not in a.estimator.reads:
            readers = [name for name, facts in ESTIMATORS.items() if key in facts.reads]
            yield f"algorithm.{key}", f"{a.adv_estimator} does not read it, but {' and '.join(readers)}"
    if not config.needs_critic:
        for key in ("model_path", "lr", "value_clip", "warmup_phases"):
            yield f"critic.{key}", f"{a.adv_estimator} has no critic"


def _loss(config: RunConfig, p: Posture, counts: Counts) -> Why:
    a = config.algorithm
    for key in CLIPPING_KEYS:
        if key not in a.loss.reads:
            readers = [name for name, facts in POLICY_LOSSES.items() if key in facts.reads]
            yield f"algorithm.{key}", f"policy_loss {a.policy_loss} does not read it, but {', '.join(readers)}"
    if counts.steps_per_phase == 1:
        # The old values are this step's own, and in the explicit posture so are the old log-probs.
        why = "one optimizer step per phase: {} when it is made"
        if config.needs_critic:
            yield "critic.value_clip", why.format("values are the old ones")
        if p.explicit:
            for key in (*CLIPPING_KEYS, *(("loss_args",) if a.loss.args_need_ratio else ())):
                yield f"algorithm.{key}", why.format("every ratio is 1")


def _kl(config: RunConfig, p: Posture) -> Why:
    a, section = config.algorithm, "algorithm.kl_ctrl"
    if not p.needs_reference:
        keys = (*(f"{section}.{key}" for key in (*STEERED, "type", "init_kl_coef")), "algorithm.kl_estimator")
        for key in (*keys, "actor_rollout_ref.ref_model_path"):
            yield key, "there is no KL term"
    elif p.kl_type == "fixed":
        for key in STEERED:
            yield f"{section}.{key}", "the coefficient is fixed"
    elif p.kl_type == "pi":
        yield f"{section}.horizon", "pi acts per phase and has no horizon"
    if a.kl_ctrl.allow_both and not (p.kl_in_reward and p.kl_in_loss):
        yield f"{section}.allow_both", "KL is not in both places"


def _rows(config: RunConfig, p: Posture) -> Why:
    """Rollout correction and policy filtration."""
    c, section = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if not p.explicit:
        at_rest = {"weights": c.weights == "none", "reject": c.reject is None}
        for key in ("weights", "reject", "cap", "low", "normalize"):
            if at_rest.get(key, False):
                continue  # said to be off, which it is
            yield (
                f"{section}.{key}",
                "cached posture: the old log-probs are the sampler's, so the ratio corrects itself",
            )
    elif c.weights == "none":
        for key in ("cap", "low", "normalize"):
            yield f"{section}.{key}", "weights is none"
    elif c.weights != "band":
        yield f"{section}.low", "only weights: band has a lower bound"
    f = config.algorithm.policy_filtration
    if f.strategy != "power":
        yield "algorithm.policy_filtration.power", f"strategy is {f.strategy}, not power"


def _engine(config: RunConfig) -> Why:
    if config.actor_rollout_ref.rollout_provider != "vllm":
        for key in ("memory_share", "tensor_parallel"):
            yield f"actor_rollout_ref.vllm.{key}", "rollout_provider is hf"


def _offload(config: RunConfig, p: Posture) -> Why:
    r = config.actor_rollout_ref
    own_reference = p.needs_reference and (r.lora is None or r.ref_model_path is not None)
    if (
        config.training.offload.params
        and not own_reference
        and not config.needs_critic
        and config.reward_model.model_path is None
    ):
        yield "training.offload.params", "there is no critic, no reward model and no reference beside the policy"


def _cluster(config: RunConfig) -> Why:
    if config.cluster.kind == "local":
        for key in ("address", "num_workers"):
            yield f"cluster.{key}", "cluster.kind is local"
        if config.training.trainer == "single":
            yield "cluster.max_restarts", "training.trainer is single: there are no ranks to start again"
    elif config.cluster.num_workers is not None:
        yield "training.num_processes", "cluster.num_workers says how many ranks Ray starts"


def _elsewhere(config: RunConfig) -> Why:
    r, functions = config.actor_rollout_ref, config.reward_model.functions
    if config.diagnostics.on_alarm != "rollback":
        for key in ("max_interventions", "healthy_every_phases"):
            yield f"diagnostics.{key}", f"diagnostics.on_alarm is {config.diagnostics.on_alarm}, not rollback"
    if config.reward_model.model_path is None and not config.needs_critic:
        yield "reward_model.reward_batch_size", "there is neither a reward model nor a critic"
        if not r.use_dynamic_bsz:
            yield (
                "actor_rollout_ref.max_tokens_per_micro_batch",
                "use_dynamic_bsz is false and there is neither a reward model nor a critic",
            )
    if not config.data.eval_files:
        for key in EVAL_KEYS:
            yield f"eval.{key}", "data.eval_files is empty"
    if config.eval.temperature == 0:
        for key in ("top_p", "top_k"):
            yield f"eval.{key}", "eval.temperature is 0: greedy"
    if not functions:
        for key in ("timeout_seconds", "workers"):
            yield f"reward_model.{key}", "there is no reward function"
