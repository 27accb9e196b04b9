# ruff: noqa: F722
"""Policy and value losses per token, unreduced, with the sums their metrics are made of.

The reduction is a weight tensor (`ops.token_weights`): loss = (weights * token_loss).sum().
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from klimb.algos.ops import MAX_LOG_RATIO, clamp_log_ratio, masked_sum, pick, replace, row_mean

Sums = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LossStats:
    """Detached scalars that add up exactly over micro-batches and ranks.

    sums: name -> (numerator, denominator); both are added over the parts, then divided once. A denominator of
    0 means no token: the metric is left out. maxima: name -> largest value, 0 without a token.
    """

    sums: Sums
    maxima: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a policy loss may read, all [B, T] and 0 off the mask. Gradients flow through the first three.

    logprobs of the new policy; log_ratio new - old in nats, unclamped; ratio its exp, clamped to +-20 in the exponent;
    advantages, detached; mask bool.
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor


Flags = dict[str, Tensor]
"""Name of a metric -> bool [B, T]; the metric is the share of masked-in tokens where it is True."""


def policy_loss(
    name: str,
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    **settings: float | None,
) -> tuple[Float32[Tensor, "b t"], LossStats]:
    """Loss of every token [B, T], 0 where the mask is False, and its statistics. r = exp(new - old).

    name: a key of POLICY_LOSSES; settings: the keyword arguments of that function. Gradients flow to logprobs
    only. Log-ratios (nats) are clamped to +-20 first; `clamped_share` counts those. Also: `approx_kl` the
    mean of r - 1 - log r (k3 of new against old), `ratio_mean`, `ratio_abs_dev` the mean of |r - 1|, the maxima
    `ratio_max` and `ratio_abs_dev_max`, and what the loss adds. Raises ConfigError for an unknown name.
    """
    token_loss = pick("algorithm.policy_loss", name, POLICY_LOSSES)
    new = replace(logprobs, mask)
    log_ratio = new - replace(old_logprobs.detach(), mask)
    ratio = clamp_log_ratio(log_ratio).exp()
    terms = Terms(
        logprobs=new, log_ratio=log_ratio, ratio=ratio, advantages=replace(advantages.detach(), mask), mask=mask
    )
    loss, flags = token_loss(terms, **settings)
    count = mask.sum().float()
    stats = _ratio_stats(log_ratio.detach(), mask)
    stats.sums.update({key: ((hits & mask).sum().float(), count) for key, hits in flags.items()})
    return replace(loss, mask), stats


def clip(
    x: Terms,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Flags]:
    """max(-r A, -clip(r, 1 - low, 1 + high) A); where A < 0 at most -dual_clip * A, unless that is None.

    Statistics, as flags [B, T]: `clip_fraction_low` r < 1 - low with A < 0, `clip_fraction_high` r > 1 + high
    with A > 0: the tokens whose gradient the clip removes. The dual bound is counted in neither.
    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; two sides: DAPO, arXiv 2503.14476, eq. 8; dual
    clip: Ye et al. 2019, arXiv 1912.09729, eq. 5.
    """
    return _clipped(x.ratio, x.advantages, clip_ratio_low, clip_ratio_high, dual_clip)


def gspo(
    x: Terms,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Flags]:
    """`clip` with the sequence's ratio s = exp(mean_t log r) in place of each token's; flags likewise.

    Each token carries s with a gradient of its own, sg(s) exp(logp_t - sg(logp_t)). s moves far less than r, so the
    bounds must be far narrower: the paper uses 3e-4 and 4e-4. Source: Zheng et al. 2025, arXiv 2507.18071, eq. 5
    to 7 and the token variant, eq. 13 and 14.
    """
    s = clamp_log_ratio(row_mean(x.log_ratio, x.mask)).exp()[:, None]
    token = s.detach() * torch.exp(x.logprobs - x.logprobs.detach())
    return _clipped(token, x.advantages, clip_ratio_low, clip_ratio_high, dual_clip)


def cispo(
    x: Terms,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Flags]:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: the weight is clipped, so no token loses its gradient.

    Flags: `clip_fraction_low` r < 1 - low, `clip_fraction_high` r > 1 + high, whatever the sign of A. Source: MiniMax
    2025, arXiv 2506.13585, eq. 4 and 5.
    """
    low, high = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    loss = -x.ratio.detach().clamp(low, high) * x.advantages * x.logprobs
    return loss, {"clip_fraction_low": x.ratio < low, "clip_fraction_high": x.ratio > high}


