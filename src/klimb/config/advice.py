"""Advice: what an experienced colleague would say about a config. Never a silent change.

Each has a code, explained in docs/advice.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from klimb.config.algorithm import OverlongPenalty
from klimb.config.counts import Counts
from klimb.config.inert import inert
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig

REINFORCE_STEPS = 4
DIVIDES_BY_SPREAD = ("grpo_passk", "reinforce_pp_baseline")
GSPO_WIDE = 0.02
"""Above it a bound on a sequence's mean ratio is as good as none."""


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
        *_algorithm(config, posture, counts),
        *(("A-INERT", f"{key} is set but nothing reads it here: {why}") for key, why in inert(config, posture, counts)),
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
    if p.needs_reference and p.kl_type != "fixed":
        out.append(
            (
                "A-ADAPTIVE-CACHED",
                f"{p.kl_type} controller in the cached posture: prefer fixed, or relax target_kl "
                "or horizon; the measured KL comes from the sampler and lags",
            )
        )
    if p.needs_reference and not 0.01 <= p.init_kl_coef <= 0.05:
        out.append(("A-COEF-CACHED", f"coefficient {p.init_kl_coef:g} in the cached posture; 0.01 to 0.05 is usual"))
    if "lam" in a.estimator.reads and p.lam > 0.92:
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
    if not p.needs_reference or p.kl_type == "fixed":
        return []
    kl, out = config.algorithm.kl_ctrl, list[tuple[str, str]]()
    if not 0.01 <= kl.target_kl <= 0.05:
        out.append(("A-TARGET-KL", f"target_kl {kl.target_kl:g} nats per token; 0.01 to 0.05 is usual"))
    factor = reach(config, counts)
    if p.kl_type == "adaptive" and factor < 10:
        usual = 10 * counts.phase
        quicker = (
            f"A horizon near {usual:,} moves it 2% a phase"
            if kl.horizon > 1.2 * usual
            else "It moves 2% a phase or more already: more phases, or another init_kl_coef"
        )
        out.append(
            (
                "A-KL-LAG",
                f"in {counts.phases} phases the coefficient can move by a factor of {factor:.3g} at most; "
                f"unless it starts near its answer it cannot reach target_kl. {quicker}",
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


def _algorithm(config: RunConfig, p: Posture, counts: Counts) -> list[tuple[str, str]]:
    a, out = config.algorithm, list[tuple[str, str]]()
    if a.policy_loss == "gspo" and max(a.clip_ratio_low, a.clip_ratio_high) > GSPO_WIDE:
        out.append(
            (
                "A-CLIP-GSPO",
                f"gspo clips the mean ratio of a whole answer, which moves far less than a token's; bounds of "
                f"{a.clip_ratio_low:g} and {a.clip_ratio_high:g} never act. The paper uses 3e-4 and 4e-4",
            )
        )
    if a.adv_estimator == "maxrl" and (p.kl_in_reward or isinstance(a.truncated, OverlongPenalty)):
        what = "KL in the reward" if p.kl_in_reward else "a price of length"
        out.append(
            (
                "A-MAXRL",
                f"maxrl divides by a group's mean reward; {what} can make that mean negative, which turns the "
                "sign of every advantage round",
            )
        )
    divides = (a.adv_estimator == "grpo" and a.norm_by_std) or a.adv_estimator in DIVIDES_BY_SPREAD
    if divides and p.kl_in_reward:
        out.append(
            (
                "A-KL-SPREAD",
                f"{a.adv_estimator} divides by the spread of rewards, and with KL in the reward equal scores have one: "
                "the noise of the KL becomes advantages of size 1. Put the KL into the loss, or take rloo",
            )
        )
    if a.policy_loss == "reinforce" and counts.steps_per_phase > REINFORCE_STEPS:
        out.append(
            (
                "A-REINFORCE-STEPS",
                "reinforce has no ratio, so from the first optimizer step on its gradient is that of another policy; "
                f"a phase makes {counts.steps_per_phase}, {REINFORCE_STEPS} or fewer are safer",
            )
        )
    return out


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
