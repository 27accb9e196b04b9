"""What the tests of the maths share: random ragged batches, a whole step on them, and the slow versions' comparison."""

import itertools
import math
import random
from dataclasses import dataclass, fields

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from klimb.algos.advantage import token_rewards
from klimb.algos.kl import ESTIMATORS, estimate
from klimb.algos.loss import POLICY_LOSSES, LossStats, policy_loss, value_loss
from klimb.algos.ops import LOSS_AGGS, replace, token_weights
from klimb.algos.table import ADVANTAGES, Phase

Plane = list[list[float]]
SEEDS = range(25)
LOWEST_ID, HIGHEST_ID = -(2**63), 2**63 - 1

often = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
kl_estimators = st.sampled_from(list(ESTIMATORS))
junk_values = st.sampled_from([math.nan, 77.0, math.inf, -math.inf])


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    policy_loss: str
    loss_agg: str
    adv_estimator: str


ALGORITHMS = [
    Algorithm(policy_loss=loss, loss_agg=agg, adv_estimator=estimator)
    for loss, agg, estimator in itertools.product(POLICY_LOSSES, LOSS_AGGS, ADVANTAGES)
]
algorithms = st.sampled_from(ALGORITHMS)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All [B, T] but scores, last_values, greedy_totals and groups [B]."""

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
    greedy_totals: Tensor
    groups: Tensor

    def rows(self, index: Tensor) -> "Inputs":
        return Inputs(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def with_junk(self, junk: float) -> "Inputs":
        return self._each_plane(lambda x: torch.where(self.mask, x, junk), self.mask)

    def padded(self, left: int, right: int, junk: float) -> "Inputs":
        mask = pad(self.mask, (left, right), value=False)
        return self._each_plane(lambda x: pad(x, (left, right), value=junk), mask)

    def _each_plane(self, change, mask: Tensor) -> "Inputs":
        planes = ("new", "old", "ref", "advantages", "values", "old_values", "returns")
        changed = {name: change(getattr(self, name)) for name in planes}
        return Inputs(**{**vars(self), **changed, "mask": mask})


def make_inputs(rows: int, width: int, density: float, seed: int) -> Inputs:
    """Masks with gaps and rows without a token; ratios on both sides of every clip bound; ids from the whole of int64.

    Scores are quarters, so groups without spread occur, and sums of token rewards are exact in float32.
    """
    g = torch.Generator().manual_seed(seed)

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
        mask=torch.rand(rows, width, generator=g) < density,
        scores=torch.randint(-2, 7, (rows,), generator=g) / 4,
        last_values=torch.randn(rows, generator=g),
        greedy_totals=torch.randn(rows, generator=g),
        groups=tensor([LOWEST_ID, 7, HIGHEST_ID])[torch.randint(0, 3, (rows,), generator=g)],
    )


@st.composite
def batches(draw) -> Inputs:
    density = draw(st.sampled_from([0.3, 0.7, 1.0]))
    return make_inputs(draw(st.integers(1, 6)), draw(st.integers(1, 8)), density, draw(seeds))


def phase_of(x: Inputs) -> Phase:
    """Token rewards with a KL term in sixty-fourths: see `make_inputs`."""
    kl = ((x.new - x.ref) * 16).round()
    return Phase(
        rewards=token_rewards(x.scores, x.mask, kl, 1 / 64),
        mask=x.mask,
        alive=x.mask.any(1),
        groups=x.groups,
        lengths=x.mask.sum(1),
        values=x.values,
        last_values=x.last_values,
        greedy_totals=x.greedy_totals,
        gamma=0.97,
        lam=0.9,
    )


@dataclass(frozen=True)
class Part:
    """One forward of the update: some rows, padded to some columns."""

    rows: Tensor
    columns: Tensor

    def of(self, x: Tensor) -> Tensor:
        return x[self.rows][:, self.columns]


def part(x: Inputs, rows: list[int]) -> Part:
    return Part(tensor(rows), torch.arange(x.mask.shape[1]))


def trimmed(x: Inputs, rows: list[int]) -> Part:
    """Only the columns where one of these rows has a token, and the first."""
    used = x.mask[rows].any(0)
    used[0] = True
    return Part(tensor(rows), used.nonzero().flatten())


def whole(x: Inputs) -> list[Part]:
    return [part(x, list(range(len(x.mask))))]


def cut(x: Inputs, rng: random.Random) -> list[Part]:
    """Micro-batches of any size, rows in any order."""
    rows, split = rng.sample(range(len(x.mask)), len(x.mask)), []
    while rows:
        size = rng.randint(1, len(rows))
        split.append(part(x, rows[:size]))
        rows = rows[size:]
    return split


def packed(x: Inputs, budget: int) -> list[Part]:
    """Longest first, as many rows in one forward as the budget of tokens allows, padded no wider than they need."""
    lengths = x.mask.sum(1).tolist()
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in bins if sum(lengths[i] for i in b) + lengths[row] <= budget]
        if fitting:
            fitting[0].append(row)
        else:
            bins.append([row])
    return [trimmed(x, b) for b in bins]


@dataclass(frozen=True)
class Outcome:
    loss: float
    policy_gradient: Tensor
    value_gradient: Tensor
    parts: list[tuple[LossStats, LossStats]]


def run(x: Inputs, algorithm: Algorithm, kl_name: str, split: list[Part], advantages: Tensor | None = None) -> Outcome:
    """Policy, KL and value loss with their gradients, accumulated over the micro-batches of `split`.

    Advantages come from the algorithm's estimator over the whole batch, unless given.
    """
    new, values = x.new.clone().requires_grad_(), x.values.clone().requires_grad_()
    weights = token_weights(x.mask, algorithm.loss_agg, max_tokens=16)
    given = ADVANTAGES[algorithm.adv_estimator](phase_of(x)) if advantages is None else advantages
    total, parts = 0.0, []
    for p in split:
        mask, logprobs = p.of(x.mask), p.of(new)
        policy, stats = policy_loss(algorithm.policy_loss, logprobs, p.of(x.old), p.of(given), mask)
        kl = estimate(kl_name, replace(logprobs, mask), replace(p.of(x.ref), mask))
        critic, critic_stats = value_loss(p.of(values), p.of(x.old_values), p.of(x.returns), 0.5, mask)
        loss = (p.of(weights) * (policy + 0.3 * kl + critic)).sum()
        loss.backward()
        total += loss.item()
        parts.append((stats, critic_stats))
    assert new.grad is not None
    assert values.grad is not None
    return Outcome(total, new.grad, values.grad, parts)


def agree(got: Tensor | None, expected: list) -> None:
    """Ours against a slow version's float64 numbers."""
    assert got is not None
    assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


class Draw:
    """Random float32 planes of one shape, and a mask with gaps and empty rows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = (self.rng.randint(1, 6), self.rng.randint(1, 12))
        self.mask = tensor([[self.rng.random() < 0.7 for _ in range(self.shape[1])] for _ in range(self.shape[0])])

    def plane(self, scale: float = 1.0) -> Tensor:
        return tensor([[self.rng.gauss(0.0, scale) for _ in range(self.shape[1])] for _ in range(self.shape[0])])

    def row(self) -> Tensor:
        return tensor([self.rng.gauss(0.0, 1.0) for _ in range(self.shape[0])])
