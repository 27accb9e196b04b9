"""Linear layers on weights in oneDNN's own layout, for the many small products of a decode on a CPU.

A product of a few dozen rows with a large matrix spends much of its time on rearranging the matrix; here that is done
once per rollout (docs/performance.md has what it gains). The operators are those that torch.compile emits. They are
private to torch, so one small product is compared first, and without them, or with another result, the layers stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


@contextmanager
def prepacked(model: nn.Module, dtype: torch.dtype, rows: int) -> Generator[None]:
    """Inside, the model's plain linear layers use packed copies of their weights, made for batches of up to `rows`.

    The copies take the memory of the weights once more until the end. Does nothing off the CPU or below float32.
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
    if dtype != torch.float32 or not layers or not is_available():
        yield
        return
    packed: dict[int, Tensor] = {}
    for layer in layers:
        if id(layer.weight) not in packed:
            packed[id(layer.weight)] = _pack(layer.weight, rows)
        # On the instance: nn.Module's call finds it before the class's.
        layer.__dict__["forward"] = partial(_multiply, packed[id(layer.weight)], layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


@cache
def is_available() -> bool:
    """Whether this torch has the operators and they compute what a linear layer computes."""
    x, weight, bias = torch.ones(3, 16), torch.arange(512.0).view(32, 16) / 512, torch.arange(32.0)
    try:
        got = _multiply(_pack(weight, 3), bias, x)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(got, linear(x, weight, bias), rtol=1e-5)


def _pack(weight: Tensor, rows: int) -> Tensor:
    operators: Any = torch.ops.mkldnn
    return cast(Tensor, operators._reorder_linear_weight(weight.detach(), rows))


def _multiply(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    operators: Any = torch.ops.mkldnn
    multiply = cast(Callable[..., Tensor], operators._linear_pointwise)
    return multiply(x, packed, bias, "none", [], "")
