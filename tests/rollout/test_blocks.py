"""Fused blocks against the model's own modules."""

from collections.abc import Callable

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from klimb.models.attention import through
from klimb.models.load import body_of
from klimb.rollout import hf
from klimb.rollout.blocks import Blocks, fits
from tests.tiny_models import ARCHITECTURES, VOCAB, make_prompts, make_requests, peaked, sample, tiny_model

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILY: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_model,
    "llama with biases": lambda: tiny_model(**BIASES),
    "llama 3 rope": lambda: tiny_model(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen3": lambda: peaked(Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=12)), 12.0),
    "mistral": lambda: peaked(MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=None)), 12.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_one_token_per_row_is_what_the_modules_compute(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILY[name]()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that are not 0 and 1
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    body = body_of(model)
    ids, positions = torch.tensor([7, 9, 30, 4]), torch.tensor([0, 3, 3, 40])
    with torch.inference_mode():
        want = through(body, ids[:, None], positions[:, None], _EachItself())[:, 0]
        got = Blocks(body, rows=4)(ids, positions, _EachItself())
    assert fits(body)
    assert torch.allclose(got, want, atol=2e-5, rtol=1e-5)


class _EachItself:
    """Attention that mixes query, key and value without a past, so that a wrong rotation shows."""

    asked = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        key_value = torch.stack([key[:, :, 0], value[:, :, 0]], dim=1)
        return self.attend_step(layer, query[:, :, 0], key_value, scaling)[:, None]

    def attend_step(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """A product of query and key is the same in every order of their entries."""
        assert scaling is not None
        key, value = key_value.unbind(1)
        per = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(per, dim=1) for x in (key, value))
        return ((query * key).sum(-1, keepdim=True) * scaling).tanh().mul(value)


@pytest.mark.parametrize("name", ["gpt2", "gptneox", "gelu"])
def test_others_do_not_fit(name: str) -> None:
    model = tiny_model(hidden_act="gelu") if name == "gelu" else tiny_model(name)
    assert not fits(body_of(model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_ways_of_a_step_give_the_same_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused blocks or packed modules, and plain modules."""
    requests = make_requests(make_prompts([3, 12, 1, 7]), 3)
    model = tiny_model(name)
    fast = sample(model, requests, slots=5, max_tokens=12)
    monkeypatch.setattr(hf, "fits", lambda body: False)
    packed = sample(model, requests, slots=5, max_tokens=12)
    monkeypatch.setattr(hf, "pays", lambda model, dtype: False)
    plain = sample(model, requests, slots=5, max_tokens=12)
    for a, b, c in zip(fast, packed, plain, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.logprobs == pytest.approx(c.logprobs, abs=2e-5)
        assert b.logprobs == pytest.approx(c.logprobs, abs=2e-5)
