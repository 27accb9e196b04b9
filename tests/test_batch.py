"""Episodes to tensors, and the split of a phase."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from klimb.batch import Split, collate, least_read, micro_batches, split_phase, trimmed
from klimb.types import Prompt, Sample, Scored


def episode(index: int, prompt: int, response: int, reward: float | None, row: int | None = None) -> Scored:
    sample = Sample(
        prompt=Prompt(row=index if row is None else row, text="", token_ids=(9,) * prompt, answer=None, source=""),
        index=index,
        token_ids=(*range(100, 100 + prompt), *range(200, 200 + response)),
        mask=(False,) * prompt + (True,) * response,
        logprobs=(0.0,) * prompt + tuple(-0.5 - i for i in range(response)),
        policy_version=(-1,) * prompt + (4,) * response,
        finish_reason="length" if index % 2 else "stop",
        text="",
    )
    rewards = () if reward is None else ((prompt + response - 1, reward),)
    failure = "error: made up" if reward is None else None
    return Scored(sample=sample, rewards=rewards, parts={}, correct=None, failure=failure)


def test_every_column_describes_its_token() -> None:
    batch = collate([episode(5, 2, 3, 1.5, row=8), episode(6, 1, 1, -2.0, row=9)], pad_id=7)
    assert batch.tokens.tolist() == [[100, 101, 200, 201, 202], [100, 200, 7, 7, 7]]
    assert batch.attention.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.sampler_logprobs.tolist() == [[0.0, 0.0, -0.5, -1.5, -2.5], [0.0, -0.5, 0.0, 0.0, 0.0]]
    assert batch.policy_version.tolist() == [[-1, -1, 4, 4, 4], [-1, 4, -1, -1, -1]]
    assert batch.rewards.tolist() == [1.5, -2.0]
    assert batch.cut_off.tolist() == [True, False]
    assert batch.group.tolist() == [8, 9]
    assert batch.row_id.tolist() == batch.source_row.tolist() == [5, 6]


def test_the_mask_goes_by_what_was_sampled_not_by_the_pad_id() -> None:
    batch = collate([episode(0, 1, 2, 1.0), episode(1, 1, 4, 1.0)], pad_id=201)
    assert batch.mask.sum(dim=1).tolist() == [2, 4]
    assert batch.attention.sum(dim=1).tolist() == [3, 5]


def test_a_failed_episode_keeps_its_row_and_loses_its_mask() -> None:
    batch = collate([episode(0, 2, 2, 1.0), episode(1, 2, 6, None), episode(2, 2, 3, 0.0)], pad_id=0)
    assert batch.num_rows == 3
    assert batch.mask.sum(dim=1).tolist() == [2, 0, 3]
    assert batch.attention.sum(dim=1).tolist() == [4, 8, 5]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0]


def test_rows_of_one_length_need_no_padding() -> None:
    batch = collate([episode(i, 2, 2, 1.0) for i in range(3)], pad_id=0)
    assert batch.attention.all()


def test_trimming_drops_only_columns_that_are_padding_in_all_rows() -> None:
    batch = collate([episode(0, 2, 2, 1.0), episode(1, 2, 6, 2.0), episode(2, 1, 4, None)], pad_id=0)
    part = trimmed(batch, torch.tensor([2, 0]))
    assert part.tokens.shape == (2, 5)
    assert part.row_id.tolist() == [2, 0]
    for f in fields(batch):
        if getattr(batch, f.name) is None:
            continue
        whole, cut = getattr(batch, f.name)[[2, 0]], getattr(part, f.name)
        assert torch.equal(cut, whole[:, :5] if whole.dim() == 2 else whole)
    assert trimmed(batch, torch.tensor([1])).tokens.shape == (1, 8)


ALONE = torch.zeros(11, dtype=torch.int64)
LENGTHS = torch.tensor([5, 30, 8, 8, 12, 3, 40, 9, 21, 7, 6])


def split(step: int = 4, micro: int = 2, budget: int | None = None, epochs: int = 3) -> Split:
    return Split(rows_per_step=step, rows_per_micro=None if budget else micro, budget=budget, epochs=epochs)


@pytest.mark.parametrize("budget", [None, 24, 64])
@pytest.mark.parametrize("step", [1, 4, 11, 50])
def test_every_epoch_has_every_row_once(budget: int | None, step: int) -> None:
    epochs = split_phase(LENGTHS, ALONE, split(step, budget=budget), seed=1)
    assert len(epochs) == 3
    for epoch in epochs:
        rows = torch.cat([r for minibatch in epoch for r in minibatch])
        assert sorted(rows.tolist()) == list(range(11))
        sizes = [sum(len(r) for r in minibatch) for minibatch in epoch]
        assert sizes[:-1] == [step] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= step


def flat(epochs: list[list[tuple[Tensor, ...]]]) -> list[list[list[list[int]]]]:
    return [[[rows.tolist() for rows in minibatch] for minibatch in epoch] for epoch in epochs]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    state = torch.get_rng_state()
    one = flat(split_phase(LENGTHS, ALONE, split(), seed=1))
    torch.rand(5)
    assert flat(split_phase(LENGTHS, ALONE, split(), seed=1)) == one
    assert flat(split_phase(LENGTHS, ALONE, split(epochs=1), seed=1)) == one[:1]
    assert flat(split_phase(LENGTHS, ALONE, split(), seed=2)) != one
    assert one[0] != one[1] != one[2] != one[0]
    torch.set_rng_state(state)
    split_phase(LENGTHS, ALONE, split(), seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_budget_changes_the_cut_but_not_the_train_batches() -> None:
    plain, packed = (split_phase(LENGTHS, ALONE, split(budget=b), seed=1) for b in (None, 24))
    for a, b in zip(plain, packed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert sorted(torch.cat(x).tolist()) == sorted(torch.cat(y).tolist())


@pytest.mark.parametrize("budget", [1, 10, 24, 64, 1000])
def test_only_a_row_alone_exceeds_the_budget(budget: int) -> None:
    parts = micro_batches(torch.arange(11), LENGTHS, split(budget=budget))
    for rows in parts:
        assert int(LENGTHS[rows].sum()) <= budget or len(rows) == 1
    assert sorted(torch.cat(parts).tolist()) == list(range(11))


def test_a_budget_is_used_well() -> None:
    assert [len(p) for p in micro_batches(torch.arange(8), torch.full((8,), 10), split(budget=40))] == [4, 4]
    assert [len(p) for p in micro_batches(torch.arange(4), torch.tensor([100, 10, 10, 10]), split(budget=40))] == [1, 3]


def test_without_a_budget_the_number_of_rows_counts() -> None:
    assert [p.tolist() for p in micro_batches(torch.tensor([4, 1, 0]), LENGTHS, split())] == [[4, 1], [0]]


def test_what_must_be_read_counts_a_shared_prompt_once() -> None:
    """Prompts of 5 (row 7, two answers of 2 and 3) and of 4 (row 8, one of 6); a failed answer is not read."""
    made = [episode(0, 5, 2, 1.0, row=7), episode(1, 5, 3, 0.0, row=7), episode(2, 4, 6, 1.0, row=8)]
    assert least_read(collate(made, 0)) == 5 + 2 + 3 + 4 + 6
    assert least_read(collate([*made, episode(3, 9, 9, None, row=9)], 0)) == 20
    apart = [episode(0, 5, 2, 1.0, row=7), episode(1, 5, 3, 0.0, row=8)]
    assert least_read(collate(apart, 0)) == 5 + 2 + 5 + 3
