"""The blocks compute what the model's own do, the last one where it is asked, and nothing that is read differs."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from klimb.models.attention import Packed, recompute_activations, through
from klimb.models.family import answers_where_asked, normed, rotated, take_over
from klimb.models.forward import backward_scores, token_logprobs, token_scores
from klimb.models.load import body_of
from tests.models.test_forward import padded
from tests.tiny_models import ARCHITECTURES, VOCAB, peaked, tiny_model, to_own_modules

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: lambda name=name: tiny_model(name, scale=3.0) for name in ARCHITECTURES},
    "qwen3": lambda: peaked(Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=12)), 3.0),
    "mistral": lambda: peaked(MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=None)), 3.0),
}
FAMILY = {"llama", "qwen2", "qwen3", "mistral"}
LENGTHS = [9, 4, 4, 1, 6]
ASKED = torch.tensor([3, 0, 8, 8, 12, 17, 23])


def made(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]()


def hidden(model: PreTrainedModel, asked: Tensor | None) -> Tensor:
    ids = torch.randint(5, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return through(body_of(model), ids[None], positions[None], Packed.of(LENGTHS, asked=asked))[0]


def scores(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of the places asked for, and what a pull on them does to every weight."""
    states = hidden(model, ASKED) if answers_where_asked(body_of(model)) else hidden(model, None)[ASKED]
    (states * torch.randn(len(ASKED), 32, generator=torch.Generator().manual_seed(1))).sum().backward()
    return states, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", sorted(FAMILY))
def test_blocks_compute_what_the_modules_of_the_model_do(name: str, biased: bool) -> None:
    found = list[tuple[Tensor, dict[str, Tensor]]]()
    for model in (made(name), to_own_modules(made(name))):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.dim() == 1 and biased):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        found.append(scores(model))
    (got, gradients), (want, wanted) = found
    assert torch.allclose(got, want, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for key, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[key], atol=1e-5 * float(wanted[key].abs().max())), key


def test_rotation_by_hand() -> None:
    """Entries 0 and 2 by 90 degrees, entries 1 and 3 by 180."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    cos, sin = torch.tensor([0.0, -1.0, 0.0, -1.0]), torch.tensor([1.0, 0.0])
    assert rotated(x, cos, sin).tolist() == [-3.0, -2.0, 1.0, -4.0]
    assert rotated(rotated(x, cos, sin), cos, -sin).tolist() == x.tolist()


def test_norm_and_its_gradients_by_hand() -> None:
    """x = (3, 4) has a mean square of 12.5; for the gradient g of y = w n, n = x / r, r = sqrt(12.5): by w it is g n,
    by x (w g - n mean(n w g)) / r."""
    norm = body_of(made("llama")).norm
    norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.tensor([2.0, 1.0])), 0.0
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    y = normed(norm, x)
    y.backward(torch.tensor([[1.0, -1.0]]))
    r = 12.5**0.5
    along = (3 / r * 2 * 1 + 4 / r * 1 * -1) / 2
    assert y.tolist() == [pytest.approx([6 / r, 4 / r])]
    assert norm.weight.grad.tolist() == pytest.approx([3 / r, -4 / r])
    assert x.grad is not None
    assert x.grad.tolist() == [pytest.approx([(2 - 3 / r * along) / r, (-1 - 4 / r * along) / r])]


def test_a_frozen_norm_has_no_gradient_and_hands_the_same_one_on() -> None:
    norm = body_of(made("llama")).norm
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    pulls = list[Tensor]()
    for trained in (True, False):
        norm.weight.requires_grad_(trained)
        leaf = x.clone().requires_grad_()
        normed(norm, leaf).square().sum().backward()
        assert leaf.grad is not None
        pulls.append(leaf.grad)
    assert torch.equal(*pulls)


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_in_bfloat16_autocast_blocks_compute_what_the_modules_do(name: str) -> None:
    states = list[Tensor]()
    for model in (made(name), to_own_modules(made(name))):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            states.append(hidden(model, None))
    assert states[0].dtype == states[1].dtype
    assert float((states[0] - states[1]).abs().mean()) < 0.01 * float(states[1].abs().mean())


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_are_those_of_all_places_selected(name: str) -> None:
    found = list[tuple[Tensor, dict[str, Tensor]]]()
    pull = torch.randn(len(ASKED), 32, generator=torch.Generator().manual_seed(1))
    for asks in (True, False):
        model = made(name)
        states = hidden(model, ASKED) if asks else hidden(model, None)[ASKED]
        (states * pull).sum().backward()
        found.append((states, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (got, gradients), (want, wanted) = found
    assert torch.allclose(got, want, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for key, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[key], atol=1e-5 * float(wanted[key].abs().max()) + 1e-7), key


@pytest.mark.parametrize("name", MODELS)
def test_a_last_mlp_of_the_family_sees_what_is_asked_and_no_more(name: str) -> None:
    model = made(name)
    assert answers_where_asked(body_of(model)) == (name in FAMILY)
    if name not in FAMILY:
        return
    seen = list[int]()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    hidden(model, ASKED)
    hidden(model, None)
    assert seen == [24, len(ASKED), 24, 24]


def test_nothing_asked_is_nothing_computed_and_still_part_of_the_graph() -> None:
    model = made("llama")
    states = hidden(model, torch.zeros(0, dtype=torch.int64))
    assert states.shape == (0, 32)
    states.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_copy_answers_with_its_own_weights() -> None:
    model = made("llama")
    other, before = copy.deepcopy(model), hidden(model, ASKED)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(hidden(model, ASKED), before)
    assert torch.allclose(hidden(other, ASKED), hidden(other, None)[ASKED], atol=1e-5)
    assert not torch.allclose(hidden(other, ASKED), before, atol=1e-2)


def test_recomputed_activations_change_no_bit() -> None:
    found = list[dict[str, Tensor]]()
    for recompute in (False, True):
        model = made("llama")
        if recompute:
            recompute_activations(body_of(model))
        hidden(model, ASKED).sin().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(gradient, found[1][key]) for key, gradient in found[0].items())


@pytest.mark.parametrize("name", MODELS)
def test_passes_before_and_in_the_update_read_the_same_bits(name: str) -> None:
    """Or the ratio of the first minibatch is not 1."""
    model, rows = made(name), padded()
    before = token_logprobs(model, *rows, 0.7)
    assert torch.equal(before, token_scores(model, *rows, 0.7).logprobs)
    assert torch.equal(before, backward_scores(model, *rows, 0.7, lambda lp, h, at: lp.sum()).logprobs)


def test_a_body_of_another_kind_is_left_as_it_is() -> None:
    body = body_of(tiny_model("gpt2"))
    take_over(body)
    assert not any("forward" in vars(module) for module in body.modules())
