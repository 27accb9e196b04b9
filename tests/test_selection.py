"""Length penalties, greedy baselines, and which rows an update reads, in numbers made by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from klimb.algos.advantage import reinforce_pp_baseline
from klimb.learn import estimate_advantages
from klimb.recipe import Correction, Overlong, Recipe, Reject
from klimb.selection import (
    correction_weights,
    draw_rows,
    shape_rewards,
    trained_tokens,
    with_greedy,
)
from klimb.types import Batch, ScoredBatch, TrainBatch
from tests.tiny_models import make_recipe

LENGTHS = [2, 4, 3, 1, 4, 2]
WIDTH = 6


def batch_of(
    rewards: list[float], groups: list[int], failed: tuple[int, ...] = (), cut: tuple[int, ...] = (), limit: int = 6
) -> Batch:
    """Rows of a prompt token and LENGTHS response tokens. failed: rows without a mask; cut: rows cut off."""
    n = len(rewards)
    lengths = torch.tensor(LENGTHS[:n])
    places = torch.arange(WIDTH)
    attention = places < lengths[:, None] + 1
    alive = torch.tensor([i not in failed for i in range(n)])
    ids = torch.arange(n)
    return Batch(
        tokens=torch.full((n, WIDTH), 5),
        attention=attention,
        mask=attention & (places > 0) & alive[:, None],
        sampler_logprobs=torch.full((n, WIDTH), -1.0),
        rewards=torch.tensor(rewards),
        cut_off=torch.tensor([i in cut for i in range(n)]),
        group=torch.tensor(groups),
        row_id=ids,
        source_row=ids,
        policy_version=torch.zeros(n, WIDTH, dtype=torch.int64),
        correct=torch.full((n,), -1),
    )


def scored_of(batch: Batch, log_rho: list[float], **more: Any) -> ScoredBatch:
    """The trainer's log-probs off the sampler's by log_rho of the row."""
    old = batch.sampler_logprobs + torch.tensor(log_rho)[:, None]
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return ScoredBatch(**columns, **{"old_logprobs": old, "ref_logprobs": None, "values": None, **more})


def lengths_of(mask: Tensor) -> list[int]:
    return mask.sum(dim=1).tolist()


def test_a_penalty_falls_on_cut_off_answers_alone() -> None:
    batch = batch_of([1.0, 1.0, 0.0, 1.0], [0, 0, 0, 0], failed=(3,), cut=(1, 3))
    got, metrics = shape_rewards(batch, make_recipe(overlong=Overlong(penalty=0.5, buffer=None)))
    assert got.rewards.tolist() == [1.0, 0.5, 0.0, 1.0]
    assert metrics == {"reward/overlong_penalty": pytest.approx(0.5 / 3)}
    same, none = shape_rewards(batch, make_recipe())
    assert same is batch
    assert none == {}


def test_the_soft_penalty_grows_over_the_buffer() -> None:
    """Limit 4, buffer 2: lengths 2, 3, 4 lose 0, half and all."""
    batch = batch_of([0.0] * 6, [0] * 6, cut=(1, 4))
    got, _ = shape_rewards(batch, make_recipe(overlong=Overlong(penalty=0.5, buffer=2), max_tokens=4))
    assert got.rewards.tolist() == [-0.0, -0.5, -0.25, -0.0, -0.5, -0.0]


def test_greedy_totals_go_to_their_prompts_whatever_the_order() -> None:
    batch = batch_of([1.0, 0.0, 1.0, 0.0, 1.0], [7, 3, 7, 9, 3])
    greedy = batch_of([0.7, 0.9, 0.3], [7, 9, 3], failed=(1,))
    got, metrics = with_greedy(batch, greedy)
    assert got.greedy_totals is not None
    assert got.greedy_totals.tolist() == pytest.approx([0.7, 0.3, 0.7, 0.0, 0.3])
    assert lengths_of(got.mask) == [2, 4, 3, 0, 4], "without a baseline nothing is trained on"
    assert metrics == {"reward/greedy_failed": 1.0}


def test_remax_subtracts_the_greedy_total() -> None:
    batch, _ = with_greedy(batch_of([1.0, 0.25], [0, 1]), batch_of([0.5, 0.5], [1, 0]))
    train, _ = estimate_advantages(scored_of(batch, [0.0, 0.0]), make_recipe(adv_estimator="remax"), 0.0)
    assert [train.advantages[i][train.mask[i]].tolist() for i in (0, 1)] == [[0.5] * 2, [-0.25] * 4]


def test_groups_without_spread_leave_the_update_and_are_counted() -> None:
    batch = batch_of([0.1, 1.0, 0.1, 0.0, 0.1, 2.0], [4, 2, 4, 2, 4, 8], failed=(5,))
    scored = scored_of(batch, [0.0] * 6)
    mask, metrics = trained_tokens(scored, make_recipe(filter_groups=True))
    assert lengths_of(mask) == [0, 4, 0, 1, 0, 0]
    assert metrics == {"filter/dropped_groups": 1.0, "filter/kept": pytest.approx(2 / 5)}
    assert trained_tokens(scored, make_recipe())[1] == {}


def test_a_group_shrunk_to_one_by_failures_has_no_spread() -> None:
    batch = batch_of([0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], failed=(0,))
    mask, metrics = trained_tokens(scored_of(batch, [0.0] * 4), make_recipe(filter_groups=True))
    assert lengths_of(mask) == [0, 0, 3, 1]
    assert metrics["filter/dropped_groups"] == 1.0


def test_what_is_kept_is_counted_once_over_all_reasons() -> None:
    """Two of four alike, one of the others cut off, the last too far from its engine: nothing is left."""
    scored = scored_of(batch_of([0.1, 0.1, 1.0, 0.0], [0, 0, 1, 1], cut=(3,)), [0.0, 0.0, 2.0, 0.0])
    both = make_recipe(filter_groups=True, exclude=True)
    assert trained_tokens(scored, both)[1]["filter/kept"] == pytest.approx(1 / 4)
    far = replace(both, correction=Correction(reject=Reject(criterion="seq_mean_k1", lo=None, hi=2.0)))
    mask, metrics = trained_tokens(scored, far)
    assert not mask.any()
    assert metrics == {
        "filter/dropped_groups": 1.0,
        "filter/excluded": 1.0,
        "filter/rejected": 1.0,
        "filter/kept": 0.0,
    }


def test_the_baseline_estimator_is_whitened_by_the_training_layer_once() -> None:
    """advantage/* speak of before: 1, 0, 10, 0 in two pairs is +-0.5 and +-5."""
    scored = scored_of(batch_of([1.0, 0.0, 10.0, 0.0], [0, 0, 1, 1]), [0.0] * 4)
    train, metrics = estimate_advantages(scored, make_recipe(adv_estimator="reinforce_pp_baseline"), 0.0)
    assert metrics["advantage/max"] == 5.0
    expected = reinforce_pp_baseline(scored.rewards, scored.group, scored.mask)
    assert torch.equal(train.advantages, expected)


REJECTS: list[tuple[Reject, list[int]]] = [
    (Reject(criterion="seq_mean_k1", lo=0.9, hi=1.1), [2, 0, 0, 1]),
    (Reject(criterion="seq_mean_k1", lo=None, hi=1.1), [2, 0, 3, 1]),
    (Reject(criterion="seq_mean_k3", lo=None, hi=0.05), [2, 0, 3, 1]),
    (Reject(criterion="token_veto", lo=0.9, hi=None), [2, 4, 0, 1]),
]


@pytest.mark.parametrize(("reject", "left"), REJECTS)
def test_rejected_rows_have_no_token_but_stay_in_the_baseline(reject: Reject, left: list[int]) -> None:
    """log rho 0, 0.4, -0.2, 0.05: ratios 1, 1.49, 0.82, 1.05 and k3 0, 0.092, 0.0187, 0.0013."""
    scored = scored_of(batch_of([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0]), [0.0, 0.4, -0.2, 0.05])
    recipe = make_recipe(adv_estimator="rloo", correction=Correction(reject=reject))
    mask, metrics = trained_tokens(scored, recipe)
    assert lengths_of(mask) == left
    assert metrics["filter/rejected"] == left.count(0)
    assert metrics["filter/kept"] == pytest.approx(1 - left.count(0) / 4)
    train, _ = estimate_advantages(scored, recipe, 0.0)
    assert torch.equal(train.mask, mask)
    assert train.advantages[0, 1].item() == pytest.approx(2 / 3), "1 - (0 + 0 + 1) / 3: the rejected ones count"
    cached, nothing = trained_tokens(scored, replace(recipe, explicit=False))
    assert torch.equal(cached, scored.mask)
    assert nothing == {}


def test_excluded_answers_have_no_token_but_stay_in_the_baseline() -> None:
    scored = scored_of(batch_of([1.0, 0.0, 0.5], [0, 0, 0], cut=(1,)), [0.0] * 3)
    recipe = make_recipe(adv_estimator="rloo", exclude=True)
    train, metrics = estimate_advantages(scored, recipe, 0.0)
    assert lengths_of(train.mask) == [2, 0, 3]
    assert train.advantages[0, 1].item() == pytest.approx(1.0 - 0.25)
    assert metrics["filter/excluded"] == 1.0
    assert not train.advantages[1].any()


def test_whitening_looks_at_trained_tokens_alone() -> None:
    scored = scored_of(batch_of([1.0, 50.0, 0.5], [0, 0, 0], cut=(1,)), [0.0] * 3)
    train, metrics = estimate_advantages(scored, make_recipe(adv_estimator="reinforce_pp", exclude=True), 0.0)
    inside = train.advantages[train.mask]
    assert inside.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert inside.std().item() == pytest.approx(1.0, abs=1e-5)
    assert metrics["advantage/not_whitened"] == 0.0


def test_a_phase_with_one_token_is_not_whitened_and_that_is_counted() -> None:
    scored = scored_of(batch_of([1.0, 0.0, 0.5, 3.0], [0, 0, 0, 0], failed=(0, 1, 2)), [0.0] * 4)
    train, metrics = estimate_advantages(scored, make_recipe(adv_estimator="reinforce_pp"), 0.0)
    assert metrics["advantage/not_whitened"] == 1.0
    assert train.advantages[3, 1].item() == 3.0


def test_bootstrap_goes_on_with_the_value_behind_a_cut_off_answer() -> None:
    """gamma = lam = 1: the advantage is reward-to-go, the value behind the end included, minus the value."""
    batch = batch_of([1.0, 1.0], [0, 1], cut=(1,))
    values = torch.full((2, WIDTH), 0.25)
    scored = scored_of(batch, [0.0, 0.0], values=values, last_values=torch.tensor([0.0, 0.5]))
    train, _ = estimate_advantages(
        scored, make_recipe(adv_estimator="gae", gamma=1.0, lam=1.0, whiten=False, bootstrap=True), 0.0
    )
    assert train.advantages[0][train.mask[0]].tolist() == pytest.approx([0.75] * 2)
    assert train.advantages[1][train.mask[1]].tolist() == pytest.approx([1.25] * 4)
    assert train.returns is not None
    assert train.returns[1][train.mask[1]].tolist() == pytest.approx([1.5] * 4)


def correction_recipe(**settings: Any) -> Recipe:
    return make_recipe(correction=Correction(**settings))


def test_correction_weights_are_the_engines_ratio_and_only_in_the_explicit_posture() -> None:
    scored = scored_of(batch_of([1.0, 0.0, 0.0], [0, 0, 0]), [0.0, 1.0, -1.0])
    w, metrics = correction_weights(scored, scored.mask, correction_recipe(weights="token", cap=2.0))
    assert w is not None
    assert [w[i, 1].item() for i in range(3)] == pytest.approx([1.0, 2.0, 0.3678794])
    assert metrics["mismatch/weight_mean"] == pytest.approx((2 * 1.0 + 4 * 2.0 + 3 * 0.3678794) / 9)
    w, metrics = correction_weights(scored, scored.mask, correction_recipe(weights="band", cap=2.0))
    assert w is not None
    assert [w[i, 1].item() for i in range(3)] == pytest.approx([1.0, 0.0, 0.0])
    assert metrics["mismatch/weight_zero"] == pytest.approx(7 / 9)
    assert correction_weights(scored, scored.mask, correction_recipe()) == (None, {})
    cached = replace(correction_recipe(weights="token"), explicit=False)
    assert correction_weights(scored, scored.mask, cached) == (None, {})


def drawn(strategy: str, seed: int = 0, **changes: Any) -> tuple[TrainBatch, TrainBatch, dict[str, float]]:
    """The whole groups' batch and the drawn one, advantages not whitened."""
    batch = replace(
        batch_of([0.1, 0.9, 0.4, 0.2, 0.8, 5.0], [1, 1, 1, 2, 2, 2], failed=(5,)),
        correct=torch.tensor([0, 1, 0, 0, 1, -1]),
    )
    scored = scored_of(batch, [0.0] * 6)
    whole, _ = estimate_advantages(scored, make_recipe(adv_estimator="rloo"), 0.0)
    recipe = make_recipe(adv_estimator="rloo", filtration=strategy, **changes)
    generator = torch.Generator().manual_seed(seed)
    train, metrics = estimate_advantages(scored, recipe, 0.0, generator)
    return whole, train, metrics


def test_best_of_n_trains_on_the_best_with_the_whole_groups_advantage() -> None:
    whole, train, metrics = drawn("best_of_n")
    assert train.source_row.tolist() == [1, 1, 1, 4, 4, 5]
    assert torch.equal(train.advantages[:5], whole.advantages[[1, 1, 1, 4, 4]])
    assert len(set(train.row_id.tolist())) == 6
    assert not set(train.row_id[:5].tolist()) & set(range(6)), "a copy has an id of its own"
    assert train.group.tolist() == whole.group.tolist()
    assert lengths_of(train.mask)[5] == 0, "a failed row is drawn by nobody and stays failed"
    assert metrics["filter/unique"] == pytest.approx(2 / 5)
    assert metrics["filter/ess"] == pytest.approx(2.0)
    assert "filter/r2" not in metrics, "every drawn row is right: there is no variance to explain"
    assert metrics["filter/r2_before"] == pytest.approx(0.5476 / 0.6096), "0.74^2 / (0.508 * 1.2)"


def test_drawing_is_a_function_of_the_generators_seed() -> None:
    a, b, c = (drawn("power", seed)[1].source_row.tolist() for seed in (0, 0, 1))
    assert a == b != c


def test_whitening_comes_after_the_draw() -> None:
    _, train, _ = drawn("best_worst", whiten=True)
    inside = train.advantages[train.mask]
    assert inside.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert inside.std().item() == pytest.approx(1.0, abs=1e-5)


def test_nothing_to_draw_from() -> None:
    scored = scored_of(batch_of([1.0, 0.0], [0, 0], failed=(0, 1)), [0.0, 0.0])
    train, metrics = estimate_advantages(
        scored, make_recipe(adv_estimator="rloo", filtration="power"), 0.0, torch.Generator()
    )
    assert train.source_row.tolist() == [0, 1]
    assert "filter/unique" not in metrics
    assert draw_rows(train, make_recipe(), torch.Generator()) == (train, {})
