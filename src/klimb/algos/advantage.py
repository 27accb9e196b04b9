# ruff: noqa: F722
"""Token rewards and advantages. Nothing here carries a gradient; whitening is left to the training layer."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from klimb.algos.ops import replace

STD_EPS = 1e-6


def token_rewards(
    scores: Float[Tensor, " b"],
    mask: Bool[Tensor, "b t"],
    kl: Float[Tensor, "b t"] | None = None,
    coef: float = 0.0,
) -> Float32[Tensor, "b t"]:
    """-coef * kl on every masked-in token, plus the episode's score on the row's last masked-in token.

    scores [B]; kl [B, T] in nats per token, or None when KL is not in the reward; result [B, T], 0 where the
    mask is False. A row without a token gets nothing, and its score may be NaN. Source: Ouyang et al. 2022,
    arXiv 2203.02155, eq. 2, with the KL spread over the tokens.
    """
    still_to_come = mask.flip(1).cumsum(1).flip(1)
    last = mask & (still_to_come == 1)
    rewards = torch.where(last, scores.detach().float()[:, None], 0.0)
    return rewards if kl is None else rewards - coef * replace(kl.detach(), mask)


def gae(
    rewards: Float[Tensor, "b t"],
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    gamma: float,
    lam: float,
    last_values: Float[Tensor, " b"] | None = None,
) -> tuple[Float32[Tensor, "b t"], Float32[Tensor, "b t"]]:
    """Generalised advantage estimation -> (advantages, returns), both [B, T], 0 where the mask is False.

    delta_t = r_t + gamma V_{t+} - V_t and A_t = delta_t + gamma lam A_{t+}, where t+ is the row's next
    masked-in token, so that a gap (a tool's answer) costs no discount. values[t] is the estimate made
    before token t. last_values [B]: the value after the row's last token, 0 for an episode that stopped;
    None is 0 for all. returns = A + V. Not whitened. Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16.
    """
    rewards, values = replace(rewards.detach(), mask), replace(values.detach(), mask)
    next_value = values.new_zeros(len(values)) if last_values is None else last_values.detach().float()
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in range(mask.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages, advantages + values


def grpo(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    norm_by_std: bool = True,
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """(R_i - mean_g) / (std_g + 1e-6) with the sample standard deviation (n - 1); without it, R_i - mean_g.

    rewards [B], groups [B] ids in any order, valid [B]: False = a failed episode, which is in no baseline and
    gets 0 (its reward may be NaN). A group without spread, or of one, gets exactly 0. Source: Shao et al.
    2024, arXiv 2402.03300, section 4.1.2; norm_by_std False: Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.
    """
    table = _Table(groups, valid)
    centred = table.centre(rewards)
    if norm_by_std:
        variance = centred.square().sum(1, keepdim=True) / (table.count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPS)
    return table.rows(centred)


def rloo(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """R_i minus the mean reward of the others in its group; arguments and special cases as in `grpo`.

    Source: Ahmadian et al. 2024, arXiv 2402.14740 (the RLOO estimator), after Kool et al. 2019.
    """
    table = _Table(groups, valid)
    # R_i - (S - R_i) / (n - 1) = (R_i - S / n) n / (n - 1)
    return table.rows(table.centre(rewards) * table.count / (table.count - 1).clamp(min=1))


class _Table:
    """Rows [B] laid out as one line per group, [G, N]. No atomic sums, so the same bits on every rank."""

    def __init__(self, groups: Tensor, valid: Tensor | None) -> None:
        order = torch.argsort(groups, stable=True)
        ordered = groups[order]
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        line = torch.empty_like(order)
        line[order] = is_first.cumsum(0) - 1
        sizes = torch.bincount(line)
        starts = sizes.cumsum(0) - sizes
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device) - starts[line[order]]
        self.at = (line, column)
        shape = (len(sizes), int(sizes.max()) if len(sizes) else 1)
        self.present = torch.zeros(shape, dtype=torch.bool, device=groups.device)
        self.present[self.at] = True if valid is None else valid
        self.count = self.present.sum(1, keepdim=True)

    def centre(self, rewards: Tensor) -> Tensor:
        """Reward minus the group's mean, [G, N]; 0 where nothing is present."""
        table = torch.zeros(self.present.shape, device=rewards.device)
        table[self.at] = rewards.detach().float()
        # A float32 mean of equal numbers is not equal to them. Counted from the lowest, equal rewards are
        # exact zeros, and so is their advantage whatever it is divided by.
        lowest = torch.where(self.present, table, torch.inf).amin(1, keepdim=True)
        above = torch.where(self.present, table - lowest, 0.0)
        mean = above.sum(1, keepdim=True) / self.count.clamp(min=1)
        return torch.where(self.present, above - mean, 0.0)

    def rows(self, table: Tensor) -> Tensor:
        """Back to [B]."""
        return table[self.at]
