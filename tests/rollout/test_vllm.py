"""The vllm engine against the trainer and the hf engine, with vLLM itself (`make test-vllm` makes an environment)."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from klimb.errors import ModelError
from klimb.evaluation import run_eval
from klimb.models.forward import token_scores
from klimb.models.load import load_causal_lm
from klimb.reward.base import Outcome, RewardSettings, verdict
from klimb.rollout.base import Request, Sampling
from klimb.rollout.hf import HFSampler
from klimb.rollout.vllm import BLOCK, EngineSettings, VLLMSampler
from klimb.types import Sample
from tests.tiny_models import CPU, EOS, PAD, byte_tokenizer, make_prompts, make_requests, sampling, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here (make test-vllm)"),
]
CONTEXT = 256
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2}  # 32 wide heads, which vLLM has kernels for
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "tied": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 2}),  # tied, with biases and learned positions
}


def engine(folder: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> VLLMSampler:
    settings: dict[str, Any] = {
        "folder": folder,
        "slots": 8,
        "context": CONTEXT,
        "dtype": torch.float32,
        "memory_share": 0.5,
        "tensor_parallel": 1,
        "sleeps": False,
    }
    return VLLMSampler(EngineSettings(**{**settings, **changes}), tokenizer)


def saved(folder: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


Pair = tuple[PreTrainedModel, VLLMSampler]


@dataclass
class Engines:
    """The one engine that is running, and the model that it was made from."""

    folder: Path
    kind: str = ""
    pair: Pair | None = None

    def of(self, kind: str) -> Pair:
        if self.pair is None or self.kind != kind:
            self.close()
            name, changes = KINDS[kind]
            tokenizer = saved(self.folder / kind, tiny_model(name, scale=4.0, **changes))
            model = load_causal_lm(self.folder / kind, False, CPU)
            self.kind, self.pair = kind, (model, engine(self.folder / kind, tokenizer))
        return self.pair

    def close(self) -> None:
        if self.pair is not None:
            self.pair[1].close()
            self.pair = None


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def pair(engines: Engines, request: pytest.FixtureRequest) -> Pair:
    """Tests leave the same weights in both."""
    return engines.of(request.param)


@pytest.fixture
def tied(engines: Engines) -> Pair:
    return engines.of("tied")


def moved(model: PreTrainedModel, seed: int) -> None:
    """Another policy, far enough away that its log-probs differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.3)


def difference(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> Tensor:
    """Per sampled token, the engine's log-prob minus that of the trainer's own pass, [N]."""
    out: list[Tensor] = []
    for s in samples:
        tokens, mask = torch.tensor([s.token_ids]), torch.tensor([s.mask])
        with torch.no_grad():
            ours = token_scores(model, tokens, torch.ones_like(mask), mask, temperature, torch.float32).logprobs
        out.append((torch.tensor([s.logprobs]) - ours)[mask])
    return torch.cat(out)


def by_hf(model: PreTrainedModel, requests: Sequence[Request], how: Sampling) -> list[Sample]:
    return HFSampler(model, byte_tokenizer(), 8).generate(requests, how)


def push(model: PreTrainedModel, sampler: VLLMSampler, version: int) -> None:
    sampler.load_weights(iter(model.named_parameters()), version)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_are_those_of_the_trainers_pass_at_the_sampling_temperature(pair: Pair, temperature: float) -> None:
    model, sampler = pair
    how = sampling(temperature=temperature)
    samples = sampler.generate(make_requests(make_prompts([3, 20, 7, 11]), per_prompt=2), how)
    assert difference(model, samples, temperature).abs().max() < 1e-4
    # ... which those at another temperature are not.
    assert difference(model, samples, temperature * 1.1).abs().mean() > 1e-2


def test_after_weights_have_landed_engine_trainer_and_hf_agree(pair: Pair) -> None:
    """Prompts longer than a block of the cache and the same before and after: nothing of the old weights is read."""
    model, sampler = pair
    requests, how = make_requests(make_prompts([BLOCK + 20, BLOCK + 70, 5])), sampling(temperature=0.0)
    before = sampler.generate(requests, how)
    moved(model, seed=1)
    assert difference(model, before, 1.0).abs().max() > 0.1, "the weights did not move far enough to tell"
    push(model, sampler, version=7)
    after, hf = sampler.generate(requests, how), by_hf(model, requests, how)
    assert [s.token_ids for s in after] == [s.token_ids for s in hf]
    assert difference(model, after, 1.0).abs().max() < 1e-4
    for ours, theirs in zip(after, hf, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (ours.text, ours.mask, ours.finish_reason) == (theirs.text, theirs.mask, theirs.finish_reason)
        n = len(ours.prompt.token_ids)
        assert ours.policy_version == (-1,) * n + (7,) * ours.num_response_tokens


def test_the_engine_keeps_a_copy_of_its_own(pair: Pair) -> None:
    """What the trainer does to its weights later is not seen by the engine, and the engine does nothing to them."""
    model, sampler = pair
    push(model, sampler, version=0)
    requests, how = make_requests(make_prompts([9, 4])), sampling()
    before, weights = sampler.generate(requests, how), copy.deepcopy(model.state_dict())
    moved(model, seed=2)
    assert sampler.generate(requests, how) == before
    model.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights.values(), strict=True))


