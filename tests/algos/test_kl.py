"""KL estimators and controllers; the numbers of cases KC-01, KC-02, KE-01 to KE-04."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from klimb.algos.advantage import token_rewards
from klimb.algos.kl import ESTIMATORS, AdaptiveKLController, FixedKLController, episode_mean, estimate
from klimb.algos.loss import policy_loss
from klimb.algos.ops import masked_mean, replace, token_weights
from klimb.errors import CheckpointError, ConfigError

NAN = math.nan


def adaptive(init: float = 0.2, target: float = 6.0, horizon: float = 10000.0) -> AdaptiveKLController:
    return AdaptiveKLController(init, target, horizon, 0.001, 5.0)


@pytest.mark.parametrize(("kl", "coef"), [(12.0, 0.201024), (3.0, 0.198976), (6.3, 0.200256), (6.0, 0.2)])
def test_case_KC_01_one_update(kl, coef):
    controller = adaptive()
    controller.update(kl, 256)
    assert controller.coef == pytest.approx(coef, abs=1e-9)


def test_case_KC_01_three_updates_and_the_fixed_controller():
    controller, fixed = adaptive(), FixedKLController(0.2)
    for _ in range(3):
        controller.update(12.0, 256)
        fixed.update(12.0, 256)
    assert controller.coef == pytest.approx(0.2030877554835, abs=1e-9)
    assert fixed.coef == 0.2


def test_case_KC_02_the_controller_is_fed_the_divergence_from_the_reference():
    policy = tensor([[-1.0, -1.0], [-2.0, -0.5]])
    reference = tensor([[-1.5, -1.2], [-2.5, -1.0]])
    kl = episode_mean(estimate("k1", policy, reference), torch.ones(2, 2, dtype=torch.bool)).item()
    assert kl == pytest.approx(0.425, abs=1e-6)
    controller = adaptive(0.1, 0.5, 1000.0)
    controller.update(0.425, 2)
    assert controller.coef == pytest.approx(0.09997, abs=1e-9)


def test_case_KE_01_every_estimator_in_numbers():
    policy, reference = tensor([-1.0, -2.0, -0.5]), tensor([-1.5, -1.6, -0.9])
    mask = torch.ones(3, dtype=torch.bool)
    expected = {
        "k1": ([0.5, -0.4, 0.4], 0.1666666666667),
        "abs": ([0.5, 0.4, 0.4], 0.4333333333333),
        "k2": ([0.125, 0.08, 0.08], 0.095),
        "k3": ([0.1065306597126, 0.09182469764127, 0.07032004603564], 0.08955846779651),
    }
    for name, (per_token, mean) in expected.items():
        for variant in {name, name + "+"} & ESTIMATORS.keys():
            kl = estimate(variant, policy, reference)
            assert_close(kl, tensor(per_token), atol=1e-6, rtol=0)
            assert masked_mean(kl, mask).item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(("name", "gradient"), [("k3", 0.007427533894183), ("k3+", 0.0082708)])
def test_case_KE_02_the_kl_loss_pulls_towards_the_reference(name, gradient):
    theta = tensor(0.5, requires_grad=True)
    logits = torch.stack([theta, torch.zeros(())])
    new = torch.log_softmax(logits, 0)[0].reshape(1, 1)
    reference = torch.log_softmax(torch.zeros(2), 0)[0].reshape(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    token_loss, _ = policy_loss("clip", new, new.detach(), torch.zeros(1, 1), mask)
    kl = estimate(name, new, reference)
    assert kl.item() == pytest.approx(0.02233552623616, abs=1e-6)
    loss = (token_weights(mask, "token-mean") * (token_loss + 0.1 * kl)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.002233552623616, abs=1e-6)
    assert theta.grad is not None
    assert theta.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_case_KE_03_nan_behind_the_mask_reaches_nothing():
    policy = tensor([[-1.0, NAN]], requires_grad=True)
    reference = tensor([[-1.2, NAN]])
    mask = tensor([[True, False]])
    new, ref = replace(policy, mask), replace(reference, mask)
    assert episode_mean(estimate("k1", new, ref), mask).item() == pytest.approx(0.2, abs=1e-6)
    k3 = episode_mean(estimate("k3", new, ref), mask)
    assert k3.item() == pytest.approx(0.01873075307798, abs=1e-6)
    # the raw difference is NaN at the pad, and even so nothing of it is seen
    rewards = token_rewards(tensor([1.0]), mask, estimate("k1", policy, reference), 0.1)
    assert_close(rewards, tensor([[0.98, 0.0]]), atol=1e-6, rtol=0)
    k3.backward()
    assert policy.grad is not None
    assert_close(policy.grad, tensor([[1.0 - math.exp(-0.2), 0.0]]), atol=1e-6, rtol=0)


def test_case_KE_04_reward_and_loss_are_two_switches():
    kl, mask = tensor([[0.2, 0.3]]), torch.ones(1, 2, dtype=torch.bool)
    assert_close(token_rewards(tensor([1.0]), mask, kl, 0.1), tensor([[-0.02, 0.97]]), atol=1e-6, rtol=0)
    assert token_rewards(tensor([1.0]), mask).tolist() == [[0.0, 1.0]]
    term = 0.1 * (token_weights(mask, "token-mean") * kl).sum()
    assert term.item() == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize("name", ["k1+", "abs+", "k3+"])
def test_plus_estimators_have_the_value_of_the_plain_and_the_gradient_of_k2(name):
    reference = tensor([[-1.0, -2.0, -30.0, -0.5]])
    logprobs = tensor([[-1.4, -1.2, -0.1, -6.5]], requires_grad=True)
    kl = estimate(name, logprobs, reference)
    assert torch.equal(kl, estimate(name[:-1], logprobs, reference))
    kl.sum().backward()
    assert logprobs.grad is not None
    assert_close(logprobs.grad, (logprobs - reference).detach())


def test_k3_is_finite_never_negative_and_at_most_ten():
    d = torch.cat([torch.linspace(-40, 40, 801), torch.logspace(-12, 0, 500), -torch.logspace(-12, 0, 500)])
    k3 = estimate("k3", d, torch.zeros_like(d))
    assert k3.min() == 0.0
    assert k3.max() == 10.0
    # small differences keep their digits: k3 is d^2 / 2 there
    assert estimate("k3", tensor([1e-3]), tensor([0.0])).item() == pytest.approx(4.99833e-7, rel=1e-3)


def test_k3_far_beyond_the_clamp_has_a_finite_gradient():
    logprobs = tensor([-200.0, 200.0], requires_grad=True)
    estimate("k3", logprobs, torch.zeros(2)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_the_reference_gets_no_gradient_and_results_are_float32():
    reference = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    logprobs = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    for name in ESTIMATORS:
        kl = estimate(name, logprobs, reference)
        assert kl.dtype == torch.float32
        kl.sum().backward()
    assert reference.grad is None
    assert logprobs.grad is not None


def test_episode_mean_weighs_rows_equally_and_skips_those_without_a_token():
    per_token = tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert episode_mean(per_token, mask).item() == pytest.approx((2.0 + 5.0) / 2)
    assert episode_mean(per_token, torch.zeros_like(mask)).item() == 0.0


def test_unknown_estimator():
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator.*'k33'.*did you mean"):
        estimate("k33", torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("kl", [NAN, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(kl):
    controller = adaptive()
    controller.update(kl, 256)
    assert controller.coef == 0.2


def test_adaptive_controller_without_episodes_and_with_negative_kl():
    controller = adaptive()
    controller.update(12.0, 0)
    assert controller.coef == 0.2
    controller.update(-1.0, 256)
    assert controller.coef == pytest.approx(0.198976, abs=1e-9)


def test_state_is_restored():
    moved, fresh = adaptive(), adaptive()
    moved.update(12.0, 256)
    fresh.load_state_dict(moved.state_dict())
    assert fresh.coef == moved.coef
    fixed = FixedKLController(0.1)
    fixed.load_state_dict(FixedKLController(0.3).state_dict())
    assert fixed.coef == 0.3
    fresh.load_state_dict({"coef": 1000.0})
    assert fresh.coef == 5.0


@pytest.mark.parametrize("state", [{}, {"coef": NAN}])
def test_a_damaged_state_is_refused(state):
    for controller in (adaptive(), FixedKLController(0.1)):
        before = controller.coef
        with pytest.raises(CheckpointError, match="KL controller state"):
            controller.load_state_dict(state)
        assert controller.coef == before
