"""Rows that begin with one prompt: computed once, and nobody can tell."""

import pytest
import torch
from torch import Tensor

from klimb.models.forward import backward_scores, token_scores, token_values
from klimb.models.load import body_of, critic_from
from tests.tiny_models import ARCHITECTURES, VOCAB, tiny_model

PROMPTS = (4, 7)
ANSWERS = ((0, 5), (1, 3), (0, 5), (0, 2), (1, 9), (0, 1), (1, 3))
"""Prompt and length of the answer of every row."""


def group(left: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, attention, mask [7, 16]; a prompt's rows lie apart, and two answers begin alike."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, VOCAB, (n,), generator=generator) for n in PROMPTS]
    rows = [torch.cat([prompts[p], torch.randint(5, VOCAB, (n,), generator=generator)]) for p, n in ANSWERS]
    tokens = torch.zeros(len(rows), 16, dtype=torch.int64)
    attention = torch.zeros(len(rows), 16, dtype=torch.bool)
    mask = attention.clone()
    for i, (row, (p, n)) in enumerate(zip(rows, ANSWERS, strict=True)):
        start = 16 - len(row) if left else 0
        tokens[i, start : start + len(row)] = row
        attention[i, start : start + len(row)] = True
        mask[i, start + PROMPTS[p] : start + PROMPTS[p] + n] = True
    return tokens, attention, mask


def alone(tensors: tuple[Tensor, Tensor, Tensor], row: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (x[row : row + 1] for x in tensors)
    return a, b, c


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_values_are_those_of_the_rows_alone(name: str, left: bool) -> None:
    model, rows = tiny_model(name), group(left)
    critic = critic_from(model)
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        together = token_scores(model, *rows, 0.7), token_values(critic, *rows)
        for i in range(len(ANSWERS)):
            scores, values = token_scores(model, *alone(rows, i), 0.7), token_values(critic, *alone(rows, i))
            assert torch.allclose(together[0].logprobs[i], scores.logprobs[0], atol=2e-5)
            assert torch.allclose(together[0].entropy[i], scores.entropy[0], atol=2e-5)
            assert torch.allclose(together[1][i], values[0], atol=2e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_the_sum_of_those_of_the_rows_alone(name: str) -> None:
    rows, pull = group(), torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    found = list[dict[str, Tensor]]()
    for way in ("together", "fused", "alone"):
        model = tiny_model(name, scale=3.0)
        if way == "together":
            (token_scores(model, *rows, 1.0).logprobs * pull).sum().backward()
        elif way == "fused":
            factors = pull[rows[2]]
            backward_scores(model, *rows, 1.0, lambda logprobs, entropy, at, f=factors: (logprobs * f[at]).sum())
        else:
            for i in range(7):
                (token_scores(model, *alone(rows, i), 1.0).logprobs * pull[i]).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for key, gradient in found[2].items():
        for way in (0, 1):
            assert torch.allclose(found[way][key], gradient, atol=2e-4, rtol=1e-4), (way, key)


def read(rows: tuple[Tensor, Tensor, Tensor]) -> int:
    """Tokens that reached the embedding."""
    model, counts = tiny_model(), list[int]()
    body_of(model).get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda _m, args, _o: counts.append(args[0].numel())
    )
    with torch.no_grad():
        token_scores(model, *rows, 1.0)
    return counts[0]


def test_every_prompt_is_read_once() -> None:
    rows = group()
    assert read(rows) == sum(PROMPTS) + sum(n for _, n in ANSWERS)
    assert read(group(left=True)) == read(rows)


def test_rows_of_other_prompts_share_nothing() -> None:
    tokens, attention, mask = group()
    tokens[:, 0] = torch.arange(5, 12)
    assert read((tokens, attention, mask)) == int(attention.sum())


def test_rows_that_nothing_is_asked_of_share_nothing() -> None:
    tokens, attention, mask = group()
    mask[1:] = False
    assert read((tokens, attention, mask)) == int(attention.sum())
