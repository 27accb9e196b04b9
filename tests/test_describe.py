"""Metrics that need no model."""

from __future__ import annotations

import pytest

from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.describe import describe, rollout_metrics
from klimb.types import FinishReason, Prompt, Sample


def sample(response: list[int], reason: FinishReason = "stop") -> Sample:
    prompt = Prompt(row=0, text="p", token_ids=(9, 8), answer=None, source="")
    n = len(response)
    return Sample(
        prompt=prompt,
        index=0,
        token_ids=(9, 8, *response),
        mask=(False, False) + (True,) * n,
        logprobs=(0.0,) * (n + 2),
        policy_version=(-1, -1) + (0,) * n,
        finish_reason=reason,
        text="",
    )


def test_lengths_count_sampled_tokens_and_truncation_is_a_share() -> None:
    metrics = rollout_metrics([sample([1, 2, 3]), sample([1], "length"), sample([1, 2, 3, 4, 5])])
    assert metrics["length/mean"] == 3.0
    assert metrics["length/max"] == 5.0
    assert metrics["length/truncated"] == pytest.approx(1 / 3)


def test_repetition_is_the_share_of_four_grams_seen_before() -> None:
    # 7 tokens of one kind have four 4-grams, three of them seen before; distinct tokens have none.
    assert rollout_metrics([sample([7] * 7)])["text/repetition"] == 0.75
    assert rollout_metrics([sample([1, 2, 3, 4, 5, 6])])["text/repetition"] == 0.0
    assert rollout_metrics([sample([7] * 7), sample([1, 2, 3, 4])])["text/repetition"] == 0.375


def test_repetition_is_left_out_when_no_response_has_four_tokens() -> None:
    assert "text/repetition" not in rollout_metrics([sample([1, 2, 3])])


def config(**algorithm: object) -> RunConfig:
    tree = {"actor_rollout_ref": {"model_path": "m"}, "algorithm": algorithm}
    return RunConfig.model_validate(tree)


def test_the_controller_is_described_by_posture() -> None:
    explicit = config()
    found = describe(resolve(explicit), explicit.algorithm.kl_ctrl, {"kl/k3": 0.03}, 5.0)
    assert found == {"kl/coef": 5.0, "kl/target": 0.02, "kl/at_clamp": 1.0, "kl/ratio_to_target": pytest.approx(1.5)}
    cached = config(use_pf_ppo=False)
    assert describe(resolve(cached), cached.algorithm.kl_ctrl, {"kl/k3": 0.03}, 0.02) == {"kl/coef": 0.02}
    off = config(use_kl_loss=False)
    assert describe(resolve(off), off.algorithm.kl_ctrl, {}, 0.05) == {}
