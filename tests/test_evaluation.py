"""An evaluation is a function of the weights and its seed, and leaves no trace in the run around it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from klimb.errors import RewardError
from klimb.evaluation import run_eval
from klimb.reward.base import Outcome, RewardSettings, failed, verdict
from klimb.rollout.hf import HFSampler
from klimb.types import Sample
from tests.tiny_models import byte_tokenizer, make_prompts, sampling, tiny_model


class LastTokenIsLow:
    """A verifier: right when the last sampled token is in the lower half; it breaks on answers to `broken` prompts."""

    name, weight, verifies = "low", 2.0, True

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = broken

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [
            failed("error", "broken") if s.prompt.row in self.broken else verdict(s.token_ids[-1] < 130)
            for s in samples
        ]

    def close(self) -> None: ...


def evaluate(sampler: HFSampler, k: int = 3, seed: int = 4, broken: Sequence[int] = (), **settings: Any) -> Any:
    prompts = make_prompts([3, 8, 2, 5])
    return run_eval(sampler, prompts, k, sampling(), [LastTokenIsLow(broken)], RewardSettings(**settings), seed)


@pytest.mark.parametrize("training", [False, True])
def test_case_RN_01_an_evaluation_leaves_generator_mode_and_weights_alone(training: bool) -> None:
    model = tiny_model("gpt2").train(training)
    sampler = HFSampler(model, byte_tokenizer(), 4)
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    if training:  # the engine never switches modes; klimb's own models are in eval mode from loading on
        modes = [m.training for m in model.modules()]
        with torch.random.fork_rng():
            evaluate(sampler)
        assert [m.training for m in model.modules()] == modes
    else:
        evaluate(sampler)
        assert not any(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.is_grad_enabled()


def test_the_same_weights_and_seed_give_the_same_answers() -> None:
    a, b, c = (
        evaluate(HFSampler(tiny_model(), byte_tokenizer(), slots), seed=seed)
        for slots, seed in ((2, 4), (12, 4), (4, 5))
    )
    texts = [[s.sample.token_ids for s in result.scored] for result in (a, b, c)]
    assert texts[0] == texts[1] != texts[2]
    assert a.metrics == b.metrics


def test_metrics_by_hand_over_prompts_and_samples() -> None:
    result = evaluate(HFSampler(tiny_model(), byte_tokenizer(), 4))
    right = [s.sample.token_ids[-1] < 130 for s in result.scored]
    assert 0 < sum(right) < 12
    assert result.metrics["eval/accuracy"] == sum(right) / 12
    assert result.metrics["eval/reward"] == pytest.approx(2 * sum(right) / 12)
    assert result.metrics["eval/pass_at_k"] == sum(any(right[i : i + 3]) for i in range(0, 12, 3)) / 4
    assert [s.sample.prompt.row for s in result.scored] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "eval/pass_at_k" not in evaluate(HFSampler(tiny_model(), byte_tokenizer(), 4), k=1).metrics


def test_neither_clip_nor_normalisation_reaches_the_held_out_score() -> None:
    sampler = HFSampler(tiny_model(), byte_tokenizer(), 4)
    plain = evaluate(sampler)
    settings: dict[str, Any] = {"clip": (-0.1, 0.1), "normalize": "running", "on_failure": -5.0}
    assert evaluate(sampler, **settings).metrics == plain.metrics
    some = evaluate(sampler, broken=(1, 2, 3), max_failed_fraction=0.9, **settings)
    right = [s.sample.token_ids[-1] < 130 for s in some.scored]
    assert some.metrics["eval/accuracy"] == sum(right[:3]) / 12, "what could not be judged counts as wrong"
    assert some.metrics["eval/reward"] == pytest.approx(2 * sum(right[:3]) / 3)
    assert some.metrics["eval/failed"] == len(some.messages) == 9
    with pytest.raises(RewardError, match="max_failed_fraction"):
        evaluate(sampler, broken=(1, 2, 3), max_failed_fraction=0.1)
