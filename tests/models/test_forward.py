"""The passes over rows against an independent slow loop, and what may not reach them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from klimb.models.attention import NAME
from klimb.models.forward import token_scores, token_values
from klimb.models.load import Critic, critic_from
from tests.tiny_models import ARCHITECTURES, VOCAB, tiny_model

LENGTHS = [9, 4, 6]
PROMPTS = [3, 1, 2]


def padded(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, attention, mask [3, 9]; row 0 has a hole in its mask, like a tool's answer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB, (3, 9), generator=generator)
    place = torch.arange(9)
    attention = torch.stack([place < n for n in LENGTHS])
    mask = torch.stack([(place >= p) & (place < n) for p, n in zip(PROMPTS, LENGTHS, strict=True)])
    mask[0, 5] = False
    return tokens.masked_fill(~attention, 0), attention, mask


def to_the_left(x: Tensor, lengths: list[int] = LENGTHS) -> Tensor:
    """The same rows with their padding in front."""
    return torch.stack([row.roll(x.shape[1] - n) for row, n in zip(x, lengths, strict=True)])


def slow(model: PreTrainedModel, tokens: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Each prefix alone and unpadded through the whole model, in float64 from the logits on."""
    logprobs, entropy = torch.zeros(mask.shape), torch.zeros(mask.shape)
    with torch.no_grad():
        for i, t in mask.nonzero().tolist():
            logits = model(input_ids=tokens[i : i + 1, :t]).logits[0, -1].double() / temperature
            logprob = logits.log_softmax(-1)
            logprobs[i, t] = logprob[tokens[i, t]]
            entropy[i, t] = -(logprob.exp() * logprob).sum()
    return logprobs, entropy


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_case_MK_01_scores_are_those_of_unpadded_prefixes_on_either_side_of_the_padding(name: str) -> None:
    model, (tokens, attention, mask) = tiny_model(name), padded()
    logprobs, entropy = slow(model, tokens, mask, 0.6)
    right = token_scores(model, tokens, attention, mask, 0.6)
    left = token_scores(model, to_the_left(tokens), to_the_left(attention), to_the_left(mask), 0.6)
    for got in (right.logprobs, left.logprobs.masked_select(to_the_left(mask))):
        want = logprobs if got.dim() == 2 else logprobs[mask]
        assert torch.allclose(got, want, atol=1e-5, rtol=0)
    assert torch.allclose(right.entropy, entropy, atol=1e-5, rtol=0)
    assert torch.allclose(left.entropy[to_the_left(mask)], entropy[mask], atol=1e-5, rtol=0)
    assert not right.logprobs[~mask].any()
    assert not right.entropy[~mask].any()


def test_case_MK_01_padding_on_both_sides_of_one_row() -> None:
    model = tiny_model("gpt2")
    tokens = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25], [0, 31, 32, 33, 0]])
    attention = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]).bool()
    mask = attention & torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
    got = token_scores(model, tokens, attention, mask, 1.0).logprobs
    for i, n in enumerate([3, 5, 3]):
        row, own = tokens[i][attention[i]], mask[i][attention[i]]
        want, _ = slow(model, row.unsqueeze(0), own.unsqueeze(0), 1.0)
        assert torch.allclose(got[i][mask[i]], want[0][own], atol=1e-5, rtol=0), n


def model_with_logits(table: list[list[float]]) -> PreTrainedModel:
    """A Llama whose next-token logits are a function of the last token alone: table[token].

    Its layers add nothing, its embeddings are one-hot times sqrt(width), so that the norm leaves them as they are.
    """
    width = len(table)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(width) * width**0.5)
        model.lm_head.weight.copy_(torch.tensor(table).T / width**0.5)
    return model


# Tokens 0 to 3 of vocabulary of 4; the fourth has a logit that never counts.
NEVER = -1e4


