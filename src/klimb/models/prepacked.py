"""Linear layers on weights in oneDNN's own layout, for the many small products of a decode on a CPU.

A product of a few dozen rows with a large matrix spends much of its time on rearranging the matrix; here that is done
once per rollout (docs/performance.md has what it gains). The operators are those that torch.compile emits. They are
private to torch, so one small product is compared first, and without them, or with another result, nothing is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from klimb.models.lora import merged_weight


@dataclass(frozen=True)
class PackedLinear:
    """One or several linear layers of the same input as one product. The weights are copied, with their adapters merged
    in where they have one: what is changed later is not seen here."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls, layers: Sequence[nn.Module], rows: int, inputs_times: Tensor | None = None, order: Tensor | None = None
    ) -> PackedLinear:
        """rows: of the batches it is made for; others give the same numbers. inputs_times [in]: what a norm before the
        layers multiplies their input by, taken into the weights. order int64 [out]: of the outputs, if not theirs."""
        weights = [merged_weight(layer) for layer in layers]
        biases = [cast(Tensor | None, layer.bias) for layer in layers]
        weight, bias = weights[0] if len(weights) == 1 else torch.cat(weights), None
        if any(b is not None for b in biases):
            zeros = [part.new_zeros(part.shape[0]) for part in weights]
            bias = torch.cat([z if b is None else b.detach() for b, z in zip(biases, zeros, strict=True)])
        if inputs_times is not None:
            weight = weight * inputs_times
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return cls.of_matrix(weight, rows, bias)

    @classmethod
    def of_matrix(cls, weight: Tensor, rows: int, bias: Tensor | None = None) -> PackedLinear:
        """weight [out, in], bias [out]."""
        return cls(_operators()._reorder_linear_weight(weight.detach(), rows), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self._then(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """silu of the product, in one go; likewise the two below, with other [..., out]."""
        return self._then(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._with(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._with(x, other, "mul")

    def _then(self, x: Tensor, function: str) -> Tensor:
        multiply = cast(Callable[..., Tensor], _operators()._linear_pointwise)
        return multiply(x, self.weight, self.bias, function, [], "")

    def _with(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        multiply = cast(Callable[..., Tensor], _operators()._linear_pointwise.binary)
        return multiply(x, other, self.weight, self.bias, operation)


@contextmanager
def prepacked(model: nn.Module, rows: int) -> Generator[None]:
    """Inside, the model's plain linear layers use packed copies of their weights, which take their memory once more."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    packed = {id(layer.weight): PackedLinear.of([layer], rows) for layer in layers}
    for layer in layers:
        # On the instance: nn.Module's call finds it before the class's.
        layer.__dict__["forward"] = packed[id(layer.weight)]
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def pays(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether packing is for this device and compute dtype, and this torch can."""
    return dtype == torch.float32 and next(model.parameters()).device.type == "cpu" and is_available()


@cache
def is_available() -> bool:
    """Whether this torch has the operators and they compute what a linear layer computes."""
    with torch.random.fork_rng(devices=[]):  # a layer's first weights are drawn: nobody's generator moves for this
        layer = nn.Linear(16, 32)
    x, other = torch.linspace(-1, 1, 48).view(3, 16), torch.full((3, 32), 2.0)
    try:
        packed = PackedLinear.of([layer], 3)
        got = packed(x), packed.silu(x), packed.plus(x, other), packed.times(x, other)
    except (AttributeError, RuntimeError):
        return False
    y = linear(x, layer.weight, layer.bias)
    want = y, silu(y), y + other, y * other
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


def _operators() -> Any:
    return torch.ops.mkldnn
