"""RunConfig to Run: the one file that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klimb.batch import Split
from klimb.config.counts import count
from klimb.config.load import with_overrides
from klimb.config.paths import model_folder
from klimb.config.posture import Posture, filled, resolve
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.data.chat import end_ids
from klimb.data.files import read_rows
from klimb.data.prompts import PromptStream, build_prompts, check_context
from klimb.data.rows import DataSettings
from klimb.derive import actor_steps, make_controller, make_follow, make_recipe, make_schedule, make_split
from klimb.doctor.finding import Facts
from klimb.errors import ConfigError
from klimb.estimate.duration import Pace
from klimb.exhaustion import LastWords
from klimb.fallback import Fallback
from klimb.floor import Cost, Floor, body_cost, cost_of, measured_pace
from klimb.ladder import Intervention, all_overrides
from klimb.learn import Roles
from klimb.malloc import keep_freed_memory
from klimb.models.attention import recompute_activations
from klimb.models.load import (
    body_of,
    context_limit,
    critic_from,
    freeze,
    frozen_copy,
    load_causal_lm,
    load_critic,
    load_tokenizer,
    model_end_ids,
    pad_id,
    with_adapter,
)
from klimb.models.lora import add_lora
from klimb.models.sharded import shard
from klimb.offload import HOST
from klimb.ranks import ALONE, Ranks
from klimb.reward.base import RewardComponent, RewardSettings
from klimb.reward.combine import Moments
from klimb.reward.divided import DividedComponent
from klimb.reward.model import RewardModel, RewardModelSettings
from klimb.reward.table import FunctionSpec, make_components
from klimb.reward.workers import WorkerPool
from klimb.rollout.base import Sampler, Sampling
from klimb.rollout.divided import DividedSampler
from klimb.rollout.hf import HFSampler
from klimb.rollout.remote import RemoteSampler
from klimb.rollout.replica import ReplicaSampler
from klimb.rollout.vllm import EngineSettings, VLLMSampler
from klimb.run import Run
from klimb.runlog import RunLog
from klimb.seeds import derive_seed
from klimb.types import Prompt
from klimb.update import make_trainable
from klimb.watch import Watch

NEEDS_ANSWER = frozenset({"exact_answer", "math"})


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenised prompts of both splits."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]
    longest: int


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Compute dtype. auto asks the device what it can do: bfloat16 products on a CPU are far slower than float32."""
    if wanted == "auto":
        # Older GPUs emulate it, slower than float32.
        has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def load_data(config: RunConfig, tokenizer: PreTrainedTokenizerBase, screen: Screen, train: bool = True) -> Data:
    """Both splits read, checked and tokenised, before any model is loaded."""
    d = config.data
    settings = DataSettings(
        prompt_key=d.prompt_key,
        answer_key=d.answer_key,
        system_prompt=d.system_prompt,
        max_prompt_tokens=d.max_prompt_tokens,
        overlong=d.overlong_prompts,
        shuffle=d.shuffle,
    )
    needs_answer = any(f.name in NEEDS_ANSWER for f in config.reward_model.functions)
    out: dict[str, tuple[Prompt, ...]] = {"train": (), "eval": ()}
    longest = 0
    for split, files in (("train", d.train_files if train else ()), ("eval", d.eval_files)):
        rows = [
            row
            for spec in files
            for row in read_rows(spec, "train" if split == "train" else "eval", settings, needs_answer)
        ]
        if split == "eval":
            rows = rows[: config.eval.max_prompts]
        if not rows:
            continue
        out[split], counts = build_prompts(rows, tokenizer, settings)
        longest = max(longest, counts.longest)
        note = f", {counts.dropped} dropped" if counts.dropped else ""
        note += f", {counts.truncated} cut" if counts.truncated else ""
        screen.say(
            f"{split} data: {counts.kept:,} prompts from {', '.join(files)}{note}; longest {counts.longest} tokens"
        )
    return Data(train=out["train"], eval=out["eval"], longest=longest)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How models are divided among ranks. divide: in place; its blocks then compute in this dtype."""

    ranks: Ranks
    divide: Callable[[nn.Module, torch.dtype], None]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where this process computes, in which dtype, and with whom."""

    device: torch.device
    dtype: torch.dtype
    division: Division | None


def make_division(config: RunConfig, ranks: Ranks, device: torch.device) -> Division | None:
    if config.training.trainer == "single":
        return None
    mesh = init_device_mesh(device.type, (ranks.size,))
    return Division(ranks=ranks, divide=lambda module, dtype: shard(module, mesh, dtype))


def make_pool(config: RunConfig) -> WorkerPool:
    r = config.reward_model
    return WorkerPool(workers=r.workers, timeout_seconds=r.timeout_seconds, max_failed_fraction=r.max_failed_fraction)


