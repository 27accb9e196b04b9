"""Every key of the YAML with its type, default and meaning. Unknown keys are errors.

`auto` is chosen by posture or device and printed by `klimb plan`. `null` means off and is accepted only
where off makes sense. Checks that concern one section stand beside its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from klimb.config.algorithm import AlgorithmConfig, OverlongPenalty
from klimb.config.base import Auto, Finite, NonNegative, Positive, PositiveFloat, Section, Strings, Unit
from klimb.config.scale import ClusterConfig, LoraSettings, OffloadConfig, VLLMConfig


class RolloutConfig(Section):
    """`actor_rollout_ref`: the policy, its reference and how episodes are sampled."""

    model_path: str
    """Hugging Face folder of the SFT model that training starts from."""
    adapter_path: str | None = None
    """Folder of a trained LoRA adapter (peft), merged into policy and reference at the start; null: none."""
    lora: LoraSettings | None = None
    """Train a LoRA adapter (rank, alpha, target_modules) on a frozen model, which is the reference too; null: train
    all weights."""
    ref_model_path: str | None = None
    """Folder of the KL reference; null: the weights training starts from, adapter included."""
    trust_remote_code: bool = False
    """Run Python code that a model folder brings along. Off unless you trust the folder."""
    rollout_provider: Literal["hf", "vllm"] = "hf"
    """Engine that samples: hf (in process, on the policy's own weights) or vllm (on a copy of them; docs/vllm.md)."""
    vllm: VLLMConfig = VLLMConfig()
    """Settings of the vllm engine."""
    rollout_batch_size: Positive = 1024
    """Episodes in one rollout phase, all ranks together."""
    rollouts_per_prompt: Positive = 1
    """Episodes per prompt (G); must divide rollout_batch_size."""
    rollout_slots: Annotated[int, Field(gt=0)] | Auto = "auto"
    """Episodes decoded at once; auto: 64 on a CPU, 256 on a GPU. Bounds the key/value cache."""
    temperature: NonNegative = 0.7
    """Sampling temperature. All log-probs in ratios and KL are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; training refuses anything but 1.0, since the ratio would be biased by the mass kept."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens, 0 = off; training refuses anything but 0."""
    stop: Annotated[tuple[str | int, ...], Field(strict=False)] = ()
    """Strings or token ids that end a response, beside the model's own end ids."""
    max_tokens: Positive = 2048
    """Response limit in tokens."""
    use_dynamic_bsz: bool = True
    """Split forwards by max_tokens_per_micro_batch instead of by micro_batch_size rows; the result is the same."""
    max_tokens_per_micro_batch: Positive = 16384
    """Token budget of one forward when use_dynamic_bsz is true, and of the reward model's and the critic's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollout_batch_size % self.rollouts_per_prompt:
            raise ValueError(
                f"actor_rollout_ref.rollouts_per_prompt is {self.rollouts_per_prompt}, which does not divide "
                f"rollout_batch_size {self.rollout_batch_size}; choose a divisor"
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"actor_rollout_ref.top_p is {self.top_p} and top_k is {self.top_k}; training needs 1.0 and 0: "
                "with a cut distribution the probability ratio is biased by the mass that was kept"
            )
        if self.temperature == 0:
            raise ValueError(
                "actor_rollout_ref.temperature is 0; training needs a temperature above 0, since greedy "
                "decoding explores nothing and its log-probs are all zero (eval.temperature may be 0)"
            )
        return self


class CriticConfig(Section):
    """`critic`: only where the estimator needs one (gae)."""

    model_path: str | None = None
    """Folder of the critic's body; null: the policy's body with a new value head."""
    lr: PositiveFloat = 1.0e-5
    """Learning rate of the critic."""
    value_clip: PositiveFloat | None = 0.5
    """Values may move this far from the old ones before the loss clips them; null: off."""
    warmup_phases: Annotated[int, Field(ge=0)] = 0
    """Rollout phases at the start in which only the critic learns; 0: none."""


class RewardFunctionConfig(Section):
    """One entry of `reward_model.functions`."""

    name: str
    """exact_answer | math | regex | length | task | gym | file.py:function | http://..."""
    weight: Finite = 1.0
    """Its share in the score; 0: measured and logged, not rewarded."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function; docs/rewards.md lists them."""


class RewardConfig(Section):
    """`reward_model`: what an episode is worth."""

    model_path: str | None = None
    """Folder of a sequence classifier with one label; null: no learned reward."""
    reward_batch_size: Positive = 512
    """Most rows in one forward of the reward model, and of the critic before the update."""
    functions: Annotated[tuple[RewardFunctionConfig, ...], Field(strict=False)] = ()
    """Reward functions; the score is the weighted sum of all and of the reward model (weight 1)."""
    clip: Annotated[tuple[Finite, Finite], Field(strict=False)] | Auto | None = "auto"
    """Bounds of the score; auto: off explicit, [-5, 5] cached; null: off."""
    normalize: Literal["none", "running"] = "none"
    """running: divide by the running spread of scores after taking off their mean."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of one call of a reward function."""
    workers: Positive = 2
    """Processes that run reward functions."""
    on_failure: Literal["drop"] | Finite = "drop"
    """What a failed episode counts: drop (out of the batch) or this number."""
    max_failed_fraction: Unit = 0.1
    """The run stops when more of a phase's episodes fail."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.clip, tuple) and self.clip[0] >= self.clip[1]:
            raise ValueError(f"reward_model.clip is {list(self.clip)}; the first bound must be below the second")
        return self


class DataConfig(Section):
    """`data`: prompts for training and for evaluation."""

    train_files: Strings = ()
    """jsonl, json, parquet, csv, a saved datasets folder, or task:arithmetic, task:instructions, gym:NAME."""
    eval_files: Strings = ()
    """Held-out prompts, same forms; empty: no evaluation."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the reference answer."""
    system_prompt: str | None = None
    """Put before every prompt as a system message; null: none."""
    max_prompt_tokens: Positive = 1024
    """Prompt limit in tokens, template included."""
    overlong_prompts: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What becomes of a longer prompt."""
    shuffle: bool = True
    """Draw a new order each epoch, a function of (seed, epoch); false: the file's order."""


class TrainingConfig(Section):
    """`training`: optimizer, lengths and checkpoints."""

    trainer: Literal["single", "fsdp"] = "single"
    """single: one process. fsdp: weights, gradients and optimizer divided among ranks, which share the work."""
    num_processes: Positive = 1
    """Ranks for fsdp, started here; under torchrun and Ray as many as they started."""
    micro_batch_size: Positive = 4
    """Rows per forward and backward. Train batch = micro x accumulation x ranks = one optimizer step."""
    gradient_accumulation_steps: Positive = 8
    """Micro-batches per optimizer step and rank."""
    lr: PositiveFloat | Auto = "auto"
    """Peak learning rate of the policy; auto: 1e-6 explicit, half of that cached."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Counted in optimizer steps, down to 0 at the last one (linear, cosine)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the optimizer steps over which the rate rises from 0."""
    weight_decay: NonNegative = 0.01
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The accumulated gradient is clipped to this norm once per optimizer step."""
    total_episodes: Positive = 20000
    """Length of the run."""
    total_epochs: Positive | None = None
    """Stop after so many passes over the data if that comes first; null: off."""
    save_freq: Positive = 2000
    """Episodes between checkpoints; the last state is always saved."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints kept, and the best by eval.metric beside them."""
    activation_checkpointing: bool = False
    """Keep only the inputs of every block in a forward and compute the rest again in backward: less memory, more time,
    the same numbers."""
    micro_batch_fallback: bool = False
    """Where an update runs out of memory, halve its micro-batches and do the step again instead of ending the run."""
    offload: OffloadConfig = OffloadConfig()
    keep_freed_memory: bool | Auto = "auto"
    """Let the C library keep memory that was freed for the next tensor, instead of handing it back to the kernel:
    faster steps for a higher peak; auto: true on a CPU. Only glibc can."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype; auto: bfloat16 on GPUs that have it, float32 on a CPU. Master weights are float32."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes prompts' order, sampling and minibatches."""
    resume: str = "auto"
    """auto: go on from the run folder's newest checkpoint; never; or the path of a checkpoint."""


class EvalConfig(Section):
    """`eval`: held-out prompts, scored without touching the training's random state."""

    before_training: bool = True
    """Evaluate the model that training starts from."""
    every_episodes: Positive | Auto = "auto"
    """Episodes between evaluations; auto: ten times in a run. One more at the end, always."""
    max_prompts: Positive = 256
    """Held-out prompts used, the first of the files."""
    temperature: NonNegative = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus for evaluation."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Top-k for evaluation, 0 = off."""
    samples_per_prompt: Positive = 1
    """Answers per prompt; above 1 pass@k is reported."""
    metric: Literal["reward", "accuracy", "pass_at_k"] = "reward"
    """What `best` means."""


class DiagnosticsConfig(Section):
    """`diagnostics`: what the doctor does while a run goes on; docs/doctor.md has its findings."""

    on_alarm: Literal["warn", "stop", "rollback"] = "warn"
    """warn: say it. stop: end the run, saved. rollback: go back to a healthy state, change one setting, and go on."""
    max_interventions: Annotated[int, Field(ge=0)] = 4
    """Rollbacks in one run at most; the alarm after the last one stops it."""
    healthy_every_phases: Positive = 10
    """rollback: phases between two healthy snapshots, which lie in the run folder until its end."""


class LoggingConfig(Section):
    """`logging`: where metrics go beside metrics.jsonl and the screen."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: str | None = None
    """Weights & Biases project; null: off."""
    mlflow: str | None = None
    """MLflow experiment; null: off."""
    trackio: str | None = None
    """Trackio project; null: off."""
    samples_per_phase: Annotated[int, Field(ge=0)] = 8
    """Episodes written to samples.jsonl each phase, 0: none."""


class FolderConfig(Section):
    """`run`: where the run lives."""

    name: str | None = None
    """Folder name, no path; null: recipe, posture and a hash of everything that changes numbers."""
    dir: str = "runs"
    """Parent folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name is not None and (self.name.strip(".") == "" or "/" in self.name):
            raise ValueError(
                f"run.name is {self.name!r}; it must be a folder's name without a slash; run.dir has paths"
            )
        return self


class VaryConfig(Section):
    """One entry of `compare.vary`: the key that the arms differ in."""

    key: str
    """Dotted key of this file."""
    values: Annotated[tuple[Any, ...], Field(strict=False, min_length=2)]
    """What it is in each arm, two or more."""
    along: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """For each value the keys that its posture wants otherwise (place, type or coefficient of the KL), or nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.along and len(self.along) != len(self.values):
            raise ValueError(
                f"compare.vary: {self.key} has {len(self.values)} values and {len(self.along)} entries of along; "
                "needed: one for each value, {} where nothing goes along"
            )
        return self


class CompareConfig(Section):
    """`compare`: what `klimb compare` makes of this file; `klimb train` does not read it."""

    vary: Annotated[tuple[VaryConfig, ...], Field(strict=False)] = ()
    """Keys that differ between the arms; several make every combination."""
    every: Positive = 50
    """Steps between two rows of the table."""
    seeds: Positive = 1
    """Runs of each arm, with training.seed counted up from the file's."""


class RunConfig(Section):
    """The whole tree."""

    actor_rollout_ref: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: FolderConfig = FolderConfig()
    compare: CompareConfig = CompareConfig()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming key, line and remedy."""
        from klimb.config.load import load_config

        return load_config(path, overrides).config

    @property
    def num_ranks(self) -> int:
        """Ranks that the run is started with here."""
        on_ray = self.cluster.num_workers if self.cluster.kind == "ray" else None
        return on_ray or self.training.num_processes

    @property
    def is_alone(self) -> bool:
        """Whether one process is all there is: ranks on Ray are fsdp's, whatever training.trainer says."""
        return self.training.trainer == "single" and self.cluster.kind != "ray"

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.estimator.needs_critic

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        a, r = self.algorithm, self.actor_rollout_ref
        wants_group = {
            f"algorithm.adv_estimator {a.adv_estimator} compares the answers to one prompt": a.estimator.compares_group,
            "algorithm.filter_groups drops prompts whose answers are all alike": a.filter_groups,
            f"algorithm.policy_filtration.strategy {a.policy_filtration.strategy} ranks the answers to one prompt": (
                a.policy_filtration.strategy != "none"
            ),
        }
        for what, wanted in wants_group.items():
            if wanted and r.rollouts_per_prompt == 1:
                raise ValueError(
                    f"{what}, but actor_rollout_ref.rollouts_per_prompt is 1, so nothing would be learnt; "
                    "set it to 4 or more"
                )
        if a.truncated == "bootstrap" and not self.needs_critic:
            raise ValueError(
                f"algorithm.truncated is bootstrap, which takes the critic's value where an answer was cut off, but "
                f"adv_estimator {a.adv_estimator} has no critic; use score, exclude or a penalty, or adv_estimator gae"
            )
        buffer = a.truncated.overlong_buffer if isinstance(a.truncated, OverlongPenalty) else None
        if buffer is not None and buffer > r.max_tokens:
            raise ValueError(
                f"algorithm.truncated.overlong_buffer is {buffer}, more than actor_rollout_ref.max_tokens "
                f"{r.max_tokens}; needed: at most max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval.metric == "pass_at_k" and self.eval.samples_per_prompt == 1:
            raise ValueError("eval.metric is pass_at_k but eval.samples_per_prompt is 1; set it above 1")
        if self.training.trainer == "single" and self.training.num_processes != 1 and self.cluster.kind == "local":
            raise ValueError(
                f"training.num_processes is {self.training.num_processes} but training.trainer is single; "
                "set num_processes to 1, or trainer to fsdp"
            )
        return self
