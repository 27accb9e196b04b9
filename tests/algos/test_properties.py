"""What must hold for every batch: padding, order and splitting change nothing, and the maths' own identities."""

import math
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from klimb.algos.advantage import gae, grpo, rloo, token_rewards
from klimb.algos.correction import mismatch
from klimb.algos.kl import ESTIMATORS, AdaptiveKLController, FixedKLController, episode_mean, estimate
from klimb.algos.loss import LossStats, policy_loss, value_loss
from klimb.algos.ops import LOSS_AGGS, masked_mean, replace, token_weights, whiten

often = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
aggregations = st.sampled_from(list(LOSS_AGGS))
estimators = st.sampled_from(list(ESTIMATORS))
junk_values = st.sampled_from([math.nan, 77.0, math.inf, -math.inf])


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All [B, T] but scores and last_values [B]."""

    new: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    mask: Tensor
    scores: Tensor
    last_values: Tensor

    def rows(self, index: Tensor) -> "Inputs":
        return Inputs(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def with_junk(self, junk: float) -> "Inputs":
        return self._each_plane(lambda x: torch.where(self.mask, x, junk), self.mask)

    def padded(self, left: int, right: int, junk: float) -> "Inputs":
        mask = pad(self.mask, (left, right), value=False)
        return self._each_plane(lambda x: pad(x, (left, right), value=junk), mask)

    def _each_plane(self, change, mask: Tensor) -> "Inputs":
        planes = ("new", "old", "ref", "advantages", "values", "old_values", "returns")
        rest = {"mask": mask, "scores": self.scores, "last_values": self.last_values}
        return Inputs(**{name: change(getattr(self, name)) for name in planes}, **rest)


@st.composite
def batches(draw) -> Inputs:
    """Masks with gaps and rows without a token; ratios on both sides of every clip bound."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    g = torch.Generator().manual_seed(draw(seeds))

    def plane(scale: float = 1.0) -> Tensor:
        return torch.randn(rows, width, generator=g) * scale

    old, values = -plane().abs(), plane()
    return Inputs(
        new=old + plane(0.7),
        old=old,
        ref=old + plane(0.5),
        advantages=plane(),
        values=values,
        old_values=values + plane(0.6),
        returns=plane(),
        mask=torch.rand(rows, width, generator=g) < draw(st.sampled_from([0.3, 0.7, 1.0])),
        scores=torch.randn(rows, generator=g),
        last_values=torch.randn(rows, generator=g),
    )


@dataclass(frozen=True)
class Outcome:
    loss: float
    policy_gradient: Tensor
    value_gradient: Tensor
    parts: list[tuple[LossStats, LossStats]]


def run(x: Inputs, loss_agg: str, kl_name: str, split: list[Tensor]) -> Outcome:
    """Policy, KL and value loss with their gradients, accumulated over the micro-batches of `split`."""
    new, values = x.new.clone().requires_grad_(), x.values.clone().requires_grad_()
    weights = token_weights(x.mask, loss_agg, max_tokens=16)
    total, parts = 0.0, []
    for index in split:
        mask = x.mask[index]
        policy, stats = policy_loss("clip", new[index], x.old[index], x.advantages[index], mask)
        kl = estimate(kl_name, replace(new[index], mask), replace(x.ref[index], mask))
        critic, critic_stats = value_loss(values[index], x.old_values[index], x.returns[index], 0.5, mask)
        loss = (weights[index] * (policy + 0.3 * kl + critic)).sum()
        loss.backward()
        total += loss.item()
        parts.append((stats, critic_stats))
    assert new.grad is not None
    assert values.grad is not None
    return Outcome(total, new.grad, values.grad, parts)


def everything(x: Inputs) -> list[Tensor]:
    """Every [B, T] result without gradient, and the scalars as one tensor."""
    kl = estimate("k3", replace(x.new, x.mask), replace(x.ref, x.mask))
    rewards = token_rewards(x.scores, x.mask, x.new - x.ref, 0.1)
    scalars = [masked_mean(x.advantages, x.mask), episode_mean(kl, x.mask)]
    scalars += [torch.tensor(v) for v in mismatch(x.new, x.old, x.mask).values()]
    planes = [rewards, *gae(rewards, x.values, x.mask, 0.97, 0.9, x.last_values), whiten(x.advantages, x.mask)]
    return [*planes, torch.stack(scalars)]


def whole(x: Inputs) -> list[Tensor]:
    return [torch.arange(len(x.mask))]


