# ruff: noqa: F722
"""Token rewards and advantages. Nothing here carries a gradient; whitening is left to the training layer."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from klimb.algos.groups import Groups
from klimb.algos.ops import replace, whiten

STD_EPS = 1e-6
MEAN_EPS = 1e-6


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


def reinforce_pp(
    rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    gamma: float,
) -> Float32[Tensor, "b t"]:
    """Discounted reward-to-go, sum over the row's later masked-in tokens of gamma^k r, [B, T], 0 off the mask.

    Not whitened: REINFORCE++ whitens it over the tokens of the batch, which the training layer does. Tokens off
    the mask cost no discount. Source: Hu 2025, arXiv 2501.03262, section 3.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]  # without values: the rewards' own sum


def remax(
    rewards: Float[Tensor, "b t"],
    greedy_totals: Float[Tensor, " b"],
    mask: Bool[Tensor, "b t"],
) -> Float32[Tensor, "b t"]:
    """Reward-to-go minus the total reward of a greedy response to the same prompt, [B, T], 0 off the mask.

    greedy_totals [B]: a constant per prompt, so the baseline brings no bias. Source: Li et al. 2023, arXiv
    2310.10505, algorithm 1.
    """
    return replace(reinforce_pp(rewards, mask, 1.0) - greedy_totals.detach().float()[:, None], mask)


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
    g = Groups(groups, valid)
    centred = g.centre(rewards)
    return g.rows(centred / (g.std(centred) + STD_EPS) if norm_by_std else centred)


def rloo(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """R_i minus the mean reward of the others in its group; arguments and special cases as in `grpo`.

    Source: Ahmadian et al. 2024, arXiv 2402.14740 (the RLOO estimator), after Kool et al. 2019.
    """
    g = Groups(groups, valid)
    # R_i - (S - R_i) / (n - 1) = (R_i - S / n) n / (n - 1)
    return g.rows(g.centre(rewards) * g.count / (g.count - 1).clamp(min=1))


def reinforce_pp_baseline(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    mask: Bool[Tensor, "b t"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, "b t"]:
    """R_i - mean_g on each masked-in token, then whitened over the batch's tokens, [B, T], 0 off the mask.

    valid as in `grpo`; None: the rows that have a token. Long answers weigh more in the whitening than short
    ones, so a group without spread, 0 before it, moves by the tokens' mean like every other; when no
    group has spread all is exactly 0. Source: Hu 2025, arXiv 2501.03262, the variant with a group baseline.
    """
    g = Groups(groups, mask.any(dim=1) if valid is None else valid)
    return whiten(g.rows(g.centre(rewards))[:, None].expand(mask.shape), mask)


def opo(
    rewards: Float[Tensor, " b"],
    lengths: Int64[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """R_i - sum_g(len R) / sum_g(len), the baseline of least variance when gradient norms grow with length.

    lengths int64 [B], tokens of the response; the rest as in `grpo`. Source: Hao et al. 2025, arXiv 2505.23585,
    section 3.
    """
    g = Groups(groups, valid)
    above, _ = g.above_lowest(rewards)
    weight = g.table(lengths)
    baseline = g.total(weight * above) / g.total(weight).clamp(min=1.0)
    return g.rows(torch.where(g.present, above - baseline, 0.0))


def grpo_passk(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """Only the best of a group gets an advantage: (R_max - R_2nd) / (std_g + 1e-6); the others 0.

    Arguments and special cases as in `grpo`. Two equal best leave nothing to tell apart, so all get 0. Source: Tang
    et al. 2025, arXiv 2503.19595, the best-of-group objective with a leave-one-out baseline, over the spread.
    """
    g = Groups(groups, valid)
    above, _ = g.above_lowest(rewards)
    ranked, order = torch.where(g.present, above, -torch.inf).sort(dim=1, descending=True, stable=True)
    if ranked.shape[1] < 2:
        return torch.zeros_like(rewards, dtype=torch.float32)
    lead = torch.where(g.count > 1, ranked[:, :1] - ranked[:, 1:2], 0.0) / (g.std(g.centre(rewards)) + STD_EPS)
    return g.rows(torch.zeros_like(above).scatter(1, order[:, :1], lead))


def maxrl(
    rewards: Float[Tensor, " b"],
    groups: Int64[Tensor, " b"],
    valid: Bool[Tensor, " b"] | None = None,
) -> Float32[Tensor, " b"]:
    """(R_i - mean_g) / mean_g, 0 where the mean is 0, that is below 1e-6 of the largest |R|.

    Arguments and special cases as in `grpo`.

    The rarer success is in a group, the more it counts. Meant for rewards of 0 and 1 and, unlike the others, not
    unmoved by a shift of rewards: a negative mean turns the sign round. Source: Tajwar et al. 2026, arXiv
    2602.02710.
    """
    g = Groups(groups, valid)
    above, lowest = g.above_lowest(rewards)
    mean = lowest + g.mean(above)
    # A mean that should be 0 is left with the rounding of its terms, which must not be divided by.
    largest = g.table(rewards).abs().amax(dim=1, keepdim=True)
    is_zero = mean.abs() <= MEAN_EPS * largest
    return g.rows(torch.where(is_zero, 0.0, g.centre(rewards) / torch.where(is_zero, 1.0, mean)))


def overlong_penalty(
    lengths: Int64[Tensor, " b"],
    cut_off: Bool[Tensor, " b"],
    penalty: float,
    max_tokens: int,
    buffer: int | None = None,
) -> Float32[Tensor, " b"]:
    """What a response loses for its length, [B], at least 0; to be subtracted from its reward.

    lengths int64 [B] in tokens; cut_off bool [B]: ended by the limit max_tokens. Without a buffer, cut-off ones lose
    `penalty`. With one, all lose penalty * (len - (max_tokens - buffer)) / buffer inside the last `buffer` tokens.
    Source: DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13.
    """
    if buffer is None:
        return torch.where(cut_off, penalty, 0.0)
    over = (lengths - (max_tokens - buffer)).clamp(0, buffer).float()
    return penalty * over / buffer
