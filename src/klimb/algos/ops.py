# ruff: noqa: F722
"""Masked arithmetic, and aggregation as data: one weight tensor per minibatch.

`mask` is bool, True where the policy sampled the token. Inputs are replaced at masked positions before any
arithmetic, so that NaN in padding reaches neither a result nor a gradient. Everything returned is float32.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from klimb.errors import ConfigError

MAX_LOG_RATIO = 20.0
WHITEN_EPS = 1e-8

T = TypeVar("T")


def pick(key: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or a ConfigError that names the config key, what is allowed and the nearest name."""
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "set it to one of these."
    raise ConfigError(f"{key}: unknown name '{name}'. Allowed: {', '.join(table)}; {hint}")


def replace(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """x as float32, 0 where the mask is False; the gradient there is exactly 0, whatever x holds."""
    return torch.where(mask, x.float(), 0.0)


def clamp_log_ratio(x: Float[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """Log-ratios (nats) limited to +-20, so that their exp is finite; beyond it the gradient is 0."""
    return x.float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_sum(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float32[Tensor, ""]:
    """Sum of x over the masked-in positions, a scalar tensor; 0 when there is none."""
    return replace(x, mask).sum()


def row_mean(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float32[Tensor, " b"]:
    """Mean of x over each row's masked-in positions, [B]; 0 with zero gradient in a row without one."""
    return replace(x, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def masked_mean(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float32[Tensor, ""]:
    """Mean of x over the masked-in positions, a scalar tensor; 0 with zero gradient when there is none."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def whiten(x: Float[Tensor, "*s"], mask: Bool[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
    """(x - mean) / sqrt(var + 1e-8) over the masked-in positions, unbiased variance; 0 elsewhere.

    With fewer than two masked-in positions x is returned as it is there. Source: the usual
    advantage normalisation of PPO (Huang et al. 2022, The 37 Implementation Details of PPO, detail 7).
    """
    x, count = replace(x, mask), mask.sum()
    if count < 2:
        return x
    # A float32 mean of equal numbers is not equal to them, and the small eps would blow the difference up.
    # After this subtraction equal numbers are exact zeros.
    x = replace(x - torch.where(mask, x, torch.inf).min(), mask)
    centred = replace(x - x.sum() / count, mask)
    variance = centred.square().sum() / (count - 1)
    return centred / torch.sqrt(variance + WHITEN_EPS)


def token_weights(mask: Bool[Tensor, "b t"], loss_agg: str, max_tokens: int | None = None) -> Float32[Tensor, "b t"]:
    """Weights [B, T] with loss = (weights * token_loss).sum(), from the mask of the whole minibatch.

    m = masked-in tokens, B = rows that have one, len_i = tokens of row i:
    `token-mean` 1/m (DAPO, arXiv 2503.14476, eq. 8); `seq-mean-token-mean` 1/(B len_i) (GRPO, arXiv
    2402.03300, eq. 3); `seq-mean-token-sum` 1/B; `seq-mean-token-sum-norm` 1/(B max_tokens) (Dr. GRPO,
    arXiv 2503.20783), max_tokens = the response limit. 0 where the mask is False, all 0 without tokens.
    Raises ConfigError for an unknown name, or when the last one comes without a positive max_tokens.
    """
    scale = pick("algorithm.loss_agg", loss_agg, LOSS_AGGS)
    lengths = mask.sum(dim=1, keepdim=True).float()
    return torch.where(mask, 1.0 / scale(lengths, max_tokens).clamp(min=1.0), 0.0)


def _rows_with_tokens(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum()


def _constant_length(lengths: Tensor, max_tokens: int | None) -> Tensor:
    if max_tokens is None or max_tokens < 1:
        raise ConfigError(
            f"algorithm.loss_agg: 'seq-mean-token-sum-norm' divides by the response limit, which is "
            f"{max_tokens}. It must be at least 1: set actor_rollout_ref.max_tokens."
        )
    return _rows_with_tokens(lengths) * max_tokens


# lengths [B, 1], max_tokens -> denominators, [B, 1] or a scalar
LOSS_AGGS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "token-mean": lambda lengths, _: lengths.sum(),
    "seq-mean-token-mean": lambda lengths, _: _rows_with_tokens(lengths) * lengths,
    "seq-mean-token-sum": lambda lengths, _: _rows_with_tokens(lengths),
    "seq-mean-token-sum-norm": _constant_length,
}
