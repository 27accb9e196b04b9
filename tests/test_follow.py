"""What is said when the KL does not follow its target, and that a resumed run says the same."""

import math

import pytest

from klimb.follow import PATIENCE, Follow, Target

TARGET = Target(kind="adaptive", target_kl=0.02, min_kl_coef=0.001, max_kl_coef=5.0)


def said(follow: Follow, kls: list[float], coef: float = 0.1) -> list[str]:
    return [text for kl in kls if (text := follow.update(kl, coef)[1]) is not None]


def test_a_run_starts_at_the_reference_and_that_is_no_lag() -> None:
    assert said(Follow(TARGET), [0.0001] * 100) == []


def test_a_kl_far_above_its_target_is_said_once_each_time() -> None:
    follow = Follow(TARGET)
    texts = said(follow, [0.01, *[0.06] * 60])
    assert len(texts) == 1
    assert "above 1.5 x target 0.02 for 20 phases" in texts[0]
    assert "the adaptive controller lags behind" in texts[0]
    assert "kl_ctrl.type=pi" in texts[0]
    assert said(follow, [*[0.02] * 20, *[0.06] * 40])[0] == texts[0], "again, once it had been back"


def test_a_coefficient_wound_up_is_said_too() -> None:
    follow = Follow(TARGET)
    texts = said(follow, [*[0.02] * 5, *[0.001] * 40], coef=4.0)
    assert len(texts) == 1
    assert "below 0.5 x target" in texts[0]


@pytest.mark.parametrize(("kl", "coef", "word"), [(0.06, 5.0, "upper clamp"), (0.001, 0.001, "lower clamp")])
def test_at_a_clamp_it_says_which(kl: float, coef: float, word: str) -> None:
    texts = said(Follow(TARGET), [0.02, *[kl] * 40], coef=coef)
    assert len(texts) == 1
    assert word in texts[0]


def test_pi_is_not_told_to_become_pi() -> None:
    pi = Target(kind="pi", target_kl=0.02, min_kl_coef=0.001, max_kl_coef=5.0)
    (text,) = said(Follow(pi), [0.02, *[0.06] * 40])
    assert "type=pi" not in text
    assert "training.lr" in text


def test_the_metric_counts_and_falls_back_to_zero() -> None:
    follow = Follow(TARGET)
    counts = [follow.update(kl, 0.1)[0]["kl/outside_phases"] for kl in [0.02, 0.2, 0.2, *[0.02] * 12]]
    assert counts[:3] == [0.0, 1.0, 2.0]
    assert counts[-1] == 0.0


def test_nothing_is_said_without_a_target_or_a_number() -> None:
    assert Follow(None).update(9.0, 0.1) == ({}, None)
    follow = Follow(TARGET)
    assert follow.update(math.nan, 0.1) == ({}, None)
    assert said(follow, [0.02, *[0.06] * (PATIENCE - 1)]) == []


def test_a_restored_state_goes_on_alike() -> None:
    kls = [0.01, 0.02, *[0.05 + 0.001 * i for i in range(40)]]
    straight, halves = Follow(TARGET), Follow(TARGET)
    expected = [straight.update(kl, 0.1 + i / 100) for i, kl in enumerate(kls)]
    got = []
    for i, kl in enumerate(kls):
        if i == 11:
            state, halves = halves.state_dict(), Follow(TARGET)
            halves.load_state_dict(state)
        got.append(halves.update(kl, 0.1 + i / 100))
    assert got == expected
    assert any(text for _, text in expected)
