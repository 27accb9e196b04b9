from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from klimb.config.load import load_config, with_overrides
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.ladder import RUNGS, Intervention, all_overrides, climb

BASE = load_config("recipes/arithmetic.yaml").config
CACHED = with_overrides(BASE, ["algorithm.use_pf_ppo=false"])


def made(number: int, rung: str, step: int = 5, back_to: int = 0, overrides: tuple[str, ...] = ()) -> Intervention:
    return Intervention(
        number=number,
        finding="kl_explosion",
        evidence="e",
        step=step,
        first=step - 1,
        back_to=back_to,
        rung=rung,
        overrides=overrides,
        episodes_lost=1,
    )


def test_the_rate_comes_first_and_is_divided_by_four() -> None:
    assert climb(BASE, 0.05, (), 5) == ("lr", ("training.lr=2.5e-05",))


def test_the_rate_repeats_while_it_breaks_soon_and_then_the_next_rung_comes() -> None:
    before = [made(1, "lr"), made(2, "lr")]
    assert climb(BASE, 0.05, before, 4)[0] == "lr"
    before.append(made(3, "lr"))
    assert climb(BASE, 0.05, before, 4) == ("kl", ("algorithm.kl_ctrl.init_kl_coef=0.1",))


def test_long_after_the_last_one_the_next_rung_comes_at_once() -> None:
    every = BASE.diagnostics.healthy_every_phases
    assert climb(BASE, 0.05, [made(1, "lr")], 2 * every + 1)[0] == "kl"
    assert climb(BASE, 0.05, [made(1, "lr"), made(2, "kl")], 100)[0] == "temperature"
    assert climb(BASE, 0.05, [made(1, "lr"), made(2, "temperature")], 100)[0] == "one_step"
    assert climb(BASE, 0.05, [made(1, "one_step")], 100)[0] == "lr"


def test_every_rung_makes_a_config_that_differs_in_what_it_says() -> None:
    config = BASE
    for before, rung in zip(("one_step", *RUNGS), RUNGS, strict=False):
        got, overrides = climb(config, 0.05, [made(1, before)], 100)
        assert got == rung
        config = with_overrides(config, overrides)
    assert resolve(config).lr == 2.5e-5
    assert resolve(config).init_kl_coef == 0.1
    assert config.actor_rollout_ref.temperature == 0.8
    assert config.training.gradient_accumulation_steps == 4


def test_a_rung_that_can_do_nothing_is_left_out() -> None:
    no_kl = with_overrides(BASE, ["algorithm.use_kl_loss=false"])
    assert climb(no_kl, 0.0, [made(1, "lr")], 100)[0] == "temperature"
    cool = with_overrides(no_kl, ["actor_rollout_ref.temperature=0.5"])
    assert climb(cool, 0.0, [made(1, "lr")], 100)[0] == "one_step"
    single = with_overrides(cool, ["training.gradient_accumulation_steps=4"])
    assert climb(single, 0.0, [made(1, "lr")], 100)[0] == "lr"


@pytest.mark.parametrize(("config", "coef", "expected"), [(BASE, 4.0, 5.0), (CACHED, 4.0, 8.0), (CACHED, 0.0, 0.01)])
def test_the_coefficient_stays_within_its_clamp_where_it_has_one(
    config: RunConfig, coef: float, expected: float
) -> None:
    assert climb(config, coef, [made(1, "lr")], 100)[1] == (f"algorithm.kl_ctrl.init_kl_coef={expected!r}",)


def test_a_coefficient_at_its_clamp_is_left_where_it_is() -> None:
    assert climb(BASE, 5.0, [made(1, "lr")], 100)[0] == "temperature"


def test_overrides_in_their_order_and_records_that_come_back() -> None:
    one, two = made(1, "lr", overrides=("training.lr=1.0",)), made(2, "lr", overrides=("training.lr=0.5",))
    assert all_overrides([one, two]) == ["training.lr=1.0", "training.lr=0.5"]
    assert Intervention.of({**asdict(two), "overrides": list(two.overrides)}) == two
    assert replace(two, number=1) != one
