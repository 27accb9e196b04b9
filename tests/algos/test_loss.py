"""Policy and value losses; the numbers of cases PC-01, LP-02, GV-03 and MT-01."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from klimb.algos.loss import LossStats, policy_loss, value_loss
from klimb.algos.ops import token_weights
from klimb.errors import ConfigError

NAN = math.nan


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def fractions(*parts: LossStats) -> dict[str, float]:
    """What is logged: numerators and denominators added over the parts, then divided."""
    return {
        name: float(sum(p.sums[name][0] for p in parts) / sum(p.sums[name][1] for p in parts)) for name in parts[0].sums
    }


PC_01_RATIO = tensor([[0.5, 10.0, 1.5, 1.5, 0.5, 0.5]])
PC_01_ADVANTAGES = tensor([[2.0, -1.0, 1.0, -1.0, 1.0, -1.0]])


@pytest.mark.parametrize(
    ("dual_clip", "loss", "slope"),
    [
        (None, [-1.0, 10.0, -1.2, 1.5, -0.5, 0.8], [-1.0, 10.0, 0.0, 1.5, -0.5, 0.0]),
        (3.0, [-1.0, 3.0, -1.2, 1.5, -0.5, 0.8], [-1.0, 0.0, 0.0, 1.5, -0.5, 0.0]),
    ],
)
def test_case_PC_01_clip_and_dual_clip(dual_clip, loss, slope):
    new = PC_01_RATIO.log().requires_grad_()
    got, stats = policy_loss("clip", new, torch.zeros(1, 6), PC_01_ADVANTAGES, ones(1, 6), dual_clip=dual_clip)
    assert_close(got, tensor([loss]), atol=1e-6, rtol=1e-6)
    got.sum().backward()
    assert new.grad is not None
    assert_close(new.grad, tensor([slope]), atol=1e-6, rtol=1e-6)
    shares = fractions(stats)
    assert shares["clip_fraction_low"] == pytest.approx(1 / 6)  # ratio 0.5 with a negative advantage
    assert shares["clip_fraction_high"] == pytest.approx(1 / 6)  # ratio 1.5 with a positive one


def test_the_two_sides_are_two_settings():
    new, old = tensor([[0.5, 0.5, 1.5, 1.5]]).log(), torch.zeros(1, 4)
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, stats = policy_loss("clip", new, old, advantages, ones(1, 4), clip_ratio_low=0.1, clip_ratio_high=0.6)
    assert_close(loss, tensor([[-0.5, 0.9, -1.5, 1.5]]))
    assert fractions(stats)["clip_fraction_low"] == 0.25
    assert fractions(stats)["clip_fraction_high"] == 0.0


def test_case_LP_02_before_any_step_the_ratio_is_one():
    new = tensor([[-0.7, -1.3, -2.9]], requires_grad=True)
    advantages = tensor([[1.0, -0.5, 2.0]])
    loss, stats = policy_loss("clip", new, new.detach(), advantages, ones(1, 3))
    total = (loss * token_weights(ones(1, 3), "token-mean")).sum()
    assert total.item() == pytest.approx(-0.8333333333333, abs=1e-6)
    assert fractions(stats) == {
        "approx_kl": 0.0,
        "clamped_share": 0.0,
        "ratio_mean": 1.0,
        "ratio_abs_dev": 0.0,
        "clip_fraction_low": 0.0,
        "clip_fraction_high": 0.0,
    }
    assert {k: v.item() for k, v in stats.maxima.items()} == {"ratio_max": 1.0, "ratio_abs_dev_max": 0.0}
    total.backward()
    assert new.grad is not None
    assert_close(new.grad, -advantages / 3)


def log_ratio_with_k3(value: float) -> float:
    """The positive x with exp(x) - 1 - x = value, by bisection."""
    low, high = 0.0, 5.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.expm1(middle) - middle < value else (low, middle)
    return low


def test_case_MT_01_metrics_are_sums_not_means_of_means():
    # four tokens, one of them clipped, k3 summing to 0.4; then one token, clipped, with k3 0.5
    new = torch.zeros(2, 4)
    new[0, 2], new[1, 0] = log_ratio_with_k3(0.4), log_ratio_with_k3(0.5)
    mask = tensor([[True] * 4, [True, False, False, False]])
    advantages, old = torch.ones(2, 4), torch.zeros(2, 4)
    _, whole = policy_loss("clip", new, old, advantages, mask)
    parts = [policy_loss("clip", new[[i]], old[[i]], advantages[[i]], mask[[i]])[1] for i in range(2)]
    for shares in (fractions(whole), fractions(*parts)):
        assert shares["clip_fraction_high"] == pytest.approx(0.4, abs=1e-6)
        assert shares["approx_kl"] == pytest.approx(0.18, abs=1e-6)


def test_ratio_statistics_in_numbers():
    new = tensor([[math.log(0.5), math.log(4.0), 0.0, NAN]])
    _, stats = policy_loss("clip", new, torch.zeros(1, 4), torch.ones(1, 4), tensor([[True, True, True, False]]))
    shares = fractions(stats)
    assert shares["ratio_mean"] == pytest.approx((0.5 + 4.0 + 1.0) / 3)
    assert shares["ratio_abs_dev"] == pytest.approx((0.5 + 3.0) / 3)
    k3 = (0.5 - 1 - math.log(0.5)) + (4.0 - 1 - math.log(4.0))
    assert shares["approx_kl"] == pytest.approx(k3 / 3)
    assert stats.maxima["ratio_max"].item() == pytest.approx(4.0)
    assert stats.maxima["ratio_abs_dev_max"].item() == pytest.approx(3.0)


def test_extreme_log_ratios_are_clamped_and_counted():
    new = tensor([[0.0, -90.0, -1.0, -1.0]], requires_grad=True)
    old = tensor([[-90.0, 0.0, -1.0, -1.0]])
    advantages = tensor([[-1.0, 1.0, 1.0, 1.0]])
    loss, stats = policy_loss("clip", new, old, advantages, ones(1, 4), dual_clip=None)
    assert loss[0, 0].item() == pytest.approx(math.exp(20.0), rel=1e-6)
    assert loss[0, 1].item() == pytest.approx(-math.exp(-20.0), rel=1e-6)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0, -1.0, -1.0]]
    assert fractions(stats)["clamped_share"] == 0.5
    deviations = math.expm1(20.0) + math.expm1(-20.0)
    assert fractions(stats)["approx_kl"] == pytest.approx(deviations / 4, rel=1e-6)
    assert stats.maxima["ratio_max"].item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_no_token_means_no_loss_no_gradient_and_no_denominator():
    junk = torch.full((2, 3), NAN)
    new, values = junk.clone().requires_grad_(), junk.clone().requires_grad_()
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss, stats = policy_loss("clip", new, junk, junk, mask)
    critic_loss, critic_stats = value_loss(values, junk, junk, 0.5, mask)
    (loss.sum() + critic_loss.sum()).backward()
    for x in (loss, critic_loss, new.grad, values.grad):
        assert x is not None
        assert torch.count_nonzero(x) == 0
    for numerator, denominator in [*stats.sums.values(), *critic_stats.sums.values()]:
        assert numerator.item() == denominator.item() == 0.0
    assert all(x.item() == 0.0 for x in stats.maxima.values())


def test_gradients_flow_to_the_new_logprobs_and_values_only():
    leaves = [torch.rand(1, 3, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    loss, stats = policy_loss("clip", *leaves, ones(1, 3))
    critic_loss, critic_stats = value_loss(*leaves, 0.5)
    for x in (loss, critic_loss):
        assert x.dtype == torch.float32
        x.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    tensors = [t for s in (stats, critic_stats) for pair in s.sums.values() for t in pair]
    assert not any(t.requires_grad for t in [*tensors, *stats.maxima.values()])


def test_unknown_loss():
    x = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss.*'clipp'.*did you mean 'clip'"):
        policy_loss("clipp", x, x, x, ones(1, 1))


def test_case_GV_03_the_larger_of_the_two_errors():
    values = tensor([[7.0, 1.0]], requires_grad=True)
    loss, stats = value_loss(values, tensor([[5.0, 5.0]]), tensor([[10.0, 10.0]]), 0.5)
    assert_close(loss, tensor([[10.125, 40.5]]), atol=1e-6, rtol=0)
    assert loss.mean().item() == pytest.approx(25.3125, abs=1e-6)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, -9.0]]
    assert fractions(stats) == {"clip_fraction": 0.5}


def test_value_loss_without_clipping():
    values = tensor([[7.0, 1.0]], requires_grad=True)
    loss, stats = value_loss(values, tensor([[5.0, 5.0]]), tensor([[10.0, 10.0]]), None)
    assert_close(loss, tensor([[4.5, 40.5]]))
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-3.0, -9.0]]
    assert fractions(stats) == {"clip_fraction": 0.0}


def test_value_statistics_count_only_masked_in_tokens():
    values, old, returns = tensor([[7.0, 1.0, NAN]]), tensor([[5.0, 5.0, NAN]]), tensor([[10.0, 10.0, NAN]])
    loss, stats = value_loss(values, old, returns, 0.5, tensor([[True, False, False]]))
    assert_close(loss, tensor([[10.125, 0.0, 0.0]]))
    assert fractions(stats) == {"clip_fraction": 1.0}


def test_the_largest_deviation_may_be_from_below():
    new = tensor([[math.log(0.2), math.log(1.1)]])
    _, stats = policy_loss("clip", new, torch.zeros(1, 2), torch.ones(1, 2), ones(1, 2))
    assert stats.maxima["ratio_abs_dev_max"].item() == pytest.approx(0.8)
    assert stats.maxima["ratio_max"].item() == pytest.approx(1.1)