def test_case_LP_01_log_probs_are_at_the_sampling_temperature() -> None:
    model = model_with_logits([[2.0, 1.0, 0.0, NEVER]] * 4)
    tokens, every = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool)
    mask = torch.tensor([[False, True]])
    assert token_scores(model, tokens, every, mask, 0.6).logprobs[0, 1].item() == pytest.approx(-0.2025730998, abs=1e-6)
    assert token_scores(model, tokens, every, mask, 1.0).logprobs[0, 1].item() == pytest.approx(-0.4076059644, abs=1e-6)


def test_case_LP_03_the_logits_of_a_position_speak_of_the_next_token() -> None:
    # The case gives logits per position of [1, 0, 2, 1]; here they hang on the token, so the first 1 is called 3.
    model = model_with_logits([[1.0, 0.0, -1.0, NEVER], [5.0, 5.0, 5.0, NEVER], [0.0, 2.0, 0.0, NEVER], [0.0] * 4])
    tokens = torch.tensor([[3, 0, 2, 1]])
    mask = torch.tensor([[False, False, True, True]])
    want = torch.tensor([-2.407605964444, -0.2395447662219])
    got = token_scores(model, tokens, torch.ones_like(mask), mask, 1.0).logprobs
    assert torch.allclose(got[mask], want, atol=1e-6)
    front = torch.zeros(1, 2, dtype=torch.bool)
    left = token_scores(
        model,
        torch.cat([torch.zeros(1, 2, dtype=torch.int64), tokens], dim=1),
        torch.cat([front, torch.ones_like(mask)], dim=1),
        torch.cat([front, mask], dim=1),
        1.0,
    ).logprobs
    assert torch.allclose(left[0, 2:][mask[0]], want, atol=1e-6)
    assert left.shape == (1, 6)


def test_case_LP_04_log_softmax_is_float32_under_bfloat16() -> None:
    # 20, 19.5 and 3 are exact in bfloat16, and so are the products that make them.
    model = model_with_logits([[20.0, 19.5, 3.0, NEVER]] * 4)
    tokens = torch.tensor([[1, 0, 2]])
    mask = torch.tensor([[False, True, True]])
    got = token_scores(model, tokens, torch.ones_like(mask), mask, 1.0, torch.bfloat16)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    assert torch.allclose(got.logprobs[mask], torch.tensor([-0.4740770099, -17.47407700995]), atol=1e-4)


def test_bfloat16_values_are_float32_and_near() -> None:
    critic, (tokens, attention, mask) = critic_with_head("llama"), padded()
    full, half = (token_values(critic, tokens, attention, mask, d) for d in (torch.float32, torch.bfloat16))
    assert half.dtype == torch.float32
    assert 0 < (full - half).abs().max() < 0.5


def critic_with_head(name: str) -> Critic:
    critic = critic_from(tiny_model(name))
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(5)))
        critic.head.bias.fill_(0.25)
    return critic


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_made_before_the_token(name: str) -> None:
    critic, (tokens, attention, mask) = critic_with_head(name), padded()
    want = torch.zeros(mask.shape)
    with torch.no_grad():
        for i, t in mask.nonzero().tolist():
            want[i, t] = critic.head(critic.body(input_ids=tokens[i : i + 1, :t])[0][0, -1])
        got = token_values(critic, tokens, attention, mask)
        left = token_values(critic, *(to_the_left(x) for x in (tokens, attention, mask)))
    assert torch.allclose(got, want, atol=5e-5, rtol=0)
    assert torch.allclose(left[to_the_left(mask)], want[mask], atol=5e-5, rtol=0)


def test_a_fresh_critic_says_zero() -> None:
    assert not token_values(critic_from(tiny_model()), *padded()).any()