def gmpo(
    x: Terms,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Flags]:
    """Row loss -mean(A) exp(mean_t q_t), on each of the row's tokens; q_t = log r, bounded on A's far side.

    q = sign(A) min(sign(A) log r, sign(A) clip(log r, -low, high)): here the bounds are in log space; the paper uses
    0.4 for both. Flags as in `clip`. Source: Zhao et al. 2025, arXiv 2507.20673, eq. 4.
    """
    sign, log_ratio = x.advantages.sign(), clamp_log_ratio(x.log_ratio)
    bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_ratio_low, clip_ratio_high))
    loss = -row_mean(x.advantages, x.mask) * row_mean(bounded, x.mask).exp()
    flags = {
        "clip_fraction_low": (log_ratio < -clip_ratio_low) & (x.advantages < 0),
        "clip_fraction_high": (log_ratio > clip_ratio_high) & (x.advantages > 0),
    }
    return loss[:, None].expand(x.mask.shape), flags


def sapo(
    x: Terms,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Flags]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a gate that closes gently instead of a clip.

    At r = 1 its gradient is that of -r A. No flags. Source: Gao et al. 2025, arXiv 2511.20347, section 3.
    """
    tau = torch.where(x.advantages > 0, tau_positive, tau_negative)
    return -x.advantages * (4.0 / tau) * torch.sigmoid(tau * (x.ratio - 1.0)), {}


def reinforce(x: Terms) -> tuple[Tensor, Flags]:
    """-A logp, without a ratio: right only while the policy is the one that sampled. Source: Williams 1992."""
    return -x.advantages * x.logprobs, {}


# The terms and, by keyword, the loss's settings -> loss [B, T], flags for the statistics
POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Flags]]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
}


OF_SINGLE_TOKENS = ("clip", "cispo", "sapo", "reinforce")
"""Losses whose value at a token needs no other token's log-prob, so that a batch may be cut anywhere."""


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Flags]:
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    flags = {
        "clip_fraction_low": (ratio < low) & (advantages < 0),
        "clip_fraction_high": (ratio > high) & (advantages > 0),
    }
    return loss, flags


def value_loss(
    values: Float[Tensor, "b t"],
    old_values: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    value_clip: float | None,
    mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float32[Tensor, "b t"], LossStats]:
    """0.5 max((V - ret)^2, (clip(V, V_old +- value_clip) - ret)^2) per token; None: no clipping.

    Without a mask every position counts in the statistics, and the inputs must already be replaced; with
    one, both are seen to here. Gradients flow to values only. `clip_fraction`: share of tokens where the
    clipped error is the larger. Source: Huang et al. 2022, The 37 Implementation Details of
    PPO, detail 9.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    values, old_values = replace(values, mask), replace(old_values.detach(), mask)
    returns = replace(returns.detach(), mask)
    error = (values - returns).square()
    clipped_error = error
    if value_clip is not None:
        clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
        clipped_error = (clipped - returns).square()
    clip_fraction = (masked_sum((clipped_error > error).float(), mask), mask.sum().float())
    loss = 0.5 * torch.maximum(error, clipped_error)
    return loss, LossStats(sums={"clip_fraction": clip_fraction}, maxima={})


def _ratio_stats(log_ratio: Tensor, mask: Tensor) -> LossStats:
    clamped = clamp_log_ratio(log_ratio)
    deviation = torch.expm1(clamped)  # r - 1, exact near 1
    per_token = {
        "approx_kl": deviation - clamped,
        "clamped_share": (log_ratio.abs() > MAX_LOG_RATIO).float(),
        "ratio_mean": clamped.exp(),
        "ratio_abs_dev": deviation.abs(),
    }
    count = mask.sum().float()
    return LossStats(
        sums={key: (masked_sum(x, mask), count) for key, x in per_token.items()},
        maxima={
            "ratio_max": _largest(per_token["ratio_mean"], mask),
            "ratio_abs_dev_max": _largest(per_token["ratio_abs_dev"], mask),
        },
    )


def _largest(x: Tensor, mask: Tensor) -> Tensor:
    return replace(x, mask).amax() if x.numel() else x.new_zeros(())
