# ruff: noqa: F722
"""Passes over rows: token log-probs, entropy and values. The only file that shifts.

A causal model's hidden state at position t-1 predicts token t, so every quantity of token t is read from the
hidden state before it. Rows go through the model end to end, without padding. Only masked-in positions reach the
head, in chunks, so memory never grows with tokens x vocabulary: without gradients a chunk's logits are dropped, with
gradients they are recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from klimb.models.attention import Packed, Sharing, through
from klimb.models.head import HeadPass, is_plain
from klimb.models.load import Critic, body_of, head_of
from klimb.models.sharded import run


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
    weights when gradients are on. Padding may stand on either side: no model sees it.
    """
    with autocast(tokens.device, dtype):
        hidden, place = _hidden(model, tokens, attention, mask)
        before = _before(hidden, place, mask)
        logprobs, entropy = _head_in_chunks(head_of(model), before, tokens[mask], temperature)
    return TokenScores(logprobs=_spread(logprobs, mask), entropy=_spread(entropy, mask))


LossOf = Callable[[Tensor, Tensor, slice], Tensor]
"""Log-probs [n] and entropies [n] of masked-in tokens, and which of all masked-in tokens these are -> their loss."""


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the head is a plain matrix, whose gradient `backward_scores` knows how to write."""
    return is_plain(head_of(model))


def backward_scores(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    temperature: float,
    loss_of: LossOf,
    dtype: torch.dtype = torch.float32,
) -> TokenScores:
    """`token_scores` and the backward of a loss of single tokens in one go: no logits are computed twice.

    While a chunk's logits are there, the gradient of its tokens' loss by their log-probs and entropies gives that by
    the logits, and so by hidden states and head at once: d logp_y = onehot_y - p, d H = -p (log p + H). Gradients are
    added to the weights' .grad, the head's only where it is trained. For losses whose value at one token needs no other
    token's log-prob; the others go through `token_scores`. Returned scores carry no gradient.
    """
    head = head_of(model)
    with autocast(tokens.device, dtype):
        hidden, place = _hidden(model, tokens, attention, mask)
        before = _before(hidden, place, mask)
    weight = cast(nn.Parameter, head.weight)  # read behind the body's pass, which gathers it where it is sharded
    targets, leaf = tokens[mask], before.detach()
    by_hidden = torch.zeros_like(leaf)
    logprobs, entropy = leaf.new_zeros(len(leaf), dtype=torch.float32), leaf.new_zeros(len(leaf), dtype=torch.float32)
    trains_head = weight.requires_grad
    if trains_head and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    with autocast(tokens.device, dtype):
        through_head = HeadPass.of(head, leaf, reuse=True)
    for at in through_head.pieces:
        with torch.no_grad(), autocast(tokens.device, dtype):
            by_logits, logprobs[at], entropy[at] = _gradient_by_logits(
                through_head, leaf[at], targets[at], temperature, at, loss_of
            )
            by_logits = by_logits.to(leaf.dtype)
            by_hidden[at] = by_logits @ weight
            if trains_head:
                assert weight.grad is not None
                weight.grad.addmm_(by_logits.T.to(weight.dtype), leaf[at].to(weight.dtype))
    before.backward(by_hidden)
    return TokenScores(logprobs=_spread(logprobs, mask), entropy=_spread(entropy, mask))


def _gradient_by_logits(
    through_head: HeadPass, hidden: Tensor, targets: Tensor, temperature: float, at: slice, loss_of: LossOf
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of a chunk's loss by the head's output [n, V]; log-probs [n]; entropies [n]."""
    y, logits = targets.unsqueeze(-1), through_head.logits(hidden, temperature)
    p, logprobs, entropy = through_head.scores(logits, y)
    with torch.enable_grad():
        leaves = (logprobs.detach().requires_grad_(), entropy.detach().requires_grad_())
        loss = loss_of(*leaves, at)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    by_logprob, by_entropy = (
        None if g is None else g.unsqueeze(-1) / temperature for g in cast(tuple[Tensor | None, Tensor | None], found)
    )
    factor = torch.zeros_like(y, dtype=p.dtype) if by_logprob is None else -by_logprob
    if by_entropy is not None:  # d H / d logits = -p (log p + H)
        normaliser = logits.gather(-1, y) - logprobs.unsqueeze(-1)
        factor = factor - by_entropy * (logits - normaliser + entropy.unsqueeze(-1))
    out = p.mul_(factor)
    return out if by_logprob is None else out.scatter_add_(-1, y, by_logprob), logprobs, entropy


