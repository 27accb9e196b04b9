"""Arms: configs that differ in what is varied and in nothing else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from klimb.config.counts import count
from klimb.config.guard import SILENT, differing, flat
from klimb.config.load import known_sections, load_config
from klimb.config.posture import AUTO_KEYS, resolve
from klimb.config.schema import RunConfig, VaryConfig
from klimb.errors import ConfigError

KL_PLACES = ("algorithm.use_kl_in_reward", "algorithm.use_kl_loss")
KL_SETTINGS = ("algorithm.kl_estimator", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.init_kl_coef")
CHOSEN = frozenset({*AUTO_KEYS, "algorithm.kl_estimator"} - {"training.lr", "eval.every_episodes"})
"""What a posture chooses, but for the learning rate and the evaluations, which are the same in all arms."""
IMPLIED: dict[str, frozenset[str]] = {
    "algorithm.use_pf_ppo": CHOSEN,
    **{key: frozenset({*KL_PLACES, *KL_SETTINGS}) for key in KL_PLACES},
    "algorithm.kl_ctrl.type": frozenset({"algorithm.kl_ctrl.init_kl_coef"}),
}
"""Varied key -> keys that may follow it."""
SEED, LR, LENGTH = "training.seed", "training.lr", "training.total_episodes"
EVAL_EVERY = "eval.every_episodes"
"""`auto` is a tenth of the run; evaluations change no number of the training."""
ADVISED_LR = 0.5
"""The cached posture's learning rate as a share of the explicit one's (A-LR-CACHED: 30 to 50% lower)."""
SLUG = 60


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
    Raises ConfigError where arms would differ in more than they should, in nothing, or cannot run.
    """
    varied = [item.key for item in vary]
    _check_varied(vary, steps, with_advice)
    base, common = load_config(path, overrides).config, list(overrides)
    if base.training.lr == "auto" and LR not in varied:
        common.append(f"{LR}={resolve(base).lr!r}")
    arms: list[Arm] = []
    for choice in product(*(range(len(item.values)) for item in vary)):
        values = {item.key: item.values[i] for item, i in zip(vary, choice, strict=True)}
        along = [pair for item, i in zip(vary, choice, strict=True) if item.along for pair in item.along[i].items()]
        own = [f"{key}={json.dumps(value)}" for key, value in (*values.items(), *along)]
        config = load_config(path, [*common, *own]).config
        own += _extra(config, steps, with_advice)
        arms.append(_arm(values, load_config(path, [*common, *own]).config))
    _check_distinct(arms)
    check_arms({arm.label: arm.config for arm in arms}, varied, {LR, LENGTH} if with_advice else {LENGTH})
    for arm in arms:
        count(arm.config, resolve(arm.config))
    return arms


def _extra(config: RunConfig, steps: int | None, with_advice: bool) -> Iterator[str]:
    if steps is not None:
        yield f"{LENGTH}={steps * config.actor_rollout_ref.rollout_batch_size}"
    if with_advice and not config.algorithm.use_pf_ppo:
        yield f"{LR}={ADVISED_LR * resolve(config).lr!r}"


def _check_varied(vary: Sequence[VaryConfig], steps: int | None, with_advice: bool) -> None:
    varied = [item.key for item in vary]
    for item in vary:
        if varied.count(item.key) > 1:
            raise ConfigError(f"{item.key} is varied twice; give all its values at once, as in {item.key}=a,b,c")
        if item.key == SEED or item.key.startswith(SILENT):
            raise ConfigError(f"{item.key}: no arm of its own comes of it; --seeds runs every arm with several seeds")
        if item.key in known_sections():
            raise ConfigError(f"{item.key} is a section; vary one of its keys, as in {item.key}.KEY=a,b")
        _check_along(item, varied)
    if steps is not None and LENGTH in varied:
        raise ConfigError(f"--steps sets {LENGTH}, which is varied; leave one of them out")
    if with_advice and ("algorithm.use_pf_ppo" not in varied or LR in varied):
        raise ConfigError(f"--with-advice halves {LR} of cached arms: vary algorithm.use_pf_ppo, and not {LR}")


def _check_along(item: VaryConfig, varied: Sequence[str]) -> None:
    allowed = IMPLIED.get(item.key, frozenset()) - set(varied)
    for key in (key for entry in item.along for key in entry):
        if key not in allowed:
            why = (
                f"with {item.key} may go: {', '.join(sorted(allowed))}" if allowed else f"nothing goes with {item.key}"
            )
            raise ConfigError(f"compare.vary: {key} cannot go along: it must be the same in every arm; {why}")