@often
@given(batches(), aggregations, estimators, junk_values)
def test_what_lies_behind_the_mask_reaches_nothing(x, loss_agg, kl_name, junk):
    clean, dirty = x.with_junk(0.0), x.with_junk(junk)
    expected, got = run(clean, loss_agg, kl_name, whole(x)), run(dirty, loss_agg, kl_name, whole(x))
    assert got.loss == expected.loss
    assert torch.equal(got.policy_gradient, expected.policy_gradient)
    assert torch.equal(got.value_gradient, expected.value_gradient)
    assert torch.count_nonzero(got.policy_gradient[~x.mask]) == 0
    assert torch.count_nonzero(got.value_gradient[~x.mask]) == 0
    for a, b in zip(everything(dirty), everything(clean), strict=True):
        assert torch.equal(a, b)


@often
@given(batches(), aggregations, estimators, st.integers(0, 4), st.integers(0, 4), junk_values)
def test_padding_width_changes_nothing(x, loss_agg, kl_name, left, right, junk):
    width = x.mask.shape[1]
    wide = x.padded(left, right, junk)
    expected, got = run(x, loss_agg, kl_name, whole(x)), run(wide, loss_agg, kl_name, whole(x))
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    for a, b in [
        (got.policy_gradient, expected.policy_gradient),
        (got.value_gradient, expected.value_gradient),
        *zip(everything(wide)[:-1], everything(x)[:-1], strict=True),
    ]:
        assert_close(a[:, left : left + width], b, atol=1e-6, rtol=1e-6)
        assert torch.count_nonzero(a[:, :left]) == torch.count_nonzero(a[:, left + width :]) == 0
    assert_close(everything(wide)[-1], everything(x)[-1], atol=1e-6, rtol=1e-5)


