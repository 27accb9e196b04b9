"""Engine `hf` where the policy is divided among ranks: every rank samples its own rows from a whole copy.

The copy is made of the full weights after each update and lives until the rollout is over, so that no layer waits for
another rank while rows of different lengths are sampled, and the update has the memory to itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klimb.models.load import freeze
from klimb.models.sharded import whole
from klimb.rollout.base import Progress, Request, Sampling
from klimb.rollout.hf import HFSampler
from klimb.types import Sample


class ReplicaSampler:
    """Samples from a copy of the model it is made with, which may be sharded afterwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = freeze(copy.deepcopy(model))
        if dtype != torch.float32:
            _narrow(self._model, dtype)
        nn.Module.to(self._model, device)
        self._engine = HFSampler(self._model, tokenizer, slots, dtype)

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        own = dict(self._model.named_parameters())
        for name, tensor in named_tensors:
            parameter = own[name]
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            parameter.copy_(whole(tensor))
        self._engine.load_weights(iter(()), version)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        return self._engine.generate(requests, sampling, progress)

    def sleep(self) -> None:
        """The weights go; shapes stay."""
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(0)

    def close(self) -> None:
        """Nothing is left to let go of but memory."""
        self.sleep()


def _narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """In place, the weights that autocast would narrow in every product, to the same numbers. Not those of a head that
    are the input embedding's too: no product reads them there, and what blocks add to would be narrow."""
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is nn.Linear and module.weight is not embedding:
            nn.Module.to(module, dtype)
