"""The output layer over the hidden states of one pass: logits of a few tokens at a time, and what is read from them.

Memory never grows with tokens x vocabulary: a chunk of logits is used up before the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from klimb.models.prepacked import PackedLinear, pays

CHUNK_LOGITS = 2**23
"""Logits computed at once: 32 MiB in float32, a few of these live at the same time."""
TILE = 16
"""Rows that a product's kernel takes at once, or a multiple of what it takes: a rest costs as much as a whole one."""
PACKED_TOKENS = 128
"""From so many tokens on a pass gains more by a copy of the head in oneDNN's layout than the copy takes."""
PACKED_NUMBERS = 2**25
"""Largest head that is copied: 128 MiB."""
PACKED_BACKWARD_TOKENS = 4096
"""Likewise for the product of the backward, whose copy takes four times as long: it is made once per optimizer step."""
TRANSPOSED = 512
"""Rows of a matrix that are transposed at once: their way through the caches."""
LEAST = 1e-30
"""Smallest probability whose logarithm is taken; float32 has 8 decades more."""


def is_plain(head: nn.Module) -> bool:
    """Whether it is a matrix and nothing else."""
    if type(head) is not nn.Linear or cast(Tensor | None, head.bias) is not None:
        return False
    return type(head.weight) is nn.Parameter or isinstance(head.weight, DTensor)


@dataclass(frozen=True)
class PackedHead:
    """A head's weight, as it is now, in oneDNN's layout: for the logits, and for the gradient by the hidden states,
    None where too few tokens would use it."""

    forward: PackedLinear
    backward: PackedLinear | None

    @classmethod
    @torch.no_grad()
    def of(cls, head: nn.Module, tokens: int, *, trains: bool = False) -> PackedHead | None:
        """tokens: of all passes that share it; trains: whether their backward goes through it too. None where it does
        not pay, or the head is no matrix in float32 on a CPU."""
        if not _packs(head, tokens):
            return None
        weight = cast(Tensor, head.weight)
        rows = _rows(weight)
        backward = trains and tokens >= PACKED_BACKWARD_TOKENS
        packed = PackedLinear.of_matrix(_transposed(weight), rows) if backward else None
        return cls(PackedLinear.of([head], rows), packed)


