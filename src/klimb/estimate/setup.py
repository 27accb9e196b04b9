"""What an estimate reads of a run: models by role, how a phase is cut into forwards, how long its texts are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from klimb.config.counts import Counts, may_skip_old
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig
from klimb.cut import cut
from klimb.estimate.shapes import Shape

CHUNK_LOGITS = 2**23
PACKED_TOKENS = 128
PACKED_NUMBERS = 2**25
PACKED_BACKWARD_TOKENS = 4096
"""As models.head: logits computed at once, and from when on, and up to what size, the head is copied."""
GROWTH = 32
"""As rollout.cache: places by which the responses' part of the cache grows."""
PREFILL = {"cpu": 1024, "cuda": 8192}
"""As rollout.hf: prompt tokens read in one forward."""
SLOTS = {"cpu": 64, "cuda": 256}
"""As build.slots: what `auto` is."""
WHOLE_ROWS = ("gspo", "gmpo")
"""Policy losses that need whole rows first, so that the head goes the long way (algos.loss.OF_SINGLE_TOKENS has the
others)."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens: of prompts and of responses, the mean and the longest. early: share of the responses that end before the
    longest do."""

    prompt: float
    longest_prompt: int
    response: float
    longest_response: int
    early: float = 1.0

    def largest(self, rows: float) -> float:
        """Mean response of the longest among many sets of so many rows: one row may be the longest, many are not."""
        return self.response + (self.longest_response - self.response) / math.sqrt(max(rows, 1))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Rows that go through a model in one forward. read: tokens that the body reads, where rows of one prompt share
    its; attended: tokens of all rows, each by itself; scored: positions that go through the head; row: tokens of a row.
    """

    rows: float
    read: float
    attended: float
    scored: float
    row: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One rank's part of a run.

    kind: cpu or cuda. wide: bytes of a number in the compute dtype. scorer: of the reward model. phase, step: episodes
    of a rollout phase, of an optimizer step; rows, budget: most rows and tokens of one forward in the update;
    value_rows: most rows of the critic's pass before it; token_budget: most tokens of that and of the reward model's.
    old: whether the old policy's forward is made. engine: bytes that a separate engine has while it is awake. adapter:
    weights that LoRA trains in place of the actor's, which then are the reference's too; None without.
    """

    kind: str
    wide: int
    ranks: int
    actor: Shape
    reference: Shape | None
    critic: Shape | None
    scorer: Shape | None
    lengths: Lengths
    phase: int
    step: int
    per_prompt: int
    slots: int
    rows: int | None
    budget: int | None
    value_rows: int
    token_budget: int
    epochs: int
    old: bool
    greedy: bool
    fused: bool
    checkpointing: bool
    keeps_freed: bool
    engine: float | None
    offloads: bool = False
    adapter: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of one epoch of a phase."""
        return -(-self.phase // self.step)

    @property
    def prompts(self) -> int:
        return -(-self.phase // self.per_prompt)

    def episode(self) -> float:
        """Mean tokens of a row."""
        return self.lengths.prompt + self.lengths.response

    def passes(self, longest: bool) -> Pass:
        """A forward of the update. longest: the largest of them; else the mean one."""
        step = min(self.step, self.phase)
        rows = min(step, self.rows if self.rows is not None else self._rows_in(self.budget))
        return self._pass(rows if longest else step / self.micros(), longest, self.budget, step)

    def value_pass(self) -> Pass:
        """The largest forward of the critic before the update."""
        rows = min(self.phase, self.value_rows, self._rows_in(self.token_budget))
        return self._pass(rows, True, self.token_budget, self.phase)

    def micros(self) -> int:
        """Forwards of one optimizer step."""
        rows = min(self.step, self.phase)
        if self.rows is not None:
            return -(-rows // self.rows)
        return len(cut([round(self.episode())] * rows, self.budget))

    def _rows_in(self, budget: int | None) -> int:
        """Rows of a forward that is cut by tokens."""
        return self.phase if budget is None else max(1, int(budget // max(self.episode(), 1)))

    def _pass(self, rows: float, longest: bool, budget: int | None, among: int) -> Pass:
        """among: rows of the train batch or phase that these are taken from; answers to a prompt lie together in it."""
        ln = self.lengths
        response = ln.largest(rows) if longest else ln.response
        prompt = ln.longest_prompt if longest and rows == 1 else ln.prompt
        attended = rows * (prompt + response)
        if budget is not None and rows > 1:
            attended = min(attended, budget)
        prompts = self._distinct(among) * rows / among
        read = attended - (rows - max(prompts, 1.0)) * prompt
        return Pass(rows=rows, read=read, attended=attended, scored=attended - rows * prompt, row=attended / rows)

    def _distinct(self, rows: int) -> float:
        """Expected number of prompts among so many rows drawn from a phase."""
        share = min(1.0, rows / self.phase)
        return self.prompts * (1.0 - (1.0 - share) ** self.per_prompt)


@dataclass(frozen=True, kw_only=True)
class Models:
    """Shapes by role; reference and critic where they are not the actor's."""

    actor: Shape
    reference: Shape | None = None
    critic: Shape | None = None
    scorer: Shape | None = None


def make_setup(
    config: RunConfig, posture: Posture, counts: Counts, models: Models, lengths: Lengths, gpu_bytes: float | None
) -> Setup:
    """gpu_bytes: memory of each GPU, None for a CPU."""
    r, t, a = config.actor_rollout_ref, config.training, config.algorithm
    kind = "cpu" if gpu_bytes is None else "cuda"
    ranks, dynamic = counts.ranks, r.use_dynamic_bsz
    bfloat16 = t.dtype == "bfloat16" or (t.dtype == "auto" and kind == "cuda")
    separate = r.rollout_provider == "vllm"
    skips = counts.steps_per_phase == 1 and may_skip_old(config, posture)
    return Setup(
        kind=kind,
        wide=2 if bfloat16 else 4,
        ranks=ranks,
        actor=models.actor,
        reference=(models.reference or models.actor) if posture.needs_reference else None,
        critic=(models.critic or models.actor) if config.needs_critic else None,
        scorer=(models.scorer or models.actor) if config.reward_model.model_path is not None else None,
        lengths=lengths,
        phase=-(-counts.phase // ranks),
        step=counts.train_batch // ranks,
        per_prompt=r.rollouts_per_prompt,
        slots=SLOTS[kind] if r.rollout_slots == "auto" else r.rollout_slots,
        rows=None if dynamic else t.micro_batch_size,
        budget=r.max_tokens_per_micro_batch if dynamic else None,
        value_rows=config.reward_model.reward_batch_size,
        token_budget=r.max_tokens_per_micro_batch,
        epochs=a.ppo_epochs,
        old=posture.explicit and not skips,
        greedy=a.estimator.needs_greedy,
        fused=a.policy_loss not in WHOLE_ROWS,
        checkpointing=t.activation_checkpointing,
        keeps_freed=t.keep_freed_memory is True or (t.keep_freed_memory == "auto" and kind == "cpu"),
        engine=r.vllm.memory_share * gpu_bytes if separate and gpu_bytes is not None else None,
        offloads=t.offload.optimizer and kind == "cuda",
        adapter=None if r.lora is None else r.lora.rank * models.actor.ends,
    )
