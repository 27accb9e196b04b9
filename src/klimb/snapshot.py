"""What a checkpoint holds, and how a run gets it back.

actor/          Hugging Face folder that transformers and vLLM open directly, tokenizer included; LoRA merged in
adapter/        with LoRA: the adapter as a peft folder, which is what a run goes on from
critic/         body and value head, where there is a critic
optimizer/      both optimizers, one safetensors file of each rank; any other number of ranks can read them
state.json      step, episodes, posture, controller, data position, reward moments, config, versions, log offsets
rng.safetensors torch's generator
manifest.json   sizes and sha256, by checkpoint.py
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.optimizer import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klimb.config.schema import RolloutConfig, RunConfig
from klimb.errors import CheckpointError
from klimb.ladder import Intervention
from klimb.models.load import VALUE_HEAD, Critic
from klimb.models.lora import check_base, has_adapter, load_adapter, save_adapter, save_plain, weights_for_engine
from klimb.models.sharded import put, whole
from klimb.offload import HOST, move_states
from klimb.ranks import Ranks
from klimb.sharded_state import is_sharded, load_optimizers, load_weights, save_optimizers, save_weights
from klimb.update import Trainable
from klimb.version import VERSION


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands. step: finished turns. best_*: the evaluation that `best` means, None before one.

    interventions: what the guard changed so far, in order."""

    step: int = 0
    episodes: int = 0
    best_step: int | None = None
    best_value: float | None = None
    interventions: tuple[Intervention, ...] = ()

    @staticmethod
    def of(record: dict[str, Any]) -> State:
        """From state.json; interventions came later than its other fields."""
        made = tuple(Intervention.of(entry) for entry in record.get("interventions", ()))
        fields = {name: value for name, value in record.items() if name != "interventions"}
        return State(**fields, interventions=made)


KEPT = (
    *("kl/k1", "kl/k3", "kl/coef", "advantage/mean", "advantage/std", "reward/mean", "reward/std"),
    *("eval/reward", "eval/accuracy", "eval/pass_at_k"),
)
"""Metrics kept in state.json, so that a checkpoint tells how the run stood without its log."""


class Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run that a checkpoint is made of. offsets: bytes of the log files at this state."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    actor: Trainable
    critic: Trainable | None
    stateful: Mapping[str, Any]
    offsets: Mapping[str, int]
    ranks: Ranks

    def optimizers(self) -> dict[str, tuple[nn.Module, Optimizer]]:
        return {name: (t.module, t.optimizer) for name, t in self.trainables().items()}

    def trainables(self) -> dict[str, Trainable]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})


def fill(folder: Path, parts: Parts, state: State, row: Mapping[str, float]) -> None:
    """Write all files but the manifest. row: the metrics of the phase that led to this state."""
    ranks = parts.ranks
    actor = cast(PreTrainedModel, parts.actor.module)
    _save_model(folder / "actor", actor, ranks)
    if has_adapter(actor):
        save_adapter(actor, folder / "adapter", ranks)
    ranks.first(lambda: parts.tokenizer.save_pretrained(folder / "actor"))
    if parts.critic is not None:
        _save_critic(folder / "critic", cast(Critic, parts.critic.module), ranks)
    save_optimizers(folder / "optimizer", parts.optimizers(), ranks)
    ranks.first(lambda: _fill_states(folder, parts, state, row))


def _save_model(folder: Path, model: PreTrainedModel, ranks: Ranks) -> None:
    """A folder that transformers opens."""
    if not is_sharded(model):
        ranks.first(lambda: save_plain(model, folder))
        return
    ranks.first(lambda: _save_settings(folder, model))
    save_weights(folder, {name: tensor.detach() for name, tensor in weights_for_engine(model)}, ranks)


def _save_critic(folder: Path, critic: Critic, ranks: Ranks) -> None:
    if not is_sharded(critic):
        ranks.first(lambda: critic.save(folder))
        return
    _save_model(folder, critic.body, ranks)
    head = {name: whole(p.detach()) for name, p in critic.head.named_parameters()}
    ranks.first(lambda: save_file(head, folder / VALUE_HEAD))


def _save_settings(folder: Path, model: PreTrainedModel) -> None:
    folder.mkdir()
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # which torch puts before what it divides
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _fill_states(folder: Path, parts: Parts, state: State, row: Mapping[str, float]) -> None:
    save_file({"torch": torch.get_rng_state()}, folder / "rng.safetensors")
    record = {
        "state": asdict(state),
        "optimizer_steps": {name: t.steps for name, t in parts.trainables().items()},
        "schedule_steps": parts.actor.schedule.num_steps,
        "posture": "explicit" if parts.config.algorithm.use_pf_ppo else "cached",
        **{name: dict(part.state_dict()) for name, part in parts.stateful.items()},
        "log_bytes": dict(parts.offsets),
        "metrics": {key: float(row[key]) for key in KEPT if key in row and math.isfinite(row[key])},
        "config_hash": _hash(parts.config.model_dump(mode="json")),
        "defaults_hash": _hash(RunConfig(actor_rollout_ref=RolloutConfig(model_path="")).model_dump(mode="json")),
        "config": parts.config.model_dump(mode="json"),
        "versions": {"klimb": VERSION, "torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
    }
    (folder / "state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Restored:
    """state; offsets to cut the log files to; metrics that the checkpoint holds; warnings for the user."""

    state: State
    offsets: dict[str, int]
    metrics: dict[str, float]
    warnings: tuple[str, ...]


def read_record(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose manifest was checked."""
    try:
        return json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: its state.json cannot be read: {error}") from None


def read_interventions(folder: Path | None) -> tuple[Intervention, ...]:
    """What the guard had changed when the checkpoint was written."""
    return () if folder is None else State.of(read_record(folder)["state"]).interventions


def restore(folder: Path, parts: Parts) -> Restored:
    """Put a checkpoint's weights and states into the parts, in place."""
    record = read_record(folder)
    _load_weights(folder, parts)
    _load_optimizers(folder, parts)
    for name, trainable in parts.trainables().items():
        # They were read to where the weights are: a module that waits for its update is not where its steps are made.
        home = HOST if trainable.states_wait else trainable.place
        if home is not None:
            move_states(trainable.optimizer, home)
        trainable.steps = int(record["optimizer_steps"][name])
    for name, part in parts.stateful.items():
        if name not in record:
            raise CheckpointError(
                f"{folder}: its state.json has no {name}; it was written by another version of klimb. Start a new run "
                "with training.resume=never, or resume with that version"
            )
        part.load_state_dict(record[name])
    torch.set_rng_state(load_file(folder / "rng.safetensors")["torch"])
    return Restored(
        state=State.of(record["state"]),
        offsets={str(name): int(size) for name, size in record["log_bytes"].items()},
        metrics={str(name): float(value) for name, value in record.get("metrics", {}).items()},
        warnings=tuple(_differences(record, parts)),
    )


def _load_optimizers(folder: Path, parts: Parts) -> None:
    if not (folder / "optimizer").is_dir():
        raise CheckpointError(
            f"{folder}: it has no folder optimizer; it was written by another version of klimb. Start a new run with "
            "training.resume=never, or resume with that version"
        )
    load_optimizers(folder / "optimizer", parts.optimizers())


def _load_weights(folder: Path, parts: Parts) -> None:
    modules = dict[str, nn.Module]()
    if has_adapter(parts.actor.module):
        actor = cast(PreTrainedModel, parts.actor.module)
        load_adapter(actor, folder / "adapter")
        check_base(actor, folder / "actor")
    else:
        modules["actor"] = parts.actor.module
    if parts.critic is not None:
        critic = cast(Critic, parts.critic.module)
        modules["critic"] = critic.body
        head = load_file(folder / "critic" / VALUE_HEAD)
        for name, parameter in critic.head.named_parameters():
            put(head[name], parameter)
    for name, module in modules.items():
        if is_sharded(module):
            load_weights(folder / name, module)
            continue
        model_class = cast(type[PreTrainedModel], type(module))
        saved = model_class.from_pretrained(folder / name, dtype=torch.float32, local_files_only=True)
        _copy(module, saved)


def _copy(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        values = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            parameter.copy_(values[name])
        buffers = dict(source.named_buffers())
        for name, buffer in target.named_buffers():
            buffer.copy_(buffers[name])


def _differences(record: Mapping[str, Any], parts: Parts) -> list[str]:
    """What may keep the rest of the run from being bit-identical."""
    out: list[str] = []
    now = {"klimb": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    for name, version in record["versions"].items():
        if version != now.get(name):
            out.append(f"the checkpoint was written with {name} {version}, this is {now.get(name)}: numbers may differ")
    if record["threads"] != torch.get_num_threads():
        out.append(
            f"the checkpoint was written with {record['threads']} threads, this process uses "
            f"{torch.get_num_threads()}: sums are rounded in another order"
        )
    if record["schedule_steps"] != parts.actor.schedule.num_steps:
        out.append(
            f"the learning-rate schedule was made for {record['schedule_steps']} optimizer steps, now it is "
            f"{parts.actor.schedule.num_steps}; the rate goes on from the new schedule"
        )
    return out
