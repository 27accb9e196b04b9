"""Two keys varied at once: by hand, and nothing said where the combinations are not all there."""

from __future__ import annotations

import math

import pytest

from klimb.comparison.effects import main_effects, sentence
from klimb.comparison.table import KL, ArmRows
from klimb.comparison.verdict import verdict

LEVELS = ("a", "b")


def arm(place: str, source: str, seeds: list[float]) -> ArmRows:
    """KL at one level in every step, for each seed."""
    rows = {seed: [{"step": i + 1.0, KL: level} for i in range(40)] for seed, level in enumerate(seeds)}
    return ArmRows(label=f"{place}{source}", runs=rows, target=None, values={"place": place, "source": source})


def square(*levels: list[float]) -> list[ArmRows]:
    """(a,a), (a,b), (b,a), (b,b)."""
    places = [(place, source) for place in LEVELS for source in LEVELS]
    return [arm(place, source, seeds) for (place, source), seeds in zip(places, levels, strict=True)]


def test_each_key_is_changed_with_the_others_held_at_every_setting() -> None:
    place, source = main_effects(square([0.02], [0.03], [0.06], [0.05]), KL, 40, 20)
    assert (place.key, place.first, place.second) == ("place", "a", "b")
    assert place.sizes == pytest.approx((0.04, 0.02))
    assert place.mean == pytest.approx(0.03)
    assert source.sizes == pytest.approx((0.01, -0.01))
    assert (source.mean, source.least) == (pytest.approx(0.0), 0.0)


def test_the_order_of_the_arms_beyond_the_first_of_each_does_not_matter() -> None:
    arms = square([0.02], [0.03], [0.06], [0.05])
    assert {e.key: sorted(e.sizes) for e in main_effects([arms[0], arms[3], arms[1], arms[2]], KL, 40, 20)} == {
        e.key: sorted(e.sizes) for e in main_effects(arms, KL, 40, 20)
    }


def test_a_key_is_named_with_seeds_and_only_when_its_least_is_above_the_others_largest() -> None:
    def text(*levels: list[float]) -> str:
        return sentence(main_effects(square(*levels), KL, 40, 20), "KL", ".4f", len(levels[0]))

    clear = text([0.02, 0.02], [0.022, 0.02], [0.06, 0.07], [0.06, 0.07])
    assert clear.startswith("KL, key by key: place from a to b changes it by +0.0445 (+0.0380 to +0.0500); source from")
    assert clear.endswith("It is place that makes the difference")
    assert "makes the difference" not in text([0.02, 0.02], [0.05, 0.02], [0.06, 0.03], [0.06, 0.07])
    assert "makes the difference" not in text([0.02], [0.021], [0.06], [0.06]), "one seed"
    assert "makes the difference" not in text([0.02, 0.02], [0.02, 0.02], [0.06, 0.01], [0.06, 0.07]), "both ways"


def test_nothing_is_said_of_one_key_of_three_values_or_of_a_missing_arm() -> None:
    arms = square([0.02], [0.03], [0.06], [0.05])
    assert main_effects(arms[:3], KL, 40, 20) == []
    assert main_effects([arm("a", "a", [0.1]), arm("b", "a", [0.1])], KL, 40, 20) == []
    assert main_effects([*arms, arm("c", "a", [0.1]), arm("c", "b", [0.1])], KL, 40, 20) == []
    assert main_effects(square([0.02], [0.03], [0.06], [math.nan]), KL, 40, 20) == []


def test_the_verdict_says_it() -> None:
    assert any(line.startswith("KL, key by key: place") for line in verdict(square([0.02], [0.03], [0.06], [0.05])))
