"""Engine `vllm` beside several ranks: Ray actors, each on the host and the GPUs of the ranks it answers.

vLLM brings a process group of its own, which does not go with the ranks' one, so it gets a process of its own. Weights
go there by way of the host's shared memory. An engine belongs to the rank that started it, and dies with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from klimb.errors import MissingExtra
from klimb.malloc import give_back
from klimb.models.sharded import whole
from klimb.ranks import Ranks
from klimb.rollout.base import Progress, Request, Sampling
from klimb.rollout.vllm import EngineSettings, VLLMSampler
from klimb.types import Sample


class Engine:
    """What runs in the actor. Weights come as references to what lies in the host's memory."""

    _sampler: VLLMSampler

    def start(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        """Not in __init__, whose errors Ray hands on as the death of the actor."""
        self._sampler = VLLMSampler(settings, tokenizer)

    def load_weights(self, named: Sequence[tuple[str, Any]], version: int) -> None:
        import ray

        self._sampler.load_weights(((name, ray.get(reference)) for name, reference in named), version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        return self._sampler.generate(requests, sampling)

    def sleep(self) -> None:
        self._sampler.sleep()

    def close(self) -> None:
        self._sampler.close()


class RemoteSampler:
    """A Sampler that all ranks ask for the same. As many neighbours as the engine has GPUs (tensor_parallel) share one,
    which the first of them starts."""

    def __init__(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> None:
        """ranks.size is a multiple of settings.tensor_parallel. All ranks return when all engines have started."""
        width = settings.tensor_parallel
        self._ranks, self._dtype, self._sleeps = ranks, settings.dtype, settings.sleeps
        self._owners = Ranks(rank=ranks.rank // width, size=ranks.size // width)
        self._engine: Any = None
        ranks.everywhere(lambda: self._start(settings, tokenizer))

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        import ray

        named: list[tuple[str, Any]] = []
        for name, tensor in named_tensors:
            full = whole(tensor.detach())
            if self._engine is not None:
                named.append((name, ray.put(full.to("cpu", self._dtype))))
        self._make_room()
        self._ranks.everywhere(lambda: self._call("load_weights", named, version))

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, in the order of the requests. progress hears of the end alone."""
        share = self._owners.share(requests)
        self._make_room()
        samples = self._ranks.everywhere(lambda: self._call("generate", share, sampling))
        if progress is not None and samples:
            progress(len(samples), len(requests))
        return samples

    def sleep(self) -> None:
        """All ranks return when all engines sleep: one may lie on the GPUs of several."""
        self._ranks.everywhere(lambda: self._call("sleep"))

    def close(self) -> None:
        import ray

        if self._engine is not None:
            self._call("close")
            ray.kill(self._engine)
            self._engine = None

    def _start(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
        """An engine that cannot start says why, as any call does."""
        if self._ranks.rank % settings.tensor_parallel == 0:
            self._engine = _actor(settings.tensor_parallel)
        return self._call("start", settings, tokenizer)

    def _make_room(self) -> None:
        """Before an engine wakes: it takes memory from GPUs, of which the ranks' allocators keep some unused. One that
        never sleeps takes none, and the next update would only ask for the same memory anew."""
        if self._sleeps:
            self._ranks.everywhere(lambda: [give_back()])

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """What this rank's engine answers, nothing where it has none. Its errors are raised as if it ran here."""
        if self._engine is None:
            return []
        import ray
        from ray.exceptions import RayTaskError

        try:
            return ray.get(getattr(self._engine, name).remote(*arguments)) or []
        except RayTaskError as error:
            raise error.cause from None


def _actor(width: int) -> Any:
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        raise MissingExtra("ray", "ray", "cluster.kind=ray") from None
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Engine).options(
        num_cpus=0,  # a rank waits while its engine works: they take turns with what the rank was given
        scheduling_strategy=here,
        runtime_env={"env_vars": _gpus(width)},
    )
    return actor.remote()


def _gpus(width: int) -> dict[str, str]:
    """Environment of an engine on this rank's GPU and those of the next ranks."""
    if not torch.cuda.is_available():
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    first = torch.cuda.current_device()
    # Without the second variable Ray would hide all GPUs from an actor that asks for none.
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[first : first + width]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
