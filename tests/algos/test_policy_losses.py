"""gspo, cispo, gmpo, sapo and reinforce, in numbers that a reader can follow by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from klimb.algos.loss import POLICY_LOSSES, LossStats, policy_loss

NAN = math.nan


def step(name: str, ratios: list[float], advantages: list[float], **settings) -> tuple[Tensor, Tensor, LossStats]:
    """Loss of one row's tokens, its gradient by the log-probs, and the statistics; old log-probs -1, a pad behind."""
    old = torch.full((1, len(ratios) + 1), -1.0)
    new = (old + tensor([[*ratios, 1.0]]).log()).requires_grad_()
    mask = tensor([[True] * len(ratios) + [False]])
    loss, stats = policy_loss(name, new, old, tensor([[*advantages, NAN]]), mask, **settings)
    loss.sum().backward()
    assert new.grad is not None
    assert loss[0, -1].item() == new.grad[0, -1].item() == 0.0
    return loss.detach()[0, :-1], new.grad[0, :-1], stats


def close(got: Tensor, expected: list[float]) -> None:
    assert_close(got, tensor(expected), atol=1e-6, rtol=1e-6)


def shares(stats: LossStats) -> tuple[float, float]:
    low, high = (stats.sums[f"clip_fraction_{side}"] for side in ("low", "high"))
    return float(low[0] / low[1]), float(high[0] / high[1])


def test_gspo_gives_both_tokens_the_geometric_mean_of_their_ratios():
    # s = sqrt(2 x 1/2) = 1: nothing is cut, although both ratios are out of bounds
    loss, slope, stats = step("gspo", [2.0, 0.5], [1.0, -3.0])
    close(loss, [-1.0, 3.0])
    close(slope, [-1.0, 3.0])
    assert shares(stats) == (0.0, 0.0)


def test_gspo_cuts_a_whole_row():
    # s = sqrt(4 x 1) = 2, over 1.2: the token with A > 0 stands at -1.2 A, that with A < 0 goes on
    loss, slope, stats = step("gspo", [4.0, 1.0], [1.0, -1.0])
    close(loss, [-1.2, 2.0])
    close(slope, [0.0, 2.0])
    assert shares(stats) == (0.0, 0.5)
    # s = 1/2, under 0.8
    loss, slope, stats = step("gspo", [0.25, 1.0], [1.0, -1.0])
    close(loss, [-0.5, 0.8])
    close(slope, [-0.5, 0.0])
    assert shares(stats) == (0.5, 0.0)


def test_gspo_has_the_dual_bound():
    loss, slope, _ = step("gspo", [8.0, 2.0], [-1.0, -1.0])  # s = 4
    close(loss, [3.0, 3.0])
    close(slope, [0.0, 0.0])
    loss, slope, _ = step("gspo", [8.0, 2.0], [-1.0, -1.0], dual_clip=None)
    close(loss, [4.0, 4.0])
    close(slope, [4.0, 4.0])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    loss, slope, stats = step("cispo", [2.0, 0.5, 1.0], [1.0, -1.0, 2.0])
    # weights 1.2, 0.8, 1; log-probs log 2 - 1, -log 2 - 1, -1
    log2 = math.log(2.0)
    close(loss, [-1.2 * (log2 - 1.0), 0.8 * (-log2 - 1.0), 2.0])
    close(slope, [-1.2, 0.8, -2.0])
    assert shares(stats) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    # whatever the sign of the advantage
    _, slope, stats = step("cispo", [2.0, 0.5], [-1.0, 1.0], clip_ratio_low=0.4, clip_ratio_high=0.5)
    close(slope, [1.5, -0.6])
    assert shares(stats) == (0.5, 0.5)


