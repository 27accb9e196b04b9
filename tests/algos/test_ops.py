"""Masked arithmetic and the four aggregations; the numbers of cases LN-01, LN-02, MK-03 and MT-02."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, tensor
from torch.testing import assert_close

from klimb.algos.loss import policy_loss
from klimb.algos.ops import (
    LOSS_AGGS,
    clamp_log_ratio,
    masked_mean,
    masked_sum,
    pick,
    replace,
    token_weights,
    whiten,
)
from klimb.errors import ConfigError

NAN = math.nan


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths))[None, :] < tensor(lengths)[:, None]


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]])
def test_case_LN_01_token_mean_is_over_the_minibatch_whatever_the_micro_batch(split):
    advantages = tensor([[-1.0, -2.0, -3.0, -4.0], [-10.0, NAN, NAN, NAN]])
    mask = mask_of([4, 1])
    weights = token_weights(mask, "token-mean")
    shift = torch.zeros((), requires_grad=True)
    old = torch.full((2, 4), -1.0)
    total = 0.0
    for rows in split:
        loss, _ = policy_loss("clip", old[rows] + shift, old[rows], advantages[rows], mask[rows])
        part = (weights[rows] * loss).sum()
        part.backward()
        total += part.item()
    assert total == pytest.approx(4.0, abs=1e-6)
    assert shift.grad is not None
    assert shift.grad.item() == pytest.approx(4.0, abs=1e-6)


PARTITIONS = {
    "one": [[0, 1, 2, 3, 4]],
    "in order": [[0, 1], [2, 3], [4]],
    "balanced": [[4, 0], [2, 1], [3]],
    "singletons": [[0], [1], [2], [3], [4]],
}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
@pytest.mark.parametrize(
    ("loss_agg", "expected"),
    [
        ("token-mean", 3.75),
        ("seq-mean-token-mean", 4.0),
        ("seq-mean-token-sum", 9.0),
        ("seq-mean-token-sum-norm", 9.0 / 8),
    ],
)
def test_case_LN_02_packing_does_not_change_the_loss(partition, loss_agg, expected):
    mask = mask_of([3, 1, 4, 2, 2])
    # at ratio 1 the loss of a token is minus its advantage
    advantages = -tensor([1.0, 2.0, 3.0, 4.0, 10.0])[:, None].expand(5, 4)
    logprobs = torch.full((5, 4), -0.5)
    weights = token_weights(mask, loss_agg, max_tokens=8)
    total = 0.0
    for rows in partition:
        loss, _ = policy_loss("clip", logprobs[rows], logprobs[rows], advantages[rows], mask[rows])
        total += (weights[rows] * loss).sum().item()
    assert total == pytest.approx(expected, abs=1e-6)


def test_case_MK_03_whitening_sees_only_masked_in_tokens():
    x = tensor([[1.0, 2.0, 99.0], [4.0, -99.0, NAN]])
    mask = tensor([[True, True, False], [True, False, False]])
    expected = tensor([[-0.872871560944, -0.218217890236, 0.0], [1.09108945118, 0.0, 0.0]])
    assert_close(whiten(x, mask), expected, atol=1e-6, rtol=0)
    assert_close(whiten(x[:, :2], mask[:, :2]), expected[:, :2], atol=1e-6, rtol=0)


def test_case_MT_02_means_and_sums_leave_out_filler():
    logprobs = tensor([[-0.5, -0.7, 1.0, 1.0]])
    mask = tensor([[True, True, False, False]])
    assert masked_mean(-logprobs, mask).item() == pytest.approx(0.6, abs=1e-6)
    assert masked_sum(-logprobs, mask).item() == pytest.approx(1.2, abs=1e-6)


def test_whitening_equal_numbers_gives_exact_zeros():
    # a float32 mean of these is off by up to 1e-3, which 1 / sqrt(1e-8) would make 10
    x = torch.full((7, 9), 12345.678)
    assert torch.count_nonzero(whiten(x, torch.ones(7, 9, dtype=torch.bool))) == 0


def test_whitening_fewer_than_two_tokens_leaves_them_as_they_are():
    x = tensor([[3.0, NAN]])
    assert whiten(x, tensor([[True, False]])).tolist() == [[3.0, 0.0]]
    assert whiten(x, tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_means_over_no_token_are_zero_with_zero_gradient():
    x = tensor([[NAN, 77.0]], requires_grad=True)
    mean = masked_mean(x, tensor([[False, False]]))
    mean.backward()
    assert mean.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_token_weights_ignore_rows_without_a_token(loss_agg):
    mask = tensor([[True, True, False], [False, False, False], [False, True, False]])
    weights = token_weights(mask, loss_agg, max_tokens=4)
    assert_close(weights[[0, 2]], token_weights(mask[[0, 2]], loss_agg, max_tokens=4))
    assert torch.count_nonzero(weights[~mask]) == 0
    assert torch.count_nonzero(weights[mask]) == 3


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_token_weights_without_tokens_are_zeros(loss_agg):
    weights = token_weights(torch.zeros(2, 3, dtype=torch.bool), loss_agg, max_tokens=4)
    assert weights.tolist() == [[0.0] * 3] * 2


def test_token_weights_in_numbers():
    mask = mask_of([1, 3])
    expected = {
        "token-mean": [1 / 4, 1 / 4],
        "seq-mean-token-mean": [1 / 2, 1 / 6],
        "seq-mean-token-sum": [1 / 2, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 20, 1 / 20],
    }
    for loss_agg, (first, second) in expected.items():
        weights = token_weights(mask, loss_agg, max_tokens=10)
        assert_close(weights, tensor([[first, 0.0, 0.0], [second] * 3]))


def test_unknown_names_raise_with_the_nearest_one():
    mask = mask_of([1])
    with pytest.raises(ConfigError, match=r"algorithm\.loss_agg.*'token-maen'.*did you mean 'token-mean'"):
        token_weights(mask, "token-maen")
    with pytest.raises(ConfigError, match=r"Allowed: a, b; set it to one of these"):
        pick("key", "zzz", {"a": 1, "b": 2})


@pytest.mark.parametrize("max_tokens", [None, 0])
def test_constant_length_needs_the_limit(max_tokens):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.max_tokens"):
        token_weights(mask_of([2]), "seq-mean-token-sum-norm", max_tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_results_are_float32_whatever_the_input(dtype):
    x = tensor([[0.5, 1.5, 2.5]], dtype=dtype)
    mask = tensor([[True, True, False]])
    for result in (replace(x, mask), masked_mean(x, mask), whiten(x, mask), clamp_log_ratio(x)):
        assert result.dtype == torch.float32
    assert masked_mean(x, mask).item() == 1.0


def test_half_precision_is_widened_before_it_is_summed():
    # in float16 this sum would be infinite
    x = torch.full((1, 100), 60000.0, dtype=torch.float16)
    assert masked_mean(x, torch.ones(1, 100, dtype=torch.bool)).item() == pytest.approx(60000.0, rel=1e-3)


def test_log_ratios_are_clamped_at_twenty():
    assert clamp_log_ratio(tensor([-30.0, -3.0, 20.5])).tolist() == [-20.0, -3.0, 20.0]


def test_shapes_and_types_are_checked_while_tests_run():
    with pytest.raises(TypeCheckError):
        masked_mean(torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        token_weights(torch.ones(2, 3), "token-mean")
