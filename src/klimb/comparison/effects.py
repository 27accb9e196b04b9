"""Several keys varied at once: how much of a difference is made by each. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from klimb.comparison.table import ArmRows


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What going from a key's first value to its second changes. sizes: for each combination of the other keys' values
    and each seed, all else equal."""

    key: str
    first: str
    second: str
    sizes: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.sizes) / len(self.sizes)

    @property
    def least(self) -> float:
        """The smallest size, 0 where the sizes do not agree in their direction."""
        agree = all(size > 0 for size in self.sizes) or all(size < 0 for size in self.sizes)
        return min(map(abs, self.sizes)) if agree else 0.0

    def shown(self, form: str) -> str:
        span = f"{min(self.sizes):+{form}} to {max(self.sizes):+{form}}"
        return f"{self.key} from {self.first} to {self.second} changes it by {self.mean:+{form}} ({span})"


def main_effects(arms: Sequence[ArmRows], metric: str, end: int, width: int) -> list[Effect]:
    """Of each varied key; none unless two or more keys have two values each, in every combination, and every mean of
    the `width` steps up to `end` is finite."""
    keys = list(arms[0].values)
    values = {key: list(dict.fromkeys(arm.values[key] for arm in arms)) for key in keys}
    if len(keys) < 2 or any(len(found) != 2 for found in values.values()) or len(arms) != 2 ** len(keys):
        return []
    means = {tuple(arm.values[key] for key in keys): arm.windows(metric, end, width) for arm in arms}
    if not all(math.isfinite(value) for row in means.values() for value in row):
        return []
    effects: list[Effect] = []
    for i, key in enumerate(keys):
        first, second = values[key]
        pairs = [(row, means[(*at[:i], second, *at[i + 1 :])]) for at, row in means.items() if at[i] == first]
        sizes = tuple(b - a for one, other in pairs for a, b in zip(one, other, strict=True))
        effects.append(Effect(key=key, first=first, second=second, sizes=sizes))
    return effects


def sentence(effects: Sequence[Effect], name: str, form: str, seeds: int) -> str:
    """Which key makes the difference is said with two or more seeds alone, where its smallest effect is above the
    largest of all others."""
    text = f"{name}, key by key: " + "; ".join(effect.shown(form) for effect in effects)
    for effect in effects:
        largest = max(abs(size) for other in effects if other is not effect for size in other.sizes)
        if seeds > 1 and effect.least > largest:
            text += f". It is {effect.key} that makes the difference"
    return text
