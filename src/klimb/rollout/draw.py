"""From logits to a token: one uniform number per request and position, by inverse transform.

A multinomial draw would take its numbers from one generator in batch order, so a text would depend on its
neighbours in the batch; here it depends on (seed, position) alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def uniforms(seed: int, count: int) -> Tensor:
    """The request's own numbers, float64 [count] in [0, 1)."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution it was drawn from.

    logits [N, V] of any float dtype, uniform float64 [N]. Returns int64 [N] and float32 [N]. Temperature 0 takes
    the likeliest token (the lowest id on a tie) and reports its log-probability at temperature 1.
    """
    logits = logits.float() if temperature == 0 else _keep(logits.float() / temperature, top_p, top_k)
    logprobs = logits - logits.logsumexp(dim=-1, keepdim=True)
    token = logits.argmax(dim=-1) if temperature == 0 else _inverse_cdf(logprobs.exp(), uniform)
    return token, logprobs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform x total.

    Two levels, blocks first: a full float64 cumulative sum over a large vocabulary costs several times more.
    """
    n, v = probs.shape
    padded = torch.nn.functional.pad(probs, (0, -v % BLOCK)).view(n, -1, BLOCK)
    block_ends = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = (uniform.to(probs.device) * block_ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(block_ends, goal, right=True).clamp(max=padded.shape[1] - 1)
    rest = goal - torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    token = (block * BLOCK + torch.searchsorted(inside, rest, right=True)).clamp(max=v - 1)
    # Rounding at a block's end can point at a token of probability 0, which was never on offer.
    impossible = probs.gather(-1, token) <= 0
    return torch.where(impossible, probs.argmax(dim=-1, keepdim=True), token).squeeze(-1)


def _keep(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits with everything outside the k likeliest, then outside the nucleus, at -inf."""
    if top_k > 0:
        bound = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < bound, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits
