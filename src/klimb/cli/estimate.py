"""The part of `klimb plan` that speaks of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from klimb import host
from klimb.cli.prompts import LOOKED_AT, lengths
from klimb.config.load import with_overrides
from klimb.config.paths import model_folder
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError
from klimb.estimate import gpus
from klimb.estimate.changes import Change, SetupOf, can_fit, changes, enough_ranks, on_ranks
from klimb.estimate.duration import Pace, kept_pace
from klimb.estimate.forecast import Forecast, Machine, bounded, counts_of, forecast, read_models, setup_of
from klimb.estimate.setup import Lengths, Models, Setup
from klimb.estimate.shapes import assumed, places
from klimb.estimate.show import GIB, duration, memory_lines, size, time_line, unit_of

RESPONSE_SHARE = 0.5
"""Of max_tokens, that a response has on average when nobody says: a run's own length/mean replaces it."""
GPU_MEMORY = 80.0


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line says. gpu_memory in GiB (an 80 GB card has 80); rate in TFLOP/s."""

    gpus: int | None = None
    gpu_memory: float | None = None
    assume: str | None = None
    response_tokens: int | None = None
    prompt_tokens: int | None = None
    rate: float | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if self.measure and (self.rate is not None or self.is_elsewhere):
            raise ConfigError("--measure measures this machine; leave --rate, --gpus and --gpu-memory out")

    @property
    def is_elsewhere(self) -> bool:
        return self.gpus is not None or self.gpu_memory is not None

    def overrides(self, on_ray: bool = False) -> tuple[str, ...]:
        """What --gpus means in keys."""
        return () if self.gpus is None else on_ranks(self.gpus, on_ray)

    def machine(self, config: RunConfig) -> Machine:
        """Of one rank: what this machine has is divided among those that run on it."""
        rate = None if self.rate is None else self.rate * 1e12
        if self.is_elsewhere:
            return Machine(gpu_bytes=(self.gpu_memory or GPU_MEMORY) * GIB, gpu_peak=rate)
        alone = host.cores_each(1)
        pace = _measured() if self.measure else kept_pace(alone, rate)
        return Machine(pace=pace.on(_cores_each(config), alone))


def _measured() -> Pace:
    import torch

    from klimb.build import pick_device
    from klimb.floor import measured_pace

    return measured_pace(pick_device(), torch.float32)


def _ranks_here(config: RunConfig) -> int:
    """Ranks that run on this machine, where there are no GPUs. 1 on a Ray cluster of several: Ray spreads them."""
    return config.num_ranks if config.cluster.kind == "local" or config.cluster.address is None else 1


def _cores_each(config: RunConfig) -> float:
    """Ray gives every rank one core, and torch takes as many."""
    return host.cores_each(_ranks_here(config), 1 if config.cluster.kind == "ray" else None)


def show_estimate(console: Console, config: RunConfig, wish: Wish) -> None:
    """Memory by phase and part, whether it fits and what makes it fit, seconds of a step and hours of the run."""
    models, name = _models(config, wish)
    if models is None:
        text = "memory and time: not told, the model's config.json is not on this machine; say --assume-model 7b"
        console.print(Text(f"\n{text}, or the path of a config.json"), soft_wrap=True)
        return
    machine, means = wish.machine(config), _lengths(config, wish)
    for line in _too_long(config, wish, means):
        console.print(Text(f"\n{line}", style="yellow"), soft_wrap=True)
    found = forecast(config, models, bounded(means), means, machine)
    for line in (*_memory(config, models, found, machine, means, name), *_time(config, found, machine, means, wish)):
        console.print(Text(line), soft_wrap=True)


def _too_long(config: RunConfig, wish: Wish, means: Lengths) -> list[str]:
    """Where the model here cannot read what the limits allow: loading it would say so, minutes later."""
    limit = None if wish.assume is not None else places(model_folder(config.actor_rollout_ref.model_path))
    needed = means.longest_prompt + means.longest_response
    if limit is None or needed <= limit:
        return []
    return [
        f"too long: a prompt of {means.longest_prompt:,} and a response of {means.longest_response:,} tokens need "
        f"{needed:,} places and the model reads {limit:,}; lower actor_rollout_ref.max_tokens or data.max_prompt_tokens"
    ]


def _models(config: RunConfig, wish: Wish) -> tuple[Models | None, str]:
    if wish.assume is not None:
        shape, name = assumed(wish.assume)
        return Models(actor=shape), name
    return read_models(config), config.actor_rollout_ref.model_path


def _lengths(config: RunConfig, wish: Wish) -> Lengths:
    """Prompts as the data has them, where it can be read; else all at their limit."""
    limit, longest_response = config.data.max_prompt_tokens, config.actor_rollout_ref.max_tokens
    read = (
        None if wish.prompt_tokens is not None else lengths(config, model_folder(config.actor_rollout_ref.model_path))
    )
    mean, longest = (float(limit), limit) if read is None else (read[0], min(read[1], limit))
    return Lengths(
        prompt=float(wish.prompt_tokens) if wish.prompt_tokens is not None else mean,
        longest_prompt=max(longest, wish.prompt_tokens or 0),
        response=float(min(wish.response_tokens or RESPONSE_SHARE * longest_response, longest_response)),
        longest_response=longest_response,
    )


def _memory(
    config: RunConfig, models: Models, found: Forecast, machine: Machine, means: Lengths, name: str
) -> list[str]:
    peaks, top = found.peaks, found.highest
    where, limit, whose = _place(config, machine)
    bounds = f"prompts of {means.longest_prompt:,} and responses of {means.longest_response:,} tokens"
    lines = ["", f"memory {where}, {_count(models.actor.weights)} weights ({name}), {bounds}", ""]
    lines += memory_lines(peaks, top.phase, "highest")
    if limit is None:
        return [*lines, "", "how much memory there is, this system does not say"]
    unit, unit_name = unit_of(peaks)
    there = f"{size(limit, unit)} {unit_name} there are{whose}"
    if top.total <= limit:
        lines += ["", f"fits: {size(top.total, unit)} of the {there}"]
    else:
        tried = changes(config, lambda c: setup_of(c, models, bounded(means), machine), limit)
        lines += ["", f"does not fit: the {top.phase} needs {size(top.total, unit)}, {there}"]
        lines += _remedies(config, tried, limit, machine, models, means)
    if machine.gpu_bytes is None:
        lines += ["a GPU is here and would be taken: plan for it with --gpus and --gpu-memory"] * host.has_gpu()
    else:
        lines.append("counted, not measured on a GPU: leave a tenth for what no part names (fragments, libraries)")
        if config.actor_rollout_ref.rollout_provider == "vllm":
            share = config.actor_rollout_ref.vllm.memory_share
            awake = "while answers are written and rewarded; it sleeps in score and update"
            lines.append(f"engine: {100 * share:.3g}% of each GPU (actor_rollout_ref.vllm.memory_share), {awake}")
            lines += _engine_too_small(config, setup_of(config, models, means, machine))
    return lines


def _engine_too_small(config: RunConfig, setup: Setup) -> list[str]:
    """Where its weights are more than what it may have of each GPU."""
    weights = setup.wide * setup.actor.weights / config.actor_rollout_ref.vllm.tensor_parallel
    if setup.engine is None or weights < setup.engine:
        return []
    return [
        f"  but its weights alone need {weights / GIB:,.1f} GiB of each, and that is {setup.engine / GIB:,.1f}: raise "
        "actor_rollout_ref.vllm.memory_share, or actor_rollout_ref.vllm.tensor_parallel (on Ray)"
    ]


def _place(config: RunConfig, machine: Machine) -> tuple[str, float | None, str]:
    """What the table is of, how many bytes there are for it, and whose they are where that is not plain."""
    if machine.gpu_bytes is not None:
        return "of each GPU", machine.gpu_bytes, ""
    ranks, here, memory = config.num_ranks, _ranks_here(config), host.memory()
    if ranks == 1:
        return "of this process", memory, ""
    where = f"of each of {ranks} ranks"
    if here == 1:
        return where, memory, " on a machine like this one, if Ray puts no other rank there"
    return where, None if memory is None else memory / here, f" for each: {here} ranks share this machine's memory"


def _count(weights: int) -> str:
    return f"{weights / 1e9:.3g}B" if weights >= 1e9 else f"{weights / 1e6:.3g}M"


def _remedies(
    config: RunConfig, tried: Sequence[Change], limit: float, machine: Machine, models: Models, means: Lengths
) -> list[str]:
    """The changes in order, each with the number after it, and what is left to say when they do not suffice."""
    lines = ["what makes it fit, each on top of the one before:"] if tried else []
    for number, change in enumerate(tried, start=1):
        after = f"{change.after.total / GIB:,.1f} GiB in the {change.after.phase}"
        fits = ", fits" if change.after.total <= limit else ""
        override = f":  {change.remedy.override}" if change.remedy.override else ""
        lines.append(f"  {number}. {change.remedy.text}{override}  -> {after}{fits}")
    available = [change for change in tried if change.available]
    if available and available[-1].after.total <= limit:
        return lines
    if not tried or tried[-1].after.total > limit:
        missing = (tried[-1].after.total if tried else limit) - limit
        lines.append(
            f"  these do not suffice: {missing / GIB:,.1f} GiB are missing" if tried else "  nothing to change"
        )
    if machine.gpu_bytes is None:
        fewer = "fewer ranks, " if _ranks_here(config) > 1 else ""
        lines.append(
            f"  left: {fewer}a smaller model, shorter responses (actor_rollout_ref.max_tokens), or another machine"
        )
        return lines

    def setup(c: RunConfig) -> Setup:
        return setup_of(c, models, bounded(means), machine)

    ranks = enough_ranks(config, setup, limit)
    if ranks is not None:
        lines.append(f"  with what this version has it fits on --gpus {ranks}")
    else:
        in_process = config.actor_rollout_ref.rollout_provider == "hf"  # every rank brings the whole policy together
        what = "with the policy sampled from on every GPU (rollout_provider=hf) " if in_process else ""
        lines.append(f"  {what}no number of such GPUs makes it fit: a smaller model, or larger GPUs")
        lines += _with_engines(config, setup, limit) if in_process else []
    return lines


def _with_engines(config: RunConfig, setup: SetupOf, limit: float) -> list[str]:
    """What vLLM engines on Ray, which keep the policy in a form of their own, would do to it."""
    words = ("cluster.kind=ray", "actor_rollout_ref.rollout_provider=vllm")
    other = with_overrides(config, (*words, *on_ranks(config.num_ranks, on_ray=True)))
    ranks = config.num_ranks if can_fit(other, setup, limit) else enough_ranks(other, setup, limit)
    if ranks is None:
        return []
    return [f"  with vLLM engines on Ray it fits on --gpus {ranks}: klimb plan ... {' '.join(words)}"]


def _time(config: RunConfig, found: Forecast, machine: Machine, means: Lengths, wish: Wish) -> list[str]:
    counts = counts_of(config)
    total = sum(found.seconds.values()) * counts.episodes / counts.phase
    said = "as said" if wish.response_tokens else f"taken as {RESPONSE_SHARE:.0%} of max_tokens (--response-tokens)"
    source = "as said" if wish.prompt_tokens else f"of the first {LOOKED_AT} or at their limit (--prompt-tokens)"
    lines = [
        "",
        f"time: {time_line(found.seconds)}",
        f"  {duration(total)} for {counts.phases:,} steps; rewards by functions, evaluations and saving come on top",
        f"  responses of {means.response:,.0f} tokens on average, {said}; prompts of {means.prompt:,.0f}, {source}",
    ]
    if machine.gpu_bytes is not None:
        return [*lines, f"  {gpus.SOURCE}" + ("; the peak as said" if wish.rate else "")]
    assert machine.pace is not None
    how = "measured now" if wish.measure else "as said" if wish.rate else "kept from another machine: --measure, --rate"
    ranks = _ranks_here(config)
    shared = f" for each of {ranks} ranks, which share {host.all_cores()}" if ranks > 1 else ""
    on = f"{_cores_each(config):.3g} core(s){shared}"
    return [*lines, f"  products at {machine.pace.products / 1e9:,.0f} GFLOP/s on {on}, {how}"]
