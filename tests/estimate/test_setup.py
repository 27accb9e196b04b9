"""How an estimate cuts a phase, held against how a run does."""

from __future__ import annotations

import pytest
import torch

from klimb.algos.loss import OF_SINGLE_TOKENS
from klimb.batch import Split, split_phase
from klimb.build import slots
from klimb.config.facts import POLICY_LOSSES
from klimb.estimate import setup as estimated
from klimb.estimate.setup import Lengths
from klimb.estimate.shapes import FAMILY
from klimb.models import family, head
from klimb.rollout import cache, hf

from .setups import config, setup


def test_numbers_of_the_engine_are_the_engines() -> None:
    assert estimated.CHUNK_LOGITS == head.CHUNK_LOGITS
    assert estimated.PACKED_TOKENS == head.PACKED_TOKENS
    assert set(FAMILY) == {body.config_class.model_type for body in family.FAMILY}
    assert estimated.PACKED_NUMBERS == head.PACKED_NUMBERS
    assert estimated.PACKED_BACKWARD_TOKENS == head.PACKED_BACKWARD_TOKENS
    assert estimated.GROWTH == cache.GROWTH
    assert estimated.PREFILL == hf.PREFILL_TOKENS
    assert {*estimated.WHOLE_ROWS, *OF_SINGLE_TOKENS} == set(POLICY_LOSSES)
    assert not {*estimated.WHOLE_ROWS} & {*OF_SINGLE_TOKENS}
    for kind, number in estimated.SLOTS.items():
        assert number == slots(config(), torch.device(kind))


@pytest.mark.parametrize(("dynamic", "micro", "budget"), [(False, 4, 999), (True, 4, 100), (True, 4, 30)])
def test_as_many_forwards_as_a_run_makes(dynamic: bool, micro: int, budget: int) -> None:
    s = setup(
        f"actor_rollout_ref.use_dynamic_bsz={str(dynamic).lower()}",
        f"actor_rollout_ref.max_tokens_per_micro_batch={budget}",
        f"training.micro_batch_size={micro}",
        "training.gradient_accumulation_steps=4",
    )
    split = Split(
        rows_per_step=16, rows_per_micro=None if dynamic else micro, budget=budget if dynamic else None, epochs=1
    )
    (steps,) = split_phase(torch.full((64,), 30), torch.arange(64), split, seed=0)
    assert (s.steps, s.micros()) == (len(steps), len(steps[0]))
    assert s.passes(longest=True).rows == len(steps[0][0])
    assert s.passes(longest=False).rows == 16 / len(steps[0])  # those of a train batch, between them


def test_prompts_that_answers_share_are_read_once() -> None:
    whole = "training.gradient_accumulation_steps=16"  # 64 rows a step, all of a phase
    one = setup("actor_rollout_ref.rollouts_per_prompt=1", whole).passes(longest=False)
    many = setup("actor_rollout_ref.rollouts_per_prompt=8", whole).passes(longest=False)
    assert one.read == one.attended == many.attended == 64 * 30
    assert many.read == 8 * 10 + 64 * 20
    assert many.scored == 64 * 20


def test_the_longest_of_many_rows_is_nearer_to_the_mean_than_of_one() -> None:
    ln = Lengths(prompt=1.0, longest_prompt=1, response=20.0, longest_response=60)
    assert ln.largest(1) == 60
    assert ln.largest(16) == 30


def test_ranks_share_the_rows_and_each_keeps_its_micro_batch() -> None:
    one = setup("training.micro_batch_size=4", "training.gradient_accumulation_steps=2")
    two = setup(
        "training.trainer=fsdp",
        "training.num_processes=2",
        "training.micro_batch_size=4",
        "training.gradient_accumulation_steps=2",
    )
    assert (one.phase, one.step, one.micros()) == (64, 8, one.micros())
    assert (two.phase, two.step) == (32, 8)


def test_the_old_pass_is_left_out_where_a_run_leaves_it_out() -> None:
    many, one = "training.gradient_accumulation_steps=4", "training.gradient_accumulation_steps=16"
    assert setup(many).old
    assert not setup(one).old
    assert not setup(many, "algorithm.use_pf_ppo=false").old
