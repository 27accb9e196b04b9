"""The blocks of Llama's family for rows that lie end to end: what their own modules compute, in fewer steps.

A block's linear layers, and whatever wraps them, stay as they are. Rotations and norms, a dozen operations each with
autograd's share, are one here with a backward of their own. And the last block goes on behind its attention at those
places only that somebody reads: a pass reads the hidden states before the sampled tokens, or a single one of each row,
and nothing comes after that block that would need the others. Models that are not of FAMILY run through their own
modules, compute everything and are selected from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

FAMILY = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Bodies whose blocks are norm, attention, residual, norm, MLP, residual, by these names."""
_MARK = "klimb_answers_where_asked"


def take_over(body: nn.Module) -> None:
    """From now on a forward that is handed klimb's attention runs through the blocks here, if the body is of FAMILY,
    and answers where the attention has places `asked`. In place, and before `recompute_activations`, which wraps what
    it finds."""
    if type(body) not in FAMILY or answers_where_asked(body):
        return
    layers = list(cast(Any, body).layers)
    for layer in layers:
        layer.forward = partial(_forward, layer, layer.forward, layer is layers[-1])
    setattr(body, _MARK, True)


def answers_where_asked(body: nn.Module) -> bool:
    return getattr(body, _MARK, False)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d], cos [..., d] and sin [..., d / 2], whose entry i is the angle of entries i and i + d / 2 (Su et al.
    2021, eq. 34, with the pairs where Llama has them)."""
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """By an RMSNorm of FAMILY."""
    weight = cast(Tensor, norm.weight)
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return norm(x)
    return cast(Tensor, _Norm.apply(x, weight, cast(float, norm.variance_epsilon)))


def _forward(
    layer: Any,
    own: Callable[..., Tensor],
    is_last: bool,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    klimb_attention: Any = None,
    **others: Any,
) -> Tensor:
    """hidden_states [1, T, H] -> the same, of the last block [1, asked, H] where places are asked for."""
    x = hidden_states
    if klimb_attention is None:
        return own(x, position_embeddings=position_embeddings, **others)
    seen = _seen(layer.self_attn, normed(layer.input_layernorm, x), position_embeddings, klimb_attention)
    if is_last and klimb_attention.asked is not None:
        x, seen = (y.index_select(1, klimb_attention.asked) for y in (x, seen))
    x = x + layer.self_attn.o_proj(seen)
    return x + layer.mlp(normed(layer.post_attention_layernorm, x))


def _seen(a: Any, x: Tensor, position_embeddings: tuple[Tensor, Tensor], attention: Any) -> Tensor:
    """What attention reads at every place, [B, T, heads x d]."""
    query, key, value = (linear(x).unflatten(-1, (-1, a.head_dim)) for linear in (a.q_proj, a.k_proj, a.v_proj))
    if hasattr(a, "q_norm"):
        query, key = normed(a.q_norm, query), normed(a.k_norm, key)
    cos, sin = (angle.unsqueeze(2) for angle in position_embeddings)
    wide = torch.promote_types(query.dtype, cos.dtype)
    query, key = (cast(Tensor, _Rotation.apply(y.to(wide), cos, sin[..., : a.head_dim // 2])) for y in (query, key))
    query, key, value = (y.transpose(1, 2) for y in (query, key, value))
    return attention.attend(a.layer_idx, query, key, value, a.scaling).flatten(2)


class _Rotation(Function):
    """`rotated`; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, -sin), None, None


class _Norm(Function):
    """y = w x / rms(x) (Zhang and Sennrich 2019, eq. 4). With n = x / rms(x) and the gradient g of y: that of x is
    (w g - n mean(n w g)) / rms(x), that of w the sum of n g."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        n = x * scale
        ctx.save_for_backward(n, scale, weight)
        return weight * n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        n, scale, weight = ctx.saved_tensors
        by_n, each = grads[0] * weight, grads[0] * n
        along = (each @ weight).div_(n.shape[-1]).unsqueeze(-1)
        by_weight = each.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return by_n.addcmul_(n, along, value=-1).mul_(scale), by_weight, None
