"""What `auto` becomes: the two postures of `algorithm.use_pf_ppo`, in one typed record.

Everything downstream reads these values from `Posture`, never from the config's `auto`-able fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from klimb.config.schema import RunConfig
from klimb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Posture:
    """The resolved values. explicit: old log-probs by a forward; cached: the sampler's."""

    explicit: bool
    lr: float
    lam: float
    kl_in_reward: bool
    kl_in_loss: bool
    kl_loss_estimator: str
    kl_reward_estimator: str
    kl_type: Literal["fixed", "adaptive", "pi"]
    init_kl_coef: float
    reward_clip: tuple[float, float] | None
    eval_every: int

    @property
    def needs_reference(self) -> bool:
        return self.kl_in_reward or self.kl_in_loss

    @property
    def name(self) -> str:
        return "explicit" if self.explicit else "cached"


AUTO_KEYS = {
    "algorithm.lam": "lam",
    "algorithm.use_kl_in_reward": "kl_in_reward",
    "algorithm.use_kl_loss": "kl_in_loss",
    "algorithm.kl_ctrl.type": "kl_type",
    "algorithm.kl_ctrl.init_kl_coef": "init_kl_coef",
    "reward_model.clip": "reward_clip",
    "training.lr": "lr",
    "eval.every_episodes": "eval_every",
}
"""Config key -> the field of Posture that says what its `auto` became (kl_estimator has one for each place)."""


def resolve(config: RunConfig) -> Posture:
    """Fill every `auto` that posture or length decides; checks that need the filled values are made here."""
    a, kl = config.algorithm, config.algorithm.kl_ctrl
    explicit, in_reward, in_loss = a.use_pf_ppo, _kl_in_reward(config), _kl_in_loss(config)
    posture = Posture(
        explicit=explicit,
        lr=(1e-6 if explicit else 5e-7) if config.training.lr == "auto" else config.training.lr,
        lam=(0.95 if explicit else 0.90) if a.lam == "auto" else a.lam,
        kl_in_reward=in_reward,
        kl_in_loss=in_loss,
        kl_loss_estimator="k3+" if a.kl_estimator == "auto" or not in_loss else a.kl_estimator,
        kl_reward_estimator="k1" if a.kl_estimator == "auto" or not in_reward else a.kl_estimator,
        kl_type=("adaptive" if explicit else "fixed") if kl.type == "auto" else kl.type,
        init_kl_coef=(0.05 if explicit else 0.02) if kl.init_kl_coef == "auto" else kl.init_kl_coef,
        reward_clip=(None if explicit else (-5.0, 5.0))
        if config.reward_model.clip == "auto"
        else config.reward_model.clip,
        eval_every=max(1, -(-config.training.total_episodes // 10))
        if config.eval.every_episodes == "auto"
        else config.eval.every_episodes,
    )
    _check_kl(config, posture)
    return posture


def _kl_in_reward(config: RunConfig) -> bool:
    """`auto` puts the KL into the reward in the cached posture, unless the user put it into the loss."""
    a = config.algorithm
    if a.use_kl_in_reward != "auto":
        return a.use_kl_in_reward
    return not a.use_pf_ppo and a.use_kl_loss is not True


def _kl_in_loss(config: RunConfig) -> bool:
    """`auto` puts the KL into the loss in the explicit posture, unless the user put it into the reward."""
    a = config.algorithm
    if a.use_kl_loss != "auto":
        return a.use_kl_loss
    return a.use_pf_ppo and a.use_kl_in_reward is not True


def filled(config: RunConfig, posture: Posture) -> RunConfig:
    """The config with every `auto` of posture and length replaced by its value; loads again to the same run."""
    a, kl = config.algorithm, config.algorithm.kl_ctrl
    return config.model_copy(
        update={
            "algorithm": a.model_copy(
                update={
                    "lam": posture.lam,
                    "use_kl_in_reward": posture.kl_in_reward,
                    "use_kl_loss": posture.kl_in_loss,
                    "kl_estimator": _estimator(a.kl_estimator, posture),
                    "kl_ctrl": kl.model_copy(update={"type": posture.kl_type, "init_kl_coef": posture.init_kl_coef}),
                }
            ),
            "reward_model": config.reward_model.model_copy(update={"clip": posture.reward_clip}),
            "training": config.training.model_copy(update={"lr": posture.lr}),
            "eval": config.eval.model_copy(update={"every_episodes": posture.eval_every}),
        }
    )


def _estimator(configured: str, posture: Posture) -> str:
    """The one in use; `auto` stays where KL is in both places with an estimator each, or in none."""
    if configured != "auto" or posture.kl_in_loss == posture.kl_in_reward:
        return configured
    return posture.kl_loss_estimator if posture.kl_in_loss else posture.kl_reward_estimator


def _check_kl(config: RunConfig, posture: Posture) -> None:
    kl, n = config.algorithm.kl_ctrl, config.actor_rollout_ref.rollout_batch_size
    if posture.kl_in_reward and posture.kl_in_loss and not kl.allow_both:
        raise ConfigError(
            "algorithm.use_kl_in_reward and algorithm.use_kl_loss are both true: the KL would count twice. "
            "Switch one off, or say algorithm.kl_ctrl.allow_both=true"
        )
    if posture.kl_type == "fixed" or not posture.needs_reference:
        return
    if not kl.min_kl_coef <= posture.init_kl_coef <= kl.max_kl_coef:
        raise ConfigError(
            f"algorithm.kl_ctrl: init_kl_coef {posture.init_kl_coef} lies outside min_kl_coef {kl.min_kl_coef} "
            f"to max_kl_coef {kl.max_kl_coef}; needed: min <= init <= max"
        )
    if posture.kl_type == "adaptive" and 0.2 * n / kl.horizon >= 1:
        raise ConfigError(
            f"algorithm.kl_ctrl.horizon {kl.horizon:g} is too short for rollout_batch_size {n}: one phase would "
            f"change the coefficient by {0.2 * n / kl.horizon:.0%}; needed: 0.2 x rollout_batch_size / horizon < 1, "
            f"so a horizon above {0.2 * n:g}"
        )
