# ruff: noqa: F722
"""Policy filtration: which answers of a prompt the update reads, drawn by how well they were rewarded.

Source: Zhang et al. 2024, Policy Filtration in RLHF, arXiv 2409.06957. A reward model is surer of very good and of
very bad answers than of those between, so training on the extremes is training on truer rewards.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from klimb.algos.groups import Groups
from klimb.algos.ops import pick


def weights(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    strategy: str,
    power: float = 2.0,
) -> Float32[Tensor, " b"]:
    """Probability of each row to be drawn within its group of N, [B], summing to 1 in every group.

    Ranked by reward, equal ones in the order of the batch. `best_of_n` the best alone; `best_random` the best 1/2, the
    others 1 / (2 (N - 1)) each; `best_worst` best and worst 1/2 each; `power` in proportion to |R|^power, all
    alike when every reward is 0. Source: arXiv 2409.06957, section 3. Raises ConfigError for an unknown strategy.
    """
    weigh = pick("algorithm.policy_filtration.strategy", strategy, STRATEGIES)
    g = Groups(groups, None)
    table = g.table(rewards)
    order = torch.where(g.present, table, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter(1, order, torch.arange(table.shape[1], device=order.device).expand_as(order))
    found = torch.where(g.present, weigh(rank, g.count, table, power), 0.0)
    return g.rows(found / found.sum(dim=1, keepdim=True))


def draw(
    weights: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    generator: torch.Generator,
) -> Int64[Tensor, " b"]:
    """Row indices int64 [B]: as many as the group has, with replacement, by its weights, at the group's own places.

    The generator lives on the CPU, so that every device draws the same rows.
    """
    drawn = torch.empty(len(groups), dtype=torch.int64)
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero().flatten().cpu()
        share = weights.detach().double().cpu()[rows]
        uniform = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        edges = share.cumsum(0)
        edges = edges / edges[-1]  # the last is 1 exactly, so a row of weight 0 is never drawn
        at = torch.searchsorted(edges, uniform, right=True)
        drawn[rows] = rows[at]
    return drawn.to(groups.device)


def effective_size(weights: Float[Tensor, " b"]) -> float:
    """(sum w)^2 / sum w^2, in rows: how many equally weighted rows the weights are worth (Kish 1965)."""
    w = weights.detach().double()
    return float(w.sum().square() / w.square().sum()) if len(w) else 0.0


def r_squared(
    rewards: Float[Tensor, " b"],
    scores: Float[Tensor, " b"],
    known: Bool[Tensor, " b"],
) -> float | None:
    """Share of the true score's variance that a line in the reward explains; None without two rows or a spread."""
    x, y = rewards.detach().double()[known], scores.detach().double()[known]
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum().square() / (x.square().sum() * y.square().sum()))


def _best_random(rank: Tensor, count: Tensor, rewards: Tensor, power: float) -> Tensor:
    return torch.where(rank == 0, 0.5, 0.5 / (count - 1).clamp(min=1))


def _best_worst(rank: Tensor, count: Tensor, rewards: Tensor, power: float) -> Tensor:
    return ((rank == 0) | (rank == count - 1)).float()


def _power(rank: Tensor, count: Tensor, rewards: Tensor, power: float) -> Tensor:
    largest = rewards.abs().amax(dim=1, keepdim=True)
    # Relative to the largest, for a high power of a large reward is not a float32 any more.
    return torch.where(largest > 0, (rewards.abs() / torch.where(largest > 0, largest, 1.0)) ** power, 1.0)


# rank [G, N] from 0 for the best, count [G, 1], rewards [G, N], power -> weights [G, N] up to a factor
STRATEGIES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "best_of_n": lambda rank, count, rewards, power: (rank == 0).float(),
    "best_random": _best_random,
    "best_worst": _best_worst,
    "power": _power,
}
