# ruff: noqa: F722
"""Passes over rows: token log-probs, entropy and values. The only file that shifts.

A causal model's hidden state at position t-1 predicts token t, so every quantity of token t is read from the
hidden state before it. Only masked-in positions reach the head, in chunks, so memory never grows with
tokens x vocabulary: without gradients a chunk's logits are dropped, with gradients they are recomputed in backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from klimb.models.load import Critic, body_of, head_of

CHUNK_LOGITS = 2**24
"""Logits computed at once: 64 MiB in float32, a few of these live at the same time."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """logprobs [B, T] float32 at the given temperature, 0 where the mask is False; entropy [B, T] likewise."""

    logprobs: Tensor
    entropy: Tensor


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Compute dtype of a pass; float32 needs no context."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def token_scores(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> TokenScores:
    """Log-probability and entropy of the distribution each masked-in token was sampled from.

    Logits are divided by the temperature, log-softmax is taken in float32. Differentiable in the model's
    weights when gradients are on. Padding may stand on either side: positions come from the attention mask.
    """
    with autocast(tokens.device, dtype):
        hidden = _hidden(body_of(model), tokens, attention)
        before = hidden[:, :-1][mask[:, 1:]]
        logprobs, entropy = _head_in_chunks(head_of(model), before, tokens[:, 1:][mask[:, 1:]], temperature)
    return TokenScores(logprobs=_spread(logprobs, mask), entropy=_spread(entropy, mask))


def token_values(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "b t"]:
    """The critic's estimate before each masked-in token is emitted, float32 [B, T], 0 elsewhere."""
    return _values(critic, _critic_hidden(critic, tokens, attention, dtype), mask)


def values_and_end(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, " b"]]:
    """`token_values`, and from the same pass the estimate behind each row's last masked-in token [B], 0 without one."""
    hidden = _critic_hidden(critic, tokens, attention, dtype)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, 0).amax(dim=1)
    end = critic.head(hidden[torch.arange(len(mask), device=mask.device), last].float()).squeeze(-1)
    return _values(critic, hidden, mask), torch.where(mask.any(dim=1), end, 0.0)


def _critic_hidden(critic: Critic, tokens: Tensor, attention: Tensor, dtype: torch.dtype) -> Tensor:
    with autocast(tokens.device, dtype):
        return _hidden(critic.body, tokens, attention)


def _values(critic: Critic, hidden: Tensor, mask: Tensor) -> Tensor:
    before = hidden[:, :-1][mask[:, 1:]].float()
    return _spread(critic.head(before).squeeze(-1), mask)


def _hidden(body: nn.Module, tokens: Tensor, attention: Tensor) -> Tensor:
    """Last hidden states [B, T, H].

    Right-padded rows need no attention mask under causal attention: no real token can see a pad behind it. That
    keeps the fast kernel. With pads in front, mask and positions are given. Pads are replaced by the row's first
    token: kernels multiply what a pad holds by 0, and the embedding of an untrained pad token may be NaN.
    """
    tokens = torch.where(attention, tokens, tokens.gather(1, attention.long().argmax(dim=1, keepdim=True)))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if bool((attention[:, 1:] & ~attention[:, :-1]).any()):
        positions = (attention.long().cumsum(dim=1) - 1).clamp(min=0)
        return body(input_ids=tokens, attention_mask=attention.long(), position_ids=positions, use_cache=False)[0]
    return body(input_ids=tokens, position_ids=positions, use_cache=False)[0]


def _head_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    rows = max(1, CHUNK_LOGITS // int(cast(Tensor, head.weight).shape[0]))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, hidden.shape[0], rows):
        h, y = hidden[start : start + rows], targets[start : start + rows]
        if torch.is_grad_enabled():
            part = checkpoint(_chunk, head, h, y, temperature, use_reentrant=False, preserve_rng_state=False)
            parts.append(cast(tuple[Tensor, Tensor], part))
        else:
            parts.append(_chunk(head, h, y, temperature))
    if not parts:
        nothing = hidden.sum(dim=-1).float()  # zero tokens, still part of the graph
        return nothing, nothing.detach()
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    entropy = normaliser - ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(dim=-1)
    return logprobs, entropy


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """[N] back to [B, T], 0 where the mask is False."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return out.masked_scatter(mask, values.float())
