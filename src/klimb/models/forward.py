# ruff: noqa: F722
"""Passes over rows: token log-probs, entropy and values. The only file that shifts.

A causal model's hidden state at position t-1 predicts token t, so every quantity of token t is read from the
hidden state before it. Rows go through the model end to end, without padding. Only masked-in positions reach the
head, in chunks, so memory never grows with tokens x vocabulary: a chunk's logits are used up (`token_logprobs`,
`backward_scores`) or recomputed in backward (`token_scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from klimb.models.attention import Packed, Sharing, through
from klimb.models.fused import backward_chunk
from klimb.models.head import HeadPass, PackedHead, entropies_of, is_plain
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


def token_logprobs(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    temperature: float,
    dtype: torch.dtype = torch.float32,
    packed: PackedHead | None = None,
) -> Float[Tensor, "b t"]:
    """`token_scores` without gradients and entropies: what a pass before the update reads, to the same last bit.
    packed: `packed_head` for several passes."""
    with torch.no_grad(), autocast(tokens.device, dtype):
        before, targets = _hidden(model, tokens, attention, mask), tokens[mask].unsqueeze(-1)
        through_head = HeadPass.of(head_of(model), before, temperature, reuse=True, shared=packed)
        # Results have their place beforehand: a small one behind every chunk would leave holes between the large ones.
        out = before.new_zeros(len(before), dtype=torch.float32)
        for at in through_head.pieces:
            out[at] = _logprobs(through_head, before[at], targets[at])
    return _spread(out, mask)


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
        before = _hidden(model, tokens, attention, mask)
        logprobs, entropy = _head_in_chunks(head_of(model), before, tokens[mask].unsqueeze(-1), temperature)
    return TokenScores(logprobs=_spread(logprobs, mask), entropy=_spread(entropy, mask))


def packed_head(model: PreTrainedModel, tokens: int, dtype: torch.dtype, *, trains: bool = False) -> PackedHead | None:
    """A copy of the head for the fast products of passes over so many masked-in tokens, good until the weights change;
    None where it would not pay. trains: for `backward_scores`."""
    return PackedHead.of(head_of(model), tokens, trains=trains) if dtype == torch.float32 else None


class LossOfSlice(Protocol):
    """The loss of some of all masked-in tokens, from their log-probs [n] and what gives their entropies [n] to those
    that read them. at: which of all they are."""

    def __call__(self, logprobs: Tensor, entropy: Callable[[], Tensor], /, *, at: slice) -> Tensor: ...


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the head is a plain matrix, whose gradient `backward_scores` knows how to write."""
    return is_plain(head_of(model))


def backward_scores(
    model: PreTrainedModel,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    temperature: float,
    loss_of: LossOfSlice,
    dtype: torch.dtype = torch.float32,
    *,
    packed: PackedHead | None = None,
) -> TokenScores:
    """`token_scores` and the backward of a loss of single tokens in one go: no logits are computed twice.

    While a chunk's probabilities are there, the gradient of its tokens' loss by their log-probs and entropies gives
    that by hidden states and head (klimb.models.fused). Gradients are added to the weights' .grad, the head's only
    where it is trained. For losses whose value at one token needs no other token's log-prob; the others go through
    `token_scores`. packed: `packed_head` for several micro-batches. Returned scores carry no gradient.
    """
    head = head_of(model)
    with autocast(tokens.device, dtype), _adding_rows(model):
        before = _hidden(model, tokens, attention, mask)
    weight = cast(nn.Parameter, head.weight)  # read behind the body's pass, which gathers it where it is sharded
    targets, leaf = tokens[mask].unsqueeze(-1), before.detach()
    by_hidden = torch.zeros_like(leaf)
    logprobs, entropy = leaf.new_zeros(2, len(leaf), dtype=torch.float32)
    with torch.no_grad(), autocast(tokens.device, dtype):
        through_head = HeadPass.of(head, leaf, temperature, reuse=True, shared=packed)
        if weight.requires_grad and weight.grad is None and not through_head.pieces:
            weight.grad = torch.zeros_like(weight)
        for at in through_head.pieces:
            by_hidden[at], logprobs[at], entropy[at] = backward_chunk(
                through_head, leaf[at], targets[at], partial(loss_of, at=at)
            )
    before.backward(by_hidden)
    return TokenScores(logprobs=_spread(logprobs, mask), entropy=_spread(entropy, mask))


