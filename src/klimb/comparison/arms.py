"""Arms: configs that differ in what is varied and in nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from klimb.config.guard import differing, flat
from klimb.config.load import load_config
from klimb.config.posture import AUTO_KEYS, resolve
from klimb.config.schema import RunConfig, VaryConfig
from klimb.errors import ConfigError

POSTURE_KEYS = (
    "algorithm.use_pf_ppo",
    "algorithm.use_kl_in_reward",
    "algorithm.use_kl_loss",
    "algorithm.kl_ctrl.type",
)
"""Keys that decide what others' `auto` is, or which others are read."""
SEED = "training.seed"
ADVISED_LR = 0.5
"""The cached posture's learning rate as a share of the explicit one's (A-LR-CACHED: 30 to 50% lower)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """label for people; slug for file names; values of the varied keys; config with the first seed."""

    label: str
    slug: str
    values: Mapping[str, Any]
    config: RunConfig


def arms_of(
    path: Path, overrides: Sequence[str], vary: Sequence[VaryConfig], steps: int | None, with_advice: bool
) -> list[Arm]:
    """Every combination of the varied keys' values, each with its posture's own choices.

    The learning rate is one for all arms, also where it is `auto`; with_advice gives cached arms half of it.
    Raises ConfigError where arms would differ in more than they should.
    """
    base = load_config(path, overrides).config
    for item in vary:
        _check_along(item)
    common = list(overrides)
    if steps is not None:
        common.append(f"training.total_episodes={steps * base.actor_rollout_ref.rollout_batch_size}")
    varied = [item.key for item in vary]
    if base.training.lr == "auto" and "training.lr" not in varied:
        common.append(f"training.lr={resolve(base).lr!r}")
    if with_advice and "algorithm.use_pf_ppo" not in varied:
        raise ConfigError(
            "--with-advice halves the learning rate of cached arms, but algorithm.use_pf_ppo is not varied here"
        )
    arms: list[Arm] = []
    for choice in product(*(range(len(item.values)) for item in vary)):
        values = {item.key: item.values[i] for item, i in zip(vary, choice, strict=True)}
        more = [(key, value) for item, i in zip(vary, choice, strict=True) for key, value in _along(item, i)]
        arm = [f"{key}={json.dumps(value)}" for key, value in (*values.items(), *more)]
        config = load_config(path, [*common, *arm]).config
        if with_advice and not config.algorithm.use_pf_ppo:
            arm.append(f"training.lr={ADVISED_LR * resolve(config).lr!r}")
            config = load_config(path, [*common, *arm]).config
        arms.append(_arm(values, config))
    also = {"training.lr"} if with_advice else set[str]()
    check_arms({arm.label: arm.config for arm in arms}, varied, also)
    return arms


def _arm(values: Mapping[str, Any], config: RunConfig) -> Arm:
    label = ", ".join(f"{key.rpartition('.')[2]}={json.dumps(value).strip(chr(34))}" for key, value in values.items())
    return Arm(label=label, slug=re.sub(r"[^\w.=+-]+", "_", label), values=values, config=config)


def _along(item: VaryConfig, index: int) -> Iterator[tuple[str, Any]]:
    if item.along:
        yield from item.along[index].items()


def _check_along(item: VaryConfig) -> None:
    keys = [key for entry in item.along for key in entry]
    allowed = implied_by([item.key])
    wrong = [key for key in keys if key not in allowed]
    if wrong:
        why = f"allowed with {item.key}: {', '.join(sorted(allowed))}" if allowed else f"nothing goes along {item.key}"
        raise ConfigError(f"compare.vary: {wrong[0]} must be the same in every arm; {why}")


def implied_by(varied: Sequence[str]) -> set[str]:
    """Keys that may follow the varied ones: what the posture chooses, but for the learning rate and the evaluations."""
    if not set(varied) & set(POSTURE_KEYS):
        return set()
    chosen = {*AUTO_KEYS, *POSTURE_KEYS, "algorithm.kl_estimator"} - {"training.lr", "eval.every_episodes"}
    return chosen - {"algorithm.use_pf_ppo", *varied}


def check_arms(configs: Mapping[str, RunConfig], varied: Sequence[str], also: set[str]) -> list[str]:
    """The keys that differ beside the varied ones, all of them implied. Raises ConfigError, naming them, for others."""
    flats = {label: flat(config) for label, config in configs.items()}
    names = list(flats)
    first = flats[names[0]]
    differ = sorted({key for name in names[1:] for key in differing(first, flats[name])})
    beside = [key for key in differ if not _within(key, varied)]
    allowed = implied_by(varied) | also
    other = [key for key in beside if key not in allowed]
    if other:
        raise ConfigError(_too_many(configs, other, f"differ in {' and '.join(varied)}, and also in"))
    return beside


def _too_many(configs: Mapping[str, RunConfig], keys: Sequence[str], what: str = "differ in") -> str:
    flats = {name: flat(config) for name, config in configs.items()}
    lines = [f"  {key}: {', '.join(f'{shown(one.get(key))} ({name})' for name, one in flats.items())}" for key in keys]
    return (
        f"the arms of a comparison must differ in one key and what it implies; these {what}:\n"
        + "\n".join(lines)
        + "\nMake all but one the same, or compare one key at a time"
    )


def shown(value: Any) -> str:
    """A config's value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def by_value(values: Mapping[str, str]) -> str:
    """label -> value as `value (label; label), value (label)`."""
    groups: dict[str, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    return ", ".join(f"{value} ({'; '.join(labels)})" for value, labels in groups.items())


def _within(key: str, varied: Sequence[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in varied)


def varied_between(configs: Mapping[str, RunConfig]) -> list[str]:
    """What runs are a comparison of: the fewest keys that tell them apart, seeds and what is implied aside."""
    flats = [flat(config) for config in configs.values()]
    differ = {key for other in flats[1:] for key in differing(flats[0], other)} - {SEED}
    posture = [key for key in POSTURE_KEYS if key in differ]
    if not posture:
        return sorted(differ)
    kinds = len({_hashable(one, differ) for one in flats})
    count = next(n for n in range(1, len(posture) + 1) if n == len(posture) or _kinds(flats, posture[:n]) == kinds)
    return posture[:count]


def arms_between(runs: Mapping[str, RunConfig], with_advice: bool) -> dict[str, Arm]:
    """Folder -> the arm its run belongs to; runs that differ in their seed alone are one arm's."""
    varied = varied_between(runs)
    if not varied:
        raise ConfigError(f"{' and '.join(runs)} are runs of one config: there is nothing to compare")
    if len(varied) > 1 and not set(varied) & set(POSTURE_KEYS):
        raise ConfigError(_too_many(runs, varied))
    check_arms(runs, varied, {SEED, *(["training.lr"] if with_advice else [])})
    flats = {name: flat(config) for name, config in runs.items()}
    return {name: _arm({key: flats[name].get(key) for key in varied}, config) for name, config in runs.items()}


def _kinds(flats: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({_hashable(one, keys) for one in flats})


def _hashable(one: Mapping[str, Any], keys: Iterable[str]) -> str:
    return json.dumps([one.get(key) for key in sorted(keys)])
