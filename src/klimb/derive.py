"""What a config makes of the maths: everything of a run that is settings rather than models or data.

Built at the start, and again when the guard changes a setting in the middle of a run.
"""

from __future__ import annotations

import torch

from klimb.algos.kl import AdaptiveKLController, FixedKLController, KLController, PIKLController
from klimb.batch import Split
from klimb.config.algorithm import CorrectionConfig, OverlongPenalty
from klimb.config.counts import Counts, may_skip_old
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig
from klimb.follow import Follow, Target
from klimb.recipe import Correction, Overlong, Recipe, Reject
from klimb.update import Schedule


def make_recipe(config: RunConfig, posture: Posture, dtype: torch.dtype) -> Recipe:
    a = config.algorithm
    return Recipe(
        explicit=posture.explicit,
        temperature=config.actor_rollout_ref.temperature,
        dtype=dtype,
        adv_estimator=a.adv_estimator,
        whiten=a.estimator.whitened,
        norm_by_std=a.norm_by_std,
        gamma=a.gamma,
        lam=posture.lam,
        policy_loss=a.policy_loss,
        loss_args=a.loss_settings,
        loss_agg=a.loss_agg,
        max_tokens=config.actor_rollout_ref.max_tokens,
        entropy_coef=a.entropy_coef,
        value_clip=config.critic.value_clip,
        kl_in_reward=posture.kl_in_reward,
        kl_in_loss=posture.kl_in_loss,
        kl_reward_estimator=posture.kl_reward_estimator,
        kl_loss_estimator=posture.kl_loss_estimator,
        max_grad_norm=config.training.max_grad_norm,
        filter_groups=a.filter_groups,
        bootstrap=a.truncated == "bootstrap",
        exclude=a.truncated == "exclude",
        overlong=Overlong(penalty=a.truncated.penalty, buffer=a.truncated.overlong_buffer)
        if isinstance(a.truncated, OverlongPenalty)
        else None,
        correction=_correction(a.rollout_correction),
        filtration=a.policy_filtration.strategy,
        filtration_power=a.policy_filtration.power,
        may_skip_old=may_skip_old(config, posture),
    )


def _correction(c: CorrectionConfig) -> Correction:
    reject = None if c.reject is None else Reject(criterion=c.reject.criterion, lo=c.reject.lo, hi=c.reject.hi)
    return Correction(weights=c.weights, cap=c.cap, low=c.low, normalize=c.normalize, reject=reject)


def make_controller(config: RunConfig, posture: Posture) -> KLController:
    kl = config.algorithm.kl_ctrl
    if posture.kl_type == "fixed":
        return FixedKLController(posture.init_kl_coef)
    if posture.kl_type == "pi":
        return PIKLController(posture.init_kl_coef, kl.target_kl, kl.min_kl_coef, kl.max_kl_coef)
    return AdaptiveKLController(posture.init_kl_coef, kl.target_kl, kl.horizon, kl.min_kl_coef, kl.max_kl_coef)


def make_follow(config: RunConfig, posture: Posture) -> Follow:
    kl = config.algorithm.kl_ctrl
    if posture.kl_type == "fixed" or not posture.needs_reference:
        return Follow(None)
    return Follow(
        Target(
            kind=posture.kl_type,
            target_kl=kl.target_kl,
            min_kl_coef=kl.min_kl_coef,
            max_kl_coef=kl.max_kl_coef,
        )
    )


def actor_steps(config: RunConfig, counts: Counts) -> int:
    """The policy's schedule is shorter by the steps that the critic makes alone."""
    alone = config.critic.warmup_phases * counts.steps_per_phase if config.needs_critic else 0
    return max(1, counts.optimizer_steps - alone)


def make_schedule(config: RunConfig, num_steps: int, peak: float) -> Schedule:
    t = config.training
    return Schedule(peak=peak, kind=t.lr_scheduler, num_steps=num_steps, warmup=round(t.warmup_ratio * num_steps))


def make_split(config: RunConfig, counts: Counts) -> Split:
    """How the update cuts a phase."""
    r, dynamic = config.actor_rollout_ref, config.actor_rollout_ref.use_dynamic_bsz
    return Split(
        rows_per_step=counts.train_batch,
        rows_per_micro=None if dynamic else config.training.micro_batch_size,
        budget=r.max_tokens_per_micro_batch if dynamic else None,
        epochs=config.algorithm.ppo_epochs,
    )
