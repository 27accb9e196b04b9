"""Forward and backward of a loss of single tokens through the head, a chunk of tokens at a time.

With p the probabilities of a token's distribution, y the token and q = p - onehot(y): d logp / d logits = -q, and for
the entropy d H / d logits = -p (log p + H). A loss that does not read the entropy needs nothing but q, and the entropy
itself no pass: q W h / temperature = sum p logits - logit(y), so that H = -logp - q W h / temperature, and q W is what
the gradient by the hidden state h is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from klimb.models.head import HeadPass, entropies_of

LossOf = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Log-probs [n] of tokens, and what gives their entropies [n] to a loss that reads them -> their loss."""


@dataclass
class _Entropy:
    """Entropies [n] of the distributions with these logits and probabilities [n, V], made when they are asked for."""

    logits: Tensor
    p: Tensor
    value: Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if self.value is None:
            self.value = entropies_of(self.logits, self.p).requires_grad_()
        return self.value


def backward_chunk(through_head: HeadPass, hidden: Tensor, y: Tensor, loss_of: LossOf) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens y [n, 1], hidden states [n, H] -> the loss's gradient by these [n, H], log-probs [n], entropies [n].

    Adds the gradient by the head's weight [V, H] to its .grad where it is trained. In less than float32 the difference
    that gives the entropy is too coarse."""
    logits, p, logprobs = through_head.read(hidden, y)
    entropy = _Entropy(logits, p)
    by_logprob, by_entropy = _by_scores(loss_of, logprobs, entropy)
    if by_entropy is None:
        if hidden.dtype != torch.float32 or torch.is_autocast_enabled(hidden.device.type):
            entropy()
        by_logits, scale = p.scatter_add_(-1, y, -torch.ones_like(by_logprob)), -by_logprob
    else:
        logp = logits - (logits.gather(-1, y) - logprobs.unsqueeze(-1))
        factor = -by_logprob - by_entropy * (logp + entropy().unsqueeze(-1))
        by_logits, scale = p.mul_(factor).scatter_add_(-1, y, by_logprob), torch.ones_like(by_logprob)
    scale, by_logits = scale / through_head.temperature, by_logits.to(hidden.dtype)
    product = through_head.by_hidden(by_logits)
    through_head.add_gradient(by_logits, scale * hidden)
    if entropy.value is None:
        return scale * product, logprobs, -logprobs - (product * hidden).sum(-1) / through_head.temperature
    return scale * product, logprobs, entropy.value.detach()


def _by_scores(loss_of: LossOf, logprobs: Tensor, entropy: _Entropy) -> tuple[Tensor, Tensor | None]:
    """Gradient of the loss by log-probs and by entropies, [n, 1] each; None where it did not read them."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = loss_of(leaf, entropy)
        leaves = [leaf] if entropy.value is None else [leaf, entropy.value]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    by_logprob, by_entropy = cast(tuple[Tensor | None, Tensor | None], (*found, None)[:2])
    by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob
    return by_logprob.unsqueeze(-1), None if by_entropy is None else by_entropy.unsqueeze(-1)
