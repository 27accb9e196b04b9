"""Optimizer steps on tiny models: invariance to the cut, the schedule, what is skipped, and that every knob acts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from klimb.algos.loss import LossStats
from klimb.batch import collate
from klimb.learn import Roles
from klimb.models.forward import token_scores
from klimb.types import Batch, TrainBatch
from klimb.update import Schedule, Tally, Trainable, update
from tests.tiny_models import (
    PAD,
    apart_roles,
    make_phase,
    make_prompts,
    make_recipe,
    make_requests,
    make_roles,
    sample,
    scored,
    split_of,
    tiny_model,
    train_batch,
)

REWARDS: list[float | None] = [1.0, 0.0, 0.5, 0.2, None, 2.0, -1.0]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_phase(tiny_model(), REWARDS, temperature=0.8)


@pytest.fixture(scope="module")
def roles() -> Roles:
    """Read only: nothing here moves a weight."""
    return apart_roles()


def recipe_of(**changes: Any) -> Any:
    defaults: dict[str, Any] = {"temperature": 0.8, "adv_estimator": "gae"}
    return make_recipe(**{**defaults, **changes})


class Recording(torch.optim.SGD):
    """Keeps the gradient of every step, and leaves the weights where they are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(
            torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        )


def recording(module: nn.Module) -> tuple[Trainable, list[Tensor]]:
    optimizer = Recording(module)
    schedule = Schedule(peak=1.0, kind="constant", num_steps=1, warmup=0)
    return Trainable(module=module, optimizer=optimizer, schedule=schedule), optimizer.seen