def _arm(values: Mapping[str, Any], config: RunConfig) -> Arm:
    short = [key.rpartition(".")[2] for key in values]
    names = short if len(set(short)) == len(short) else list(values)
    label = ", ".join(f"{name}={shown(value)}" for name, value in zip(names, values.values(), strict=True))
    slug = re.sub(r"[^\w.=+-]+", "_", label)
    if len(slug) > SLUG or slug != label.replace(", ", "_"):
        slug = f"{slug[:SLUG]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"
    return Arm(label=label, slug=slug, values=values, config=config)


def _check_distinct(arms: Sequence[Arm]) -> None:
    for one, other in combinations(arms, 2):
        if not differing(flat(one.config), flat(other.config)):
            raise ConfigError(f"arms {one.label} and {other.label} are the same config; leave one of the values out")


def check_arms(configs: Mapping[str, RunConfig], varied: Sequence[str], also: set[str]) -> list[str]:
    """The keys that differ beside the varied ones, all of them implied. Raises ConfigError, naming them, for others."""
    flats = [flat(config) for config in configs.values()]
    differ = sorted({key for other in flats[1:] for key in differing(flats[0], other)})
    beside = [key for key in differ if not any(key == one or key.startswith(f"{one}.") for one in varied)]
    allowed = {EVAL_EVERY, *also}.union(*(IMPLIED.get(key, frozenset[str]()) for key in varied))
    other = [key for key in beside if key not in allowed]
    if other:
        raise ConfigError(_too_many(configs, other, f"differ in {' and '.join(varied)}, and also in"))
    return beside


def _too_many(configs: Mapping[str, RunConfig], keys: Iterable[str], what: str = "differ in") -> str:
    lines = [f"  {line}" for line in by_label(configs, keys)]
    return (
        f"the arms of a comparison must differ in one key and what it implies; these {what}:\n"
        + "\n".join(lines)
        + "\nMake all but one the same, or compare one key at a time"
    )


def by_label(configs: Mapping[str, RunConfig], keys: Iterable[str]) -> list[str]:
    """`key: value (label; label), value (label)` for each key."""
    flats = {label: flat(config) for label, config in configs.items()}
    out: list[str] = []
    for key in keys:
        groups: dict[str, list[str]] = {}
        for label, one in flats.items():
            groups.setdefault(shown(one.get(key)), []).append(label)
        out.append(f"{key}: " + ", ".join(f"{value} ({'; '.join(labels)})" for value, labels in groups.items()))
    return out


def shown(value: Any) -> str:
    """A config's value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def arms_between(runs: Mapping[str, RunConfig], with_advice: bool) -> dict[str, Arm]:
    """Folder -> the arm its run belongs to. Runs of one arm differ in their seed alone; ConfigError otherwise."""
    flats = {name: flat(config) for name, config in runs.items()}
    first = next(iter(flats.values()))
    differ = {key for other in flats.values() for key in differing(first, other)} - {SEED}
    if not differ:
        raise ConfigError(f"{' and '.join(runs)} are runs of one config: there is nothing to compare")
    posture = [key for key in IMPLIED if key in differ]
    if not posture and len(differ) > 1:
        raise ConfigError(_too_many(runs, sorted(differ)))
    varied = next((keys for keys in _prefixes(posture) if _separates(flats, keys)), posture or sorted(differ))
    check_arms(runs, varied, {SEED, LR} if with_advice else {SEED})
    arms = {name: _arm({key: flats[name].get(key) for key in varied}, config) for name, config in runs.items()}
    if not _separates(flats, varied):
        raise ConfigError(_too_many(runs, sorted(differ)))
    return arms


def _prefixes(keys: Sequence[str]) -> Iterator[list[str]]:
    return (list(keys[:n]) for n in range(1, len(keys) + 1))


def _separates(flats: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> bool:
    """Whether runs that agree in these keys agree in everything but the seed."""
    firsts: dict[str, Mapping[str, Any]] = {}
    for one in flats.values():
        first = firsts.setdefault(json.dumps([one.get(key) for key in keys]), one)
        if set(differing(first, one)) - {SEED}:
            return False
    return True
