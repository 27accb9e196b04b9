"""The head's fast product is its product, forward and backward, and is made only where it pays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from klimb.models import head as module
from klimb.models.head import PACKED_TOKENS, HeadPass, entropies_of, is_plain, logprobs_of
from klimb.models.prepacked import is_available

WORDS, WIDTH = 90, 16


def head(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WORDS, bias=bias)


def hidden(tokens: int = PACKED_TOKENS) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def test_packed_logits_and_their_gradients_are_those_of_the_layer() -> None:
    layer, x = head(), hidden().requires_grad_()
    through = HeadPass.of(layer, x, 0.7, reuse=False)
    assert (through.packed is not None) == is_available()
    weights = torch.randn(PACKED_TOKENS, WORDS, generator=torch.Generator().manual_seed(2))
    found = list[tuple[torch.Tensor, ...]]()
    for logits in (through.logits(x), layer(x) / 0.7):
        found.append((logits, *torch.autograd.grad((logits * weights).sum(), (x, layer.weight))))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_a_frozen_head_has_no_gradient() -> None:
    layer, x = head().requires_grad_(False), hidden().requires_grad_()
    HeadPass.of(layer, x, 1.0, reuse=False).logits(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x), atol=1e-5)


def test_a_chunk_reuses_the_room_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 32 * WORDS)
    for tokens in (PACKED_TOKENS, PACKED_TOKENS - 1):  # with a packed head, and without
        x = hidden(tokens)
        through = HeadPass.of(head(), x, 1.0, reuse=True)
        assert [at.stop - at.start for at in through.pieces][:2] == [32, 32]
        assert sum(at.stop - at.start for at in through.pieces) == tokens
        with torch.no_grad():
            for at in through.pieces:
                logits = through.logits(x[at])
                assert torch.allclose(logits, head()(x[at]), atol=1e-5)
                p = through.probabilities(logits)
                logprobs = logprobs_of(logits, p, torch.zeros(len(logits), 1, dtype=torch.int64))
                entropy = entropies_of(logits, p)
                assert through.room is not None
                assert p.data_ptr() == through.room.data_ptr()
                assert torch.allclose(logprobs, logits.log_softmax(-1)[:, 0], atol=1e-5)
                assert torch.allclose(entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


def test_what_is_no_plain_matrix_in_float32_or_does_not_pay_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    few, biased, wide = (hidden(PACKED_TOKENS - 1), head()), (hidden(), head(bias=True)), (hidden().double(), head())
    for x, layer in (few, biased, wide):
        assert HeadPass.of(layer, x, 1.0, reuse=True).packed is None
    assert is_plain(head())
    assert not is_plain(head(bias=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert HeadPass.of(head(), hidden(), 1.0, reuse=True).packed is None
    monkeypatch.setattr(module, "PACKED_NUMBERS", WORDS * WIDTH - 1)
    assert HeadPass.of(head(), hidden(), 1.0, reuse=True).packed is None


def test_no_tokens_make_no_chunks() -> None:
    assert HeadPass.of(head(), hidden(0), 1.0, reuse=True).pieces == []