def moved(
    batch: Batch,
    roles: Roles,
    recipe: Any,
    kl_coef: float = 0.0,
    micro: int = 2,
    step: int = 7,
    budget: int | None = None,
    epochs: int = 1,
    change: Callable[[TrainBatch], TrainBatch] = lambda b: b,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Gradients that reach the optimizers of actor and critic in the first step of a phase, and its metrics."""
    own = roles if recipe.adv_estimator == "gae" else replace(roles, critic=None)
    cut = split_of(batch, step, micro, budget, epochs)
    train = change(train_batch(batch, cut, own, recipe, kl_coef))
    actor, gradients = recording(own.actor)
    critic, of_critic = (None, [torch.zeros(0)]) if own.critic is None else recording(own.critic)
    metrics = update(actor, critic, train, cut, recipe, kl_coef)
    return gradients[0], of_critic[0], metrics


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# Cuts: invariance


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_cases_LN_02_and_OS_01_the_cut_into_micro_batches_changes_no_gradient(
    batch: Batch, roles: Roles, loss_agg: str
) -> None:
    """Seven rows in one step, every gradient and every metric, KL and entropy terms included."""
    recipe = recipe_of(loss_agg=loss_agg, kl_in_loss=True, entropy_coef=0.01, value_clip=0.2)
    whole = moved(batch, roles, recipe, kl_coef=0.1, micro=7)
    for cut in ({"micro": 1}, {"micro": 2}, {"micro": 3}, {"budget": 40}, {"budget": 20}):
        got = moved(batch, roles, recipe, kl_coef=0.1, **cut)  # type: ignore[arg-type]
        assert distance(got[0], whole[0]) < 2e-6
        assert distance(got[1], whole[1]) < 2e-6
        assert got[2] == pytest.approx(whole[2], rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_case_OS_01_a_smaller_last_train_batch_has_its_own_denominator(
    batch: Batch, roles: Roles, loss_agg: str
) -> None:
    """Seven rows in steps of four and three: each has the gradient of its rows as a phase of their own."""
    recipe = recipe_of(loss_agg=loss_agg)
    cut = split_of(batch, step=4, micro=2)
    assert [sum(len(r) for r in minibatch) for minibatch in cut[0]] == [4, 3]
    train = train_batch(batch, cut, roles, recipe)
    assert roles.critic is not None
    for module, which in ((roles.actor, 0), (roles.critic, 1)):
        trainable, both = recording(module)
        pair = (trainable, None) if which == 0 else (None, trainable)
        update(*pair, train, cut, recipe, 0.0)
        assert len(both) == 2
        for gradient, minibatch in zip(list(both), cut[0], strict=True):
            rows = torch.cat(minibatch)
            update(*pair, train.select(rows), [[(torch.arange(len(rows)),)]], recipe, 0.0)
            assert distance(gradient, both[-1]) < 2e-6


def test_the_width_of_the_padding_changes_no_gradient(batch: Batch, roles: Roles) -> None:
    def wider(train: TrainBatch) -> TrainBatch:
        two = {
            name: nn.functional.pad(x, (0, 5), value=value)
            for name, value in [
                ("tokens", 9), ("attention", False), ("mask", False), ("sampler_logprobs", 7.0), ("policy_version", -1),
                ("old_logprobs", 77.0), ("ref_logprobs", 77.0), ("values", 77.0),
                ("advantages", 77.0), ("returns", 77.0),
            ]
            if (x := getattr(train, name)) is not None
        }  # fmt: skip
        return replace(train, **two)

    a, b = moved(batch, roles, recipe_of()), moved(batch, roles, recipe_of(), change=wider)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def test_a_failed_row_contributes_nothing(roles: Roles) -> None:
    """The gradient with a failed episode is that of the phase without it."""
    samples = sample(roles.actor, make_requests(make_prompts([3, 7]), 3), temperature=0.8)
    rewards = [1.0, 0.0, 0.5, -1.0, 2.0, 0.0]
    for estimator in ("gae", "grpo", "rloo"):
        recipe = recipe_of(adv_estimator=estimator)
        with_failed = collate(scored([*samples, replace(samples[0], index=6)], [*rewards, None]), PAD)
        without = collate(scored(samples, rewards), PAD)
        a, b = (moved(x, roles, recipe, micro=7) for x in (with_failed, without))
        assert distance(a[0], b[0]) < 1e-6
        if estimator == "gae":
            assert distance(a[1], b[1]) < 1e-6


def test_a_train_batch_of_failures_makes_no_step(roles: Roles) -> None:
    failed = make_phase(roles.actor, [None] * 4)
    recipe = recipe_of(kl_in_loss=True, entropy_coef=0.1)
    cut = split_of(failed, 2, 2)
    train = train_batch(failed, cut, roles, recipe, 0.1)
    actor, of_actor = recording(roles.actor)
    assert roles.critic is not None
    critic, of_critic = recording(roles.critic)
    metrics = update(actor, critic, train, cut, recipe, 0.1)
    assert of_actor == of_critic == []
    assert actor.steps == critic.steps == 2
    assert metrics["policy/skipped_steps"] == 0
    assert "policy/entropy" not in metrics
    assert "policy/first_ratio_dev_max" not in metrics


def test_equal_rewards_without_kl_give_no_policy_gradient(roles: Roles) -> None:
    phase = make_phase(roles.actor, [0.7] * 8)
    for estimator in ("grpo", "rloo"):
        assert not moved(phase, roles, recipe_of(adv_estimator=estimator))[0].any()
        assert moved(phase, roles, recipe_of(adv_estimator=estimator, kl_in_loss=True), 0.1)[0].any()


# Ratios and mismatch


@pytest.mark.parametrize("explicit", [True, False])
def test_the_first_forward_measures_the_old_log_probs(batch: Batch, roles: Roles, explicit: bool) -> None:
    recipe = recipe_of(explicit=explicit, kl_in_loss=True)
    metrics = moved(batch, roles, recipe, 0.1, step=4, epochs=2)[2]
    assert metrics["policy/first_ratio_dev_max"] <= (1e-6 if explicit else 2e-4)
    assert metrics["policy/first_ratio_dev_mean"] <= (1e-6 if explicit else 2e-5)
    assert ("mismatch/kl" in metrics) == (not explicit)
    assert ("kl/k3_trainer" in metrics) == (not explicit)
    if not explicit:
        assert {
            f"mismatch/{n}" for n in ("k3", "ppl_ratio", "ess", "probs_diff_mean", "max_log_ratio")
        } <= metrics.keys()
        assert metrics["mismatch/ess"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_case_LP_02_dropout_in_the_config_leaves_the_first_ratio_at_one(name: str) -> None:
    dropout = {"gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}, "llama": {"attention_dropout": 0.5}}
    model = tiny_model(name, **dropout[name])
    phase = make_phase(model, [1.0, -0.5, 2.0, 0.0])
    own = make_roles(model)
    assert any(isinstance(m, nn.Dropout) and m.p == 0.5 for m in model.modules()) == (name == "gpt2")
    for micro in (1, 2, 4):
        metrics = moved(phase, own, recipe_of(adv_estimator="rloo"), micro=micro, step=4)[2]
        assert metrics["policy/first_ratio_dev_max"] <= 1e-6
        assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-9)
        assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)


def test_a_wrong_old_log_prob_is_seen_in_the_first_ratio(batch: Batch, roles: Roles) -> None:
    metrics = moved(batch, roles, recipe_of(), change=lambda b: replace(b, old_logprobs=b.old_logprobs - 0.5))[2]
    assert metrics["policy/first_ratio_dev_mean"] == pytest.approx(math.exp(0.5) - 1, abs=1e-4)


# Every knob acts


KNOBS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "entropy_coef": ({}, {"entropy_coef": 0.05}, "actor"),
    "dual_clip": ({}, {"loss_args": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": None}}, "actor"),
    "clip_ratio_low": ({}, {"loss_args": {"clip_ratio_low": 0.9, "clip_ratio_high": 0.2, "dual_clip": 3.0}}, "actor"),
    "clip_ratio_high": ({}, {"loss_args": {"clip_ratio_low": 0.2, "clip_ratio_high": 9.0, "dual_clip": 3.0}}, "actor"),
    "kl_in_loss": ({}, {"kl_in_loss": True}, "actor"),
    "kl_loss_estimator": ({"kl_in_loss": True}, {"kl_in_loss": True, "kl_loss_estimator": "k3"}, "actor"),
    "kl_in_reward": ({}, {"kl_in_reward": True}, "both"),
    "kl_reward_estimator": ({"kl_in_reward": True}, {"kl_in_reward": True, "kl_reward_estimator": "k3"}, "both"),
    "gamma": ({}, {"gamma": 0.8}, "both"),
    "lam": ({"lam": 0.95}, {"lam": 0.5}, "both"),
    "value_clip": ({}, {"value_clip": 0.05}, "critic"),
    "max_grad_norm": ({}, {"max_grad_norm": 0.01}, "both"),
    "temperature": ({}, {"temperature": 1.3}, "actor"),
    "norm_by_std": ({"adv_estimator": "grpo"}, {"adv_estimator": "grpo", "norm_by_std": False}, "actor"),
    "adv_estimator": ({"adv_estimator": "grpo"}, {"adv_estimator": "rloo"}, "actor"),
    **{f"loss_agg {name}": ({}, {"loss_agg": name}, "both") for name in AGGREGATIONS[1:]},
    "max_tokens": (
        {"loss_agg": AGGREGATIONS[3]},
        {"loss_agg": AGGREGATIONS[3], "max_tokens": 40},
        "both",
    ),
}


def off_policy(train: TrainBatch) -> TrainBatch:
    """Old log-probs and values as if the weights had moved, so that the clips have something to do."""
    noise = torch.randn(train.mask.shape, generator=torch.Generator().manual_seed(0)) * train.mask
    values = None if train.values is None else train.values + 0.5 * noise
    return replace(train, old_logprobs=train.old_logprobs + noise, values=values)


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_changes_the_step_it_should_and_no_other(batch: Batch, roles: Roles, knob: str) -> None:
    base, changed, where = KNOBS[knob]
    a, b = (moved(batch, roles, recipe_of(**c), 0.5, micro=7, change=off_policy) for c in (base, changed))
    assert (distance(b[0], a[0]) > 1e-4) == (where in ("actor", "both"))
    if "adv_estimator" not in changed:
        assert (distance(b[1], a[1]) > 1e-4) == (where in ("critic", "both"))


def test_case_KE_04_the_kl_coefficient_acts_where_kl_was_placed_and_nowhere_else(batch: Batch, roles: Roles) -> None:
    def pair(**placement: bool) -> tuple[Tensor, Tensor, dict[str, float]]:
        return moved(batch, roles, recipe_of(**placement), 0.5)

    off, loss, reward, both = (
        pair(),
        pair(kl_in_loss=True),
        pair(kl_in_reward=True),
        pair(kl_in_loss=True, kl_in_reward=True),
    )
    assert distance(loss[0], off[0]) > 1e-3
    assert torch.equal(loss[1], off[1]), "the critic's returns hold no KL"
    assert distance(reward[1], off[1]) > 1e-3
    assert "policy/kl_loss" not in off[2]
    assert "policy/kl_loss" not in reward[2]
    # Both: the gradient of the loss term comes on top of what the reward does, once.
    assert distance(both[0] - reward[0], loss[0] - off[0]) < 1e-4
    assert torch.equal(both[1], reward[1])
    # The term by hand: coefficient x token mean, with the gradient of k2.
    whole = (batch.tokens, batch.attention, batch.mask, 0.8)
    assert roles.reference is not None
    d = token_scores(roles.actor, *whole).logprobs - token_scores(roles.reference, *whole).logprobs.detach()
    parameters = list(roles.actor.parameters())
    by_hand = torch.autograd.grad(0.5 * (d.square() / 2)[batch.mask].mean(), parameters)
    assert distance(loss[0] - off[0], torch.cat([g.flatten() for g in by_hand])) < 1e-4
    k3 = (torch.exp(-d) - 1 + d)[batch.mask].mean()
    assert loss[2]["policy/kl_loss"] == pytest.approx(float(k3.detach()), rel=1e-4)


def test_the_gradient_is_clipped_once_on_the_whole_step(batch: Batch, roles: Roles) -> None:
    free = moved(batch, roles, recipe_of(), micro=1)
    clipped = moved(batch, roles, recipe_of(max_grad_norm=0.05), micro=1)
    assert float(clipped[0].norm()) == pytest.approx(0.05, rel=1e-3)
    assert float(clipped[1].norm()) == pytest.approx(0.05, rel=1e-3)
    assert (
        clipped[2]["policy/grad_norm"] == free[2]["policy/grad_norm"] == pytest.approx(float(free[0].norm()), rel=1e-3)
    )
    assert distance(clipped[0] / clipped[0].norm(), free[0] / free[0].norm()) < 1e-3


# Metrics


def test_case_MT_01_metrics_are_sums_over_micro_batches_divided_once() -> None:
    def stats(tokens: int, clipped: int, kl: float) -> LossStats:
        n = torch.tensor(float(tokens))
        sums = {"clip_fraction_low": (torch.tensor(float(clipped)), n), "approx_kl": (torch.tensor(kl), n)}
        return LossStats(sums=sums, maxima={"ratio_max": torch.tensor(kl)})

    parts, whole = Tally(), Tally()
    parts.add_stats("policy", stats(4, 1, 0.4))
    parts.add_stats("policy", stats(1, 1, 0.5))
    whole.add_stats("policy", stats(5, 2, 0.9))
    for tally in (parts, whole):
        assert tally.metrics()["policy/clip_fraction_low"] == pytest.approx(0.4, abs=1e-6)
        assert tally.metrics()["policy/approx_kl"] == pytest.approx(0.18, abs=1e-6)
    assert parts.metrics()["policy/ratio_max"] == pytest.approx(0.5)
    empty = Tally()
    empty.add_stats("policy", stats(0, 0, 0.0))
    assert "policy/approx_kl" not in empty.metrics()


def test_entropy_is_the_mean_over_sampled_tokens(batch: Batch, roles: Roles) -> None:
    whole = token_scores(roles.actor, batch.tokens, batch.attention, batch.mask, 0.8).entropy.detach()
    want = float(whole.sum() / batch.mask.sum())
    assert moved(batch, roles, recipe_of(), micro=1)[2]["policy/entropy"] == pytest.approx(want, rel=1e-5)
