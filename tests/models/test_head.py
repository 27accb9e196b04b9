"""The head's fast product is its product, forward and backward, and is made only where it pays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from klimb.models import head as module
from klimb.models.head import (
    PACKED_BACKWARD_TOKENS,
    PACKED_TOKENS,
    HeadPass,
    PackedHead,
    entropies_of,
    is_plain,
    logprobs_of,
)
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


def test_a_copy_for_several_passes_is_used_by_those_that_would_make_one() -> None:
    """So that a pass gives the same bits whoever made the copy."""
    layer = head()
    shared = PackedHead.of(layer, 10 * PACKED_TOKENS)
    if not is_available():
        assert shared is None
        return
    assert HeadPass.of(layer, hidden(), 1.0, reuse=True, shared=shared).packed is shared
    assert HeadPass.of(layer, hidden(PACKED_TOKENS - 1), 1.0, reuse=True, shared=shared).packed is None
    x = hidden()
    alone, together = (HeadPass.of(layer, x, 1.0, reuse=True, shared=s).logits(x) for s in (None, shared))
    assert torch.equal(alone, together)


def test_the_gradient_by_hidden_states_is_packed_from_enough_tokens_on() -> None:
    layer, x = head(), hidden()
    if not is_available():
        return
    few, many = (PackedHead.of(layer, n, trains=True) for n in (PACKED_BACKWARD_TOKENS - 1, PACKED_BACKWARD_TOKENS))
    assert few is not None
    assert many is not None
    assert few.backward is None
    assert many.backward is not None
    by_logits = torch.randn(PACKED_TOKENS, WORDS, generator=torch.Generator().manual_seed(3))
    for shared in (few, many):
        got = HeadPass.of(layer, x, 1.0, reuse=True, shared=shared).by_hidden(by_logits)
        assert torch.allclose(got, by_logits @ layer.weight, atol=1e-5)


def test_log_probs_and_entropies_are_those_of_double_precision_however_unlikely_the_token() -> None:
    spread = (
        torch.randn(6, WORDS, generator=torch.Generator().manual_seed(4)) * torch.tensor([[0.1, 1, 5, 20, 20, 60]]).T
    )
    y = torch.randint(WORDS, (6, 1), generator=torch.Generator().manual_seed(5))
    y[3:] = spread[3:].argmin(dim=-1, keepdim=True)
    p = spread.softmax(-1)
    assert float(p.gather(-1, y).min()) == 0.0
    want = spread.double().log_softmax(-1)
    assert torch.allclose(logprobs_of(spread, p, y).double(), want.gather(-1, y).squeeze(-1), rtol=1e-6, atol=1e-6)
    entropy = -(want.exp() * want).sum(-1)
    assert torch.allclose(entropies_of(spread, p).double(), entropy, atol=2e-5)


def test_one_unlikely_token_changes_no_bit_of_the_others() -> None:
    logits = torch.randn(3, WORDS, generator=torch.Generator().manual_seed(6))
    y = torch.zeros(3, 1, dtype=torch.int64)
    before = logprobs_of(logits, logits.softmax(-1), y)
    logits[1, 0] = -200.0
    after = logprobs_of(logits, logits.softmax(-1), y)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert after[1] < -190


def test_the_gradient_of_an_unlikely_tokens_log_prob_is_finite() -> None:
    logits = torch.zeros(2, WORDS)
    logits[0, 0] = -200.0
    logits.requires_grad_()
    logprobs_of(logits, logits.softmax(-1), torch.zeros(2, 1, dtype=torch.int64)).sum().backward()
    want = -torch.tensor([[0.0] + [1 / (WORDS - 1)] * (WORDS - 1), [1 / WORDS] * WORDS])
    want[:, 0] += 1
    assert logits.grad is not None
    assert torch.allclose(logits.grad, want, atol=1e-6)
