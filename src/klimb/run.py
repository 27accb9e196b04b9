"""Everything a run is made of, built once by build.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from klimb import snapshot
from klimb.algos.kl import KLController
from klimb.batch import Split
from klimb.clock import Clock
from klimb.config.counts import Counts
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.data.prompts import PromptStream
from klimb.exhaustion import LastWords
from klimb.fallback import Fallback
from klimb.floor import Floor
from klimb.follow import Follow
from klimb.learn import Roles
from klimb.models.lora import weights_for_engine
from klimb.ranks import Ranks
from klimb.recipe import Recipe
from klimb.reward.base import RewardComponent, RewardSettings
from klimb.reward.combine import Moments
from klimb.rollout.base import Sampler, Sampling
from klimb.runlog import RunLog
from klimb.types import Prompt
from klimb.update import Trainable
from klimb.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Models, data, settings and places. base_config: as the user gave it; config: with what the guard changed.

    greedy_sampling: None unless the estimator asks for greedy answers."""

    base_config: RunConfig
    config: RunConfig
    posture: Posture
    counts: Counts
    recipe: Recipe
    split: Split
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    roles: Roles
    actor: Trainable
    critic: Trainable | None
    controller: KLController
    follow: Follow
    sampler: Sampler
    sampling: Sampling
    greedy_sampling: Sampling | None
    eval_sampling: Sampling
    prompts: PromptStream
    eval_prompts: tuple[Prompt, ...]
    components: tuple[RewardComponent, ...]
    reward_settings: RewardSettings
    moments: Moments
    floor: Floor
    value_split: Split
    fallback: Fallback
    log: RunLog
    screen: Screen
    watch: Watch
    last_words: LastWords
    ranks: Ranks


def renew_engine(run: Run, version: int, clock: Clock) -> None:
    """Hand the policy's weights to the engine, which takes memory for them: a part of the rollout."""
    with clock("rollout"):
        run.sampler.load_weights(weights_for_engine(run.roles.actor), version)


def run_parts(run: Run) -> snapshot.Parts:
    """What a checkpoint is made of."""
    return snapshot.Parts(
        config=run.base_config,
        tokenizer=run.tokenizer,
        actor=run.actor,
        critic=run.critic,
        stateful={"controller": run.controller, "follow": run.follow, "prompts": run.prompts, "moments": run.moments},
        offsets=run.log.offsets(),
        ranks=run.ranks,
    )