def test_a_seed_fixes_a_text_whatever_the_batch_around_it(tied: Pair) -> None:
    _, sampler = tied
    requests, how = make_requests(make_prompts([6, 30, 12, 3]), per_prompt=5), sampling()
    together = sampler.generate(requests, how)
    assert [s.index for s in together] == [r.index for r in requests]
    for request in (requests[0], requests[7], requests[19]):
        (alone,) = sampler.generate([request], how)
        assert alone.token_ids == together[request.index].token_ids
    again = sampler.generate(requests[::-1], how)
    assert [s.token_ids for s in again[::-1]] == [s.token_ids for s in together]
    other = sampler.generate(make_requests(make_prompts([6, 30, 12, 3]), per_prompt=5, seed=1), how)
    assert sum(a.token_ids != b.token_ids for a, b in zip(together, other, strict=True)) > 15


def test_tokens_are_drawn_from_the_policys_distribution(tied: Pair) -> None:
    """First tokens of 2,000 requests against the trainer's probabilities of the 5 likeliest."""
    model, sampler = tied
    (prompt,) = make_prompts([8])
    samples = sampler.generate(
        [Request(prompt=prompt, index=i, seed=i) for i in range(2000)], sampling(max_tokens=1, temperature=0.8)
    )
    with torch.no_grad():
        probs = (model(torch.tensor([prompt.token_ids])).logits[0, -1] / 0.8).softmax(-1)
    for p, token in zip(*(x.tolist() for x in probs.topk(5)), strict=True):
        share = sum(s.token_ids[-1] == token for s in samples) / len(samples)
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / len(samples))


def test_an_end_id_ends_a_response_and_is_kept(tied: Pair) -> None:
    _, sampler = tied
    requests = make_requests(make_prompts([5, 9, 14]), per_prompt=8)
    free = sampler.generate(requests, sampling(end_ids=frozenset({1}), max_tokens=40))
    response = [s.token_ids[len(s.prompt.token_ids) :] for s in free]
    ends = frozenset({response[0][3], response[1][5], EOS, 1})
    for s, whole in zip(sampler.generate(requests, sampling(end_ids=ends, max_tokens=40)), response, strict=True):
        stop = next((i + 1 for i, token in enumerate(whole) if token in ends), len(whole))
        assert s.token_ids[len(s.prompt.token_ids) :] == whole[:stop]
        assert s.finish_reason == ("stop" if whole[stop - 1] in ends else "length")
        assert len(s.logprobs) == len(s.token_ids)
    (longest,) = sampler.generate(requests[:1], sampling(end_ids=frozenset({1}), max_tokens=17))
    assert (longest.num_response_tokens, longest.finish_reason) == (17, "length")


def test_the_folders_own_end_token_ends_nothing_unless_klimb_names_it(tied: Pair) -> None:
    _, sampler = tied
    requests = make_requests(make_prompts([5, 9, 14, 3]), per_prompt=60)
    free = sampler.generate(requests, sampling(end_ids=frozenset({PAD}), max_tokens=40, temperature=2.0))
    inside = [s for s in free if EOS in s.token_ids[len(s.prompt.token_ids) : -1]]
    assert inside, "no response went through the end token: the test says nothing"
    ended = sampler.generate([requests[s.index] for s in inside], sampling(max_tokens=40, temperature=2.0))
    assert all(s.finish_reason == "stop" and s.token_ids[-1] == EOS for s in ended)


def test_stop_strings_end_where_those_of_hf_do_and_their_token_is_kept(tied: Pair) -> None:
    _, sampler = tied
    requests = make_requests(make_prompts([5, 9, 14]), per_prompt=30)
    free = sampler.generate(requests, sampling(max_tokens=30))
    letters = [c for c in "".join(s.text for s in free) if c.isascii() and c.isprintable()]
    pairs = [a + b for s in free for a, b in zip(s.text, s.text[1:], strict=False) if a in letters and b in letters]
    strings = (letters[0], max(set(pairs), key=pairs.count))
    tail = byte_tokenizer()
    stopped = 0
    for s, whole in zip(sampler.generate(requests, sampling(max_tokens=30, stop_strings=strings)), free, strict=True):
        n = len(s.prompt.token_ids)
        response = whole.token_ids[n:]
        texts = (tail.decode(response[: i + 1], clean_up_tokenization_spaces=False) for i in range(len(response)))
        stop = next((i + 1 for i, text in enumerate(texts) if any(x in text for x in strings)), len(response))
        assert s.token_ids[n:] == response[:stop]
        stopped += stop < len(response)
        if stop < len(response):
            assert s.finish_reason == "stop"
            assert any(x in s.text for x in strings), "text is what was sampled, the stop string in it"
    assert stopped > 10


