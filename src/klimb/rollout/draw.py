"""From logits to a token: one uniform number per request and position, by inverse transform.

A multinomial draw would take its numbers from one generator in batch order, so a text would depend on its
neighbours in the batch; here it depends on (seed, position) alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def uniforms(seed: int, count: int) -> Tensor:
    """The request's own numbers, float64 [count] in [0, 1)."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution it was drawn from.

    logits [N, V] of any float dtype, uniform float64 [N]. Returns int64 [N] and float32 [N]. Temperature 0 takes
    the likeliest token (the lowest id on a tie) and reports its log-probability at temperature 1.
    """
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature
    if temperature > 0:
        logits = _keep(logits, top_p, top_k)
    probs = logits.softmax(dim=-1)
    # Two levels, blocks first: a full float64 cumulative sum over a large vocabulary costs several times more.
    spare = -probs.shape[1] % BLOCK
    blocks = (pad(probs, (0, spare)) if spare else probs).view(len(probs), -1, BLOCK)
    block_ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    token = logits.argmax(dim=-1, keepdim=True) if temperature == 0 else _inverse_cdf(blocks, block_ends, uniform)
    chosen = probs.gather(-1, token.clamp_(max=probs.shape[1] - 1))
    if bool((chosen <= 0).any()):
        # Rounding at a block's end can point at a token of probability 0, which was never on offer.
        token = torch.where(chosen <= 0, probs.argmax(dim=-1, keepdim=True), token)
        chosen = probs.gather(-1, token)
    return token.squeeze(-1), chosen.log().squeeze(-1)


def _inverse_cdf(blocks: Tensor, block_ends: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform x total, int64 [N, 1].

    blocks [N, blocks, BLOCK]: probabilities of the tokens; block_ends float64 [N, blocks]: their cumulative sums.
    """
    goal = (uniform.to(blocks.device) * block_ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(block_ends, goal, right=True).clamp(max=blocks.shape[1] - 1)
    rest = goal - torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    return block * BLOCK + torch.searchsorted(inside, rest, right=True).clamp(max=BLOCK - 1)


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
