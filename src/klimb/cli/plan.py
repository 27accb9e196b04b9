"""`klimb plan`: the resolved config with its origins, the batch arithmetic, passes, advice, memory and time."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from klimb.cli.estimate import Wish, show_estimate
from klimb.config import advice, counts
from klimb.config.load import Loaded, known_keys, known_sections
from klimb.config.paths import VLLM, check_engines, missing_paths, only_alone
from klimb.config.posture import AUTO_KEYS, Posture, resolve
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, DataError
from klimb.tasks.table import load_task

OTHER_AUTO = {
    "training.keep_freed_memory": "true on a CPU, else false",
    "training.dtype": "bfloat16 on a GPU that has it, else float32",
    "actor_rollout_ref.rollout_slots": "64 on a CPU, 256 on a GPU",
    "training.resume": "the run folder's newest checkpoint, if there is one",
    "cluster.address": "the Ray cluster that this machine belongs to",
}
"""What `auto` means where neither posture nor length decides it."""

PIPE_WIDTH = 200


def show_plan(loaded: Loaded, elsewhere: bool, wish: Wish | None = None) -> None:
    """Print all of it, and what it needs of the machine that is wished for.

    Raises ConfigError for missing paths unless they are elsewhere.
    """
    config, console = loaded.config, open_console()
    missing = [text for _, text in missing_paths(config)]
    if missing and not elsewhere:
        raise ConfigError("\n".join([*missing, "If these paths are on another machine, plan with --elsewhere"]))
    check_tasks(config)
    check_engines(config)
    posture = resolve(config)
    console.print(values_table(loaded, posture))
    show_arithmetic(console, config, posture)
    console.print(Text(f"\nposture: {explain(config, posture)}"), soft_wrap=True)
    for text in later(config):
        console.print(Text(f"not in this version: {text}"), soft_wrap=True)
    for text in missing:
        console.print(Text(f"not on this machine: {text}", style="yellow"), soft_wrap=True)
    show_advice(console, config, posture)
    show_estimate(console, config, wish or Wish())


def open_console() -> Console:
    """The terminal, or on a pipe lines that are not folded: what reads them looks for whole keys and paths."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def check_tasks(config: RunConfig) -> None:
    """Refuse a built-in task that does not exist. gym: names are checked where reasoning-gym is imported anyway."""
    for key, specs in (("train_files", config.data.train_files), ("eval_files", config.data.eval_files)):
        for spec in specs:
            if spec.startswith("task:"):
                try:
                    load_task(spec)
                except DataError as error:
                    raise ConfigError(f"data.{key}: {error}") from None


def values_table(loaded: Loaded, posture: Posture) -> Table:
    """Every key: value, and file, override, auto or default."""
    columns = (Column("key", no_wrap=True), Column("value", overflow="fold"), Column("from", overflow="fold"))
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    keys = [key for key, _ in known_keys()]
    sections = known_sections()
    for key in keys:
        value = _value(loaded.config, key)
        if key in sections:
            continue
        origin = loaded.origins.get(key, "default")
        if value == "auto" and (key in AUTO_KEYS or key in OTHER_AUTO or key == "algorithm.kl_estimator"):
            value, origin = _auto(key, posture), "auto" if origin == "default" else f"auto, {origin}"
        table.add_row(Text(key), Text(_shown(value)), Text(origin, style="" if origin != "default" else "dim"))
    return table


def show_arithmetic(console: Console, config: RunConfig, posture: Posture) -> None:
    """The batch arithmetic as one table; also at the start of every run."""
    numbers = counts.count(config, posture)
    table = Table("", "", "how", title="batch arithmetic", title_justify="left", box=None, pad_edge=False)
    for name, number, how in counts.table(config, numbers):
        table.add_row(Text(name), Text(number, justify="right"), Text(how, style="dim"))
    if posture.needs_reference and posture.kl_type != "fixed":
        ctrl = config.algorithm.kl_ctrl
        how = f"within {ctrl.min_kl_coef:g} to {ctrl.max_kl_coef:g}"
        if posture.kl_type == "adaptive":
            how = f"at most x{advice.reach(config, numbers):.3g} in {numbers.phases} phases, {how}"
        coef = Text(f"{posture.init_kl_coef:g}", justify="right")
        table.add_row("KL coefficient", coef, Text(how, style="dim"))
        per_answer = ctrl.target_kl * config.actor_rollout_ref.max_tokens
        table.add_row(
            "target KL",
            Text(f"{ctrl.target_kl:g}", justify="right"),
            Text(f"nats per token; {per_answer:.3g} per answer of max_tokens", style="dim"),
        )
    console.print(Text())
    console.print(table)


def show_advice(console: Console, config: RunConfig, posture: Posture) -> None:
    found = advice.advise(config, posture, counts.count(config, posture))
    if found:
        console.print(Text("\nadvice (docs/advice.md explains each code)"))
    for item in found:
        console.print(Text(f"  {item.code}: {item.text}"), soft_wrap=True)


def explain(config: RunConfig, posture: Posture) -> str:
    """Which models are forwarded when, and where the KL sits."""
    passes = ["rollout (policy)"]
    skips = counts.skips_old_pass(config, posture, counts.count(config, posture))
    if config.algorithm.estimator.needs_greedy:
        passes.append("greedy answers (policy)")
    if posture.explicit and not skips:
        passes.append("old log-probs (policy, no gradient)")
    if posture.needs_reference:
        shared = config.actor_rollout_ref.lora is not None and config.actor_rollout_ref.ref_model_path is None
        passes.append("reference (" + ("the policy with its adapter off, " if shared else "") + "no gradient)")
    if config.needs_critic:
        passes.append("values (critic, no gradient)")
    if config.reward_model.model_path:
        passes.append("reward model")
    passes.append("update (policy" + (" and critic)" if config.needs_critic else ")"))
    places = [name for name, on in (("the reward", posture.kl_in_reward), ("the loss", posture.kl_in_loss)) if on]
    kl = (
        f"KL in {' and '.join(places)}, {posture.kl_type} coefficient from {posture.init_kl_coef:g}"
        if places
        else "no KL"
    )
    old = "old log-probs recomputed" if posture.explicit else "old log-probs are the sampler's"
    if skips:
        old = "one optimizer step per phase, so the update's own forward gives the old log-probs"
    lora = config.actor_rollout_ref.lora
    trained = "" if lora is None else f"trained: a LoRA adapter of rank {lora.rank}; all other weights stay\n"
    return (
        f"{posture.name} (use_pf_ppo={str(posture.explicit).lower()}): {old}; {kl}\n"
        f"passes per phase: {', '.join(passes)}\n"
        f"{trained}"
        "(upstream verl's key of the same name means policy filtration, another thing)"
    )


def later(config: RunConfig) -> list[str]:
    """Values this version plans but does not run."""
    return [
        f"{key} beside several ranks{' without cluster.kind=ray' if key == VLLM else ''}; klimb train refuses it"
        for key in only_alone(config)
    ]


def _auto(key: str, posture: Posture) -> Any:
    if key == "algorithm.kl_estimator":
        used = [
            ("loss", posture.kl_loss_estimator, posture.kl_in_loss),
            ("reward", posture.kl_reward_estimator, posture.kl_in_reward),
        ]
        return ", ".join(f"{name} ({place})" for place, name, on in used if on) or "unused"
    return getattr(posture, AUTO_KEYS[key]) if key in AUTO_KEYS else OTHER_AUTO[key]


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(_item(v) for v in value) + "]"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(v)}" for name, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _item(value: Any) -> str:
    return f"{value.name} x {value.weight:g}" if hasattr(value, "weight") else _shown(value)