def test_greedy_answers_and_evaluation_settings(tied: Pair) -> None:
    """temperature 0: the likeliest token, log-probs at temperature 1. top_k and top_p: log-probs of what is left."""
    model, sampler = tied
    requests = make_requests(make_prompts([5, 40]), per_prompt=3)
    greedy = sampler.generate(requests, sampling(temperature=0.0, top_p=0.5, top_k=3))
    assert [s.token_ids for s in greedy] == [s.token_ids for s in by_hf(model, requests, sampling(temperature=0.0))]
    assert difference(model, greedy, 1.0).abs().max() < 1e-4
    for how in (sampling(top_k=4, temperature=1.5), sampling(top_p=0.6)):
        for s in sampler.generate(requests, how):
            with torch.no_grad():
                logits = model(torch.tensor([s.token_ids])).logits[0] / how.temperature
            for t in range(len(s.prompt.token_ids), len(s.token_ids)):
                ordered = logits[t - 1].softmax(-1).sort(descending=True)
                kept = how.top_k or int((ordered.values.cumsum(0) - ordered.values < how.top_p).sum())
                place = ordered.indices.tolist().index(s.token_ids[t])
                assert place < kept
                assert s.logprobs[t] == pytest.approx(
                    float(ordered.values[place].log() - ordered.values[:kept].sum().log()), abs=1e-3
                )


def test_progress_counts_to_the_end_and_nothing_asked_is_nothing_answered(tied: Pair) -> None:
    _, sampler = tied
    calls: list[tuple[int, int]] = []
    requests = make_requests(make_prompts([5, 9, 14]), per_prompt=4)
    sampler.generate(requests, sampling(), lambda done, of: calls.append((done, of)))
    assert calls[-1] == (12, 12)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert sampler.generate([], sampling()) == []


def test_a_request_beyond_the_engines_context_is_refused(tied: Pair) -> None:
    _, sampler = tied
    requests = make_requests(make_prompts([CONTEXT - 11]))
    assert sampler.generate(requests, sampling(max_tokens=11, end_ids=frozenset({PAD})))[0].num_response_tokens == 11
    with pytest.raises(ModelError, match=f"need {CONTEXT + 1} places, but the vllm engine was made for {CONTEXT}"):
        sampler.generate(requests, sampling(max_tokens=12))


def test_an_engine_that_cannot_be_started_is_the_users_to_mend(engines: Engines, tmp_path: Path) -> None:
    engines.close()
    tokenizer = saved(tmp_path, tiny_model(**KINDS["tied"][1]))
    with pytest.raises(ModelError, match=r"vLLM cannot be started on this model here: .*rollout_provider=hf"):
        engine(tmp_path, tokenizer, context=100 * CONTEXT)


class Short:
    name, weight, verifies = "short", 1.0, True

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [verdict(s.num_response_tokens < 5) for s in samples]

    def close(self) -> None: ...


def test_the_process_around_the_engine_is_left_as_it_was(engines: Engines, tmp_path: Path) -> None:
    """Threads, torch's generator, what other processes load, gradients: vLLM changes some of these when it starts."""
    engines.close()
    model = tiny_model(**KINDS["tied"][1])
    tokenizer = saved(tmp_path, model)
    before = (torch.get_rng_state(), torch.get_num_threads(), torch.set_num_threads, os.environ.get("LD_PRELOAD"))
    sampler = engine(tmp_path, tokenizer)
    push(model, sampler, 0)
    run_eval(sampler, make_prompts([3, 8]), 2, sampling(), [Short()], RewardSettings(), seed=4)
    sampler.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.set_num_threads, os.environ.get("LD_PRELOAD")) == before[1:]
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
def test_two_processes_share_one_copy_of_the_weights(engines: Engines, tmp_path: Path) -> None:
    """tensor_parallel: 2, on a CPU. Weights reach both processes, and the answers are the same."""
    engines.close()
    model = tiny_model(scale=4.0, **KINDS["tied"][1])
    sampler = engine(tmp_path, saved(tmp_path, model), tensor_parallel=2)
    try:
        requests, how = make_requests(make_prompts([5, 40]), per_prompt=3), sampling(temperature=0.0)
        for version in (0, 1):
            push(model, sampler, version)
            samples = sampler.generate(requests, how)
            assert [s.token_ids for s in samples] == [s.token_ids for s in by_hf(model, requests, how)]
            assert difference(model, samples, 1.0).abs().max() < 1e-4
            moved(model, seed=3)
    finally:
        sampler.close()
