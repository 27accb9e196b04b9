"""The whole copy that a rank samples from: narrowed as autocast narrows, and nothing more."""

from __future__ import annotations

import pytest
import torch

from klimb.models.lora import weights_for_engine
from klimb.rollout.hf import HFSampler
from klimb.rollout.replica import ReplicaSampler
from tests.tiny_models import CPU, byte_tokenizer, make_prompts, make_requests, sampling, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_copy_samples_what_the_model_itself_does(name: str, tied: bool, dtype: torch.dtype) -> None:
    model, requests = tiny_model(name, tie_word_embeddings=tied), make_requests(make_prompts([3, 8, 5]), 2)
    copy = ReplicaSampler(model, byte_tokenizer(), 4, dtype, CPU)
    copy.sleep()
    copy.load_weights(weights_for_engine(model), 0)
    itself = HFSampler(model, byte_tokenizer(), 4, dtype)
    for own, other in zip(itself.generate(requests, sampling()), copy.generate(requests, sampling()), strict=True):
        assert other.token_ids == own.token_ids
        assert other.logprobs == own.logprobs
