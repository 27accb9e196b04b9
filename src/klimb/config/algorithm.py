"""`algorithm`: the switch, the estimator, the loss, the KL, and what is left out of the update."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from klimb.config.base import Auto, NonNegative, Positive, PositiveFloat, Section, Unit
from klimb.config.facts import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss


def _one_of(key: str, table: Mapping[str, object]) -> Callable[[Any], Any]:
    def check(name: Any) -> Any:
        if name is not None and (not isinstance(name, str) or name not in table):
            near = difflib.get_close_matches(str(name), table, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"algorithm.{key} is {name!r}; allowed: {', '.join(table)}{hint}")
        return name

    return check


class OverlongPenalty(Section):
    """`algorithm.truncated` as a mapping."""

    penalty: PositiveFloat
    """Taken off the reward of a cut-off answer."""
    overlong_buffer: Positive | None = None
    """Tokens before the limit over which the penalty grows from 0, for every answer; null: all of it, if cut off."""


class RejectConfig(Section):
    """`algorithm.rollout_correction.reject`: rows too far from the engine that wrote them leave the update."""

    criterion: Literal["seq_mean_k1", "seq_mean_k3", "token_veto"]
    """What is measured: the row's geometric mean ratio, its mean k3 (nats), or its smallest token ratio."""
    lo: PositiveFloat | None = None
    """Lowest value kept (seq_mean_k1, token_veto); null: no bound."""
    hi: PositiveFloat | None = None
    """Highest value kept (seq_mean_k1, seq_mean_k3); null: no bound."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        bounds = {"seq_mean_k1": ("lo", "hi"), "seq_mean_k3": ("hi",), "token_veto": ("lo",)}[self.criterion]
        if all(getattr(self, name) is None for name in bounds):
            raise ValueError(
                f"algorithm.rollout_correction.reject: {self.criterion} needs {' or '.join(bounds)}; without a bound "
                "nothing is rejected"
            )
        for name in {"lo", "hi"} - set(bounds):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"algorithm.rollout_correction.reject.{name} is set, but {self.criterion} has only {bounds[0]}; "
                    "leave it out"
                )
        low, high = self.lo or 0.0, float("inf") if self.hi is None else self.hi
        if self.criterion != "seq_mean_k3" and not low < 1.0 < high:
            raise ValueError(
                f"algorithm.rollout_correction.reject: {self.criterion} is 1 where engine and trainer agree, which lo "
                f"{low:g} to hi {high:g} would reject; needed: lo < 1 < hi"
            )
        return self


class CorrectionConfig(Section):
    """`algorithm.rollout_correction`: engine and trainer give one token different probabilities; rho is their ratio."""

    weights: Literal["none", "token", "sequence", "band"] = "none"
    """Weight of a token's loss: token min(rho, cap); sequence min(product over the row, cap); band rho inside
    [low, cap], else 0. Explicit posture only: the cached ratio already holds rho."""
    cap: PositiveFloat = 2.0
    """Largest weight."""
    low: PositiveFloat | None = None
    """band: smallest weight that counts; null: 1 / cap."""
    normalize: bool = False
    """Divide the weights by their mean over the phase."""
    reject: RejectConfig | None = None
    """{criterion, lo, hi}: rows outside leave the update; null: none do."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        low = 1.0 / self.cap if self.low is None else self.low
        if self.weights == "band" and low >= self.cap:
            raise ValueError(
                f"algorithm.rollout_correction: band from low {low:g} to cap {self.cap:g} is empty; needed: low < cap"
                + (" (low is 1 / cap when not set, so cap must be above 1)" if self.low is None else "")
            )
        return self


class FiltrationConfig(Section):
    """`algorithm.policy_filtration`: which answers of a prompt are trained on (arXiv 2409.06957)."""

    strategy: Literal["none", "best_of_n", "best_random", "best_worst", "power"] = "none"
    """N rows are drawn with replacement from the N answers to a prompt, by rank or reward; none: all, as they are."""
    power: NonNegative = 2.0
    """power: weight |reward|^power."""


class KLConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty and what steers it."""

    type: Literal["auto", "fixed", "adaptive", "pi"] = "auto"
    """fixed: the coefficient stays; adaptive: it follows the measured KL, slowly; pi: it follows without the lag
    (proportional-integral on log KL); auto: by posture."""
    horizon: PositiveFloat = 10000.0
    """Episodes over which the adaptive controller corrects; smaller reacts faster."""
    target_kl: PositiveFloat = 0.02
    """KL per token, in nats, that adaptive and pi steer to."""
    init_kl_coef: NonNegative | Auto = "auto"
    """Coefficient at the start; auto: 0.05 explicit, 0.02 cached."""
    min_kl_coef: PositiveFloat = 0.001
    """Lower clamp of a coefficient that is steered."""
    max_kl_coef: PositiveFloat = 5.0
    """Upper clamp of a coefficient that is steered."""
    allow_both: bool = False
    """Allow KL in the reward and in the loss at once, where it counts twice."""


class AlgorithmConfig(Section):
    """`algorithm`: the switch, the estimator, the loss and the KL."""

    use_pf_ppo: bool = True
    """true: explicit posture, old log-probs by a forward of the training stack. false: cached, the sampler's.
    (Upstream verl uses the same name for policy filtration, another thing.)"""
    adv_estimator: Annotated[str, BeforeValidator(_one_of("adv_estimator", ESTIMATORS))] = "gae"
    """gae (needs a critic); grpo, rloo, reinforce_pp_baseline, opo, grpo_passk, maxrl (compare the answers to one
    prompt); reinforce_pp; remax (one more greedy answer per prompt). docs/algorithms.md has the formulas."""
    norm_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr. GRPO."""
    filter_groups: bool = False
    """Leave prompts whose answers all got the same reward out of the update (dynamic sampling, DAPO)."""
    policy_loss: Annotated[str, BeforeValidator(_one_of("policy_loss", POLICY_LOSSES))] = "clip"
    """clip (PPO with asymmetric bounds and dual clip), gspo, cispo, gmpo, sapo or reinforce; docs/algorithms.md."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Settings that only one policy loss has: sapo {tau_positive: 1.0, tau_negative: 1.05}."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number; see docs/algorithms.md."""
    gamma: Unit = 1.0
    """Discount per token (gae, reinforce_pp)."""
    lam: Unit | Auto = "auto"
    """GAE's lambda; auto: 0.95 explicit, 0.90 cached."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 3.0
    """Bound of the loss for negative advantages, times the advantage; null: off."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    ppo_epochs: Positive = 1
    """Passes over each rollout phase."""
    truncated: Literal["score", "bootstrap", "exclude"] | OverlongPenalty = "score"
    """Episodes cut off by max_tokens: score (as computed); bootstrap (the critic's value goes on); exclude (no token of
    it is trained on, its reward stays in the group's baseline); {penalty: x} takes x off; {overlong_buffer: n,
    penalty: x} takes off a share of x that grows over the last n tokens."""
    use_kl_in_reward: bool | Auto = "auto"
    """Subtract KL from the token rewards; auto: true in the cached posture."""
    use_kl_loss: bool | Auto = "auto"
    """Add KL as a loss term; auto: true in the explicit posture."""
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "auto"
    """auto: k3+ as a loss, k1 in the reward."""
    kl_ctrl: KLConfig = KLConfig()
    rollout_correction: CorrectionConfig = CorrectionConfig()
    policy_filtration: FiltrationConfig = FiltrationConfig()

    @property
    def estimator(self) -> Estimator:
        """The facts of the estimator in use."""
        return ESTIMATORS[self.adv_estimator]

    @property
    def loss(self) -> PolicyLoss:
        """The facts of the policy loss in use."""
        return POLICY_LOSSES[self.policy_loss]

    @property
    def loss_settings(self) -> dict[str, float | None]:
        """Everything the policy loss takes by keyword."""
        shared: dict[str, float | None] = {key: getattr(self, key) for key in self.loss.reads}
        return shared | self.loss.args.model_validate(self.loss_args).model_dump()

    @model_validator(mode="after")
    def _check_loss_args(self) -> Self:
        known = self.loss.args.model_fields
        for key in self.loss_args:
            if key not in known:
                owners = [
                    f"policy_loss {name} has it" for name, f in POLICY_LOSSES.items() if key in f.args.model_fields
                ]
                allowed = f"allowed: {', '.join(known)}" if known else f"{self.policy_loss} has none of its own"
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean '{near[0]}'?" if near else "".join(f"; {owner}" for owner in owners)
                raise ValueError(f"algorithm.loss_args: unknown setting '{key}'; {allowed}{hint}")
        try:
            self.loss.args.model_validate(self.loss_args)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(
                f"algorithm.loss_args.{first['loc'][0]} is {first['input']!r}; allowed: "
                f"{first['msg'].replace('Input should be', '').strip()}"
            ) from None
        return self
