"""Every estimator against a slow float64 loop written from the formulas, to 1e-6."""

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, tensor

from klimb.algos.advantage import (
    grpo,
    grpo_passk,
    maxrl,
    opo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from tests.algos.batches import HIGHEST_ID, LOWEST_ID, SEEDS, Draw, Plane, agree

every_seed = pytest.mark.parametrize("seed", SEEDS)


class Rows:
    """Rewards, binary in every other draw, lengths and failures of up to 24 rows in up to four groups."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.n = self.rng.randint(1, 24)
        self.groups = [self.rng.choice([LOWEST_ID, -1, 0, HIGHEST_ID]) for _ in range(self.n)]
        self.valid = [self.rng.random() < 0.85 for _ in range(self.n)]
        self.lengths = [self.rng.randint(1, 40) for _ in range(self.n)]
        rewards = [self.rng.random() < 0.5 if seed % 2 == 0 else self.rng.gauss(0.0, 2.0) for _ in range(self.n)]
        self.rewards = tensor(rewards, dtype=torch.float32)

    @property
    def failed_as_nan(self) -> Tensor:
        return torch.where(tensor(self.valid), self.rewards, math.nan)

    def slow(self, advantage: Callable[[list[float], list[int], int], float], valid: list[bool]) -> list[float]:
        """`advantage(rewards, lengths, own place)` of every valid row's group, 0 for the rest and without spread."""
        rewards, result = self.rewards.tolist(), [0.0] * self.n
        for i in range(self.n):
            members = [j for j in range(self.n) if valid[j] and self.groups[j] == self.groups[i]]
            own = [rewards[j] for j in members]
            if valid[i] and max(own) > min(own):
                result[i] = advantage(own, [self.lengths[j] for j in members], members.index(i))
        return result


def slow_grpo(rewards: list[float], lengths: list[int], i: int) -> float:
    return (rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def slow_dr_grpo(rewards: list[float], lengths: list[int], i: int) -> float:
    return rewards[i] - statistics.fmean(rewards)


def slow_rloo(rewards: list[float], lengths: list[int], i: int) -> float:
    return rewards[i] - statistics.fmean(rewards[:i] + rewards[i + 1 :])


def slow_opo(rewards: list[float], lengths: list[int], i: int) -> float:
    return rewards[i] - sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)


def slow_passk(rewards: list[float], lengths: list[int], i: int) -> float:
    if i != rewards.index(max(rewards)):
        return 0.0
    second = max(rewards[:i] + rewards[i + 1 :])
    return (rewards[i] - second) / (statistics.stdev(rewards) + 1e-6)


def slow_maxrl(rewards: list[float], lengths: list[int], i: int) -> float:
    mean = statistics.fmean(rewards)
    return (rewards[i] - mean) / mean if mean else 0.0


# ours by rewards, groups, lengths, valid; and the slow version
PAIRS = {
    "grpo": (lambda r, g, n, v: grpo(r, g, valid=v), slow_grpo),
    "dr_grpo": (lambda r, g, n, v: grpo(r, g, norm_by_std=False, valid=v), slow_dr_grpo),
    "rloo": (lambda r, g, n, v: rloo(r, g, v), slow_rloo),
    "opo": (lambda r, g, n, v: opo(r, n, g, v), slow_opo),
    "grpo_passk": (lambda r, g, n, v: grpo_passk(r, g, v), slow_passk),
    "maxrl": (lambda r, g, n, v: maxrl(r, g, v), slow_maxrl),
}


@pytest.mark.parametrize("name", PAIRS)
@every_seed
def test_group_estimators(seed, name):
    rows = Rows(seed)
    if name == "maxrl" and seed % 2:
        rows.rewards = rows.rewards.abs() + 0.1  # near a mean of 0 the quotient magnifies every rounding
    ours, slow = PAIRS[name]
    groups, lengths = tensor(rows.groups), tensor(rows.lengths)
    agree(ours(rows.failed_as_nan, groups, lengths, tensor(rows.valid)), rows.slow(slow, rows.valid))
    agree(ours(rows.rewards, groups, lengths, None), rows.slow(slow, [True] * rows.n))


def slow_whiten(plane: Plane, mask: list[list[bool]]) -> Plane:
    tokens = [x for row, m in zip(plane, mask, strict=True) for x, inside in zip(row, m, strict=True) if inside]
    mean, scale = 0.0, 1.0
    if len(tokens) > 1:
        mean, scale = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    return [
        [(x - mean) / scale if inside else 0.0 for x, inside in zip(row, m, strict=True)]
        for row, m in zip(plane, mask, strict=True)
    ]


@every_seed
def test_reinforce_pp_baseline(seed):
    rows = Rows(seed)
    width = max(rows.lengths)
    every = [[t < n for t in range(width)] for n in rows.lengths]
    trained = [[inside and ok for inside in m] for m, ok in zip(every, rows.valid, strict=True)]
    # all rows count; only the valid ones do; and left to the function: those with a token
    for mask, counted, given in (
        (every, [True] * rows.n, tensor([True] * rows.n)),
        (trained, rows.valid, tensor(rows.valid)),
        (trained, rows.valid, None),
    ):
        centred = rows.slow(slow_dr_grpo, counted)
        rewards = torch.where(tensor(counted), rows.rewards, math.nan)
        got = reinforce_pp_baseline(rewards, tensor(rows.groups), tensor(mask), given)
        agree(got, slow_whiten([[x] * width for x in centred], mask))


def slow_reward_to_go(rewards: Plane, mask: list[list[bool]], gamma: float) -> Plane:
    """sum over j >= k of gamma^(j - k) r_j, places counted in masked-in tokens: the sum, not the recursion."""
    result = [[0.0] * len(row) for row in rewards]
    for b, row in enumerate(mask):
        at = [t for t, inside in enumerate(row) if inside]
        for k, t in enumerate(at):
            result[b][t] = sum(gamma**i * rewards[b][later] for i, later in enumerate(at[k:]))
    return result


@every_seed
def test_reinforce_pp(seed):
    draw = Draw(seed)
    rewards, gamma = draw.plane(), draw.rng.uniform(0.7, 1.0)
    hidden = torch.where(draw.mask, rewards, math.nan)
    agree(reinforce_pp(hidden, draw.mask, gamma), slow_reward_to_go(rewards.tolist(), draw.mask.tolist(), gamma))


@every_seed
def test_remax(seed):
    draw = Draw(seed)
    rewards, greedy = draw.plane(), draw.row()
    to_go = slow_reward_to_go(rewards.tolist(), draw.mask.tolist(), 1.0)
    slow = [
        [x - total if inside else 0.0 for x, inside in zip(row, m, strict=True)]
        for row, m, total in zip(to_go, draw.mask.tolist(), greedy.tolist(), strict=True)
    ]
    agree(remax(torch.where(draw.mask, rewards, math.nan), greedy, draw.mask), slow)


def slow_overlong(length: int, cut_off: bool, penalty: float, max_tokens: int, buffer: int | None) -> float:
    if buffer is None:
        return penalty if cut_off else 0.0
    start = max_tokens - buffer
    if length <= start:
        return 0.0
    return penalty * (length - start) / buffer if length <= max_tokens else penalty


@pytest.mark.parametrize("buffer", [None, 1, 7, 40])
@every_seed
def test_overlong_penalty(seed, buffer):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 45) for _ in range(9)]
    cut_off, penalty = [length >= 40 for length in lengths], rng.uniform(0.1, 3.0)
    slow = [slow_overlong(n, cut, penalty, 40, buffer) for n, cut in zip(lengths, cut_off, strict=True)]
    agree(overlong_penalty(tensor(lengths), tensor(cut_off), penalty, 40, buffer), slow)