def build_components(
    config: RunConfig,
    pool: WorkerPool,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    division: Division | None = None,
) -> tuple[RewardComponent, ...]:
    """The reward functions and, behind them, the reward model."""
    r = config.reward_model
    specs = [FunctionSpec(name=f.name, weight=f.weight, args=f.args) for f in r.functions]
    components: Sequence[RewardComponent] = make_components(specs, pool)
    if r.model_path is not None:
        settings = RewardModelSettings(
            path=str(model_folder(r.model_path)),
            batch_size=r.reward_batch_size,
            max_tokens=config.actor_rollout_ref.max_tokens_per_micro_batch,
            trust_remote_code=config.actor_rollout_ref.trust_remote_code,
            offload=config.training.offload.params and device != HOST,
        )
        model = RewardModel(
            settings,
            policy_tokenizer=tokenizer,
            device=device,
            ranks=ALONE if division is None else division.ranks,
            divide=None if division is None else lambda module: division.divide(module, torch.float32),
        )
        components = (*components, model)
    if division is None:
        return tuple(components)
    return tuple(DividedComponent(component, division.ranks) for component in components)


def reward_settings(config: RunConfig, posture: Posture) -> RewardSettings:
    r = config.reward_model
    return RewardSettings(
        on_failure=r.on_failure,
        max_failed_fraction=r.max_failed_fraction,
        normalize=r.normalize,
        clip=posture.reward_clip,
    )


def slots(config: RunConfig, device: torch.device) -> int:
    wanted = config.actor_rollout_ref.rollout_slots
    return (64 if device.type == "cpu" else 256) if wanted == "auto" else wanted


def samplings(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sampling, Sampling]:
    """How training samples and how evaluation does."""
    r, e = config.actor_rollout_ref, config.eval
    ids, strings = end_ids(tokenizer, model_end_ids(model), r.stop)
    training = Sampling(temperature=r.temperature, max_tokens=r.max_tokens, end_ids=ids, stop_strings=strings)
    return training, replace(training, temperature=e.temperature, top_p=e.top_p, top_k=e.top_k)


def build_run(
    config: RunConfig,
    folder: Path,
    screen: Screen,
    pool: WorkerPool,
    interventions: Sequence[Intervention] = (),
    ranks: Ranks = ALONE,
) -> Run:
    """Everything loaded and checked, cheap things first. `pool` stays the caller's to close. interventions: what the
    guard changed before the checkpoint that the run goes on from."""
    base_config, config = config, with_overrides(config, all_overrides(interventions)) if interventions else config
    posture = resolve(config)
    r, t, device = config.actor_rollout_ref, config.training, pick_device()
    dtype = pick_dtype(t.dtype, device)
    if t.keep_freed_memory is True or (t.keep_freed_memory == "auto" and device.type == "cpu"):
        keep_freed_memory()
    actor_folder = model_folder(r.model_path)
    tokenizer = load_tokenizer(actor_folder, r.trust_remote_code)
    data = load_data(config, tokenizer, screen)
    if not data.train:
        raise ConfigError("data.train_files is empty; name at least one file, or task:arithmetic")
    counts = count(config, posture, len(data.train))
    division = make_division(config, ranks, device)
    components = build_components(config, pool, tokenizer, device, division)
    _check_eval(config, data, components)
    # Models to be divided are loaded whole into host memory: of the device's each rank needs its part only.
    place = device if division is None else HOST
    actor_model = load_policy(config, actor_folder, place)
    check_context(data.longest, r.max_tokens, context_limit(actor_model))
    on = Device(device=device, dtype=dtype, division=division)
    sampler = make_sampler(config, actor_model, tokenizer, on, data.longest + r.max_tokens)
    roles, wait = _offloaded(config, _roles(config, posture, actor_model, place), device, screen)
    floor = _floor(roles, measured_pace(device, dtype), ranks)
    _prepare(roles, t.activation_checkpointing, on)
    sampling, eval_sampling = samplings(config, actor_model, tokenizer)
    complete = filled(config, posture).model_dump(mode="json")
    actor_schedule = make_schedule(config, actor_steps(config, counts), posture.lr)
    critic_schedule = make_schedule(config, counts.optimizer_steps, config.critic.lr)
    return Run(
        base_config=base_config,
        config=config,
        posture=posture,
        counts=counts,
        recipe=make_recipe(config, posture, dtype),
        split=make_split(config, counts),
        value_split=Split(
            rows_per_step=counts.phase,
            rows_per_micro=config.reward_model.reward_batch_size,
            budget=r.max_tokens_per_micro_batch,
            epochs=1,
        ),
        fallback=Fallback(on=t.micro_batch_fallback, say=screen.warn),
        folder=folder,
        tokenizer=tokenizer,
        pad_id=pad_id(tokenizer),
        roles=roles,
        actor=make_trainable(actor_model, actor_schedule, t.weight_decay, None, wait),
        critic=None
        if roles.critic is None
        else make_trainable(roles.critic, critic_schedule, t.weight_decay, roles.place, wait),
        controller=make_controller(config, posture),
        follow=make_follow(config, posture),
        sampler=sampler,
        sampling=sampling,
        greedy_sampling=replace(sampling, temperature=0.0) if config.algorithm.estimator.needs_greedy else None,
        eval_sampling=eval_sampling,
        prompts=PromptStream(data.train, t.seed, config.data.shuffle),
        eval_prompts=data.eval,
        components=components,
        reward_settings=reward_settings(config, posture),
        moments=Moments(),
        floor=floor,
        log=RunLog(folder, config.logging, folder.name, complete, writes=ranks.is_first),
        screen=screen,
        last_words=LastWords(folder, speaks=ranks.is_first),
        watch=Watch(Facts.of(complete)),
        ranks=ranks,
    )


