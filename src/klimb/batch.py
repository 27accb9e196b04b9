"""Scored episodes to tensors, and the split of a phase into train batches and micro-batches.

The split is decided once per phase: the old-policy pass runs over the first epoch's own micro-batches, so that
its numbers and the update's are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from klimb.cut import cut
from klimb.seeds import derive_seed
from klimb.types import Batch, Scored


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a phase is cut. rows_per_step: episodes of one optimizer step; rows_per_micro and budget: most rows and most
    tokens of one forward, None for no such limit."""

    rows_per_step: int
    rows_per_micro: int | None
    budget: int | None
    epochs: int


AnyBatch = TypeVar("AnyBatch", bound=Batch)
Minibatch = tuple[Tensor, ...]
"""The micro-batches of one optimizer step, each int64 [rows] of row indices."""


def collate(scored: Sequence[Scored], pad_id: int) -> Batch:
    """Rows right-padded to the longest. A failed episode keeps its row, with an empty mask."""
    samples = [s.sample for s in scored]
    longest = max(len(s.token_ids) for s in samples)

    def rows(values: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in values], dtype=dtype)

    alive = torch.tensor([bool(s.rewards) for s in scored]).unsqueeze(1)
    index = torch.tensor([s.index for s in samples], dtype=torch.int64)
    return Batch(
        tokens=rows([s.token_ids for s in samples], pad_id, torch.int64),
        attention=rows([[True] * len(s.token_ids) for s in samples], False, torch.bool),
        mask=rows([s.mask for s in samples], False, torch.bool) & alive,
        sampler_logprobs=rows([s.logprobs for s in samples], 0.0, torch.float32),
        rewards=torch.tensor([s.total for s in scored], dtype=torch.float32),
        cut_off=torch.tensor([s.finish_reason == "length" for s in samples]),
        group=torch.tensor([s.prompt.row for s in samples], dtype=torch.int64),
        row_id=index,
        source_row=index,
        policy_version=rows([s.policy_version for s in samples], -1, torch.int64),
        correct=torch.tensor([-1 if s.correct is None else int(s.correct) for s in scored], dtype=torch.int64),
    )


def trimmed(batch: AnyBatch, rows: Tensor) -> AnyBatch:
    """The given rows without the columns that are padding in all of them."""
    part = batch.select(rows)
    width = int(part.attention.sum(dim=1).max())
    cut = {
        name: value[:, :width]
        for name in (f.name for f in fields(part))
        if isinstance(value := getattr(part, name), Tensor) and value.dim() == 2
    }
    return replace(part, **cut)


def forward_lengths(batch: Batch) -> Tensor:
    """int64 [B]: tokens of each row, 0 for one that nothing is trained on and no model need read."""
    return batch.attention.sum(dim=1) * batch.mask.any(dim=1)


def least_read(batch: Batch) -> int:
    """Tokens that a model must read to see every row: what rows of one prompt begin with counts once."""
    is_read = batch.mask.any(dim=1)
    prompts = torch.where(is_read, batch.mask.long().argmax(dim=1) - batch.attention.long().argmax(dim=1), 0)
    group = batch.group.unique(return_inverse=True)[1]
    shared = prompts.new_zeros(len(group)).scatter_reduce(0, group, prompts, "amax")
    return int(forward_lengths(batch).sum() - prompts.sum() + shared.sum())


def split_phase(lengths: Tensor, groups: Tensor, split: Split, seed: int) -> list[list[Minibatch]]:
    """Per epoch the train batches of a phase, each cut into micro-batches. lengths int64 [B]: tokens of each row, 0 for
    a row that is not forwarded. groups int64 [B]: rows of one prompt, which are put beside each other within a train
    batch: in one forward they share it.

    The order is a function of (seed, epoch), and so is the number of train batches, whatever failed. The last train
    batch of an epoch may be smaller; its loss has its own denominator.
    """
    epochs: list[list[Minibatch]] = []
    for epoch in range(split.epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches", epoch))
        order = torch.randperm(len(lengths), generator=generator)
        steps = [rows[groups[rows].argsort(stable=True)] for rows in order.split(split.rows_per_step)]
        epochs.append([micro_batches(rows, lengths, split) for rows in steps])
    return epochs


def micro_batches(rows: Tensor, lengths: Tensor, split: Split) -> Minibatch:
    """Cut rows into forwards, in their order, by number and by a budget of tokens.

    A row longer than the budget gets a forward of its own, one of length 0 none. The cut never changes the result, only
    memory and time.
    """
    rows = rows[lengths[rows] > 0]
    return rows.split(cut(lengths[rows].tolist(), split.budget, split.rows_per_micro))
