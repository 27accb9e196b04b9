"""The records that walk from room to room: frozen, keyword-only, one shape per name.

Index t describes token t: `logprobs[t] = log p(tokens[t] | tokens[:t])`, `values[t]` is the critic's
estimate made before token t is emitted, `mask[t]` is True where the policy sampled the token. Rows are
whole sequences, prompt and response together, right-padded to the longest: [B, T]. A later stage is a new
type with its fields required, never the same record filled in later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data, tokenised.

    row: its place in the data set; groups are formed by it, never by the text.
    text: what a person reads; only logs and rewards use it.
    token_ids: what the model reads, chat template and start token included.
    answer: the reference solution, or None; only rewards read it.
    source: file or task the row came from. extra: the row's other columns, for rewards.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    answer: str | None
    source: str
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One episode: a prompt with one sampled response. Token ids are exactly those that were sampled.

    token_ids [L] prompt and response; mask [L] True = sampled by the policy; logprobs [L] the sampler's, at
    the sampling temperature, 0 where the mask is False; policy_version [L] version of the weights that
    sampled the token, -1 where the mask is False. text: the masked-in tokens decoded, without end id and special
    tokens.
    """

    prompt: Prompt
    index: int
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    policy_version: tuple[int, ...]
    finish_reason: FinishReason
    text: str

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        assert len(self.mask) == len(self.logprobs) == len(self.policy_version) == n
        assert n > 0 and not self.mask[0], "the first token has nothing to be conditioned on"

    @property
    def num_response_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the rewards made of one sample.

    rewards: (token index, value) pairs, today one, at the last masked-in token; empty when the episode failed and
    nothing stands in for it.
    parts: each component raw, before weight, normalisation and clip; a component that abstained is absent.
    correct: the verifier's verdict, None when no verifier looked. failure: why the episode failed, or None.
    """

    sample: Sample
    rewards: tuple[tuple[int, float], ...]
    parts: dict[str, float]
    correct: bool | None
    failure: str | None

    @property
    def total(self) -> float:
        return sum(value for _, value in self.rewards)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Tensors whose first dimension is the row."""

    def select(self, rows: Tensor) -> Self:
        """The given rows (int64 [R]) in the given order."""
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: change(x) if isinstance(x, Tensor) else x for name, x in values.items()})


def _check(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert x is None or (tuple(x.shape) == shape and x.dtype == dtype), (
        f"{name}: expected {dtype} {shape}, got {x.dtype} {tuple(x.shape)}"
    )


@dataclass(frozen=True, kw_only=True)
class Batch(_Rows):
    """A rollout phase as tensors, the same on every rank.

    tokens int64 [B, T]; attention bool [B, T] True = a real token; mask bool [B, T] True = sampled by the
    policy and trained on; sampler_logprobs float32 [B, T]; rewards float32 [B] the episode's score; cut_off bool [B]
    True = ended by the length limit; group int64 [B] the prompt's row id; row_id int64 [B] the episode; source_row
    int64 [B] the episode it is a copy of (itself, unless filtration drew it); policy_version int64 [B, T]; correct
    int64 [B] the verifier's verdict, 1 or 0, -1 where no verifier looked; greedy_totals float32 [B] reward of a
    greedy answer to the same prompt, None unless the estimator asks for one.
    A failed episode stays as a row with an empty mask: the number of optimizer steps does not depend on failures.
    """

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    sampler_logprobs: Tensor
    rewards: Tensor
    cut_off: Tensor
    group: Tensor
    row_id: Tensor
    source_row: Tensor
    policy_version: Tensor
    correct: Tensor
    greedy_totals: Tensor | None = None

    def __post_init__(self) -> None:
        b, t = self.tokens.shape
        for name in ("tokens", "policy_version"):
            _check(name, getattr(self, name), (b, t), torch.int64)
        for name in ("attention", "mask"):
            _check(name, getattr(self, name), (b, t), torch.bool)
        for name in ("group", "row_id", "source_row", "correct"):
            _check(name, getattr(self, name), (b,), torch.int64)
        _check("sampler_logprobs", self.sampler_logprobs, (b, t), torch.float32)
        for name in ("rewards", "greedy_totals"):
            _check(name, getattr(self, name), (b,), torch.float32)
        _check("cut_off", self.cut_off, (b,), torch.bool)
        assert not self.mask[:, 0].any(), "the first token cannot be trained: nothing comes before it"

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(Batch):
    """Batch plus the passes made before any update.

    old_logprobs float32 [B, T] of the policy at batch start (explicit: recomputed; cached: the sampler's), None when
    the update's only forward is that of the old policy too;
    ref_logprobs float32 [B, T] or None without KL; values float32 [B, T] or None without a critic; last_values
    float32 [B] the critic's estimate behind a cut-off row's last token, 0 elsewhere, None where nothing reads it.
    """

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    last_values: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.tokens.shape[0], self.tokens.shape[1])
        for name in ("old_logprobs", "ref_logprobs", "values"):
            _check(name, getattr(self, name), shape, torch.float32)
        _check("last_values", self.last_values, shape[:1], torch.float32)


@dataclass(frozen=True, kw_only=True)
class TrainBatch(ScoredBatch):
    """ScoredBatch plus what the update pulls towards.

    advantages float32 [B, T]; returns float32 [B, T] or None without a critic; correction float32 [B, T] weights of
    the policy's token losses, None: all 1. The mask is True where a token is trained on: rows that were rejected or
    excluded have none.
    """

    advantages: Tensor
    returns: Tensor | None
    correction: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.tokens.shape[0], self.tokens.shape[1])
        for name in ("advantages", "returns", "correction"):
            _check(name, getattr(self, name), shape, torch.float32)