def test_gmpo_is_the_geometric_mean_on_every_token():
    # log-ratios log 1.1 and log 1.1, inside 0.2: the row's loss is -1.1, and each token pulls by half of it, twice
    loss, slope, stats = step("gmpo", [1.1, 1.1], [1.0, 1.0])
    close(loss, [-1.1, -1.1])
    close(slope, [-1.1, -1.1])
    assert shares(stats) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("ratios", "advantages", "loss", "slope", "cut"),
    [
        # A > 0: e^1 is bounded to e^0.4, e^-0.2 goes as it is: exp((0.4 - 0.2) / 2)
        ([1.0, -0.2], [2.0, 2.0], -2.0 * math.exp(0.1), [0.0, -2.0 * math.exp(0.1)], (0.0, 0.5)),
        # A > 0: far below is not bounded: exp((-1 + 0) / 2)
        ([-1.0, 0.0], [1.0, 1.0], -math.exp(-0.5), [-math.exp(-0.5)] * 2, (0.0, 0.0)),
        # A < 0: e^-1 is bounded to e^-0.3, e^1 goes as it is: exp((-0.3 + 1) / 2)
        ([-1.0, 1.0], [-1.0, -1.0], math.exp(0.35), [0.0, math.exp(0.35)], (0.5, 0.0)),
        # signs differ: mean A = 1; q = 0.4 for the first, -0.3 for the second
        ([1.0, -1.0], [3.0, -1.0], -math.exp(0.05), [0.0, 0.0], (0.5, 0.5)),
    ],
)
def test_gmpo_bounds_in_log_space_on_the_far_side(ratios, advantages, loss, slope, cut):
    got, gradient, stats = step(
        "gmpo", [math.exp(x) for x in ratios], advantages, clip_ratio_low=0.3, clip_ratio_high=0.4
    )
    close(got, [loss, loss])
    close(gradient, slope)
    assert shares(stats) == cut


def test_sapo_at_ratio_one():
    # the gate is 1/2, so the value is -2 A / tau, and the slope that of -r A
    loss, slope, stats = step("sapo", [1.0, 1.0], [1.0, -1.0])
    close(loss, [-2.0, 2.0 / 1.05])
    close(slope, [-1.0, 1.0])
    assert not any(name.startswith("clip_fraction") for name in stats.sums)


def test_sapo_closes_as_the_ratio_grows():
    # r = 1 + log 3: sigmoid(log 3) = 3/4, slope -4 x 3/4 x 1/4 x r
    r = 1.0 + math.log(3.0)
    loss, slope, _ = step("sapo", [r], [1.0])
    close(loss, [-3.0])
    close(slope, [-0.75 * r])
    # A < 0, tau 2: sigmoid(2 (r - 1)) = 3/4 at r = 1 + log(3) / 2, value 4 / 2 x 3/4
    r = 1.0 + math.log(3.0) / 2
    loss, slope, _ = step("sapo", [r], [-1.0], tau_negative=2.0)
    close(loss, [1.5])
    close(slope, [0.75 * r])


def test_reinforce_reads_no_ratio():
    loss, slope, stats = step("reinforce", [5.0, 0.1], [2.0, -3.0])
    close(loss, [-2.0 * (math.log(5.0) - 1.0), 3.0 * (math.log(0.1) - 1.0)])
    close(slope, [-2.0, 3.0])
    assert not any(name.startswith("clip_fraction") for name in stats.sums)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_row_without_a_token_adds_nothing(name):
    new = tensor([[-1.0, -2.0], [NAN, NAN]], requires_grad=True)
    other = tensor([[-1.5, -1.0], [NAN, NAN]])
    mask = tensor([[True, True], [False, False]])
    loss, stats = policy_loss(name, new, other, other, mask)
    loss.sum().backward()
    assert loss[1].tolist() == [0.0, 0.0]
    assert new.grad is not None
    assert new.grad[1].tolist() == [0.0, 0.0]
    assert new.grad[0].isfinite().all()
    assert all(denominator.item() == 2.0 for _, denominator in stats.sums.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_token_means_no_loss_and_no_gradient(name):
    junk = torch.full((2, 3), NAN)
    new = junk.clone().requires_grad_()
    loss, stats = policy_loss(name, new, junk, junk, torch.zeros(2, 3, dtype=torch.bool))
    loss.sum().backward()
    assert new.grad is not None
    assert torch.count_nonzero(loss) == torch.count_nonzero(new.grad) == 0
    assert all(numerator.item() == denominator.item() == 0.0 for numerator, denominator in stats.sums.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_are_float32_and_gradients_flow_to_the_new_log_probs_only(name, dtype):
    leaves = [torch.rand(1, 3, dtype=dtype).requires_grad_() for _ in range(3)]
    loss, stats = policy_loss(name, *leaves, torch.ones(1, 3, dtype=torch.bool))
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is leaves[2].grad is None
    tensors = [t for pair in stats.sums.values() for t in pair]
    assert not any(t.requires_grad for t in [*tensors, *stats.maxima.values()])
