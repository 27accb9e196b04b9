"""Several ranks come to what one process comes to: on recorded rollouts and in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from klimb.processes import start
from klimb.ranks import ALONE, Ranks
from tests.rank_work import (
    COLUMNS,
    Case,
    Outcome,
    alone,
    five_steps_of_all,
    hidden_of_all,
    hidden_states,
    scores,
    scores_of_all,
)
from tests.tiny_models import byte_tokenizer, tiny_model

KL = {"kl_in_loss": True}
CASES = (
    Case(name="grpo explicit", recipe=KL),
    Case(name="grpo cached", recipe={"explicit": False, "kl_in_reward": True}),
    Case(name="ppo explicit", recipe=KL, critic=True, epochs=2),
    Case(name="ppo cached", recipe={"explicit": False, "kl_in_reward": True}, critic=True),
    Case(name="grpo by tokens", recipe=KL, budget=40, step=8),
    Case(name="ppo by tokens", recipe=KL, critic=True, budget=40, step=8),
    Case(name="one rank has no rows", recipe=KL, rewards=(1.0, 0.0, None, None), micro=4, step=4),
    Case(name="all failed", recipe=KL, rewards=(None, None, None, None), critic=True),
    Case(name="one step a phase", recipe={**KL, "may_skip_old": True}, step=16, micro=3),
    Case(name="sequence loss", recipe={**KL, "policy_loss": "gspo", "loss_args": {"clip_ratio_low": 3e-4}}, micro=3),
    Case(name="grpo lora", recipe=KL, lora=True),
    Case(name="ppo lora, cached", recipe={"explicit": False, "kl_in_reward": True}, critic=True, lora=True, tied=True),
    Case(name="checkpointing, tied", recipe={**KL, "entropy_coef": 0.01}, checkpointing=True, tied=True),
)


def test_one_rank_takes_every_turn() -> None:
    parts = [torch.tensor([0, 1]), torch.tensor([2])]
    assert [turn.rows.tolist() for turn in ALONE.turns(parts)] == [[0, 1], [2]]
    assert ALONE.turns([]) == []
    assert ALONE.everywhere(lambda: [1, 2]) == [1, 2]
    assert ALONE.any(True)
    assert not ALONE.any(False)


@pytest.mark.parametrize(("parts", "size"), [(1, 2), (2, 2), (3, 2), (5, 3), (7, 3), (0, 3)])
def test_ranks_have_as_many_turns_and_every_part_once(parts: int, size: int) -> None:
    cut = [torch.tensor([2 * i, 2 * i + 1]) for i in range(parts)]
    turns = [Ranks(rank=rank, size=size).turns(cut) for rank in range(size)]
    assert {len(own) for own in turns} == {-(-parts // size)}
    read = sorted(tuple(turn.rows.tolist()) for own in turns for turn in own if not turn.is_filler)
    assert read == [(2 * i, 2 * i + 1) for i in range(parts)]
    assert all(turn.rows.tolist() == [0] for own in turns for turn in own if turn.is_filler)


@pytest.mark.parametrize(("items", "size"), [(0, 2), (1, 3), (7, 3), (8, 2)])
def test_shares_are_neighbours_and_make_the_whole(items: int, size: int) -> None:
    shares = [Ranks(rank=rank, size=size).share(range(items)) for rank in range(size)]
    assert [x for share in shares for x in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture(scope="module")
def of_one() -> dict[str, Outcome]:
    return {case.name: alone(case) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_one_process_on_recorded_rollouts(of_one: dict[str, Outcome], size: int) -> None:
    outcomes = start(five_steps_of_all, (CASES,), size, 0)
    assert outcomes is not None
    for case, found in zip(CASES, outcomes, strict=True):
        expected = of_one[case.name]
        for step, (one, many) in enumerate(zip(expected.metrics, found.metrics, strict=True)):
            assert set(one) == set(many), (case.name, step)
            for key in (key for key in COLUMNS if key in one):
                assert many[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), (case.name, step, key)
            assert {k: v for k, v in one.items() if "skipped" in k} == {k: v for k, v in many.items() if "skipped" in k}
        for name, weight in expected.weights.items():
            worst = float((found.weights[name] - weight).abs().max())
            assert worst < 1e-4, (case.name, name)


@pytest.mark.slow
def test_in_bfloat16_ranks_compute_what_one_process_does_under_autocast() -> None:
    """To the last bit while the norms' weights are numbers of bfloat16, as 1 is. Where a LayerNorm takes no mixed input
    (on a CPU) what blocks add to is narrow: 8 bits of values up to 4, in some sums."""
    names = ("llama", "qwen2", "gpt2", "gptneox")
    found = start(hidden_of_all, (names,), 2, 0)
    assert found is not None
    for name in names:
        hidden, has_gradient = found[name]
        assert has_gradient, name
        one = hidden_states(tiny_model(name), torch.bfloat16)
        assert not torch.equal(one, hidden_states(tiny_model(name), torch.float32)), name
        if name in ("llama", "qwen2"):
            assert torch.equal(hidden, one), name
        else:
            assert float((hidden.float() - one.float()).abs().max()) < 0.1, name


@pytest.mark.slow
def test_the_reward_model_is_float32_whatever_the_ranks_compute_in(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForSequenceClassification(tiny_model(num_labels=1).config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    expected = scores(tmp_path, None)
    assert len(set(expected)) == 6
    assert start(scores_of_all, (tmp_path,), 2, 0) == pytest.approx(expected, abs=1e-6)


def test_the_cases_move_the_policy(of_one: dict[str, Outcome]) -> None:
    """Else agreeing would mean nothing; all have a KL, and all but the failed ones a gradient."""
    for name, outcome in of_one.items():
        if name == "all failed":
            continue
        assert all(row["policy/grad_norm"] > 1e-3 for row in outcome.metrics), name
        assert outcome.metrics[-1].get("kl/k3", 1.0) > 1e-4, name