def make_sampler(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: Device,
    context: int,
) -> Sampler:
    """The engine that the config names, made before the model is divided: every rank then samples from a whole copy.
    context: most tokens of a prompt and its response together."""
    r, num_slots = config.actor_rollout_ref, slots(config, device.device)
    if r.rollout_provider == "vllm":
        settings = EngineSettings(
            folder=model_folder(r.model_path).resolve(),  # another process need not be in this one's folder
            slots=num_slots,
            context=context,
            dtype=device.dtype,
            memory_share=r.vllm.memory_share,
            tensor_parallel=r.vllm.tensor_parallel,
            sleeps=device.device.type == "cuda",
            trust_remote_code=r.trust_remote_code,
        )
        if device.division is None:
            return VLLMSampler(settings, tokenizer)
        return RemoteSampler(settings, tokenizer, device.division.ranks)
    if device.division is None:
        return HFSampler(model, tokenizer, num_slots, device.dtype)
    replica = ReplicaSampler(model, tokenizer, num_slots, device.dtype, device.device)
    return DividedSampler(replica, device.division.ranks)


def _floor(roles: Roles, pace: Pace, ranks: Ranks) -> Floor:
    critic = None if roles.critic is None else Cost(body=body_cost(roles.critic.body), head=0.0)
    return Floor(pace=pace, ranks=ranks.size, actor=cost_of(roles.actor), critic=critic)


def _prepare(roles: Roles, checkpointing: bool, on: Device) -> None:
    """Activation checkpointing inside of what is divided: a block is gathered before it runs again."""
    if checkpointing:
        recompute_activations(body_of(roles.actor))
        if roles.critic is not None:
            recompute_activations(roles.critic.body)
    if on.division is None:
        return
    on.division.divide(roles.actor, on.dtype)
    for model in (roles.reference, roles.critic):
        if model is not None and model is not roles.actor:
            on.division.divide(model, on.dtype)


def load_policy(config: RunConfig, folder: Path, device: torch.device) -> PreTrainedModel:
    """The model that training starts from, adapter included."""
    r = config.actor_rollout_ref
    model = load_causal_lm(folder, r.trust_remote_code, device)
    return model if r.adapter_path is None else with_adapter(model, Path(r.adapter_path).expanduser())


def _check_eval(config: RunConfig, data: Data, components: Sequence[RewardComponent]) -> None:
    if config.data.eval_files and not data.eval:
        raise ConfigError(f"data.eval_files: {', '.join(config.data.eval_files)} hold no prompt; leave the key out")
    if data.eval and config.eval.metric != "reward" and not any(c.verifies for c in components):
        raise ConfigError(
            f"eval.metric is {config.eval.metric}, but no reward function tells right from wrong; add a verifier, "
            "with weight 0 if it must not be rewarded, for example {name: exact_answer, weight: 0.0}"
        )


def _roles(config: RunConfig, posture: Posture, actor: PreTrainedModel, device: torch.device) -> Roles:
    r = config.actor_rollout_ref
    reference = critic = None
    if posture.needs_reference and r.ref_model_path is not None:
        reference = freeze(load_causal_lm(model_folder(r.ref_model_path), r.trust_remote_code, device))
    elif posture.needs_reference:
        reference = frozen_copy(actor) if r.lora is None else actor
    if config.needs_critic:
        path = config.critic.model_path
        critic = critic_from(actor) if path is None else load_critic(model_folder(path), r.trust_remote_code, device)
    if r.lora is not None:  # the critic above is a copy of the base
        base = str(model_folder(r.model_path)) if r.adapter_path is None else None
        add_lora(actor, r.lora, derive_seed(config.training.seed, "lora"), base)
    return Roles(actor=actor, reference=reference, critic=critic)


def _offloaded(config: RunConfig, roles: Roles, device: torch.device, screen: Screen) -> tuple[Roles, bool]:
    """The roles, those that wait in the host's memory moved there; and whether optimizer states wait there too."""
    offload = config.training.offload
    if device == HOST:
        if offload.params or offload.optimizer:
            screen.warn(
                "training.offload: this machine has no GPU, so weights and optimizer states are in the host's memory "
                "already; nothing is moved and nothing is saved"
            )
        return roles, False
    if offload.params:
        for module in (roles.reference, roles.critic):
            if module is not None and module is not roles.actor:
                cast(nn.Module, module).to(HOST)
    return replace(roles, place=device if offload.params else None), offload.optimizer