def token_values(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "b t"]:
    """The critic's estimate before each masked-in token is emitted, float32 [B, T], 0 elsewhere."""
    return values_and_end(critic, tokens, attention, mask, dtype)[0]


def values_and_end(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, " b"]]:
    """`token_values`, and from the same pass the estimate behind each row's last masked-in token [B], 0 without one."""
    with autocast(tokens.device, dtype):
        hidden, place = _hidden(critic, tokens, attention, mask)
    last = torch.where(mask, place, 0).amax(dim=1)
    end = critic.head(hidden[last].float()).squeeze(-1)
    values = critic.head(_before(hidden, place, mask).float()).squeeze(-1)
    return _spread(values, mask), torch.where(mask.any(dim=1), end, 0.0)


def _hidden(model: PreTrainedModel | Critic, tokens: Tensor, attention: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states [U, H] of the real tokens, rows end to end; and where each token of [B, T] stands among them,
    -1 for padding. The longest row comes first, so that rows of one length are neighbours. Rows that begin with the
    same prompt (all before the first masked-in token) share its hidden states, which are computed once."""
    lengths = attention.sum(dim=1)
    order = lengths.argsort(descending=True, stable=True)
    real = attention[order]
    place = torch.full_like(tokens, -1)
    place[order] = torch.where(real, real.flatten().cumsum(0).view_as(real) - 1, -1)
    ids, positions = tokens[order][real], (real.long().cumsum(dim=1) - 1)[real]
    sharing, place = _sharing(tokens, attention, mask, place)
    if sharing is not None:
        ids, positions = ids[sharing.kept], positions[sharing.kept]
    packed = Packed.of(lengths[order].tolist(), sharing)
    body = model.body if isinstance(model, Critic) else body_of(model)
    return run(model, through, body, ids[None], positions[None], packed)[0], place


def _before(hidden: Tensor, place: Tensor, mask: Tensor) -> Tensor:
    """Hidden states [n, H] that predict the masked-in tokens: of the token before each."""
    return hidden.index_select(0, place[:, :-1][mask[:, 1:]])


def _sharing(tokens: Tensor, attention: Tensor, mask: Tensor, place: Tensor) -> tuple[Sharing | None, Tensor]:
    """What rows with one prompt share, None when no two have one; and place [B, T] among the tokens that are left."""
    first_real, width = attention.long().argmax(dim=1).tolist(), tokens.shape[1]
    starts = torch.where(mask.any(dim=1), mask.long().argmax(dim=1), width).tolist()
    owner, rows = dict[tuple[int, ...], int](), tokens.tolist()
    stands_for = place.clone()
    for row, (begin, end) in enumerate(zip(first_real, starts, strict=True)):
        if end == width:
            continue  # no token of this row is asked for
        first = owner.setdefault(tuple(rows[row][begin:end]), row)
        stands_for[row, begin:end] = place[first, first_real[first] : first_real[first] + end - begin]
    if torch.equal(stands_for, place):
        return None, place
    total = int(place.max()) + 1
    target = torch.empty(total, dtype=torch.int64, device=tokens.device)
    target[place[attention]] = stands_for[attention]  # every token of the rows: the one that stands for it
    is_kept = target == torch.arange(total, device=tokens.device)
    number = is_kept.cumsum(0) - 1
    left = torch.where(attention, number[stands_for.clamp(min=0)], -1)
    return Sharing(source=number[target], kept=is_kept.nonzero().squeeze(1)), left


def _head_in_chunks(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    through_head = HeadPass.of(head, hidden, reuse=not torch.is_grad_enabled())
    if not torch.is_grad_enabled():
        # Results have their place beforehand: a small one behind every chunk would leave holes between the large ones.
        out = hidden.new_zeros(2, hidden.shape[0], dtype=torch.float32)
        for at in through_head.pieces:
            out[0, at], out[1, at] = _chunk(through_head, hidden[at], targets[at], temperature)
        return out[0], out[1]
    if not through_head.pieces:
        nothing = hidden.sum(dim=-1).float()  # zero tokens, still part of the graph
        return nothing, nothing.detach()
    parts = list[tuple[Tensor, Tensor]]()
    for at in through_head.pieces:
        h, y = hidden[at], targets[at]
        part = checkpoint(_chunk, through_head, h, y, temperature, use_reentrant=False, preserve_rng_state=False)
        parts.append(cast(tuple[Tensor, Tensor], part))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(through_head: HeadPass, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return through_head.scores(through_head.logits(hidden, temperature), targets.unsqueeze(-1))[1:]


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """[N] back to [B, T], 0 where the mask is False."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return out.masked_scatter(mask, values.float())
