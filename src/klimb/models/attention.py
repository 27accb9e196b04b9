"""Attention over rows laid end to end, through transformers' attention interface.

A batch of rows goes through a model as one row without padding, so that linear layers see real tokens only. What
belongs together is known to the object handed down with the forward (`through`): every layer of any architecture that
uses the interface asks it, instead of a mask. Without one, klimb's attention is transformers' own sdpa.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from klimb.errors import ModelError
from klimb.models.family import answers_where_asked, take_over

NAME = "klimb"
"""What models are loaded with as their attention implementation."""


class Attention(Protocol):
    """Who attends to whom. asked int64 [n]: the places of a pass whose hidden states are read, None for all."""

    @property
    def asked(self) -> Tensor | None: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [B, heads, T, d], key and value [B, key heads, T, d], rotated -> [B, T, heads, d]."""
        ...


@dataclass(frozen=True)
class Sharing:
    """Rows that begin alike go through a model's other layers once. source int64 [N]: place among the tokens given of
    every token of all rows; kept int64 [U]: place among all rows' tokens of every token given."""

    source: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Packed:
    """Causal attention within each of some rows that lie end to end. runs: (rows, length) of neighbours of one length,
    which are attended to together; asked int64 [n]: places among the tokens given whose hidden states are read, in this
    order, None for all."""

    runs: tuple[tuple[int, int], ...]
    sharing: Sharing | None = None
    asked: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], sharing: Sharing | None = None, asked: Tensor | None = None) -> Packed:
        return cls(tuple((len(list(same)), length) for length, same in groupby(lengths)), sharing, asked)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One row [1, heads, N, d] holds all of them."""
        if self.sharing is not None:
            query, key, value = (x.index_select(2, self.sharing.source) for x in (query, key, value))
        parts, whole = list[Tensor](), [x.squeeze(0) for x in (query, key, value)]
        sizes = [rows * length for rows, length in self.runs]
        # One run is the whole already: autograd's part of taking it apart and putting it together would be copies.
        each = [whole] if len(sizes) == 1 else zip(*(x.split(sizes, dim=1) for x in whole), strict=True)
        for run, qkv in zip(self.runs, each, strict=True):
            q, k, v = (x.unflatten(1, run).transpose(0, 1) for x in qkv)
            gqa = query.shape[1] != key.shape[1]
            part = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if self.sharing is None else out.index_select(0, self.sharing.kept)).unsqueeze(0)


def through(body: nn.Module, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Last hidden states [B, T, H] of tokens [B, T] at positions [B, T], or [1, n, H] of those that the attention asks
    for, by a body that was loaded with klimb's attention (another would let rows see each other, and say nothing)."""
    if (found := getattr(body.config, "_attn_implementation", None)) != NAME:
        raise ModelError(f"a model with {found} attention; call its set_attn_implementation({NAME!r}) first")
    # A mask of four dimensions is taken as ready-made by transformers, which builds none of its own then.
    unused = torch.zeros(1, 1, 1, 1, device=tokens.device)
    hidden = body(
        input_ids=tokens, position_ids=positions, attention_mask=unused, use_cache=False, klimb_attention=attention
    )[0]
    whole = attention.asked is None or answers_where_asked(body)
    return hidden if whole else hidden.index_select(1, cast(Tensor, attention.asked))


def admit(body: nn.Module) -> None:
    """Make a body ready for rows laid end to end, in place, and try it: its own code with one row after the other says
    what must come out. Refuses an architecture whose rows see each other, or that goes another way."""
    take_over(body)
    config = cast(Any, body).config
    device = next(body.parameters()).device
    ids = torch.arange(1, 8, device=device) % config.get_text_config().vocab_size
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2], device=device)
    packed = Packed.of([4, 3], asked=torch.arange(7, device=device).flip(0))
    with torch.no_grad():
        alone = [body(input_ids=part[None], use_cache=False)[0][0] for part in (ids[:4], ids[4:])]
        try:
            together = through(body, ids[None], positions[None], packed)[0].flip(0)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            together = None
    if together is None or not torch.allclose(torch.cat(alone), together, atol=1e-4, rtol=1e-4):
        raise ModelError(
            f"{config.model_type}: this architecture does not do its attention through transformers' attention "
            "interface alone (a recurrent state, position biases, attention sinks or soft-capping), which klimb needs "
            "to read rows without padding; Llama, Qwen2, Qwen3, Mistral, SmolLM and their like do"
        )


def recompute_activations(body: nn.Module) -> None:
    """From now on a forward with gradients keeps only what every block of the body was given, and backward runs the
    block again. In place; the numbers stay the same to the last bit."""
    blocks = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(
            f"{cast(Any, body).config.model_type}: training.activation_checkpointing finds no blocks in it"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    klimb_attention: Attention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if asked := [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]:
        raise ModelError(
            f"{cast(Any, module).config.model_type}: this architecture's attention asks for {', '.join(asked)} "
            "(soft-capping, sinks or position biases), which klimb's does not do"
        )
    if klimb_attention is not None:
        return klimb_attention.attend(cast(int, module.layer_idx), query, key, value, scaling), None
    plain = cast(Callable[..., tuple[Tensor, None]], sdpa_attention_forward)
    return plain(module, query, key, value, attention_mask, scaling=scaling, **others)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
