"""The proportional-integral KL controller: its numbers by hand, its clamps, its state, and whether it tracks."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from klimb.algos.kl import AdaptiveKLController, KLController, PIGains, PIKLController
from klimb.errors import CheckpointError

TARGET = 0.02
GAINS = PIGains(proportional=0.5, integral=0.1, slack=0.0, fall=9.0, smoothing=0.5, low=0.25, high=4.0)
NOISY = [0.0, 0.004, 0.013, 0.031, 0.055, 0.038, 0.021, 0.017, 0.026, 0.9, 0.011, 0.019]


def controller(init: float = 0.05, gains: PIGains | None = GAINS) -> PIKLController:
    return PIKLController(init, TARGET, 0.001, 5.0, gains)


def test_four_updates_by_hand() -> None:
    pi = controller()
    pi.update(0.01, 32)  # the first: only the integral part, of half the target
    assert pi.coef == pytest.approx(0.05 * 2**-0.1, rel=1e-12)
    pi.update(0.03, 32)  # smoothed 0.01 -> 0.02, the target: only the proportional part, of a doubling
    assert pi.coef == pytest.approx(0.05 * 2**-0.1 * 2**0.5, rel=1e-12)
    pi.update(1.0, 32)  # clipped to 0.08, smoothed 0.02 -> 0.05: 2.5 times as much, 2.5 times the target
    assert pi.coef == pytest.approx(0.1143263, rel=1e-6)
    pi.update(0.0, 32)  # clipped to 0.005, smoothed 0.05 -> 0.0275
    assert pi.coef == pytest.approx(0.1143263 * 0.55**0.5 * 1.375**0.1, rel=1e-6)


def test_slack_is_taken_off_the_error_of_the_integral_part() -> None:
    pi = controller(gains=replace(GAINS, slack=math.log(2)))
    pi.update(2 * TARGET, 32)
    assert pi.coef == 0.05
    pi.update(2 * TARGET, 32)
    assert pi.coef == 0.05
    pi.update(TARGET, 32)  # smoothed 1.5 times the target
    assert pi.coef == pytest.approx(0.05 * 0.75**0.6, rel=1e-12)


def test_gives_back_little_before_its_target_was_first_reached() -> None:
    pi = controller(gains=replace(GAINS, fall=0.01))
    for _ in range(3):
        pi.update(TARGET / 2, 32)
    assert pi.coef == pytest.approx(0.05 * math.exp(-0.03), rel=1e-12)
    for _ in range(40):
        pi.update(TARGET * 1.2, 32)
    before = pi.coef
    for _ in range(40):
        pi.update(TARGET / 2, 32)
    assert pi.coef < before * math.exp(-40 * 0.05)


def test_rests_at_its_target() -> None:
    pi = controller(0.3)
    for _ in range(50):
        pi.update(TARGET, 32)
    assert pi.coef == 0.3


def test_same_moves_at_any_scale_of_kl_and_coefficient() -> None:
    small, large = PIKLController(0.05, 0.02, 1e-9, 1e9, GAINS), PIKLController(5.0, 0.2, 1e-9, 1e9, GAINS)
    for kl in NOISY:
        small.update(kl, 32)
        large.update(10 * kl, 32)
        assert large.coef == pytest.approx(100 * small.coef, rel=1e-9)


@pytest.mark.parametrize(("kl", "clamp", "then"), [(3.0, 5.0, 0.001), (0.0, 0.001, 0.5)])
def test_leaves_a_clamp_at_once(kl: float, clamp: float, then: float) -> None:
    pi = controller()
    for _ in range(100):
        pi.update(kl, 32)
        assert 0.001 <= pi.coef <= 5.0
    assert pi.coef == clamp
    pi.update(then, 32)
    assert pi.coef != clamp
    for _ in range(5):
        pi.update(then, 32)
    assert abs(math.log(pi.coef / clamp)) > 0.5  # an integral of 100 phases would still hold it there


@pytest.mark.parametrize("gains", [GAINS, None])
def test_state_round_trip_is_exact_in_mid_run(gains: PIGains | None) -> None:
    for stop in range(len(NOISY)):
        through, stopped, resumed = controller(gains=gains), controller(gains=gains), controller(2.0, gains)
        for kl in NOISY[:stop]:
            through.update(kl, 32)
            stopped.update(kl, 32)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        for kl in NOISY[stop:]:
            through.update(kl, 32)
            resumed.update(kl, 32)
            assert resumed.coef == through.coef
        assert resumed.state_dict() == through.state_dict()


def test_loaded_coefficient_is_clamped() -> None:
    pi = controller()
    pi.load_state_dict({"coef": 80.0, "smoothed_kl": 0.03})
    assert pi.coef == 5.0


@pytest.mark.parametrize(
    "state", [{}, {"coef": math.nan}, {"coef": 0.1, "smoothed_kl": math.nan}, {"coef": 0.1, "smoothed_kl": -0.02}]
)
def test_damaged_state_is_refused(state: dict[str, float]) -> None:
    with pytest.raises(CheckpointError, match="KL controller state"):
        controller().load_state_dict(state)


@pytest.mark.parametrize(("kl", "episodes"), [(math.nan, 32), (math.inf, 32), (-math.inf, 32), (0.5, 0)])
def test_nothing_seen_changes_nothing(kl: float, episodes: int) -> None:
    pi = controller()
    pi.update(kl, episodes)
    assert pi.state_dict() == {"coef": 0.05}
    for value in NOISY[:4]:
        pi.update(value, 32)
    before = pi.state_dict()
    pi.update(kl, episodes)
    assert pi.state_dict() == before
    pi.update(0.04, 32)
    other = controller()
    for value in [*NOISY[:4], 0.04]:
        other.update(value, 32)
    assert pi.state_dict() == other.state_dict()


@pytest.mark.parametrize("kl", [-0.3, 0.0, 1e-300, 1e300])
def test_any_finite_kl_keeps_it_within_its_clamps(kl: float) -> None:
    pi = controller()
    for n in range(400):
        pi.update(kl if n % 3 else TARGET, 32)
        assert 0.001 <= pi.coef <= 5.0


def simulated(steers: KLController, drive: float) -> list[float]:
    """KL over target by phase, on a plant that starts at the reference: a steady drive moves the root of KL, the
    coefficient pulls it back with a lag of four phases, and a half is added to it that is there without one."""
    root, felt, out = 0.0, steers.coef, list[float]()
    for _ in range(150):
        out.append(root**2 / TARGET)
        steers.update(root**2, 32)
        felt += (steers.coef - felt) / 4
        root = (root + drive) / (1 + 0.15 * (0.5 + felt))
    return out


@pytest.mark.parametrize("drive", [0.02, 0.025, 0.03])
@pytest.mark.parametrize("init", [0.02, 0.05, 0.2])
def test_tracks_where_the_classical_rule_overshoots_twice_as_far(drive: float, init: float) -> None:
    pi = simulated(PIKLController(init, TARGET, 0.001, 5.0), drive)
    classical = simulated(AdaptiveKLController(init, TARGET, 320.0, 0.001, 5.0), drive)
    assert max(classical) - 1 > 0.5
    assert max(pi) - 1 < (max(classical) - 1) / 2
    assert all(0.6 < ratio < 1.5 for ratio in pi[-30:]), "and ends within half of its target"
