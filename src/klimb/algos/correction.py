# ruff: noqa: F722
"""How far the rollout engine's log-probabilities are from the trainer's."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klimb.algos.ops import clamp_log_ratio


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
    clamped = clamp_log_ratio(log_rho)
    rho = clamped.exp()
    diff = (old.exp() - sampler.exp()).abs()
    measures = {
        "kl": -log_rho.mean(),
        "k3": (torch.expm1(clamped) - clamped).mean(),
        "ppl_ratio": clamp_log_ratio(row_means).exp().mean(),
        "ess": (1.0 / (rho / rho.mean()).square().mean()).clamp(max=1.0),
        "probs_diff_mean": diff.mean(),
        "probs_diff_max": diff.max(),
        "max_log_ratio": log_rho.abs().max(),
    }
    numbers = torch.stack(list(measures.values())).cpu()  # one transfer, not seven
    return {name: float(numbers[i]) for i, name in enumerate(measures)}
