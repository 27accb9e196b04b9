"""One decode step through the blocks of a Llama-like model, in few and fused operations on packed weights.

A step of a small batch is made of hundreds of small operations, each several times as long as in a loop of its own:
between two of the same kind the products' weights have gone through the caches. So a block is about twenty here. It
computes what the model computes (tests hold every model of FAMILY against its own modules); any other architecture
decodes through its own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from klimb.models.family import FAMILY
from klimb.models.prepacked import PackedLinear


class StepAttention(Protocol):
    def attend_step(self, layer: int, query: Tensor, key_value: Tensor, scaling: float | None) -> Tensor:
        """query [n, heads, d] and key_value [n, 2, key heads, d] of one token per row -> [n, heads, d]."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Block:
    """query_norm, key_norm [d]: of Qwen3. The other norms' weights are taken into the products behind them."""

    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: PackedLinear
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    scaling: float


class Blocks:
    """The body of a model of FAMILY for one token per row. Its weights are copies, packed for batches of `rows`.

    key_order int64 [d]: the entries of a head's queries and keys as they come here: those that a rotation turns
    together side by side, which makes it one product of complex numbers, in place.
    """

    def __init__(self, body: nn.Module, rows: int) -> None:
        model = cast(Any, body)
        config, first = model.config, model.layers[0].self_attn
        self._embed, self._rotary, self._norm = model.embed_tokens, model.rotary_emb, model.norm.weight
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._eps = float(config.rms_norm_eps)
        self._smallest = self._norm.new_tensor(self._eps)
        self.key_order = torch.arange(first.head_dim, device=self._norm.device).view(2, -1).T.flatten()
        self._blocks = [self._packed(layer, rows) for layer in model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """tokens and positions int64 [n] -> last hidden states [n, H]."""
        x = self._embed(tokens)
        cos, sin = (angle[..., : angle.shape[-1] // 2] for angle in self._rotary(x[:, None], positions[:, None]))
        turn, turned = torch.complex(cos, sin), self._heads + self._key_heads
        for number, b in enumerate(self._blocks):
            qkv = b.qkv(self._unit(x)).unflatten(1, (turned + self._key_heads, -1))
            if b.query_norm is not None and b.key_norm is not None:
                query, key, value = qkv.split([self._heads, self._key_heads, self._key_heads], dim=1)
                qkv = torch.cat([self._normed(query, b.query_norm), self._normed(key, b.key_norm), value], dim=1)
            torch.view_as_complex(qkv.unflatten(2, (-1, 2)))[:, :turned].mul_(turn)
            query, key_value = qkv[:, : self._heads], qkv[:, self._heads :].unflatten(1, (2, -1))
            x = b.out.plus(attention.attend_step(number, query, key_value, b.scaling).flatten(1), x)
            unit = self._unit(x)
            x = b.down.plus(b.up.times(unit, b.gate.silu(unit)), x)
        return self._normed(x, self._norm)

    def _unit(self, x: Tensor) -> Tensor:
        """x / rms(x) of rows [n, H], in half the operations of torch's own."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._smallest, length, length, value=1 / x.shape[-1]).rsqrt_()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._eps)

    def _packed(self, layer: Any, rows: int) -> _Block:
        a, m, d = layer.self_attn, layer.mlp, len(self.key_order)
        order = torch.arange((self._heads + 2 * self._key_heads) * d, device=self.key_order.device).view(-1, d)
        order[: self._heads + self._key_heads] = order[: self._heads + self._key_heads, self.key_order]
        before, within = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return _Block(
            qkv=PackedLinear.of([a.q_proj, a.k_proj, a.v_proj], rows, before, order.flatten()),
            query_norm=a.q_norm.weight[self.key_order] if hasattr(a, "q_norm") else None,
            key_norm=a.k_norm.weight[self.key_order] if hasattr(a, "k_norm") else None,
            out=PackedLinear.of([a.o_proj], rows),
            gate=PackedLinear.of([m.gate_proj], rows, within),
            up=PackedLinear.of([m.up_proj], rows, within),
            down=PackedLinear.of([m.down_proj], rows),
            scaling=float(a.scaling),
        )


def fits(body: nn.Module) -> bool:
    """Whether the body is of the family that `Blocks` computes."""
    return type(body) in FAMILY and cast(Any, body).config.hidden_act == "silu"
