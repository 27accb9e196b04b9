"""Optimizer steps over time: the schedule, skipped steps, an optimizer that comes back, and learning itself."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.adam import Adam

from klimb.learn import Roles
from klimb.models.load import critic_from
from klimb.ranks import ALONE
from klimb.types import Batch, TrainBatch
from klimb.update import Schedule, Tally, Trainable, Work, _step, update
from tests.tiny_models import adamw, apart_roles, make_phase, make_recipe, split_of, tiny_model, train_batch, weights_of

RECIPE = make_recipe(adv_estimator="gae", temperature=0.8)


@pytest.fixture(scope="module")
def batch(roles: Roles) -> Batch:
    return make_phase(roles.actor, [1.0, 0.0, 0.5, 0.2, None, 2.0, -1.0], temperature=0.8)


@pytest.fixture(scope="module")
def roles() -> Roles:
    """Read only: copied before training."""
    return apart_roles()


def poisoned(train: TrainBatch) -> TrainBatch:
    advantages = train.advantages.clone()
    i, t = train.mask.nonzero()[0].tolist()
    advantages[i, t] = math.inf
    returns = train.returns
    assert returns is not None
    returns = returns.clone()
    returns[i, t] = math.nan
    return replace(train, advantages=advantages, returns=returns)


def test_a_non_finite_step_is_skipped_counted_and_still_advances_the_schedule(batch: Batch, roles: Roles) -> None:
    recipe = RECIPE
    own = Roles(actor=copy.deepcopy(roles.actor), reference=None, critic=copy.deepcopy(roles.critic))
    cut = split_of(batch, step=4, micro=2, epochs=2)
    train = poisoned(train_batch(batch, cut, own, recipe))
    assert own.critic is not None
    actor, critic = adamw(own.actor, 1e-3, "linear", 8), adamw(own.critic, 1e-3, "linear", 8)
    bad = next(m for m in cut[0] if 0 in torch.cat(m).tolist())
    before = [weights_of(own.actor), weights_of(own.critic)]
    metrics = update(actor, critic, train, [[bad]], recipe, 0.0)
    assert metrics["policy/skipped_steps"] == metrics["value/skipped_steps"] == 1
    assert torch.equal(weights_of(own.actor), before[0])
    assert torch.equal(weights_of(own.critic), before[1])
    assert (actor.steps, critic.steps) == (1, 1)
    assert not actor.optimizer.state
    assert "policy/grad_norm" not in metrics
    assert all(math.isfinite(v) for k, v in metrics.items() if k in ("policy/loss", "value/loss"))
    # Two epochs of two steps: one of each epoch is skipped, the others are made and finite.
    metrics = update(actor, critic, train, cut, recipe, 0.0)
    assert metrics["policy/skipped_steps"] == metrics["value/skipped_steps"] == 2
    assert (actor.steps, critic.steps) == (5, 5)
    assert weights_of(own.actor).isfinite().all()
    assert not torch.equal(weights_of(own.actor), before[0])
    assert math.isfinite(metrics["policy/grad_norm"])


def test_case_LR_01_the_schedule_counts_optimizer_steps(roles: Roles) -> None:
    """Ten phases of 8 rows, steps of 2, two epochs: 80 steps."""
    phase = make_phase(roles.actor, [1.0, 0.0] * 4, max_tokens=3)
    own = Roles(actor=copy.deepcopy(roles.actor), reference=None, critic=None)
    actor = adamw(own.actor, 1e-5, "linear", 80)
    recipe = replace(RECIPE, adv_estimator="grpo")
    cut = split_of(phase, step=2, micro=2, epochs=2)
    train = train_batch(phase, cut, own, recipe)
    for turn in range(1, 11):
        update(actor, None, train, cut, recipe, 0.0)
        used = actor.optimizer.param_groups[0]["lr"]
        assert used == pytest.approx(1e-5 * (1 - (8 * turn - 1) / 80), abs=1e-12)
        if turn in (5, 9):
            assert actor.lr == pytest.approx({5: 5e-6, 9: 1e-6}[turn], abs=1e-12)
    assert actor.steps == 80
    assert actor.lr == 0.0


@pytest.mark.parametrize(
    ("kind", "warmup", "want"),
    [
        ("constant", 0, {0: 1.0, 5: 1.0, 100: 1.0}),
        ("constant", 3, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 50: 1.0}),
        ("linear", 0, {0: 1.0, 5: 0.5, 9: 0.1, 10: 0.0, 30: 0.0}),
        ("linear", 2, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 6: 0.5, 10: 0.0}),
        ("cosine", 0, {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0, 2: 0.5 * (1 + math.cos(0.2 * math.pi))}),
        ("cosine", 2, {0: 1 / 3, 2: 1.0, 6: 0.5, 10: 0.0}),
    ],
)
def test_the_rate_of_every_step(kind: str, warmup: int, want: dict[int, float]) -> None:
    schedule = Schedule(peak=2.0, kind=kind, num_steps=10, warmup=warmup)
    for step, share in want.items():
        assert schedule.lr(step) == pytest.approx(2.0 * share, abs=1e-12)
    steps = [schedule.lr(i) for i in range(warmup, 12)]
    assert steps == sorted(steps, reverse=True)


def test_case_CR_05_an_optimizer_that_comes_back_goes_on_with_moments_and_rate(batch: Batch, roles: Roles) -> None:
    """One weight, given gradients, real Adam behind Trainable; after two updates into a fresh one."""
    cut = split_of(batch, step=7, micro=4)
    work = Work.of(train_batch(batch, cut, roles, RECIPE), cut[0][0], RECIPE, ALONE)

    def fresh(value: float) -> Trainable:
        module = nn.Linear(1, 1, bias=False)
        module.weight.data.fill_(value)
        schedule = Schedule(peak=0.1, kind="linear", num_steps=4, warmup=0)
        return Trainable(module=module, optimizer=Adam(module.parameters(), lr=0.1), schedule=schedule)

    def step(trainable: Trainable, gradient: float) -> float:
        weight = next(trainable.module.parameters())
        (weight.sum() * gradient).backward()
        _step(trainable, True, "policy", {}, Tally(), work)
        return float(weight.detach())

    first = fresh(1.0)
    seen = [step(first, g) for g in (1.0, 1.0)]
    second = fresh(seen[-1])
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.steps = first.steps
    resumed = [step(second, g) for g in (-0.5, -0.5)]
    straight = [step(first, g) for g in (-0.5, -0.5)]
    want = [0.900000001, 0.82500000175, 0.7992173317585, 0.7937996498046]
    assert seen + straight == pytest.approx(want, abs=1e-6)
    assert resumed == straight


def test_the_critic_learns_a_fixed_batch_while_the_actor_rests(batch: Batch, roles: Roles) -> None:
    own = Roles(actor=roles.actor, reference=None, critic=critic_from(tiny_model()))
    recipe = RECIPE
    cut = split_of(batch, step=7, micro=4)
    train = train_batch(batch, cut, own, recipe)
    assert own.critic is not None
    critic, before = adamw(own.critic, 3e-3), weights_of(roles.actor)
    losses = [update(None, critic, train, cut, recipe, 0.0)["value/loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(weights_of(roles.actor), before)
    assert "policy/loss" not in update(None, critic, train, cut, recipe, 0.0)


def test_the_actor_makes_rewarded_answers_likelier(roles: Roles) -> None:
    phase = make_phase(roles.actor, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    own = Roles(actor=copy.deepcopy(roles.actor), reference=None, critic=None)
    recipe = make_recipe()
    cut = split_of(phase, step=8, micro=4)
    before = train_batch(phase, cut, own, recipe)
    actor = adamw(own.actor, 1e-3)
    for _ in range(3):
        update(actor, None, before, cut, recipe, 0.0)
    after = train_batch(phase, cut, own, recipe)
    change = (after.old_logprobs - before.old_logprobs).sum(dim=1)
    good = phase.rewards == 1.0
    assert (change[good] > 0).all()
    assert change[good].mean() > change[~good].mean() + 0.1


def test_a_train_batch_without_a_token_moves_nothing_but_the_schedule(batch: Batch, roles: Roles) -> None:
    """Old momentum must not step on an empty gradient."""
    own = Roles(actor=copy.deepcopy(roles.actor), reference=None, critic=copy.deepcopy(roles.critic))
    cut = split_of(batch, step=4, micro=2)
    train = train_batch(batch, cut, own, RECIPE)
    assert own.critic is not None
    actor, critic = adamw(own.actor, 1e-2), adamw(own.critic, 1e-2)
    update(actor, critic, train, cut, RECIPE, 0.0)
    before = [weights_of(own.actor), weights_of(own.critic)]
    metrics = update(actor, critic, replace(train, mask=torch.zeros_like(train.mask)), cut, RECIPE, 0.0)
    assert torch.equal(weights_of(own.actor), before[0])
    assert torch.equal(weights_of(own.critic), before[1])
    assert (actor.steps, critic.steps) == (4, 4)
    assert metrics["policy/skipped_steps"] == metrics["value/skipped_steps"] == 0
