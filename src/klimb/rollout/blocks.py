"""One decode step through the blocks of a Llama-like model, in few and fused operations on packed weights.

A step of a small batch is made of hundreds of small operations, each with its call through the module that owns it;
here a block is about twenty. It computes what the model computes (tests hold every model of FAMILY against its own
modules); any other architecture decodes through its own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from klimb.models.attention import Attention
from klimb.models.family import FAMILY, rotated
from klimb.models.prepacked import PackedLinear


@dataclass(frozen=True, kw_only=True)
class _Block:
    """query_norm, key_norm: of Qwen3."""

    qkv: PackedLinear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    out: PackedLinear
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    scaling: float


class Blocks:
    """The body of a model of FAMILY for one token per row. Its weights are copies, packed for batches of `rows`."""

    def __init__(self, body: nn.Module, rows: int) -> None:
        model = cast(Any, body)
        config = model.config
        self._embed, self._rotary, self._norm = model.embed_tokens, model.rotary_emb, model.norm
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._eps = self._norm.weight.new_tensor(config.rms_norm_eps)
        self._blocks = [_block(layer, rows) for layer in model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens and positions int64 [n] -> last hidden states [n, H]."""
        x = self._embed(tokens)
        cos, sin = self._rotary(x[:, None], positions[:, None])
        sin = sin[..., : sin.shape[-1] // 2]
        for number, b in enumerate(self._blocks):
            qkv = b.qkv(_unit(x, self._eps)).unflatten(1, (self._heads + 2 * self._key_heads, -1))
            both, value = qkv.split([self._heads + self._key_heads, self._key_heads], dim=1)
            if b.query_norm is not None and b.key_norm is not None:
                query, key = both.split([self._heads, self._key_heads], dim=1)
                both = torch.cat([_normed(b.query_norm, query), _normed(b.key_norm, key)], dim=1)
            query, key = rotated(both, cos, sin).split([self._heads, self._key_heads], dim=1)
            seen = attention.attend(number, query[:, :, None], key[:, :, None], value[:, :, None], b.scaling)
            x = b.out.plus(seen.flatten(1), x)
            seen = _unit(x, self._eps)
            x = b.down.plus(b.up.times(seen, b.gate.silu(seen)), x)
        return _normed(self._norm, x)


def fits(body: nn.Module) -> bool:
    """Whether the body is of the family that `Blocks` computes."""
    return type(body) in FAMILY and cast(Any, body).config.hidden_act == "silu"


def _block(layer: Any, rows: int) -> _Block:
    a, m = layer.self_attn, layer.mlp
    return _Block(
        qkv=PackedLinear.of([a.q_proj, a.k_proj, a.v_proj], rows, layer.input_layernorm.weight),
        query_norm=getattr(a, "q_norm", None),
        key_norm=getattr(a, "k_norm", None),
        out=PackedLinear.of([a.o_proj], rows),
        gate=PackedLinear.of([m.gate_proj], rows, layer.post_attention_layernorm.weight),
        up=PackedLinear.of([m.up_proj], rows, layer.post_attention_layernorm.weight),
        down=PackedLinear.of([m.down_proj], rows),
        scaling=float(a.scaling),
    )


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    weight = cast(Tensor, norm.weight)
    return rms_norm(x, weight.shape, weight, cast(float, norm.variance_epsilon))


def _unit(x: Tensor, eps: Tensor) -> Tensor:
    """x / rms(x) of rows [n, H], in half the operations of torch's own."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