@contextmanager
def _adding_rows(model: PreTrainedModel) -> Generator[None]:
    """Inside, where the head is the embedding too, what a forward looks up there has a gradient of those rows alone,
    which autograd adds to the one that is there; otherwise it makes a table of zeros first, as large as the embedding,
    for every micro-batch. On a CPU: on a GPU rows are added in no fixed order."""
    embedding, weight = cast(Any, model.get_input_embeddings()), cast(Tensor, head_of(model).weight)
    tied = type(embedding) is nn.Embedding and embedding.weight is weight and type(weight) is nn.Parameter
    if not tied or weight.device.type != "cpu":
        yield
        return
    embedding.sparse = True
    try:
        yield
    finally:
        embedding.sparse = False


def token_values(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "b t"]:
    """The critic's estimate before each masked-in token is emitted, float32 [B, T], 0 elsewhere."""
    with autocast(tokens.device, dtype):
        hidden = _hidden(critic, tokens, attention, mask)
    return _spread(critic.head(hidden.float()).squeeze(-1), mask)


def values_and_end(
    critic: Critic,
    tokens: Int[Tensor, "b t"],
    attention: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, " b"]]:
    """`token_values`, and from the same pass the estimate behind each row's last masked-in token [B], 0 without one."""
    with autocast(tokens.device, dtype):
        hidden = _hidden(critic, tokens, attention, mask, ends=True)
    values, end = critic.head(hidden.float()).squeeze(-1).tensor_split([len(hidden) - len(tokens)])
    return _spread(values, mask), torch.where(mask.any(dim=1), end, 0.0)


def end_states(
    model: PreTrainedModel, tokens: Int[Tensor, "b t"], attention: Bool[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b h"]:
    """The body's last hidden state at each row's last masked-in token, of any of its tokens where there is none."""
    return _hidden(model, tokens, attention, mask, before=False, ends=True)


def _hidden(
    model: PreTrainedModel | Critic,
    tokens: Tensor,
    attention: Tensor,
    mask: Tensor,
    *,
    before: bool = True,
    ends: bool = False,
) -> Tensor:
    """Last hidden states: [n, H] those that predict the masked-in tokens, of the token before each; with ends, behind
    them, [B, H] those of each row's last masked-in token.

    The real tokens go through the body as rows end to end. The longest row comes first, so that rows of one length are
    neighbours. Rows that begin with the same prompt (all before the first masked-in token) share its hidden states,
    which are computed once."""
    lengths = attention.sum(dim=1)
    order = lengths.argsort(descending=True, stable=True)
    real = attention[order]
    place = torch.full_like(tokens, -1)  # where each token stands among the real ones, -1 for padding
    place[order] = torch.where(real, real.flatten().cumsum(0).view_as(real) - 1, -1)
    ids, positions = tokens[order][real], (real.long().cumsum(dim=1) - 1)[real]
    sharing, place = _sharing(tokens, attention, mask, place)
    if sharing is not None:
        ids, positions = ids[sharing.kept], positions[sharing.kept]
    asked = [place[:, :-1][mask[:, 1:]]] if before else []
    asked += [torch.where(mask, place, 0).amax(dim=1)] if ends else []
    packed = Packed.of(lengths[order].tolist(), sharing, torch.cat(asked))
    body = model.body if isinstance(model, Critic) else body_of(model)
    return run(model, through, body, ids[None], positions[None], packed)[0]


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
    through_head = HeadPass.of(head, hidden, temperature, reuse=False)
    if not through_head.pieces:
        nothing = hidden.sum(dim=-1).float()  # zero tokens, still part of the graph
        return nothing, nothing.detach()
    parts = list[tuple[Tensor, Tensor]]()
    for at in through_head.pieces:
        h, y = hidden[at], targets[at]
        part = checkpoint(_chunk, through_head, h, y, use_reentrant=False, preserve_rng_state=False)
        parts.append(cast(tuple[Tensor, Tensor], part))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _logprobs(through_head: HeadPass, hidden: Tensor, y: Tensor) -> Tensor:
    return through_head.read(hidden, y)[2]  # a function, so that no variable keeps a chunk until the next one is made


def _chunk(through_head: HeadPass, hidden: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits, p, logprobs = through_head.read(hidden, y)
    return logprobs, entropies_of(logits, p)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """[N] back to [B, T], 0 where the mask is False."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return out.masked_scatter(mask, values.float())
