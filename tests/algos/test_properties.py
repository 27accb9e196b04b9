"""What must hold for every batch: padding, order and splitting change nothing, and the maths' own identities."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from klimb.algos.advantage import gae, token_rewards
from klimb.algos.correction import CRITERIA, KINDS, keep_rows, mismatch, weights
from klimb.algos.kl import AdaptiveKLController, FixedKLController, episode_mean, estimate
from klimb.algos.loss import POLICY_LOSSES, policy_loss
from klimb.algos.ops import LOSS_AGGS, masked_mean, replace, token_weights, whiten
from klimb.algos.table import ADVANTAGES
from tests.algos.batches import (
    Algorithm,
    Inputs,
    Outcome,
    algorithms,
    batches,
    cut,
    junk_values,
    kl_estimators,
    make_inputs,
    often,
    packed,
    phase_of,
    run,
    trimmed,
    whole,
)

WHOLE_ROWS = ("gspo", "gmpo")
"""Losses with a mean over the row's tokens."""


def everything(x: Inputs) -> list[Tensor]:
    """Every [B, T] result without gradient, and the scalars as one tensor."""
    kl = estimate("k3", replace(x.new, x.mask), replace(x.ref, x.mask))
    rewards = token_rewards(x.scores, x.mask, x.new - x.ref, 0.1)
    scalars = [masked_mean(x.advantages, x.mask), episode_mean(kl, x.mask)]
    scalars += [torch.tensor(v) for v in mismatch(x.new, x.old, x.mask).values()]
    planes = [rewards, *gae(rewards, x.values, x.mask, 0.97, 0.9, x.last_values), whiten(x.advantages, x.mask)]
    phase = phase_of(x)
    planes += [advantages(phase) for advantages in ADVANTAGES.values()]
    planes += [weights(x.new, x.old, x.mask, kind, 1.7, 0.6, normalize=True) for kind in KINDS]
    kept = [keep_rows(x.new, x.old, x.mask, criterion, 0.7, 1.3) for criterion in CRITERIA]
    planes += [x.mask * rows.float()[:, None] for rows in kept]
    return [*planes, torch.stack(scalars)]


