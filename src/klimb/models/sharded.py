"""Models whose weights are divided among ranks, by PyTorch's `fully_shard`.

Every block is gathered when it is needed and let go behind it; embedding, last norm and head, which klimb's passes use
outside of the model's own forward, are gathered at the start of a pass and stay until the backward or `release`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from klimb.errors import ModelError

PASS = "klimb_pass"
"""The method that a pass enters a sharded model by."""


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Divide the weights among the ranks of the mesh, in place, block by block. dtype: what blocks are gathered and
    computed in; gradients are added up in float32."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ModelError(f"training.trainer is fsdp, but no blocks are found to shard in {type(model).__name__}")
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=_policy(block, mesh, dtype))
    # The head's gradient is added up over chunks of tokens, which float32 alone does without loss.
    fully_shard(model, mesh=mesh)
    setattr(model, PASS, _enter)
    register_fsdp_forward_method(cast(Any, model), PASS)


def _policy(block: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """A block is given what it would be given in one process, and autocast narrows what goes into its products: what
    blocks add to stays in float32. On a CPU a LayerNorm refuses weights that are narrower than its input."""
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    refuses = mesh.device_type == "cpu" and any(isinstance(module, nn.LayerNorm) for module in block.modules())
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=refuses)


def _enter(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return compute(*inputs)


def run(root: nn.Module, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """compute(*inputs), a part of a pass through the root; what the root itself owns is gathered before."""
    return getattr(root, PASS)(compute, *inputs) if isinstance(root, FSDPModule) else compute(*inputs)


def release(root: nn.Module) -> None:
    """Let go of what a pass without a backward has left gathered."""
    if isinstance(root, FSDPModule):
        root.reshard()


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that may be divided; all ranks take part."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def put(value: Tensor, parameter: Tensor) -> None:
    """A full value into a parameter that may be divided; every rank has all of it and takes its part."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
