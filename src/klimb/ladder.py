"""What the guard changes when a run breaks: one setting at a time, the one that helps most often first.

lr: the learning rate through four. kl: the KL coefficient times two. temperature: 0.2 less. one_step: one optimizer
step per rollout phase. The lr rung repeats while the run breaks again soon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klimb.config.counts import count
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.doctor.finding import Finding

RUNGS = ("lr", "kl", "temperature", "one_step")
REPEATS = 3
"""Times in a row that the rate is lowered before another setting is tried."""
CURABLE = frozenset(
    {"kl_explosion", "ratio_spikes", "entropy_collapse", "entropy_explosion", "nonfinite", "repetition"}
)
"""Findings that a rung can cure. A constant reward or an engine that is off comes back after any rollback."""
FROM_THE_START = frozenset({"start", "reference"})
"""Variants of them that hold before the first update: no state to go back to is sound."""


def is_curable(finding: Finding) -> bool:
    return finding.code in CURABLE and finding.variant not in FROM_THE_START


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """number from 1; finding with its evidence, named at `step`, began at `first`; back_to: the step gone back to;
    rung climbed; overrides it made; episodes thrown away."""

    number: int
    finding: str
    evidence: str
    step: int
    first: int
    back_to: int
    rung: str
    overrides: tuple[str, ...]
    episodes_lost: int

    @staticmethod
    def of(record: Mapping[str, Any]) -> Intervention:
        """From state.json."""
        fields = {name: value for name, value in record.items() if name != "overrides"}
        return Intervention(**fields, overrides=tuple(record["overrides"]))


def all_overrides(interventions: Sequence[Intervention]) -> list[str]:
    """In their order: later ones of the same key win."""
    return [override for intervention in interventions for override in intervention.overrides]


def climb(config: RunConfig, coef: float, before: Sequence[Intervention], step: int) -> tuple[str, tuple[str, ...]]:
    """The next rung and its overrides. config: as it runs now, overrides of earlier rungs included; coef: the KL
    coefficient of the state gone back to; step: at which it broke."""
    last = before[-1] if before else None
    in_a_row = _in_a_row(before)
    soon = last is not None and step - last.back_to <= 2 * config.diagnostics.healthy_every_phases
    start = 0 if last is None else RUNGS.index(last.rung) + 1
    if last is not None and last.rung == "lr" and soon and in_a_row < REPEATS:
        start = 0
    for rung in (*RUNGS[start:], *RUNGS[:start]):
        overrides = _overrides(rung, config, coef)
        if overrides:
            return rung, overrides
    raise AssertionError("the rate can always be lowered")


def _in_a_row(before: Sequence[Intervention]) -> int:
    count = 0
    for intervention in reversed(before):
        if intervention.rung != "lr":
            break
        count += 1
    return count


def _overrides(rung: str, config: RunConfig, coef: float) -> tuple[str, ...]:
    posture = resolve(config)
    if rung == "lr":
        return (f"training.lr={posture.lr / 4!r}",)
    if rung == "kl":
        if not posture.needs_reference:
            return ()
        raised = max(2 * coef, 0.01)
        if posture.kl_type != "fixed":
            raised = min(raised, config.algorithm.kl_ctrl.max_kl_coef)
        return (f"algorithm.kl_ctrl.init_kl_coef={raised!r}",) if raised > coef else ()
    if rung == "temperature":
        now = config.actor_rollout_ref.temperature
        return (f"actor_rollout_ref.temperature={round(now - 0.2, 6)!r}",) if now > 0.5 else ()
    return _one_step(config)


def _one_step(config: RunConfig) -> tuple[str, ...]:
    t, phase = config.training, config.actor_rollout_ref.rollout_batch_size
    rows = t.micro_batch_size * t.num_processes
    if phase % rows or count(config, resolve(config), 1).steps_per_phase == 1:
        return ()
    return ("algorithm.ppo_epochs=1", f"training.gradient_accumulation_steps={phase // rows}")