@dataclass(frozen=True)
class HeadPass:
    """A head for the hidden states of one pass. pieces: the chunks that its tokens go in; packed: its copy for fast
    products; room: blocks [n, V] that every chunk's probabilities, and logits that are not packed products, are written
    into. A C library that hands out aligned blocks may not fit one into the hole the last one left, so chunk after
    chunk of fresh blocks can grow the process by several of them."""

    head: nn.Module
    temperature: float
    pieces: list[slice]
    packed: PackedHead | None = None
    room: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, head: nn.Module, hidden: Tensor, temperature: float, *, reuse: bool, shared: PackedHead | None = None
    ) -> HeadPass:
        """hidden [n, H]. reuse: a chunk is used up when the next one is made, so that both may have the same room; not
        where autograd keeps them. Other heads than a matrix in float32 bring their own tensors. shared: a copy that was
        made for several passes; whether this one uses any hangs on its own tokens, so that the numbers do."""
        weight, tokens = cast(Tensor, head.weight), len(hidden)
        rows = _rows(weight)
        pieces = [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]
        if not pieces or not is_plain(head) or hidden.dtype != torch.float32 or weight.dtype != torch.float32:
            return cls(head, temperature, pieces)
        packed = (shared or PackedHead.of(head, tokens)) if _packs(head, tokens) else None
        blocks = 1 if packed is not None else 2
        room = hidden.new_empty(blocks, pieces[0].stop, weight.shape[0]) if reuse else None
        return cls(head, temperature, pieces, packed, room)

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.head.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of some tokens [n, H]: float32 [n, V], divided by the temperature."""
        if self.packed is not None:
            logits = cast(Tensor, _Product.apply(hidden, self.weight, self.packed.forward))
        elif self.room is not None:
            logits = torch.mm(hidden, self.weight.t(), out=self.room[1, : len(hidden)])
        else:
            logits = cast(Tensor, self.head(hidden)).float()
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def read(self, hidden: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens y [n, 1] with hidden states [n, H]: logits and probabilities [n, V], log-probs [n]. Every pass
        comes this way, so that a token's log-prob has the same bits in all of them."""
        logits = self.logits(hidden)
        p = self.probabilities(logits)
        return logits, p, logprobs_of(logits, p, y)

    def by_hidden(self, by_logits: Tensor) -> Tensor:
        """Gradient by the hidden states [n, H], from that by the head's output [n, V]."""
        if self.packed is not None and self.packed.backward is not None:
            return self.packed.backward(by_logits)
        return by_logits @ self.weight

    def add_gradient(self, by_logits: Tensor, hidden: Tensor) -> None:
        """That by the weight [V, H] of a chunk [n, V] of one by the logits, of tokens with hidden states [n, H], to its
        .grad; the first one is written, not added to zeros. In the weight's dtype, autocast or not."""
        weight = self.weight
        if not weight.requires_grad:
            return
        by_logits, hidden = by_logits.T.to(weight.dtype), hidden.to(weight.dtype)
        if weight.grad is None:
            weight.grad = torch.mm(by_logits, hidden, out=torch.empty_like(weight))
        else:
            weight.grad.addmm_(by_logits, hidden)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[n, V], of logits [n, V]."""
        return torch.softmax(logits, dim=-1, out=None if self.room is None else self.room[0, : len(logits)])


def logprobs_of(logits: Tensor, p: Tensor, y: Tensor) -> Tensor:
    """Log-probs [n] of y [n, 1], from logits and probabilities [n, V]: the logarithm of a probability is as exact as
    logit minus normaliser and needs no pass over either. Those that may be rounded to 0 take the latter."""
    chosen = p.gather(-1, y).squeeze(-1)
    small = chosen < LEAST
    if not bool(small.any()):
        return chosen.log()
    far = logits.gather(-1, y).squeeze(-1) - _normaliser(logits, p)
    return torch.where(small, far, chosen.masked_fill(small, 1.0).log())


def entropies_of(logits: Tensor, p: Tensor) -> Tensor:
    """Entropies [n] of the distributions with these logits and probabilities [n, V]."""
    return _normaliser(logits, p) - torch.bmm(p.unsqueeze(1), logits.unsqueeze(2)).view(-1)


def _normaliser(logits: Tensor, p: Tensor) -> Tensor:
    """log of the sum of exponentials [n]: the largest probability is exp(largest logit - normaliser)."""
    return logits.amax(dim=-1) - p.amax(dim=-1).log()


def _transposed(weight: Tensor) -> Tensor:
    """[V, H] -> [H, V], a block at a time: torch's copy of the whole takes twice as long."""
    out = weight.new_empty(weight.shape[::-1])
    for at in range(0, len(weight), TRANSPOSED):
        out[:, at : at + TRANSPOSED] = weight[at : at + TRANSPOSED].t()
    return out


def _rows(weight: Tensor) -> int:
    """Tokens in a chunk: as many as fit, in whole tiles of a product's kernel."""
    rows = CHUNK_LOGITS // int(weight.shape[0])
    return rows - rows % TILE if rows >= TILE else max(1, rows)


def _packs(head: nn.Module, tokens: int) -> bool:
    """Whether packing is for this head, and gains more than the copy takes."""
    weight = cast(Tensor, head.weight)
    whole = is_plain(head) and not isinstance(weight, DTensor) and not torch.is_autocast_enabled("cpu")
    return whole and tokens >= PACKED_TOKENS and weight.numel() <= PACKED_NUMBERS and pays(head, weight.dtype)


class _Product(Function):
    """hidden [n, H] by weight [V, H], computed with a packed copy of the weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, packed: PackedLinear) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return packed(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,), (hidden, weight) = grad_outputs, ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden if ctx.needs_input_grad[1] else None, None
