"""What makes a run fit that does not: changes in the article's order, least harmful first, each on top of the last.

Every change is tried as the override that is printed, on the config itself, so what it saves is counted like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from klimb.config.load import with_overrides
from klimb.config.schema import RunConfig
from klimb.doctor.finding import Remedy
from klimb.doctor.remedies import (
    FEWER_ACTIVATIONS,
    FEWER_SLOTS,
    OTHER_POSTURE,
    SMALLER_BUDGET,
    SMALLER_MICRO,
    halved_micro,
)
from klimb.estimate.memory import Peak, highest, peaks
from klimb.estimate.setup import Setup

SetupOf = Callable[[RunConfig], Setup]
MOST_RANKS = 1024
LEAST_SLOTS = 8
"""Fewer answers at once are no way to sample."""
LEAST_GAIN = 0.01
"""Share of what is missing that a change must give to be worth its cost in speed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """remedy; after: the highest peak with it and all before it; available: whether this version has it."""

    remedy: Remedy
    after: Peak
    available: bool = True


def changes(config: RunConfig, setup_of: SetupOf, limit: float) -> list[Change]:
    """Those that lower a peak that is too high, until all are within the limit or nothing is left to try."""
    out, now = list[Change](), setup_of(config)
    if highest(now).total <= limit:
        return out
    for attempt in (_slots, _checkpointing, _forwards, _offload, _posture):
        for text, override in attempt(config, now, limit):
            changed = config if override is None else with_overrides(config, override.split())
            after = setup_of(changed)
            after = replace(after, offloads=True) if now.offloads or attempt is _offload else after
            if _missing(after, limit) < _missing(now, limit) * (1 - LEAST_GAIN):
                remedy = Remedy(text=text, override=override)
                if out and out[-1].remedy.text == text:  # one line for several halvings
                    out.pop()
                out.append(Change(remedy=remedy, after=highest(after), available=override is not None))
                config, now = changed, after
            if highest(now).total <= limit:
                return out
    return out


def can_fit(config: RunConfig, setup_of: SetupOf, limit: float) -> bool:
    """Whether it fits, all changes made that this version has."""
    if highest(setup_of(config)).total <= limit:
        return True
    found = [change for change in changes(config, setup_of, limit) if change.available]
    return bool(found) and found[-1].after.total <= limit


def on_ranks(ranks: int, on_ray: bool) -> tuple[str, ...]:
    """The overrides that mean so many ranks. Ray reads its own key, and its ranks are always fsdp's."""
    if on_ray:
        return (f"cluster.num_workers={ranks}",)
    trainer = "fsdp" if ranks > 1 else "single"
    return (f"training.trainer={trainer}", f"training.num_processes={ranks}")


def enough_ranks(config: RunConfig, setup_of: SetupOf, limit: float) -> int | None:
    """The smallest power of two of GPUs on which it would fit, all changes made that this version has; None beyond
    MOST_RANKS."""
    ranks = config.num_ranks
    while (ranks := 2 * ranks) <= MOST_RANKS:
        more = with_overrides(config, on_ranks(ranks, config.cluster.kind == "ray"))
        if can_fit(more, setup_of, limit):
            return ranks
    return None


def _missing(setup: Setup, limit: float) -> float:
    """Bytes that the phases lack, all together: one phase's change counts also while another's peak is higher."""
    return sum(max(0.0, peak.total - limit) for peak in peaks(setup))


def _peak_of(setup: Setup, phase: str) -> float:
    return next(peak.total for peak in peaks(setup) if peak.phase == phase)


Attempt = Iterator[tuple[str, str | None]]
"""Text and override; None: not in this version."""


def _slots(config: RunConfig, now: Setup, limit: float) -> Attempt:
    """Only where the rollout is too large by itself."""
    slots = min(now.slots, now.phase)
    while slots > LEAST_SLOTS and now.engine is None and _peak_of(replace(now, slots=slots), "rollout") > limit:
        slots //= 2
        yield FEWER_SLOTS, f"actor_rollout_ref.rollout_slots={slots}"


def _checkpointing(config: RunConfig, now: Setup, limit: float) -> Attempt:
    if not config.training.activation_checkpointing:
        yield FEWER_ACTIVATIONS, "training.activation_checkpointing=true"


def _forwards(config: RunConfig, now: Setup, limit: float) -> Attempt:
    """Half the micro-batch as often as it helps; where forwards are cut by tokens, half the tokens."""
    t, r = config.training, config.actor_rollout_ref
    if not r.use_dynamic_bsz:
        micro, accumulation = t.micro_batch_size, t.gradient_accumulation_steps
        while micro > 1 and micro % 2 == 0:
            yield SMALLER_MICRO, halved_micro(micro, accumulation)
            micro, accumulation = micro // 2, 2 * accumulation
    budget = r.max_tokens_per_micro_batch
    row = now.lengths.longest_prompt + now.lengths.longest_response
    while budget // 2 >= row:  # a longer row goes alone in any case
        budget //= 2
        yield SMALLER_BUDGET, f"actor_rollout_ref.max_tokens_per_micro_batch={budget}"


def _offload(config: RunConfig, now: Setup, limit: float) -> Attempt:
    if now.kind == "cuda" and config.is_alone:
        yield "Keep the optimizer's moments in the host's memory", "training.offload.optimizer=true"
    elif now.kind == "cuda":
        yield "Keep the optimizer's moments in the host's memory (not with fsdp in this version)", None


def _posture(config: RunConfig, now: Setup, limit: float) -> Attempt:
    if config.algorithm.use_pf_ppo:
        yield OTHER_POSTURE, "algorithm.use_pf_ppo=false"
