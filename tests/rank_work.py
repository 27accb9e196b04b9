"""What ranks run in tests, importable by the processes that are started for them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from klimb.batch import Split, forward_lengths, split_phase
from klimb.build import Division, build_components, make_division, make_pool
from klimb.config.scale import LoraSettings
from klimb.config.schema import RunConfig
from klimb.errors import KlimbError
from klimb.learn import Roles, estimate_advantages, is_on_policy, score_tokens
from klimb.models.attention import Packed, recompute_activations, through
from klimb.models.forward import autocast, token_scores
from klimb.models.load import body_of
from klimb.models.lora import add_lora, weights_for_engine
from klimb.models.sharded import run, shard, whole
from klimb.processes import Start, joined
from klimb.ranks import ALONE, Ranks
from klimb.types import Batch
from klimb.update import update
from tests.tiny_models import (
    CPU,
    adamw,
    apart_roles,
    byte_tokenizer,
    make_phase,
    make_prompts,
    make_recipe,
    make_requests,
    sample,
    tiny_model,
)

ON_RANKS = RunConfig.model_validate({"actor_rollout_ref": {"model_path": ""}, "training": {"trainer": "fsdp"}})
RAGGED: list[float | None] = [1.0, 0.0, 0.5, 0.2, None, 2.0, -1.0, 0.3, 0.9, -0.4, 0.1]
COLUMNS = ("policy/loss", "policy/grad_norm", "kl/k3", "value/loss", "value/grad_norm", "policy/entropy")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Five phases on recorded rollouts. recipe: changes; micro rows or a budget of tokens; rows of a train batch."""

    name: str
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    critic: bool = False
    micro: int = 2
    budget: int | None = None
    step: int = 4
    epochs: int = 1
    rewards: tuple[float | None, ...] = tuple(RAGGED)
    checkpointing: bool = False
    tied: bool = False
    lora: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


def five_steps(case: Case, ranks: Ranks) -> Outcome:
    """Metrics of every phase and the policy's weights behind the last one."""
    recipe = make_recipe(**{"adv_estimator": "gae" if case.critic else "grpo", "max_grad_norm": 1.0, **case.recipe})
    phases = [_phase(case, seed) for seed in range(5)]
    roles = _roles(case)
    if case.checkpointing:
        recompute_activations(body_of(roles.actor))
    if ranks.size > 1:
        mesh = init_device_mesh("cpu", (ranks.size,))
        for model in (roles.actor, *([] if case.lora else [roles.reference]), roles.critic):
            if model is not None:
                shard(model, mesh, recipe.dtype)
    actor, critic = adamw(roles.actor, 1e-3), None if roles.critic is None else adamw(roles.critic, 1e-3)
    metrics = list[dict[str, float]]()
    for number, batch in enumerate(phases):
        split = Split(
            rows_per_step=case.step,
            rows_per_micro=None if case.budget else case.micro,
            budget=case.budget,
            epochs=case.epochs,
        )
        epochs = split_phase(forward_lengths(batch), batch.group, split, number)
        skip = is_on_policy(epochs, recipe)
        scored, seen = score_tokens(batch, epochs[0], roles, recipe, skip, ranks=ranks)
        train, _ = estimate_advantages(scored, recipe, 0.1)
        metrics.append({**seen, **update(actor, critic, train, epochs, recipe, 0.1, ranks)})
    weights = {name: whole(w.detach()).clone() for name, w in weights_for_engine(roles.actor)}
    return Outcome(metrics=metrics, weights=weights)


def _roles(case: Case) -> Roles:
    apart = apart_roles()
    actor = tiny_model(tie_word_embeddings=True) if case.tied else apart.actor
    critic = apart.critic if case.critic else None
    if case.lora:
        add_lora(actor, LoraSettings(rank=4, alpha=64), seed=1)
        return Roles(actor=actor, reference=actor, critic=critic)
    return Roles(actor=actor, reference=apart.reference, critic=critic)


def _phase(case: Case, seed: int) -> Batch:
    """Sampled by other weights than those trained, so that old, new and sampler's log-probs differ."""
    return make_phase(tiny_model(seed=seed), case.rewards)


def five_steps_of_all(cases: Sequence[Case], told: Start) -> list[Outcome] | None:
    """In every rank; the first one's answer counts."""
    torch.set_num_threads(1)
    with joined(ON_RANKS) as ranks:
        return [five_steps(case, ranks) for case in cases]


def alone(case: Case) -> Outcome:
    return five_steps(case, ALONE)


def hidden_states(model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """[12, H] of two rows that lie end to end."""
    positions = torch.tensor([*range(7), *range(5)])[None]
    with torch.no_grad(), autocast(model.device, dtype):
        return run(model, through, body_of(model), torch.arange(5, 17)[None], positions, Packed.of([7, 5]))[0]


def hidden_of_all(names: Sequence[str], told: Start) -> dict[str, tuple[Tensor, bool]]:
    """Of models in bfloat16, by architecture; and whether a backward through them gives finite gradients."""
    torch.set_num_threads(1)
    found = dict[str, tuple[Tensor, bool]]()
    with joined(ON_RANKS) as ranks:
        for name in names:
            model, batch = tiny_model(name), make_phase(tiny_model(name), [1.0, 0.0])
            shard(model, init_device_mesh("cpu", (ranks.size,)), torch.bfloat16)
            hidden = hidden_states(model, torch.bfloat16)
            inputs = (batch.tokens, batch.attention, batch.mask, 1.0, torch.bfloat16)
            token_scores(model, *inputs).logprobs.sum().backward()
            norms = [whole(p.grad).norm() for p in model.parameters() if p.grad is not None]
            found[name] = hidden, bool(torch.stack(norms).isfinite().all())
    return found


def scores(folder: Path, division: Division | None) -> list[float | None]:
    """By the reward model in the folder, in a run that computes in bfloat16."""
    component = build_components(_scoring(folder), make_pool(_scoring(folder)), byte_tokenizer(), CPU, division)[0]
    samples = sample(tiny_model(), make_requests(make_prompts([3, 7, 5]), 2))
    return [outcome.value for outcome in component.score(samples)]


def scores_of_all(folder: Path, told: Start) -> list[float | None]:
    torch.set_num_threads(1)
    with joined(_scoring(folder)) as ranks:
        return scores(folder, make_division(_scoring(folder), ranks, CPU))


def _scoring(folder: Path) -> RunConfig:
    tree = {
        "actor_rollout_ref": {"model_path": ""},
        "reward_model": {"model_path": str(folder)},
        "training": {"trainer": "fsdp", "dtype": "bfloat16"},
    }
    return RunConfig.model_validate(tree)


def say_rank(word: str, told: Start) -> str:
    return f"{word} {os.environ['RANK']} {told.again}"


def fail_on(rank: int, told: Start) -> None:
    """One rank refuses, the other waits for it."""
    with joined(ON_RANKS) as ranks:
        if ranks.rank == rank:
            raise KlimbError(f"mistake of rank {rank}")
        ranks.any(True)


def meet_again(told: Start) -> list[int]:
    """Ten starts after each other; the second rank comes late, when the first may have found who was there before."""
    met = list[int]()
    for attempt in range(10):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        time.sleep(0.3 * int(os.environ["RANK"]))
        with joined(ON_RANKS) as ranks:
            met.append(int(ranks.totals({"": 1.0})[""]))
    return met
