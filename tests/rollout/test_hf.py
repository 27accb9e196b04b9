"""Continuous batching: what a request gets depends on its prompt, its seed and the weights, on nothing else."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from klimb.errors import ModelError
from klimb.models.attention import NAME
from klimb.models.forward import token_scores
from klimb.rollout import hf
from klimb.rollout.base import Request
from klimb.rollout.hf import HFSampler
from klimb.types import Prompt, Sample
from tests.tiny_models import (
    ARCHITECTURES,
    END,
    EOS,
    VOCAB,
    byte_tokenizer,
    make_prompts,
    make_requests,
    sample,
    sampling,
    tiny_model,
)

LENGTHS = [3, 21, 1, 60, 5]
ENDS = frozenset({EOS, END, *range(50, 62)})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(make_prompts(LENGTHS), 3)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, requests: list[Request]) -> list[Sample]:
    """Each request in a call of its own."""
    return [sample(model, [r], slots=1, temperature=0.7, max_tokens=24, end_ids=ENDS)[0] for r in requests]


def assert_same(got: Sequence[Sample], want: Sequence[Sample]) -> None:
    for a, b in zip(got, want, strict=True):
        assert replace(a, logprobs=b.logprobs) == b
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


def test_the_cases_differ_in_length_and_end(alone: list[Sample]) -> None:
    assert {s.finish_reason for s in alone} == {"stop", "length"}
    assert len({s.num_response_tokens for s in alone}) > 4


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 64])
def test_the_number_of_slots_changes_nothing(
    model: PreTrainedModel, requests: list[Request], alone: list[Sample], slots: int
) -> None:
    assert_same(sample(model, requests, slots, temperature=0.7, max_tokens=24, end_ids=ENDS), alone)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_the_requests_changes_nothing(
    model: PreTrainedModel, requests: list[Request], alone: list[Sample], seed: int
) -> None:
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(seed)).tolist()
    got = sample(model, [requests[i] for i in order], 4, temperature=0.7, max_tokens=24, end_ids=ENDS)
    assert_same(got, [alone[i] for i in order])


def test_the_size_of_one_reading_changes_nothing(
    model: PreTrainedModel, requests: list[Request], alone: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "PREFILL_TOKENS", {"cpu": 64})
    monkeypatch.setattr(hf, "GROWTH", 1)  # the cache has to grow
    assert_same(sample(model, requests, 6, temperature=0.7, max_tokens=24, end_ids=ENDS), alone)


def test_a_longer_limit_only_goes_on(model: PreTrainedModel, requests: list[Request], alone: list[Sample]) -> None:
    for a, b in zip(sample(model, requests, 6, temperature=0.7, max_tokens=90, end_ids=ENDS), alone, strict=True):
        assert a.token_ids[: len(b.token_ids)] == b.token_ids


def test_another_seed_gives_another_text(model: PreTrainedModel, requests: list[Request], alone: list[Sample]) -> None:
    others = [replace(r, seed=r.seed + 1) for r in requests]
    got = sample(model, others, 6, temperature=0.7, max_tokens=24, end_ids=ENDS)
    assert sum(a.token_ids == b.token_ids for a, b in zip(got, alone, strict=True)) <= 2
    assert len({s.token_ids for s in alone}) > 12, "answers to one prompt differ"


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_recorded_log_probs_are_those_of_a_whole_forward(name: str, temperature: float) -> None:
    model = tiny_model(name, scale=8.0)
    samples = sample(model, make_requests(make_prompts(LENGTHS), 2), 4, temperature=temperature, max_tokens=80)
    assert max(s.num_response_tokens for s in samples) > hf.GROWTH, "the cache has to grow"
    for s in samples:
        tokens, mask = torch.tensor([s.token_ids]), torch.tensor([s.mask])
        with torch.no_grad():
            whole = token_scores(model, tokens, torch.ones_like(mask), mask, temperature).logprobs
        assert torch.allclose(torch.tensor([s.logprobs]), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_transformers_own_greedy(name: str) -> None:
    model = tiny_model(name)
    prompts = make_prompts(LENGTHS)
    got = sample(model, make_requests(prompts), 3, temperature=0.0, max_tokens=30)
    for prompt, mine in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt.token_ids])
        theirs = model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0
        )
        assert list(mine.token_ids) == theirs[0].tolist()


def test_a_sample_describes_itself(model: PreTrainedModel, requests: list[Request], alone: list[Sample]) -> None:
    for request, s in zip(requests, alone, strict=True):
        n = len(request.prompt.token_ids)
        assert s.prompt is request.prompt
        assert s.index == request.index
        assert s.token_ids[:n] == request.prompt.token_ids
        assert s.mask == (False,) * n + (True,) * (len(s.token_ids) - n)
        assert s.logprobs[:n] == (0.0,) * n
        assert all(x < 0 for x in s.logprobs[n:])
        response = s.token_ids[n:]
        assert not any(t in ENDS for t in response[:-1])
        assert (response[-1] in ENDS) == (s.finish_reason == "stop")
        assert s.finish_reason == "stop" or len(response) == 24
        spoken = [t for t in response if t not in ENDS]
        assert s.text == byte_tokenizer().decode(spoken, skip_special_tokens=True)


def test_case_MK_02_the_sampled_end_token_is_masked_in_though_it_is_the_pad(model: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer(with_pad=False)
    tokenizer.pad_token = tokenizer.eos_token
    ends = frozenset({tokenizer.pad_token_id, *range(50, 90)})
    requests = make_requests(make_prompts([4, 2, 9]), 8)
    samples = HFSampler(model, tokenizer, 8).generate(requests, sampling(end_ids=ends, max_tokens=5))
    assert {s.finish_reason == "length" for s in samples} == {False, True}
    for s in samples:
        response = s.token_ids[len(s.prompt.token_ids) :]
        ended = response[-1] in ends
        assert s.mask[-len(response) :] == (True,) * len(response)
        assert s.finish_reason == ("stop" if ended else "length")
        assert ended or len(response) == 5


def biased(token: int) -> PreTrainedModel:
    """A model that says one token nearly always."""
    model = tiny_model("gpt2", tie_word_embeddings=False)
    head = model.get_output_embeddings()
    assert head is not None
    with torch.no_grad():
        # The final norm's bias points where only this token's output row looks.
        model.base_model.ln_f.bias.add_(10 * torch.ones(32))
        head.weight[token] = 5.0
    return model


@pytest.mark.parametrize("end", [0, EOS, END])
def test_an_end_token_at_once_is_a_response_of_one_token(end: int) -> None:
    s = sample(biased(end), make_requests(make_prompts([4])), end_ids=frozenset({0, EOS, END}))[0]
    assert s.token_ids[4:] == (end,)
    assert (s.finish_reason, s.text, s.mask[-1]) == ("stop", "", True)


def test_an_end_token_that_is_not_one_of_the_ends_is_sampled_over_and_over() -> None:
    s = sample(biased(EOS), make_requests(make_prompts([4])), end_ids=frozenset({END}), max_tokens=6)[0]
    assert s.token_ids[4:] == (EOS,) * 6
    assert (s.finish_reason, s.text) == ("length", "")


@pytest.mark.parametrize("stop", ["aaa", "aa", "\u4e2d" * 10, "a" * 25])
def test_a_stop_string_ends_where_it_is_complete(stop: str) -> None:
    """Ten Chinese characters are thirty byte tokens: more than ten plus a little."""
    want = byte_tokenizer().encode(stop, add_special_tokens=False)
    model = successor_model([*want, *want])
    prompt = Prompt(row=0, text="", token_ids=(EOS,), answer=None, source="", extra={})
    request = Request(prompt=prompt, index=0, seed=0)
    s = HFSampler(model, byte_tokenizer(), 2).generate(
        [request], sampling(temperature=0.0, max_tokens=100, stop_strings=("zz", stop))
    )[0]
    assert list(s.token_ids[1:]) == want
    assert (s.finish_reason, s.text) == ("stop", stop)


def successor_model(sequence: Sequence[int]) -> PreTrainedModel:
    """A GPT-2 that says the sequence, whatever it reads: its embeddings of positions decide alone."""
    model = tiny_model("gpt2", scale=0.0, tie_word_embeddings=False, n_embd=1024)
    head = model.get_output_embeddings()
    assert head is not None
    with torch.no_grad():
        places = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
        model.base_model.wpe.weight.copy_(places)
        normed = torch.nn.functional.layer_norm(places, (1024,))
        for place, token in enumerate(sequence[:40]):
            head.weight[token] += normed[place]
    return model


def test_a_stop_token_needs_no_string() -> None:
    stop = byte_tokenizer().convert_tokens_to_ids("a")
    assert isinstance(stop, int)
    s = sample(biased(stop), make_requests(make_prompts([4])), end_ids=frozenset({EOS, stop}))[0]
    assert s.token_ids[4:] == (stop,)
    assert s.finish_reason == "stop"


def test_one_token_at_most(model: PreTrainedModel, requests: list[Request], alone: list[Sample]) -> None:
    got = sample(model, requests, 3, temperature=0.7, max_tokens=1, end_ids=ENDS)
    for a, b in zip(got, alone, strict=True):
        assert a.token_ids == b.token_ids[: len(a.prompt.token_ids) + 1]
        assert a.finish_reason == ("stop" if a.token_ids[-1] in ENDS else "length")


def test_a_prompt_asked_for_often_is_read_once(model: PreTrainedModel, requests: list[Request]) -> None:
    read: list[int] = []
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _m, args, _o: read.append(args[0].numel()))
    same = [replace(requests[9], index=i, seed=i) for i in range(12)]
    together = sample(model, same, 12, max_tokens=6)
    handle.remove()
    assert read[0] == 60
    assert max(read[1:]) <= 12
    assert_same(together, [sample(model, [r], 1, max_tokens=6)[0] for r in same])
    assert len({s.token_ids for s in together}) > 6


def test_every_token_carries_the_version_of_the_weights(requests: list[Request]) -> None:
    model = tiny_model()
    sampler = HFSampler(model, byte_tokenizer(), 4)
    before = sampler.generate(requests, sampling())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    sampler.load_weights(iter(model.named_parameters()), 7)
    after = sampler.generate(requests, sampling())
    for samples, version in ((before, 0), (after, 7)):
        for s in samples:
            n = len(s.prompt.token_ids)
            assert s.policy_version == (-1,) * n + (version,) * (len(s.token_ids) - n)
    assert [s.token_ids for s in after] != [s.token_ids for s in before]
    fresh = HFSampler(model, byte_tokenizer(), 2)
    fresh.load_weights(iter(()), 7)
    assert_same(fresh.generate(requests, sampling()), after)


def test_indices_need_not_be_consecutive(model: PreTrainedModel, requests: list[Request], alone: list[Sample]) -> None:
    some = [replace(requests[i], index=100 - 7 * i) for i in (4, 0, 9)]
    got = sample(model, some, 2, temperature=0.7, max_tokens=24, end_ids=ENDS)
    assert_same(got, [replace(alone[i], index=100 - 7 * i) for i in (4, 0, 9)])


def test_sampling_leaves_torch_s_generator_and_the_gradients_alone(requests: list[Request]) -> None:
    model = tiny_model()
    state = torch.get_rng_state()
    sample(model, requests, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    ids = torch.tensor([requests[0].prompt.token_ids])
    model(input_ids=ids).logits.sum().backward()  # nothing of inference mode sticks to the model
    assert all(p.grad is not None for p in model.parameters())


def test_no_request_gives_no_sample(model: PreTrainedModel) -> None:
    assert sample(model, []) == []


def test_progress_counts_up_to_all(model: PreTrainedModel, requests: list[Request]) -> None:
    calls: list[tuple[int, int]] = []
    HFSampler(model, byte_tokenizer(), 4).generate(requests, sampling(), lambda *x: calls.append(x))
    assert calls[-1] == (15, 15)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_bfloat16_sampling_records_float32_log_probs(requests: list[Request]) -> None:
    model = tiny_model()
    samples = HFSampler(model, byte_tokenizer(), 4, torch.bfloat16).generate(requests, sampling())
    for s in samples:
        tokens, mask = torch.tensor([s.token_ids]), torch.tensor([s.mask])
        full = token_scores(model, tokens, torch.ones_like(mask), mask, 1.0, torch.bfloat16).logprobs
        assert torch.allclose(torch.tensor([s.logprobs]), full, atol=0.2)


@pytest.mark.parametrize("lengths", [[6, 3], [20]])
def test_a_window_of_attention_is_kept_or_refused(lengths: list[int]) -> None:
    config: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MistralForCausalLM(MistralConfig(**config, **heads, sliding_window=16)).eval()
        model.set_attn_implementation(NAME)
    requests = make_requests(make_prompts(lengths), 2)
    inside = 16 - max(lengths)
    if inside > 0:
        for s in sample(model, requests, max_tokens=inside):
            tokens, mask = torch.tensor([s.token_ids]), torch.tensor([s.mask])
            whole = token_scores(model, tokens, torch.ones_like(mask), mask, 1.0).logprobs
            assert torch.allclose(torch.tensor([s.logprobs]), whole, atol=1e-5)
    with pytest.raises(ModelError, match="the model has 16"):
        sample(model, requests, max_tokens=max(inside, 0) + 1)


def test_case_WS_01_no_state_of_old_weights_outlives_a_sync() -> None:
    """A model with p(token 0) = sigmoid(w): the same prompt before and after the weights change."""
    sizes = {"vocab_size": 2, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = tiny_model(**sizes, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "embed" in name or name == "model.norm.weight" else 0.0)
    head = model.get_output_embeddings().weight
    prompt = Prompt(row=0, text="", token_ids=(0, 1, 1), answer=None, source="tiny")
    sampler = HFSampler(model, byte_tokenizer(), slots=2)

    def logprob_of_token_0(version: int) -> tuple[float, set[int]]:
        sampler.load_weights(model.named_parameters(), version)
        requests = [Request(prompt=prompt, index=i, seed=i) for i in range(8)]
        samples = sampler.generate(requests, sampling(max_tokens=1, end_ids=frozenset()))
        found = {s.logprobs[-1] for s in samples if s.token_ids[-1] == 0}
        assert len(found) == 1
        return found.pop(), {s.policy_version[-1] for s in samples}

    assert logprob_of_token_0(0) == (pytest.approx(-0.6931471805599, abs=1e-6), {0})
    with torch.no_grad():
        head[0].fill_(1.0 / 4)
    after, versions = logprob_of_token_0(1)
    assert after == pytest.approx(-0.3132616875182, abs=1e-5)
    assert versions == {1}
    ids = torch.tensor([[*prompt.token_ids, 0]])
    whole = torch.ones_like(ids, dtype=torch.bool)
    mask = torch.tensor([[False, False, False, True]])
    recomputed = token_scores(model, ids, whole, mask, 1.0).logprobs[0, 3].item()
    assert math.exp(recomputed - after) == pytest.approx(1.0, abs=1e-6)
