"""A run folder is never mixed: what must stay the same between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klimb.config.posture import filled, resolve
from klimb.config.schema import RunConfig
from klimb.errors import CheckpointError

FREE = (
    "actor_rollout_ref.rollout_slots",
    "actor_rollout_ref.vllm.",
    "actor_rollout_ref.use_dynamic_bsz",
    "actor_rollout_ref.max_tokens_per_micro_batch",
    "actor_rollout_ref.trust_remote_code",
    "critic.lr",
    "critic.warmup_phases",
    "reward_model.reward_batch_size",
    "reward_model.timeout_seconds",
    "reward_model.workers",
    "reward_model.max_failed_fraction",
    "data.eval_files",
    "training.",
    "eval.",
    "diagnostics.",
)
"""Keys (and sections) that may change on resume, with a warning."""

SILENT = ("logging.", "run.", "compare.", "cluster.", "training.resume", "training.keep_checkpoints")
"""Keys that change no number. The ranks that `cluster` makes are counted by training.num_processes."""

GUARDED_AGAIN = ("training.seed", "training.dtype")


def refuse_other_kind(before: RunConfig, now: RunConfig, place: Path) -> list[str]:
    """Warnings for harmless differences. Raises CheckpointError, naming the keys, for the others.

    Optimizer moments, cached log-probs and the controller's statistics mean other things under another posture,
    model, estimator or reward.
    """
    old, new = flat(before), flat(now)
    changed = differing(old, new)
    free = [key for key in changed if key.startswith(FREE) and key not in GUARDED_AGAIN]
    fixed = [key for key in changed if key not in free]
    if fixed:
        lines = [f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in fixed]
        raise CheckpointError(
            f"{place}: this run is of another kind and cannot be continued with this config:\n"
            + "\n".join(lines)
            + "\nOptimizer moments, old log-probs and the KL controller mean other things there. Start a new run "
            "beside it with run.name=NEW_NAME (or training.resume=never), or set these keys back"
        )
    return [f"{key} was {old.get(key)!r}, goes on with {new.get(key)!r}" for key in free]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys of two flat configs that make two different runs of them."""
    changed = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    return [key for key in changed if not key.startswith(SILENT)]


def flat(config: RunConfig) -> dict[str, Any]:
    """Every dotted key with its value, `auto`s filled in."""
    out: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, dict) and value and not prefix.endswith("args"):
            for key, child in value.items():
                walk(child, f"{prefix}.{key}" if prefix else str(key))
        else:
            out[prefix] = value

    walk(filled(config, resolve(config)).model_dump(mode="json"), "")
    return out