def gradient_of(model: nn.Module, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    with monkeypatch.context() as patch:
        if chunk is not None:
            patch.setattr("klimb.models.head.CHUNK_LOGITS", chunk)
        got = token_scores(model, *padded(), 0.7)  # type: ignore[arg-type]
        model.zero_grad()
        weight = torch.arange(27.0).view(3, 9)
        (got.logprobs * weight + got.entropy * weight.flip(0)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return got.logprobs.detach(), got.entropy.detach(), gradient


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [0.5, 1, 2, 5, 13])
def test_the_chunked_head_changes_neither_value_nor_gradient(
    name: str, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    whole = gradient_of(model, None, monkeypatch)
    cut = gradient_of(model, int(rows * VOCAB), monkeypatch)
    for a, b in zip(whole, cut, strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_gradient_is_that_of_the_whole_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, attention, mask) = tiny_model(name), padded()
    got = gradient_of(model, VOCAB, monkeypatch)[2]
    model.zero_grad()
    logprob = (model(input_ids=tokens, attention_mask=attention.long()).logits / 0.7).log_softmax(-1)
    taken = logprob[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logprob.exp() * logprob).sum(-1)[:, :-1]
    weight = torch.arange(27.0).view(3, 9)
    loss = torch.where(mask[:, 1:], taken * weight[:, 1:] + entropy * weight.flip(0)[:, 1:], 0.0).sum()
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_nothing_of_vocabulary_size_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klimb.models.head.CHUNK_LOGITS", 2 * VOCAB)
    model, shapes = tiny_model(), list[tuple[int, ...]]()
    head = model.get_output_embeddings()
    assert head is not None
    seen: list[int] = []
    handle = head.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[0]))

    def pack(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        got = token_scores(model, *padded(), 1.0)
    assert not [s for s in shapes if s and s[-1] == VOCAB]
    assert shapes
    masked_in = int(padded()[2].sum())
    assert max(seen) == 2
    assert sum(seen) == masked_in
    got.logprobs.sum().backward()
    assert sum(seen) == 2 * masked_in, "made again in backward, chunk by chunk"
    handle.remove()


@pytest.mark.parametrize("left", [False, True])
def test_nan_in_the_padding_reaches_neither_result_nor_gradient(left: bool) -> None:
    rows = padded() if not left else tuple(to_the_left(x) for x in padded())
    tokens, attention, _ = rows
    model, critic = tiny_model(), critic_with_head("llama")
    before = [token_scores(model, *rows, 1.0).logprobs, token_values(critic, *rows)]
    assert (tokens == 0).equal(~attention)
    with torch.no_grad():
        for body in (model.base_model, critic.body):
            body.get_input_embeddings().weight[0] = torch.nan
    after = [token_scores(model, *rows, 1.0).logprobs, token_values(critic, *rows)]
    for a, b, module in zip(before, after, (model, critic), strict=True):
        assert torch.equal(a, b)
        b.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_what_stands_in_the_padding_does_not_matter() -> None:
    model, (tokens, attention, mask) = tiny_model("gpt2"), padded()
    other = tokens.masked_fill(~attention, 77)
    a, b = (token_scores(model, x, attention, mask, 1.0).logprobs for x in (tokens, other))
    assert torch.equal(a, b)


@pytest.mark.parametrize("which", ["policy", "critic"])
def test_no_masked_in_token_gives_zeros_and_a_zero_gradient(which: str) -> None:
    tokens, attention, mask = padded()
    nothing: Any = torch.zeros_like(mask)
    if which == "policy":
        module: nn.Module = tiny_model()
        scores = token_scores(module, tokens, attention, nothing, 1.0)  # type: ignore[arg-type]
        out = scores.logprobs + scores.entropy
    else:
        critic = critic_with_head("llama")
        module, out = critic, token_values(critic, tokens, attention, nothing)
    assert not out.any()
    out.sum().backward()
    assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


def test_scores_need_no_gradient_where_gradients_are_off() -> None:
    with torch.no_grad():
        got = token_scores(tiny_model(), *padded(), 1.0)
    assert not got.logprobs.requires_grad
    assert torch.allclose(got.logprobs, token_scores(tiny_model(), *padded(), 1.0).logprobs, atol=0)
