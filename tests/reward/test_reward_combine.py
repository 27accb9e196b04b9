"""Weighted sums, abstaining, failures, running moments and clip, with numbers worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import Given, make_sample

from klimb.errors import RewardError
from klimb.reward.base import Outcome, RewardSettings, failed, verdict
from klimb.reward.combine import Moments, RewardReport, collect, finish, score_samples
from klimb.types import Scored

LENIENT = RewardSettings(max_failed_fraction=1.0)


def score(
    *components: Given, settings: RewardSettings = LENIENT, moments: Moments | None = None
) -> tuple[tuple[Scored, ...], RewardReport]:
    samples = [make_sample(row=10 + i) for i in range(len(components[0].values))]
    return score_samples(samples, components, settings, moments)


def test_case_RF_01_one_of_several_functions_abstains() -> None:
    scored, report = score(Given(name="one", values=[1, 0, None, 1]), Given(name="two", values=[0.5, 0.5, 0.5, 0.5]))
    assert [s.total for s in scored] == [1.5, 0.5, 0.5, 1.5]
    assert [s.failure for s in scored] == [None] * 4
    assert scored[2].parts == {"two": 0.5}
    assert report.metrics["reward/failed"] == 0
    assert report.metrics["reward/one"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("value", "kind"), [(None, "abstained"), (math.nan, "non_finite"), (math.inf, "non_finite")])
def test_case_RF_01_the_only_function_gives_no_number(value: float | None, kind: str) -> None:
    scored, report = score(Given(name="only", values=[1, 0, value, 1]))
    assert [s.rewards for s in scored] == [((3, 1.0),), ((3, 0.0),), (), ((3, 1.0),)]
    kept = [s.total for s in scored if s.failure is None]
    mean = sum(kept) / len(kept)
    assert [x - mean for x in kept] == pytest.approx([1 / 3, -2 / 3, 1 / 3], abs=1e-6)
    assert report.counts == {kind: 1}
    assert report.metrics["reward/failed"] == 1
    assert "sample 2 (data row 12" in report.messages[0]
    assert all(math.isfinite(x) for x in report.metrics.values())
    assert math.isfinite(report.metrics["reward/mean"])
    assert report.metrics["reward/mean"] == pytest.approx(2 / 3)


def test_case_RF_01_strict_names_function_and_sample() -> None:
    with pytest.raises(
        RewardError, match=r"1 of 4 episodes(.|\n)*sample 2 \(data row 12(.|\n)*'only': non_finite: .*nan"
    ):
        score(Given(name="only", values=[1, 0, math.nan, 1]), settings=RewardSettings())


def test_weights_and_reward_at_last_sampled_token() -> None:
    sample = make_sample(response_ids=(4, 5, 6))
    components = [Given(name="a", values=[2.0], weight=0.5), Given(name="b", values=[3.0], weight=-1.0)]
    (scored,), _ = score_samples([sample], components, LENIENT, None)
    assert scored.rewards == ((4, -2.0),)
    assert scored.parts == {"a": 2.0, "b": 3.0}


def test_a_value_of_weight_zero_does_not_speak_for_the_others() -> None:
    scored, report = score(Given(name="a", values=[None]), Given(name="watch", values=[1.0], weight=0.0))
    assert report.counts == {"abstained": 1}
    assert scored[0].rewards == ()
    assert scored[0].parts == {"watch": 1.0}
    alone, _ = score(Given(name="watch", values=[1.0], weight=0.0))
    assert alone[0].rewards == ((3, 0.0),)


def test_verdict_comes_from_the_first_verifier_that_gave_one_even_at_weight_zero() -> None:
    scored, _ = score(
        Given(name="style", values=[Outcome(value=1.0, correct=True)] * 2),
        Given(name="first", values=[None, verdict(False)], verifies=True, weight=0.0),
        Given(name="second", values=[verdict(True), verdict(True)], verifies=True, weight=0.0),
    )
    assert [s.correct for s in scored] == [True, False]
    assert [s.total for s in scored] == [1.0, 1.0]


def test_failed_component_fails_the_row_and_a_number_stands_in_unclipped() -> None:
    settings = RewardSettings(on_failure=-7.0, max_failed_fraction=1.0, clip=(-1.0, 1.0), normalize="running")
    moments = Moments()
    scored, report = score(
        Given(name="a", values=[1.0, 1.0, 1.0]),
        Given(name="b", values=[0.0, failed("error", "ValueError: bad"), 4.0]),
        settings=settings,
        moments=moments,
    )
    assert [s.total for s in scored] == [-1.0, -7.0, 1.0]
    assert scored[1].failure == "b: error: ValueError: bad"
    assert moments.count == 2
    assert moments.mean == 3.0
    assert report.metrics["reward/mean"] == 0.0
    assert report.messages == ("sample 1 (data row 11 of rows.jsonl): reward 'b': error: ValueError: bad",)


def test_empty_response_is_a_failure_of_its_own_and_never_gets_a_number() -> None:
    samples = [make_sample(), make_sample("", response_ids=())]
    settings = RewardSettings(on_failure=0.0, max_failed_fraction=1.0)
    scored, report = score_samples(samples, [Given(values=[1.0])], settings, None)
    assert [s.rewards for s in scored] == [((3, 1.0),), ()]
    assert report.counts == {"empty": 1}


def test_raw_parts_and_counts_are_taken_before_the_clip() -> None:
    settings = RewardSettings(clip=(-1.0, 1.0))
    scored, report = score(Given(name="a", values=[5.0, 0.5, -3.0, 1.0]), settings=settings)
    assert [s.total for s in scored] == [1.0, 0.5, -1.0, 1.0]
    assert [s.parts["a"] for s in scored] == [5.0, 0.5, -3.0, 1.0]
    assert report.metrics == {
        "reward/failed": 0.0,
        "reward/clipped": 2.0,
        "reward/mean": 0.375,
        "reward/std": pytest.approx(math.sqrt((0.625**2 + 0.125**2 + 1.375**2 + 0.625**2) / 4)),
        "reward/min": -1.0,
        "reward/max": 1.0,
        "reward/a": 0.875,
    }


def test_all_failed_has_no_mean_and_no_nan() -> None:
    _, report = score(Given(values=[None, None]))
    assert report.metrics == {"reward/failed": 2.0, "reward/clipped": 0.0}


def test_sum_beyond_float32_is_non_finite() -> None:
    _, report = score(Given(name="a", values=[3e38]), Given(name="b", values=[3e38]))
    assert report.counts == {"non_finite": 1}


def test_exactly_the_allowed_share_of_failures_goes_on() -> None:
    settings = RewardSettings(max_failed_fraction=0.25)
    score(Given(values=[None, 1, 1, 1]), settings=settings)
    with pytest.raises(RewardError, match="2 of 4 episodes"):
        score(Given(values=[None, None, 1, 1]), settings=settings)


def test_running_moments_use_this_batch_and_resume_exactly() -> None:
    settings = RewardSettings(normalize="running")
    straight, first = Moments(), Moments()
    a, _ = score(Given(values=[1.0, 3.0]), settings=settings, moments=first)
    assert [s.total for s in a] == [-1.0, 1.0]
    score(Given(values=[1.0, 3.0]), settings=settings, moments=straight)
    resumed = Moments()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    batch = Given(values=[0.1, 0.7, 1e-3])
    x, _ = score(batch, settings=settings, moments=straight)
    y, _ = score(batch, settings=settings, moments=resumed)
    assert [s.total for s in x] == [s.total for s in y]
    assert straight.state_dict() == resumed.state_dict()


def test_equal_scores_normalise_to_zero() -> None:
    scored, _ = score(Given(values=[0.1] * 3), settings=RewardSettings(normalize="running"), moments=Moments())
    assert [s.total for s in scored] == [0.0, 0.0, 0.0]


def test_evaluation_passes_no_moments_and_sees_raw_scores() -> None:
    scored, _ = score(Given(values=[1.0, 3.0]), settings=RewardSettings(normalize="running"), moments=None)
    assert [s.total for s in scored] == [1.0, 3.0]


@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), min_size=1, max_size=6))
def test_moments_agree_with_the_two_pass_formula(batches: list[list[float]]) -> None:
    moments = Moments()
    for batch in batches:
        moments.update(batch)
    seen = [x for batch in batches for x in batch]
    if not seen:
        assert moments.count == 0
        assert moments.std == 0.0
        return
    mean = sum(seen) / len(seen)
    assert moments.count == len(seen)
    assert moments.mean == pytest.approx(mean, abs=1e-9)
    assert moments.std**2 == pytest.approx(sum((x - mean) ** 2 for x in seen) / len(seen), abs=1e-8)


def test_ranks_that_collect_apart_finish_to_the_same() -> None:
    samples = [make_sample(row=i) for i in range(4)]
    settings = RewardSettings(normalize="running")
    whole, _ = score_samples(samples, [Given(values=[1, 2, 3, 4])], settings, Moments())
    rows = collect(samples[:2], [Given(values=[1, 2])]) + collect(samples[2:], [Given(values=[3, 4])])
    apart, _ = finish(rows, settings, Moments())
    assert whole == apart
