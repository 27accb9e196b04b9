"""A finding: what was seen, why it happens, what to try, in the order in which to try it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "warning", "alarm"]
RANK: dict[str, int] = {"alarm": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What to do; override: what does it, quoted as a shell needs it, None where today's value is not known or where it
    is no matter of the config; key: the setting that it is about."""

    text: str
    override: str | None = None
    key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """klimb's names of the settings that it changes."""
        if self.override is None:
            return () if self.key is None else (self.key,)
        return tuple(word.partition("=")[0] for word in shlex.split(self.override))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rule saw. first, last: steps between which it holds, perhaps with gaps; since: where its last stretch
    began; named: the step at which there was enough to say so; evidence and series: what to show;
    variant: which of several forms, with a mechanism or remedies of its own."""

    severity: Severity
    first: int
    named: int
    last: int
    since: int
    evidence: str
    series: str
    variant: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding(Seen):
    """What a rule saw, with its name and what follows. code: one of docs/doctor.md; mechanism: two sentences; remedies:
    by priority; after: the finding that began earlier and may explain this one."""

    code: str
    mechanism: str
    remedies: tuple[Remedy, ...]
    after: str | None = None

    @property
    def first_override(self) -> str | None:
        """Of the first remedy that has one."""
        return next((remedy.override for remedy in self.remedies if remedy.override is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the run's settings; None where it is not. target_kl: only where a controller steers to it."""

    source: str = "klimb"
    explicit: bool | None = None
    lr: float | None = None
    temperature: float | None = None
    engine: str | None = None
    target_kl: float | None = None
    init_kl_coef: float | None = None
    kl_type: str | None = None
    kl_in_reward: bool | None = None
    kl_in_loss: bool | None = None
    max_kl_coef: float | None = None
    min_kl_coef: float | None = None
    ppo_epochs: int | None = None
    train_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    rollout_batch: int | None = None
    rollouts_per_prompt: int | None = None
    max_tokens: int | None = None
    critic_lr: float | None = None
    reward_clip: bool | None = None
    checkpointing: bool | None = None
    fallback: bool | None = None
    offload: bool | None = None
    several_ranks: bool | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Facts:
        """From a run folder's config.yaml, `auto`s filled in there; what is missing or odd stays unknown."""

        def get(key: str, kind: type[Any]) -> Any:
            node: Any = config
            for part in key.split("."):
                node = node.get(part) if isinstance(node, Mapping) else None
            if kind is float and isinstance(node, int) and not isinstance(node, bool):
                return float(node)
            right = isinstance(node, kind) and (kind is bool or not isinstance(node, bool))
            return node if right else None

        a, r, t, kl = "algorithm", "actor_rollout_ref", "training", "algorithm.kl_ctrl"
        kl_type = get(f"{kl}.type", str)
        in_reward, in_loss = get(f"{a}.use_kl_in_reward", bool), get(f"{a}.use_kl_loss", bool)
        steered = kl_type in ("adaptive", "pi") and (in_reward or in_loss)
        micro, accumulation = get(f"{t}.micro_batch_size", int), get(f"{t}.gradient_accumulation_steps", int)
        ranks = get(f"{t}.num_processes", int) or 1
        offload = [get(f"{t}.offload.{what}", bool) for what in ("params", "optimizer")]
        clip = config.get("reward_model", {}) if isinstance(config.get("reward_model"), Mapping) else {}
        return Facts(
            explicit=get(f"{a}.use_pf_ppo", bool),
            lr=get(f"{t}.lr", float),
            temperature=get(f"{r}.temperature", float),
            engine=get(f"{r}.rollout_provider", str),
            target_kl=get(f"{kl}.target_kl", float) if steered else None,
            init_kl_coef=get(f"{kl}.init_kl_coef", float),
            kl_type=kl_type,
            kl_in_reward=in_reward,
            kl_in_loss=in_loss,
            max_kl_coef=get(f"{kl}.max_kl_coef", float),
            min_kl_coef=get(f"{kl}.min_kl_coef", float),
            ppo_epochs=get(f"{a}.ppo_epochs", int),
            train_batch=None if micro is None or accumulation is None else micro * accumulation * ranks,
            micro_batch=micro,
            accumulation=accumulation,
            rollout_batch=get(f"{r}.rollout_batch_size", int),
            rollouts_per_prompt=get(f"{r}.rollouts_per_prompt", int),
            max_tokens=get(f"{r}.max_tokens", int),
            critic_lr=get("critic.lr", float),
            reward_clip=None if "clip" not in clip else clip["clip"] is not None,
            checkpointing=get(f"{t}.activation_checkpointing", bool),
            fallback=get(f"{t}.micro_batch_fallback", bool),
            offload=None if None in offload else all(offload),
            several_ranks=get(f"{t}.trainer", str) == "fsdp" or get("cluster.kind", str) == "ray",
        )