@often
@given(batches(), aggregations, estimators, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(x, loss_agg, kl_name, rng):
    order = torch.tensor(rng.sample(range(len(x.mask)), len(x.mask)))
    expected = run(x, loss_agg, kl_name, whole(x))
    got = run(x.rows(order), loss_agg, kl_name, whole(x))
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    for a, b in [
        (got.policy_gradient, expected.policy_gradient),
        (got.value_gradient, expected.value_gradient),
        *zip(everything(x.rows(order))[:-1], everything(x)[:-1], strict=True),
    ]:
        assert_close(a, b[order], atol=1e-6, rtol=1e-6)


@often
@given(batches(), aggregations, estimators, st.randoms(use_true_random=False))
def test_micro_batches_change_neither_loss_nor_gradient_nor_metrics(x, loss_agg, kl_name, rng):
    rows = rng.sample(range(len(x.mask)), len(x.mask))
    split = []
    while rows:
        size = rng.randint(1, len(rows))
        split.append(torch.tensor(rows[:size]))
        rows = rows[size:]
    expected, got = run(x, loss_agg, kl_name, whole(x)), run(x, loss_agg, kl_name, split)
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    assert_close(got.policy_gradient, expected.policy_gradient, atol=1e-6, rtol=1e-6)
    assert_close(got.value_gradient, expected.value_gradient, atol=1e-6, rtol=1e-6)
    for which in (0, 1):
        (target,) = [part[which] for part in expected.parts]
        stats = [part[which] for part in got.parts]
        for name, pair in target.sums.items():
            for i in (0, 1):
                added = sum(s.sums[name][i].item() for s in stats)
                assert added == pytest.approx(pair[i].item(), abs=1e-6, rel=1e-5)
        for name, largest in target.maxima.items():
            assert max(s.maxima[name].item() for s in stats) == largest.item()


@often
@given(batches(), estimators)
def test_ratio_one_means_no_clipping(x, kl_name):
    outcome = run(
        Inputs(**{**vars(x), "old": x.new, "ref": x.new, "old_values": x.values}),
        "token-mean",
        kl_name,
        whole(x),
    )
    (stats, critic_stats) = outcome.parts[0]
    for name in ("clip_fraction_low", "clip_fraction_high", "approx_kl", "clamped_share", "ratio_abs_dev"):
        assert stats.sums[name][0].item() == 0.0
    assert critic_stats.sums["clip_fraction"][0].item() == 0.0
    weights = token_weights(x.mask, "token-mean")
    # KL against itself pulls nowhere, but for k1, whose gradient is 1 everywhere
    pull = 0.3 if kl_name == "k1" else 0.0
    expected = torch.where(x.mask, weights * (pull - x.advantages), 0.0)
    assert_close(outcome.policy_gradient, expected, atol=1e-6, rtol=1e-6)
    expected = torch.where(x.mask, weights * (x.values - x.returns), 0.0)
    assert_close(outcome.value_gradient, expected, atol=1e-6, rtol=1e-6)


@st.composite
def grouped(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, group ids in any order, valid rows (an invalid one holds NaN)."""
    n = draw(st.integers(1, 12))
    ids = draw(st.lists(st.sampled_from([0, 1, -7, 2**40]), min_size=n, max_size=n))
    rewards = draw(st.lists(st.floats(-10, 10, width=32), min_size=n, max_size=n))
    valid = torch.tensor(draw(st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n)))
    return torch.where(valid, torch.tensor(rewards), math.nan), torch.tensor(ids), valid


@often
@given(grouped(), st.floats(-1000, 1000, width=32))
def test_equal_rewards_in_a_group_give_exactly_zero(rows, reward):
    _, groups, valid = rows
    rewards = torch.where(valid, reward, math.nan)
    for estimator in (grpo, rloo):
        assert torch.count_nonzero(estimator(rewards, groups, valid=valid)) == 0


@often
@given(grouped(), st.integers(-64, 64))
def test_a_constant_added_to_every_reward_changes_nothing(rows, shift):
    rewards, groups, valid = rows
    rewards = (rewards * 64).round() / 64  # so that the shifted rewards are exact in float32
    for estimator in (grpo, rloo):
        before, after = (estimator(r, groups, valid=valid) for r in (rewards, rewards + shift))
        assert torch.equal(before, after)


@often
@given(grouped(), st.randoms(use_true_random=False))
def test_group_advantages_follow_their_rows_and_sum_to_zero(rows, rng):
    rewards, groups, valid = rows
    order = torch.tensor(rng.sample(range(len(groups)), len(groups)))
    for estimator in (grpo, rloo):
        advantages = estimator(rewards, groups, valid=valid)
        assert_close(
            estimator(rewards[order], groups[order], valid=valid[order]), advantages[order], atol=1e-5, rtol=1e-5
        )
        assert torch.count_nonzero(advantages[~valid]) == 0
        for g in groups.unique():
            assert advantages[groups == g].sum().item() == pytest.approx(0.0, abs=1e-4)


@often
@given(batches())
def test_gae_undiscounted_is_reward_to_go_minus_value(x):
    rewards = torch.where(x.mask, x.advantages, math.nan)
    advantages, returns = gae(rewards, x.values, x.mask, 1.0, 1.0, x.last_values)
    gains = replace(rewards, x.mask)
    to_go = gains.flip(1).cumsum(1).flip(1) + x.last_values[:, None]
    assert_close(advantages, replace(to_go - x.values, x.mask), atol=1e-5, rtol=1e-5)
    assert_close(returns, replace(to_go, x.mask), atol=1e-5, rtol=1e-5)


@often
@given(batches())
def test_whitened_tokens_have_mean_zero_and_variance_one(x):
    assume(x.mask.sum() >= 2)
    tokens = whiten(x.advantages * 5 + 3, x.mask)[x.mask]
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert tokens.var().item() == pytest.approx(1.0, abs=1e-3)


@often
@given(
    st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 4096)), max_size=30),
    st.integers(0, 30),
)
def test_the_controller_stays_in_its_clamps_and_resumes_where_it_was(observed, stop):
    straight = AdaptiveKLController(0.05, 0.02, 1000.0, 0.04, 0.07)
    resumed = AdaptiveKLController(0.05, 0.02, 1000.0, 0.04, 0.07)
    for i, (kl, n) in enumerate(observed):
        if i == stop:
            state = resumed.state_dict()
            resumed = AdaptiveKLController(0.06, 0.02, 1000.0, 0.04, 0.07)
            resumed.load_state_dict(state)
        before = straight.coef
        straight.update(kl, n)
        resumed.update(kl, n)
        assert 0.04 <= straight.coef <= 0.07
        assert straight.coef == resumed.coef
        if math.isfinite(kl):
            assert (straight.coef - before) * (kl - 0.02) >= 0.0
        else:
            assert straight.coef == before


@often
@given(st.lists(st.floats(), max_size=5), st.floats(0.0, 5.0))
def test_the_fixed_controller_never_moves(observed, coef):
    controller = FixedKLController(coef)
    for kl in observed:
        controller.update(kl, 100)
    assert controller.coef == coef
