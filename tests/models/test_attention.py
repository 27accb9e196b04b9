"""Rows laid end to end see themselves only, in every architecture that goes through the interface."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GptOssConfig, GptOssForCausalLM, MambaConfig, MambaForCausalLM

from klimb.errors import ModelError
from klimb.models.attention import Packed, recompute_activations, through
from klimb.models.load import body_of, load_causal_lm
from tests.tiny_models import ARCHITECTURES, VOCAB, tiny_model

LENGTHS = [9, 4, 4, 1, 6]


def laid_out() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_end_to_end_are_the_rows_alone(name: str) -> None:
    body, (ids, positions) = body_of(tiny_model(name)), laid_out()
    alone = torch.cat([body(input_ids=row[None], use_cache=False)[0][0] for row in ids.split(LENGTHS)])
    together = through(body, ids[None], positions[None], Packed.of(LENGTHS))[0]
    assert torch.allclose(together, alone, atol=2e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_so_are_their_gradients(name: str) -> None:
    ids, positions = laid_out()
    pull = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(1))
    found = list[dict[str, torch.Tensor]]()
    for packed in (True, False):
        body = body_of(tiny_model(name, scale=3.0))
        if packed:
            hidden = through(body, ids[None], positions[None], Packed.of(LENGTHS))[0]
        else:
            hidden = torch.cat([body(input_ids=row[None], use_cache=False)[0][0] for row in ids.split(LENGTHS)])
        (hidden * pull).sum().backward()
        found.append({n: p.grad for n, p in body.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][key], atol=1e-4, rtol=1e-4), key


def test_neighbours_of_one_length_are_one_run() -> None:
    assert Packed.of(LENGTHS).runs == ((1, 9), (2, 4), (1, 1), (1, 6))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_rows_the_attention_is_transformers_own(name: str) -> None:
    """With a mask and padding, as anyone else calls the model."""
    ids = torch.randint(5, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    model = tiny_model(name)
    with torch.no_grad():
        ours = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        theirs = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(ours, theirs)


def test_a_model_with_another_attention_is_refused_at_once() -> None:
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    ids, positions = laid_out()
    with pytest.raises(ModelError, match=r"a model with sdpa attention.*set_attn_implementation\('klimb'\)"):
        through(body_of(model), ids[None], positions[None], Packed.of(LENGTHS))


SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
OTHERS: dict[str, Any] = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SMALL, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2
        )
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_architectures_of_another_kind_are_refused(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    OTHERS[name]().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        load_causal_lm(tmp_path, False, torch.device("cpu"))
    assert "attention" in str(error.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recomputed_activations_give_the_same_gradients_to_the_last_bit(name: str) -> None:
    ids, positions = laid_out()
    found = list[dict[str, torch.Tensor]]()
    for recompute in (False, True):
        body = body_of(tiny_model(name, scale=3.0))
        if recompute:
            recompute_activations(body)
        through(body, ids[None], positions[None], Packed.of(LENGTHS))[0].sin().sum().backward()
        found.append({n: p.grad for n, p in body.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][key]) for key, gradient in found[0].items())


def saved_bytes(recompute: bool) -> int:
    """Bytes that autograd keeps for the backward of a forward over the rows."""
    body, (ids, positions), sizes = body_of(tiny_model()), laid_out(), list[int]()
    if recompute:
        recompute_activations(body)

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        through(body, ids[None], positions[None], Packed.of(LENGTHS))
    return sum(sizes)


def test_recomputed_activations_are_not_kept() -> None:
    assert saved_bytes(recompute=True) < 0.2 * saved_bytes(recompute=False)


def test_a_body_without_blocks_says_so() -> None:
    class Flat(torch.nn.Module):
        config = tiny_model().config

    with pytest.raises(ModelError, match=r"llama: training\.activation_checkpointing finds no blocks"):
        recompute_activations(Flat())
