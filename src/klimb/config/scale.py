"""Sections for what is more than one plain process: adapter, offload, a separate engine, a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from klimb.config.base import Positive, Section


class VLLMConfig(Section):
    """`actor_rollout_ref.vllm`: the vllm engine; read where rollout_provider is vllm."""

    memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a GPU's memory for the engine's weights and cache; on a CPU rollout_slots alone size the cache."""
    tensor_parallel: Positive = 1
    """GPUs that one copy of the weights is spread over; on a Ray cluster those of so many ranks, which share it."""


class LoraSettings(Section):
    """`actor_rollout_ref.lora`: train a small adapter, keep the model as it is. There is no dropout in klimb."""

    rank: Positive = 16
    """Columns of the adapter's matrices: how much it can say."""
    alpha: Positive = 32
    """What the adapter adds is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | Literal["all-linear"] = "all-linear"
    """Linear layers that get an adapter, by their last names (q_proj) or whole ones; all-linear: all but the head."""


class OffloadConfig(Section):
    """`training.offload`: keep what is not at work in the host's memory; on a CPU it is there anyway."""

    params: bool = False
    """Move reference, critic and reward model to the GPU for their passes only."""
    optimizer: bool = False
    """Move the optimizers' states to the GPU for the optimizer steps only."""


class ClusterConfig(Section):
    """`cluster`: where the ranks run."""

    kind: Literal["local", "ray"] = "local"
    """local: on this machine. ray: on the machines of a Ray cluster; docs/cluster.md."""
    address: str | None = None
    """ray: host:port of the head, or auto for the cluster of this machine; null: one of this machine alone."""
    num_workers: Positive | None = None
    """ray: ranks, each with a GPU where the cluster has any; null: training.num_processes."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times that all ranks start again from the newest checkpoint after one has died."""
