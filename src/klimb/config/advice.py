"""Advice: what an experienced colleague would say about a config. Never a silent change.

Each has a code, explained in docs/advice.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from klimb.config.counts import Counts
from klimb.config.posture import Posture
from klimb.config.schema import GROUP_ESTIMATORS, RunConfig


@dataclass(frozen=True, kw_only=True)
class Advice:
    code: str
    text: str


def advise(config: RunConfig, posture: Posture, counts: Counts) -> list[Advice]:
    """Everything worth saying, most consequential first."""
    found = [
        *_posture(config, posture),
        *_controller(config, posture, counts),
        *_batch(config, counts),
        *_inert(config, posture),
        *_run(config, posture),
    ]
    return [Advice(code=code, text=text) for code, text in found]


def _posture(config: RunConfig, p: Posture) -> list[tuple[str, str]]:
    a, out = config.algorithm, list[tuple[str, str]]()
    if p.explicit and p.kl_in_reward:
        out.append(
            (
                "A-KL-CROSS",
                "explicit posture with KL in the reward: the penalty passes through advantages and "
                "whitening, so the coefficient no longer acts directly; costs the steadiness the forward buys",
            )
        )
    if not p.explicit and p.kl_in_loss:
        out.append(
            (
                "A-KL-CROSS",
                "cached posture with KL in the loss: fine, but the usual cached setting keeps KL in "
                "the reward with a small fixed coefficient; expect a reference forward in either case",
            )
        )
    if p.kl_in_loss and not p.kl_loss_estimator.endswith("+") and p.kl_loss_estimator != "k2":
        out.append(
            (
                "A-KL-GRADIENT",
                f"kl_estimator {p.kl_loss_estimator} as a loss has "
                + ("zero expected" if p.kl_loss_estimator == "k1" else "a biased")
                + f" gradient; {p.kl_loss_estimator}+ has the same value and k2's gradient",
            )
        )
    if p.explicit:
        return out
    if p.needs_reference and p.kl_type == "adaptive":
        out.append(
            (
                "A-ADAPTIVE-CACHED",
                "adaptive controller in the cached posture: prefer fixed, or relax target_kl "
                "or horizon; the measured KL comes from the sampler and lags",
            )
        )
    if p.needs_reference and not 0.01 <= p.init_kl_coef <= 0.05:
        out.append(("A-COEF-CACHED", f"coefficient {p.init_kl_coef:g} in the cached posture; 0.01 to 0.05 is usual"))
    if a.adv_estimator not in GROUP_ESTIMATORS and p.lam > 0.92:
        out.append(("A-LAM-CACHED", f"lam {p.lam:g} in the cached posture; 0.90 damps what noisy ratios pass on"))
    if p.reward_clip is None:
        out.append(
            (
                "A-CLIP-CACHED",
                "no reward clip in the cached posture; [-5, 5] keeps one outlier from moving all",
            )
        )
    if config.training.lr != "auto" and p.lr > 7e-7:
        out.append(
            (
                "A-LR-CACHED",
                f"lr {p.lr:g} in the cached posture; take 50 to 70% of what the explicit posture bears",
            )
        )
    if config.actor_rollout_ref.max_tokens >= 8192 and p.needs_reference and p.init_kl_coef < 0.05:
        out.append(
            (
                "A-LONG-CACHED",
                "responses of 8K and more in the cached posture: ratios drift along the answer; "
                "a stronger KL coefficient compensates",
            )
        )
    return out


def _controller(config: RunConfig, p: Posture, counts: Counts) -> list[tuple[str, str]]:
    if not p.needs_reference or p.kl_type != "adaptive":
        return []
    kl, out = config.algorithm.kl_ctrl, list[tuple[str, str]]()
    if not 0.01 <= kl.target_kl <= 0.05:
        out.append(("A-TARGET-KL", f"target_kl {kl.target_kl:g} nats per token; 0.01 to 0.05 is usual"))
    factor = reach(config, counts)
    if factor < 10:
        out.append(
            (
                "A-KL-LAG",
                f"in {counts.phases} phases the coefficient can move by a factor of {factor:.2g} at most; "
                f"unless it starts near its answer it cannot reach target_kl. A horizon near "
                f"{10 * counts.phase:,} moves it 2% a phase",
            )
        )
    return out


def reach(config: RunConfig, counts: Counts) -> float:
    """The largest factor by which the adaptive coefficient can grow over the whole run."""
    per_phase = 1 + 0.2 * counts.phase / config.algorithm.kl_ctrl.horizon
    return per_phase**counts.phases


def _batch(config: RunConfig, counts: Counts) -> list[tuple[str, str]]:
    if 4 <= counts.batch_ratio <= 8:
        return []
    return [
        (
            "A-BATCH-RATIO",
            f"rollout batch : train batch is {counts.batch_ratio:g}; 4 to 8 optimizer steps per phase "
            "are usual: fewer waste the rollout, more push the ratio out of its clip range",
        )
    ]


def _inert(config: RunConfig, p: Posture) -> list[tuple[str, str]]:
    """Keys the user set that nothing reads in this combination."""
    a, kl = config.algorithm, config.algorithm.kl_ctrl
    group = a.adv_estimator in GROUP_ESTIMATORS
    r = config.actor_rollout_ref
    no_kl = not p.needs_reference
    fixed = no_kl or p.kl_type == "fixed"
    checks: list[tuple[object, str, str, bool, str]] = [
        (a, "algorithm", "gamma", group, f"{a.adv_estimator} has one reward per answer"),
        (a, "algorithm", "lam", group, f"{a.adv_estimator} uses no lambda"),
        (a, "algorithm", "norm_by_std", a.adv_estimator != "grpo", "only grpo reads it"),
        (a, "algorithm", "kl_estimator", no_kl, "there is no KL term"),
        *(
            (
                kl,
                "algorithm.kl_ctrl",
                k,
                fixed,
                "the controller is not adaptive" if not no_kl else "there is no KL term",
            )
            for k in ("horizon", "target_kl", "min_kl_coef", "max_kl_coef")
        ),
        (kl, "algorithm.kl_ctrl", "init_kl_coef", no_kl, "there is no KL term"),
        (kl, "algorithm.kl_ctrl", "type", no_kl, "there is no KL term"),
        *(
            (config.critic, "critic", k, group, f"{a.adv_estimator} has no critic")
            for k in ("model_path", "lr", "value_clip", "warmup_phases")
        ),
        (
            r,
            "actor_rollout_ref",
            "max_tokens_per_micro_batch",
            not r.use_dynamic_bsz and config.reward_model.model_path is None,
            "use_dynamic_bsz is false and there is no reward model",
        ),
        (r, "actor_rollout_ref", "ref_model_path", no_kl, "there is no KL term"),
        *(
            (config.eval, "eval", k, not config.data.eval_files, "data.eval_files is empty")
            for k in (
                "before_training",
                "every_episodes",
                "max_prompts",
                "temperature",
                "top_p",
                "top_k",
                "samples_per_prompt",
                "metric",
            )
        ),
        *(
            (
                config.reward_model,
                "reward_model",
                k,
                not config.reward_model.functions,
                "there is no reward function",
            )
            for k in ("timeout_seconds", "workers")
        ),
    ]
    return [
        ("A-INERT", f"{section}.{key} is set but nothing reads it here: {why}")
        for owner, section, key, inert, why in checks
        if inert and key in getattr(owner, "model_fields_set", ())
    ]


def _run(config: RunConfig, p: Posture) -> list[tuple[str, str]]:
    out = list[tuple[str, str]]()
    if not config.data.eval_files:
        out.append(("A-NO-EVAL", "data.eval_files is empty: nothing will tell a better model from a hacked reward"))
    if not p.explicit:
        out.append(
            (
                "A-FIRST-RUN",
                "if this is the first run on this data: start explicit, collect the reward, KL and "
                "eval curves, then try cached against them",
            )
        )
    return out
