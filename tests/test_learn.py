"""The passes before any update, what they say of KL and mismatch, and advantages from real phases."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from klimb.algos.kl import AdaptiveKLController
from klimb.learn import estimate_advantages, group_metrics, policy_metrics, score_tokens
from klimb.models.forward import token_scores, token_values
from klimb.types import Batch, ScoredBatch
from tests.tiny_models import make_phase, make_recipe, make_roles, split_of, tiny_model

REWARDS = [1.0, 0.0, 0.5, None, 0.25, 0.25, 0.25, 0.25, -1.0]
MISMATCH = {
    f"mismatch/{n}" for n in ("kl", "k3", "ppl_ratio", "ess", "probs_diff_mean", "probs_diff_max", "max_log_ratio")
}


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_phase(tiny_model(), REWARDS)


def scored_by_hand(logprobs: list[list[float]], ref: list[list[float]], scores: list[float]) -> ScoredBatch:
    """Rows with one prompt token in front of the given log-probs, all sampled."""
    rows, width = len(logprobs), len(logprobs[0]) + 1

    def table(values: list[list[float]]) -> Tensor:
        return torch.cat([torch.zeros(rows, 1), torch.tensor(values)], dim=1)

    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    ids = torch.arange(rows)
    return ScoredBatch(
        tokens=torch.full((rows, width), 5),
        attention=torch.ones_like(mask),
        mask=mask,
        sampler_logprobs=table(logprobs),
        rewards=torch.tensor(scores),
        cut_off=torch.zeros(rows, dtype=torch.bool),
        group=ids,
        row_id=ids,
        source_row=ids,
        policy_version=torch.zeros(rows, width, dtype=torch.int64),
        correct=torch.full((rows,), -1),
        old_logprobs=table(logprobs),
        ref_logprobs=table(ref),
        values=torch.zeros(rows, width),
    )


def test_explicit_scores_by_a_forward_of_the_actor(batch: Batch) -> None:
    model = tiny_model()
    epochs = split_of(batch, step=4, micro=2)
    got, metrics = score_tokens(batch, epochs[0], make_roles(model), make_recipe())
    want = token_scores(model, batch.tokens, batch.attention, batch.mask, 1.0).logprobs
    assert torch.allclose(got.old_logprobs, want, atol=1e-5)
    assert not got.old_logprobs.requires_grad
    assert metrics["policy/old_forwards"] == sum(len(m) for m in epochs[0]) == 5
    assert metrics.keys() >= MISMATCH
    assert metrics["mismatch/max_log_ratio"] < 1e-4
    assert got.ref_logprobs is None
    assert got.values is None
    assert "kl/k3" not in metrics


def test_cached_takes_the_samplers_and_makes_no_forward_of_the_actor(batch: Batch) -> None:
    model = tiny_model()
    calls: list[int] = []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    roles = make_roles(model, reference=tiny_model(seed=1), critic=False)
    got, metrics = score_tokens(batch, split_of(batch, 4, 2)[0], roles, make_recipe(explicit=False))
    assert torch.equal(got.old_logprobs, batch.sampler_logprobs)
    assert metrics["policy/old_forwards"] == 0
    assert not calls
    assert not MISMATCH & metrics.keys(), "the update measures it, in its own forward"
    assert metrics["kl/k3"] > 0


@pytest.mark.parametrize("budget", [None, 20, 60])
def test_the_passes_do_not_depend_on_the_cut(batch: Batch, budget: int | None) -> None:
    model, reference = tiny_model(), tiny_model(seed=1)
    roles = make_roles(model, reference=reference, critic=True)
    assert roles.critic is not None
    with torch.no_grad():
        roles.critic.head.weight.fill_(0.1)
    got, _ = score_tokens(batch, split_of(batch, 3, 2, budget)[0], roles, make_recipe(temperature=0.7))
    whole = (batch.tokens, batch.attention, batch.mask)
    assert torch.allclose(got.old_logprobs, token_scores(model, *whole, 0.7).logprobs, atol=1e-5)
    assert got.ref_logprobs is not None
    assert got.values is not None
    assert torch.allclose(got.ref_logprobs, token_scores(reference, *whole, 0.7).logprobs, atol=1e-5)
    assert torch.allclose(got.values, token_values(roles.critic, *whole), atol=1e-4)
    for x in (got.old_logprobs, got.ref_logprobs, got.values):
        assert not x[~batch.mask].any()
    for f in fields(batch):
        mine, theirs = getattr(got, f.name), getattr(batch, f.name)
        assert mine is theirs is None or torch.equal(mine, theirs)


def test_case_LP_01_every_role_is_scored_at_the_sampling_temperature() -> None:
    model = tiny_model()
    batch = make_phase(model, [1.0, 0.0, 1.0, 0.0], temperature=0.6)
    roles = make_roles(model, reference=True)
    for explicit in (True, False):
        recipe = make_recipe(temperature=0.6, explicit=explicit)
        got, metrics = score_tokens(batch, split_of(batch, 4, 4)[0], roles, recipe)
        assert got.ref_logprobs is not None
        assert torch.allclose((got.old_logprobs - batch.sampler_logprobs).exp(), torch.ones(()), atol=1e-5)
        assert torch.allclose(got.ref_logprobs, batch.sampler_logprobs, atol=1e-5)
        assert abs(metrics["kl/k1"]) < 1e-5
    wrong, _ = score_tokens(batch, split_of(batch, 4, 4)[0], roles, make_recipe(temperature=1.0))
    assert ((wrong.old_logprobs - batch.sampler_logprobs).exp() - 1)[batch.mask].abs().mean() > 0.1


def kl_metrics(scored: ScoredBatch) -> dict[str, float]:
    assert scored.old_logprobs is not None
    return policy_metrics(scored, scored.old_logprobs, engine=False)


def test_case_KC_02_the_controller_gets_the_divergence_from_the_reference_per_token() -> None:
    scored = scored_by_hand([[-1.0, -1.0], [-2.0, -0.5]], [[-1.5, -1.2], [-2.5, -1.0]], [0.0, 0.0])
    metrics = kl_metrics(scored)
    assert metrics["kl/k1"] == pytest.approx(0.425, abs=1e-6)
    d = torch.tensor([0.5, 0.2, 0.5, 0.5]).double()
    assert metrics["kl/k3"] == pytest.approx(float(((-d).exp() - 1 + d).mean()), abs=1e-6)
    controller = AdaptiveKLController(0.1, target_kl=0.5, horizon=1000.0, min_kl_coef=0.001, max_kl_coef=5.0)
    controller.update(metrics["kl/k1"], 2)
    assert controller.coef == pytest.approx(0.09997, abs=1e-9)


def test_kl_is_a_mean_over_episodes_of_their_own_means() -> None:
    scored = scored_by_hand(
        [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], [[-2.0, -2.0, -2.0], [-1.0, -9.0, -9.0]], [0.0] * 2
    )
    mask = scored.mask.clone()
    mask[1, 2:] = False
    assert kl_metrics(replace(scored, mask=mask))["kl/k1"] == pytest.approx(0.5)
    mask[1] = False
    assert kl_metrics(replace(scored, mask=mask))["kl/k1"] == pytest.approx(1.0)
    assert kl_metrics(replace(scored, mask=torch.zeros_like(mask))) == {}
    assert kl_metrics(replace(scored, ref_logprobs=None)) == {}


@pytest.mark.parametrize(("in_reward", "want"), [(True, [-0.02, 0.97]), (False, [0.0, 1.0])])
def test_case_KE_04_kl_is_in_the_token_rewards_only_when_asked(in_reward: bool, want: list[float]) -> None:
    scored = scored_by_hand([[-1.0, -1.0]], [[-1.2, -1.3]], [1.0])
    recipe = make_recipe(adv_estimator="gae", kl_in_reward=in_reward, kl_in_loss=not in_reward, gamma=1.0, lam=0.0)
    train, _ = estimate_advantages(scored, recipe, 0.1)
    # With lambda 0 and all values 0 the returns are the token rewards.
    assert train.returns is not None
    assert train.returns[0, 1:].tolist() == pytest.approx(want, abs=1e-6)


def test_kl_in_the_reward_of_a_group_estimator_is_the_episodes_sum() -> None:
    scored = scored_by_hand([[-1.0, -1.0]] * 2, [[-1.2, -1.3], [-1.0, -1.0]], [1.0, 1.0])
    scored = replace(scored, group=torch.tensor([3, 3]))
    recipe = make_recipe(norm_by_std=False, kl_in_reward=True)
    train, _ = estimate_advantages(scored, recipe, 0.1)
    assert train.advantages[0, 1:].tolist() == pytest.approx([-0.025, -0.025], abs=1e-6)
    assert train.advantages[1, 1:].tolist() == pytest.approx([0.025, 0.025], abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_group_advantages_by_hand_with_a_failed_row(batch: Batch, estimator: str) -> None:
    recipe = make_recipe(adv_estimator=estimator)
    ready, _ = score_tokens(batch, split_of(batch, 4, 2)[0], make_roles(tiny_model()), recipe)
    train, metrics = estimate_advantages(ready, recipe, 0.0)
    alive = torch.tensor([1.0, 0.0, 0.5])  # the fourth failed and is in nobody's baseline
    if estimator == "grpo":
        want = (alive - 0.5) / (alive.std() + 1e-6)
    else:
        want = torch.tensor([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])
    per_row = torch.cat([want, torch.zeros(6)])  # the second group has no spread, the last is alone
    assert torch.allclose(train.advantages, per_row[:, None] * batch.mask, atol=1e-5)
    assert train.returns is None
    assert metrics["advantage/max"] == pytest.approx(float(want.max()), abs=1e-5)


def test_gae_whitens_and_its_metrics_speak_of_before(batch: Batch) -> None:
    recipe = make_recipe(adv_estimator="gae", gamma=0.99, lam=0.9)
    roles = make_roles(tiny_model(), critic=True)
    ready, _ = score_tokens(batch, split_of(batch, 4, 2)[0], roles, recipe)
    train, metrics = estimate_advantages(ready, recipe, 0.0)
    inside = train.advantages[batch.mask]
    assert float(inside.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(inside.std()) == pytest.approx(1.0, abs=1e-4)
    assert not train.advantages[~batch.mask].any()
    assert train.returns is not None
    row = batch.mask[0].nonzero().flatten()
    # A fresh critic says 0, so the raw advantage decays back from the score.
    want = [0.0 + (0.99 * 0.9) ** (len(row) - 1 - i) for i in range(len(row))]
    assert train.returns[0, row].tolist() == pytest.approx(want, abs=1e-5)
    assert metrics["advantage/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["value/explained_variance"] == pytest.approx(0.0, abs=1e-5)


def test_the_share_of_groups_without_spread(batch: Batch) -> None:
    # Groups: {1, 0, 0.5}, {0.25 four times}, {-1 alone}.
    assert group_metrics(batch) == {"reward/frac_zero_std": pytest.approx(2 / 3)}
    assert group_metrics(replace(batch, mask=torch.zeros_like(batch.mask))) == {}
    assert group_metrics(replace(batch, group=torch.arange(9))) == {}


def test_a_phase_in_which_everything_failed_goes_through() -> None:
    model = tiny_model()
    batch = make_phase(model, [None] * 4)
    for estimator in ("grpo", "rloo", "gae"):
        recipe = make_recipe(adv_estimator=estimator, kl_in_reward=True)
        roles = make_roles(model, reference=True, critic=True)
        ready, metrics = score_tokens(batch, split_of(batch, 2, 2)[0], roles, recipe)
        train, more = estimate_advantages(ready, recipe, 0.1)
        assert not train.advantages.any()
        assert not (MISMATCH | {"kl/k3", "advantage/mean"}) & (metrics | more).keys()