def nothing_changed(got: Outcome, expected: Outcome) -> None:
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    assert_close(got.policy_gradient, expected.policy_gradient, atol=1e-6, rtol=1e-6)
    assert_close(got.value_gradient, expected.value_gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_aggregation_and_estimator_ignores_how_its_rows_are_laid_out(name, loss_agg):
    for seed, estimator in enumerate(ADVANTAGES):
        algorithm = Algorithm(policy_loss=name, loss_agg=loss_agg, adv_estimator=estimator)
        x = make_inputs(6, 7, 0.6, seed)
        expected = run(x, algorithm, "k3+", whole(x))
        assert torch.count_nonzero(expected.policy_gradient) > 0
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        other = x.rows(order).padded(2, 3, math.nan)
        got = run(other, algorithm, "k3+", packed(other, 9))
        back = (got.policy_gradient[order.argsort(), 2:9], got.value_gradient[order.argsort(), 2:9])
        nothing_changed(Outcome(got.loss, *back, got.parts), expected)


@often
@given(batches(), algorithms, kl_estimators, junk_values)
def test_what_lies_behind_the_mask_reaches_nothing(x, algorithm, kl_name, junk):
    clean, dirty = x.with_junk(0.0), x.with_junk(junk)
    expected, got = run(clean, algorithm, kl_name, whole(x)), run(dirty, algorithm, kl_name, whole(x))
    assert got.loss == expected.loss
    assert torch.equal(got.policy_gradient, expected.policy_gradient)
    assert torch.equal(got.value_gradient, expected.value_gradient)
    assert torch.count_nonzero(got.policy_gradient[~x.mask]) == 0
    assert torch.count_nonzero(got.value_gradient[~x.mask]) == 0
    for a, b in zip(everything(dirty), everything(clean), strict=True):
        assert torch.equal(a, b)


@often
@given(batches(), algorithms, kl_estimators, st.integers(0, 4), st.integers(0, 4), junk_values)
def test_padding_width_changes_nothing(x, algorithm, kl_name, left, right, junk):
    width = x.mask.shape[1]
    wide = x.padded(left, right, junk)
    expected, got = run(x, algorithm, kl_name, whole(x)), run(wide, algorithm, kl_name, whole(wide))
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    (*planes, scalars), (*wide_planes, wide_scalars) = everything(x), everything(wide)
    for a, b in [
        (got.policy_gradient, expected.policy_gradient),
        (got.value_gradient, expected.value_gradient),
        *zip(wide_planes, planes, strict=True),
    ]:
        assert_close(a[:, left : left + width], b, atol=1e-6, rtol=1e-6)
        assert torch.count_nonzero(a[:, :left]) == torch.count_nonzero(a[:, left + width :]) == 0
    assert_close(wide_scalars, scalars, atol=1e-6, rtol=1e-5)


@often
@given(batches(), algorithms, kl_estimators, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(x, algorithm, kl_name, rng):
    order = torch.tensor(rng.sample(range(len(x.mask)), len(x.mask)))
    expected = run(x, algorithm, kl_name, whole(x))
    got = run(x.rows(order), algorithm, kl_name, whole(x))
    assert got.loss == pytest.approx(expected.loss, abs=1e-6, rel=1e-6)
    for a, b in [
        (got.policy_gradient, expected.policy_gradient),
        (got.value_gradient, expected.value_gradient),
        *zip(everything(x.rows(order))[:-1], everything(x)[:-1], strict=True),
    ]:
        assert_close(a, b[order], atol=1e-6, rtol=1e-6)


@often
@given(batches(), algorithms, kl_estimators, st.randoms(use_true_random=False))
def test_micro_batches_change_neither_loss_nor_gradient_nor_metrics(x, algorithm, kl_name, rng):
    expected, got = run(x, algorithm, kl_name, whole(x)), run(x, algorithm, kl_name, cut(x, rng))
    nothing_changed(got, expected)
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
@given(batches(), algorithms, kl_estimators, st.integers(1, 20))
def test_packing_by_a_budget_of_tokens_changes_nothing(x, algorithm, kl_name, budget):
    nothing_changed(run(x, algorithm, kl_name, packed(x, budget)), run(x, algorithm, kl_name, whole(x)))


@often
@given(batches(), algorithms, kl_estimators)
def test_where_no_row_must_stay_whole_tokens_may_stand_in_one_line(x, algorithm, kl_name):
    assume(algorithm.policy_loss not in WHOLE_ROWS and x.mask.any())
    given_advantages = ADVANTAGES[algorithm.adv_estimator](phase_of(x))
    expected = run(x, algorithm, kl_name, whole(x), given_advantages)
    weights = token_weights(x.mask, algorithm.loss_agg, max_tokens=16)[x.mask][None, :]
    new = x.new[x.mask][None, :].requires_grad_()
    old, advantages, ref = (plane[x.mask][None, :] for plane in (x.old, given_advantages, x.ref))
    loss, _ = policy_loss(algorithm.policy_loss, new, old, advantages, torch.ones_like(new, dtype=torch.bool))
    (weights * (loss + 0.3 * estimate(kl_name, new, ref))).sum().backward()
    assert new.grad is not None
    assert_close(new.grad[0], expected.policy_gradient[x.mask], atol=1e-6, rtol=1e-6)


@often
@given(batches(), algorithms, kl_estimators, st.integers(1, 4))
def test_the_number_of_ranks_changes_nothing(x, algorithm, kl_name, ranks):
    """Every rank has its own rows at its own width; only the weights come from the mask of all."""
    expected = run(x, algorithm, kl_name, whole(x))
    advantages = ADVANTAGES[algorithm.adv_estimator](phase_of(x))
    loss, policy, values = 0.0, torch.zeros_like(x.new), torch.zeros_like(x.new)
    for rank in range(ranks):
        mine = list(range(rank, len(x.mask), ranks))
        split = [trimmed(x, mine[i : i + 2]) for i in range(0, len(mine), 2)]
        if split:
            got = run(x, algorithm, kl_name, split, advantages)
            loss, policy, values = loss + got.loss, policy + got.policy_gradient, values + got.value_gradient
    nothing_changed(Outcome(loss, policy, values, []), expected)


@often
@given(batches(), algorithms, kl_estimators)
def test_ratio_one_means_no_clipping(x, algorithm, kl_name):
    same = Inputs(**{**vars(x), "old": x.new, "ref": x.new, "old_values": x.values})
    outcome = run(same, algorithm, kl_name, whole(x), x.advantages)
    (stats, critic_stats) = outcome.parts[0]
    unmoved = {"clip_fraction_low", "clip_fraction_high", "approx_kl", "clamped_share", "ratio_abs_dev"}
    for name in unmoved & stats.sums.keys():
        assert stats.sums[name][0].item() == 0.0
    assert critic_stats.sums["clip_fraction"][0].item() == 0.0
    weights = token_weights(x.mask, algorithm.loss_agg, max_tokens=16)
    # KL against itself pulls nowhere, but for k1, whose gradient is 1 everywhere
    pull = 0.3 if kl_name == "k1" else 0.0
    advantages = replace(x.advantages, x.mask)
    if algorithm.policy_loss == "gmpo":
        advantages = (advantages.sum(1) / x.mask.sum(1).clamp(min=1))[:, None]
    expected = torch.where(x.mask, weights * (pull - advantages), 0.0)
    assert_close(outcome.policy_gradient, expected, atol=1e-6, rtol=1e-6)
    expected = torch.where(x.mask, weights * (x.values - x.returns), 0.0)
    assert_close(outcome.value_gradient, expected, atol=1e-6, rtol=1e-6)


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
