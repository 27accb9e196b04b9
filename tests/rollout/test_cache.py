"""Keys and values by prompt and row: whatever left, moved or grew, a row attends to its own past."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from klimb.rollout.cache import RowCache

HEADS, KEY_HEADS, DIM, LAYERS = 6, 2, 4, 2
LENGTHS = (5, 3, 2)
ROWS = (0, 0, 0, 1, 2, 2)


def numbers(generator: torch.Generator, heads: int, tokens: int) -> Tensor:
    return torch.randn(heads, tokens, DIM, generator=generator)


class Past:
    """What each row has seen, kept the slow way: keys and values [key heads, tokens, d] by layer."""

    def __init__(self, prompt: list[tuple[Tensor, Tensor]]) -> None:
        self.layers = list(prompt)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.layers[layer]
        self.layers[layer] = keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        return scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)[0, :, 0]


def filled(length: int) -> tuple[RowCache, list[Past], torch.Generator]:
    generator = torch.Generator().manual_seed(0)
    cache = RowCache(len(ROWS), max(LENGTHS), length, torch.device("cpu"))
    prompts = [
        [(numbers(generator, KEY_HEADS, n), numbers(generator, KEY_HEADS, n)) for _ in range(LAYERS)] for n in LENGTHS
    ]
    reading = cache.add_prompts(LENGTHS)
    for layer in range(LAYERS):
        keys, values = (torch.cat([p[layer][i] for p in prompts], 1)[None] for i in (0, 1))
        reading.attend(layer, numbers(generator, HEADS, sum(LENGTHS))[None], keys, values, None)
    cache.add_rows(ROWS)
    return cache, [Past(prompts[p]) for p in ROWS], generator


def step(cache: RowCache, pasts: list[Past], generator: torch.Generator) -> None:
    cache.begin_step()
    for layer in range(LAYERS):
        query, key, value = (
            torch.stack([numbers(generator, heads, 1) for _ in pasts]) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        got = cache.attend(layer, query, key, value, None)
        want = torch.stack([p.attend(layer, *qkv) for p, *qkv in zip(pasts, query, key, value, strict=True)])
        assert got.shape == (len(pasts), 1, HEADS, DIM)
        assert torch.allclose(got[:, 0], want, atol=1e-5)


def leave(cache: RowCache, pasts: list[Past], row: int) -> None:
    cache.leave(row)
    pasts[row] = pasts[-1]
    pasts.pop()


@pytest.mark.parametrize("length", [1, 3, 32])
def test_a_row_attends_to_its_prompt_and_its_own_tokens(length: int) -> None:
    cache, pasts, generator = filled(length)
    for _ in range(7):
        step(cache, pasts, generator)
    assert cache.positions().tolist() == [LENGTHS[p] + 7 for p in ROWS]


@pytest.mark.parametrize("order", [(0, 0, 0, 0, 0), (5, 4, 3, 2, 1), (3, 3, 1, 0, 1)])
def test_rows_leave_in_any_order(order: tuple[int, ...]) -> None:
    cache, pasts, generator = filled(2)
    for row in order:
        step(cache, pasts, generator)
        leave(cache, pasts, row)
    step(cache, pasts, generator)
    assert len(cache.prompt_lengths) == 1


def test_a_prompt_stays_until_its_last_row_has_left() -> None:
    cache, pasts, _ = filled(2)
    leave(cache, pasts, 4)
    assert cache.prompt_lengths == [5, 3, 2]
    leave(cache, pasts, 4)
    assert cache.prompt_lengths == [5, 3]
    leave(cache, pasts, 3)
    assert cache.prompt_lengths == [5]


def test_the_place_of_a_prompt_that_left_is_taken_again() -> None:
    cache, pasts, generator = filled(2)
    leave(cache, pasts, 3)  # the only row of prompt 1
    step(cache, pasts, generator)
    new = [(numbers(generator, KEY_HEADS, 4), numbers(generator, KEY_HEADS, 4)) for _ in range(LAYERS)]
    reading = cache.add_prompts([4])
    for layer, (key, value) in enumerate(new):
        reading.attend(layer, numbers(generator, HEADS, 4)[None], key[None], value[None], None)
    cache.add_rows([2])
    pasts.append(Past(new))
    step(cache, pasts, generator)
    step(cache, pasts, generator)


def test_a_token_needs_a_step() -> None:
    cache, _, generator = filled(2)
    key = numbers(generator, KEY_HEADS, 1)[None]
    with pytest.raises(AssertionError, match="begin_step"):
        cache.attend(0, numbers(generator, HEADS, 1)[None], key, key, None)
