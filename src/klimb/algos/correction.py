# ruff: noqa: F722
"""The rollout engine against the trainer: how far apart they are, weights that correct it, rows to reject.

rho = exp(old - sampler): the trainer's probability of a sampled token over the engine's that drew it.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from klimb.algos.ops import clamp_log_ratio, masked_mean, pick, replace, row_mean


def weights(
    old_logprobs: Float[Tensor, "b t"],
    sampler_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    kind: str,
    cap: float,
    low: float | None = None,
    normalize: bool = False,
) -> Float32[Tensor, "b t"]:
    """Importance weights [B, T] for the token losses, detached, 0 off the mask.

    `none` 1; `token` min(rho, cap); `sequence` min(product of the row's rho, cap) on each of its tokens; `band`
    rho inside [low, cap], else 0, low None: 1 / cap. normalize: divided by their mean over the masked-in tokens.
    Log-ratios, and their sums over a row, are clamped to +-20. Sources: truncated importance sampling, Ionides
    2008; band: IcePop, Ling team 2025, arXiv 2510.18855. Raises ConfigError for an unknown kind.
    """
    weigh = pick("algorithm.rollout_correction.weights", kind, KINDS)
    log_rho = _log_rho(old_logprobs, sampler_logprobs, mask)
    w = replace(weigh(log_rho, cap, low).expand(mask.shape), mask)
    mean = masked_mean(w, mask)
    return torch.where(mean > 0, w / mean, w) if normalize else w


def _log_rho(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    return replace(old_logprobs.detach(), mask) - replace(sampler_logprobs.detach(), mask)


def _token(log_rho: Tensor, cap: float, low: float | None) -> Tensor:
    return clamp_log_ratio(log_rho).exp().clamp(max=cap)


def _sequence(log_rho: Tensor, cap: float, low: float | None) -> Tensor:
    return clamp_log_ratio(log_rho.sum(dim=1, keepdim=True)).exp().clamp(max=cap)


def _band(log_rho: Tensor, cap: float, low: float | None) -> Tensor:
    rho = clamp_log_ratio(log_rho).exp()
    return torch.where((rho >= (1.0 / cap if low is None else low)) & (rho <= cap), rho, 0.0)


# log rho [B, T], cap, low -> weights [B, T] or [B, 1]
KINDS: dict[str, Callable[[Tensor, float, float | None], Tensor]] = {
    "none": lambda log_rho, cap, low: torch.ones_like(log_rho),
    "token": _token,
    "sequence": _sequence,
    "band": _band,
}


def keep_rows(
    old_logprobs: Float[Tensor, "b t"],
    sampler_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    criterion: str,
    lo: float | None,
    hi: float | None,
) -> Bool[Tensor, " b"]:
    """Which rows are near enough to be trained on, [B]; True for a row without a token. None: no bound there.

    `seq_mean_k1` lo <= exp(mean log rho) <= hi, the geometric mean ratio; `seq_mean_k3` mean(rho - 1 - log rho) <= hi,
    in nats; `token_veto` smallest rho >= lo. A bound that a criterion does not have is not read. Source: the row's
    geometric ratio, as in sequence-level masking (Zheng et al. 2025, arXiv 2507.18071, eq. 7). Raises ConfigError for
    an unknown criterion.
    """
    measure = pick("algorithm.rollout_correction.reject.criterion", criterion, CRITERIA)
    log_rho = _log_rho(old_logprobs, sampler_logprobs, mask)
    number = measure(log_rho, mask)
    low = -torch.inf if lo is None or criterion not in BOUNDED_BELOW else lo
    high = torch.inf if hi is None or criterion not in BOUNDED_ABOVE else hi
    return ((number >= low) & (number <= high)) | ~mask.any(dim=1)


def _row_min(x: Tensor, mask: Tensor) -> Tensor:
    """Infinite in a row without a token."""
    return torch.cat([torch.where(mask, x, torch.inf), x.new_full((len(x), 1), torch.inf)], dim=1).amin(dim=1)


def _k3(log_rho: Tensor) -> Tensor:
    x = clamp_log_ratio(log_rho)
    return torch.expm1(x) - x


# log rho [B, T], mask [B, T] -> one number per row [B]
CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "seq_mean_k1": lambda log_rho, mask: clamp_log_ratio(row_mean(log_rho, mask)).exp(),
    "seq_mean_k3": lambda log_rho, mask: row_mean(_k3(log_rho), mask),
    "token_veto": lambda log_rho, mask: clamp_log_ratio(_row_min(log_rho, mask)).exp(),
}


BOUNDED_BELOW = ("seq_mean_k1", "token_veto")
BOUNDED_ABOVE = ("seq_mean_k1", "seq_mean_k3")


def mismatch(
    old_logprobs: Float[Tensor, "b t"],
    sampler_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
) -> dict[str, float]:
    """Measures of the engine/trainer mismatch, rho = exp(old - sampler), means over masked-in tokens.

    Inputs [B, T] in nats. `kl` mean of sampler - old; `k3` mean of rho - 1 - log rho; `ppl_ratio` mean over
    rows of exp(the row's mean of sampler - old); `ess` 1 / mean((rho / mean rho)^2), in (0, 1], a share
    (Kish 1965); `probs_diff_mean` and `probs_diff_max` of |exp(old) - exp(sampler)|; `max_log_ratio` the
    largest |old - sampler|. Log-ratios are clamped to +-20 before exp. Empty when there is no token.
    """
    lengths = mask.sum(dim=1)
    if not lengths.any():
        return {}
    old, sampler = old_logprobs.detach().float()[mask], sampler_logprobs.detach().float()[mask]
    log_rho = old - sampler
    row_sums = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, -log_rho).sum(dim=1)
    row_means = (row_sums / lengths)[lengths > 0]
    rho = clamp_log_ratio(log_rho).exp()
    diff = (old.exp() - sampler.exp()).abs()
    measures = {
        "kl": -log_rho.mean(),
        "k3": _k3(log_rho).mean(),
        "ppl_ratio": clamp_log_ratio(row_means).exp().mean(),
        "ess": (1.0 / (rho / rho.mean()).square().mean()).clamp(max=1.0),
        "probs_diff_mean": diff.mean(),
        "probs_diff_max": diff.max(),
        "max_log_ratio": log_rho.abs().max(),
    }
    numbers = torch.stack(list(measures.values())).cpu()  # one transfer, not seven
    return {name: float(numbers[i]) for i, name in enumerate(measures)}
