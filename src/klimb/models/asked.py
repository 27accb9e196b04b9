"""The last block of a model, behind its attention, at those places only that somebody reads.

A pass reads the hidden states before the sampled tokens, or a single one of each row. Other blocks need them all, the
last one's attention reads them as keys and values, and nothing comes after that: so its MLP, two thirds of a block's
products, is computed for what is asked. In models of FAMILY; the others compute everything and are selected from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

FAMILY = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Bodies whose blocks are norm, attention, residual, norm, MLP, residual, by these names."""
_MARK = "klimb_answers_where_asked"


def answer_where_asked(body: nn.Module) -> None:
    """From now on a forward whose attention has places `asked` (klimb.models.attention.Packed) answers there alone, if
    the body is of FAMILY. In place, and before `recompute_activations`, which wraps what it finds."""
    if type(body) in FAMILY:
        last = cast(Any, body).layers[-1]
        last.forward = partial(_forward, last, last.forward)
        setattr(last, _MARK, True)


def answers_where_asked(body: nn.Module) -> bool:
    layers = getattr(body, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and getattr(layers[-1], _MARK, False)


def _forward(layer: Any, whole: Callable[..., Tensor], hidden_states: Tensor, **others: Any) -> Tensor:
    """hidden_states [1, T, H] -> [1, asked, H], or [1, T, H] where nothing is said."""
    asked = getattr(others.get("klimb_attention"), "asked", None)
    if asked is None:
        return whole(hidden_states, **others)
    seen, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **others)
    x = (hidden_states + seen).index_select(1, asked)
    return x + layer.mlp(layer.post_attention_layernorm(x))
