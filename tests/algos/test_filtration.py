"""Policy filtration: weights, the draw, and what is logged of both; by hand, by a slow version and by frequencies."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

from klimb.algos.filtration import STRATEGIES, draw, effective_size, r_squared, weights
from klimb.errors import ConfigError
from tests.algos.batches import HIGHEST_ID, LOWEST_ID, SEEDS, agree, often, seeds

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("best_of_n", [0.0, 1.0, 0.0, 0.0]),
        ("best_random", [1 / 6, 1 / 2, 1 / 6, 1 / 6]),
        ("best_worst", [0.0, 0.5, 0.5, 0.0]),
        ("power", [1 / 18, 9 / 18, 4 / 18, 4 / 18]),
    ],
)
def test_weights_in_numbers(strategy, expected):
    rewards, groups = tensor([1.0, 3.0, -2.0, 2.0]), tensor([9, 9, 9, 9])
    assert_close(weights(rewards, groups, strategy), tensor(expected))


@pytest.mark.parametrize(
    ("strategy", "rewards", "expected"),
    [
        ("best_of_n", [1.0, 2.0, 2.0], [0.0, 1.0, 0.0]),
        ("best_random", [2.0, 1.0, 2.0], [0.5, 0.25, 0.25]),
        ("best_worst", [1.0, 2.0, 2.0, 1.0], [0.0, 0.5, 0.0, 0.5]),
        ("best_worst", [7.0, 7.0, 7.0], [0.5, 0.0, 0.5]),
        ("power", [0.0, 0.0], [0.5, 0.5]),
        ("power", [0.0, -4.0], [0.0, 1.0]),
    ],
)
def test_equal_rewards_rank_in_the_order_of_the_batch(strategy, rewards, expected):
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    assert weights(tensor(rewards), groups, strategy).tolist() == expected


@every_strategy
def test_a_group_of_one_is_drawn_whatever_its_reward(strategy):
    assert weights(tensor([-3.0, 0.0]), tensor([5, LOWEST_ID]), strategy).tolist() == [1.0, 1.0]


def test_the_power_is_a_setting_and_may_be_high():
    groups = tensor([0, 0])
    assert_close(weights(tensor([1.0, -3.0]), groups, "power", 1.0), tensor([0.25, 0.75]))
    assert_close(weights(tensor([1.0, -3.0]), groups, "power", 0.0), tensor([0.5, 0.5]))
    # 1e30 squared is not a float32
    assert_close(weights(tensor([1e30, 2e30]), groups, "power", 2.0), tensor([0.2, 0.8]))


def test_unknown_strategy():
    with pytest.raises(ConfigError, match=r"algorithm\.policy_filtration\.strategy.*did you mean 'best_of_n'"):
        weights(tensor([1.0]), tensor([0]), "best_on_n")


def slow_weights(rewards: list[float], groups: list[int], strategy: str, power: float) -> list[float]:
    result = [0.0] * len(rewards)
    for group in set(groups):
        rows = sorted((i for i, g in enumerate(groups) if g == group), key=lambda i: (-rewards[i], i))
        best, worst, n = rows[0], rows[-1], len(rows)
        for i in rows:
            result[i] = {
                "best_of_n": 1.0 * (i == best),
                "best_random": 1.0 if n == 1 else 0.5 if i == best else 1 / (2 * (n - 1)),
                "best_worst": 0.5 * (i == best) + 0.5 * (i == worst),
                "power": abs(rewards[i]) ** power / (sum(abs(rewards[j]) ** power for j in rows) or 1.0)
                if any(rewards[j] for j in rows)
                else 1 / n,
            }[strategy]
    return result


@every_strategy
@pytest.mark.parametrize("seed", SEEDS)
def test_weights_agree_with_a_slow_version(seed, strategy):
    rng = random.Random(seed)
    n, power = rng.randint(1, 20), rng.choice([0.5, 1.0, 2.0, 3.0])
    groups = [rng.choice([LOWEST_ID, 3, HIGHEST_ID]) for _ in range(n)]
    rewards = tensor([float(rng.randint(-1, 1)) if seed % 2 else rng.gauss(0.0, 2.0) for _ in range(n)])
    got = weights(rewards, tensor(groups), strategy, power)
    agree(got, slow_weights(rewards.tolist(), groups, strategy, power))
    agree(tensor([got[tensor(groups) == g].sum() for g in set(groups)]), [1.0] * len(set(groups)))


@every_strategy
@often
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=10, unique=True), st.randoms(use_true_random=False))
def test_weights_follow_their_rows(strategy, rewards, rng):
    order = torch.tensor(rng.sample(range(len(rewards)), len(rewards)))
    x, groups = tensor(rewards) / 4, tensor([rng.choice([-1, 1]) for _ in rewards])
    assert_close(weights(x[order], groups[order], strategy), weights(x, groups, strategy)[order])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequencies(share: Tensor, groups: Tensor, times: int) -> Tensor:
    """How often each row is drawn, per place of its group."""
    generator = seeded(0)
    counts = torch.zeros(len(share))
    for _ in range(times):
        counts += torch.bincount(draw(share, groups, generator), minlength=len(share))
    sizes = tensor([(groups == g).sum() for g in groups])
    return counts / (times * sizes)


def test_frequencies_come_near_the_weights():
    # groups of 5000 places: 4 draws are 20,000 of each group
    size = 5000
    groups = torch.cat([torch.zeros(size), torch.ones(size)]).long()[torch.randperm(2 * size, generator=seeded(1))]
    share = torch.zeros(2 * size)
    first, second = (groups == 0).nonzero().flatten(), (groups == 1).nonzero().flatten()
    share[first[[0, 1700, -1]]] = tensor([0.5, 0.3, 0.2])
    share[second[[3, 4]]] = tensor([0.1, 0.9])
    got = frequencies(share, groups, 4)
    # four standard deviations of a share of 20,000 are at most 0.0142
    assert_close(got, share, atol=0.0142, rtol=0)
    assert torch.count_nonzero(got[share == 0]) == 0


@every_strategy
def test_frequencies_of_a_small_group(strategy):
    rewards, groups = tensor([0.0, 2.0, -1.0, 5.0, 5.0]), tensor([HIGHEST_ID, 0, HIGHEST_ID, 0, HIGHEST_ID])
    share = weights(rewards, groups, strategy)
    got = frequencies(share, groups, 500)
    # 1000 draws at least: four standard deviations are at most 0.0633
    assert_close(got, share, atol=0.0633, rtol=0)
    assert torch.count_nonzero(got[share == 0]) == 0


@st.composite
def weighted(draw_from) -> tuple[Tensor, Tensor]:
    """Weights, some of them 0 but not all of a group, and ids from the whole of int64."""
    n = draw_from(st.integers(1, 12))
    pool = draw_from(st.lists(st.integers(LOWEST_ID, HIGHEST_ID), min_size=1, max_size=3))
    groups = tensor(draw_from(st.lists(st.sampled_from(pool), min_size=n, max_size=n)))
    share = tensor(draw_from(st.lists(st.sampled_from([0.0, 0.0, 1e-3, 0.4, 1.0]), min_size=n, max_size=n)))
    for g in groups.unique():
        if share[groups == g].sum() == 0:
            share[(groups == g).nonzero()[-1]] = 1.0
    return share, groups


@often
@given(weighted(), seeds)
def test_every_place_gets_a_row_of_its_own_group_that_has_a_weight(rows, seed):
    share, groups = rows
    drawn = draw(share, groups, seeded(seed))
    assert drawn.dtype == torch.int64
    assert torch.equal(groups[drawn], groups)
    assert (share[drawn] > 0).all()
    assert torch.equal(drawn, draw(share, groups, seeded(seed)))
    assert torch.equal(drawn, draw(share.double() * 3, groups, seeded(seed)))


def test_another_seed_draws_other_rows_and_a_generator_moves_on():
    share, groups = torch.full((64,), 1 / 64), torch.zeros(64, dtype=torch.int64)
    generator = seeded(0)
    first, second = draw(share, groups, generator), draw(share, groups, generator)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(share, groups, seeded(1)))
    assert draw(share[:0], groups[:0], generator).tolist() == []


def test_effective_size_in_numbers():
    assert effective_size(tensor([0.25, 0.25, 0.25, 0.25])) == 4.0
    assert effective_size(tensor([0.0, 7.0, 0.0])) == 1.0
    assert effective_size(tensor([0.5, 0.25, 0.25])) == pytest.approx(1 / 0.375)
    assert effective_size(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_effective_size_and_r_squared_agree_with_slow_versions(seed):
    rng = random.Random(seed)
    n = rng.randint(4, 30)
    x = tensor([rng.gauss(100.0, 1.0) for _ in range(n)])
    y = tensor([0.5 * a + rng.gauss(0.0, 0.5) for a in x.tolist()])
    known = [True, True, True] + [rng.random() < 0.6 for _ in range(n - 3)]
    w = [abs(a - 100.0) for a in x.tolist()]
    expected = sum(w) ** 2 / sum(a * a for a in w)
    assert effective_size(tensor(w, dtype=torch.float64)) == pytest.approx(expected, rel=1e-9)
    pairs = [(a, b) for a, b, k in zip(x.tolist(), y.tolist(), known, strict=True) if k]
    hidden = torch.where(tensor(known), y, math.nan)
    slow = statistics.correlation(*zip(*pairs, strict=True)) ** 2
    assert r_squared(x, hidden, tensor(known)) == pytest.approx(slow, rel=1e-6)


def test_r_squared_in_numbers():
    every = tensor([True, True, True])
    x = tensor([1.0, 2.0, 3.0])
    assert r_squared(x, tensor([5.0, 3.0, 1.0]), every) == pytest.approx(1.0)
    assert r_squared(x, tensor([0.0, 1.0, 0.0]), every) == pytest.approx(0.0)
    # covariance 1/2, squared, over variances 1 and 1/3
    assert r_squared(x, tensor([0.0, 1.0, 1.0]), every) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("rewards", "scores", "known"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [False, True, False]),
        ([1.0, 1.0, 9.0], [1.0, 2.0, 3.0], [True, True, False]),
        ([1.0, 2.0, 9.0], [4.0, 4.0, 3.0], [True, True, False]),
        ([], [], []),
    ],
)
def test_r_squared_needs_two_rows_and_a_spread_on_both_sides(rewards, scores, known):
    assert r_squared(tensor(rewards), tensor(scores), tensor(known, dtype=torch.bool)) is None
