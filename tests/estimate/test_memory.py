"""Counted bytes, held against tensors of real passes and against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from klimb.estimate.memory import (
    FLOAT,
    KERNEL_BYTES,
    block_bytes,
    forward_bytes,
    head_room,
    highest,
    kept_bytes,
    peaks,
)
from klimb.estimate.setup import Lengths, Pass
from klimb.estimate.shapes import ASSUMED, Shape
from klimb.models.attention import Packed, Sharing, recompute_activations, through
from klimb.models.head import CHUNK_LOGITS
from klimb.models.load import body_of
from tests.tiny_models import tiny_model, to_own_modules

from .setups import SMALL, TEXTS, setup

ZERO = {"process_bytes": 0.0}


def shape(layers: int, key_heads: int) -> Shape:
    return replace(SMALL, layers=layers, key_heads=key_heads)


def kept_by_autograd(
    layers: int, key_heads: int, shared: int, recompute: bool = False, lean: bool = True
) -> tuple[int, Pass]:
    """Bytes that a forward of 8 rows of 64 tokens keeps for its backward; shared: tokens that all rows begin with;
    lean: by klimb's own blocks, or by the modules of the model as those of other architectures."""
    s = shape(layers, key_heads)
    model = tiny_model(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=s.heads,
        num_key_value_heads=key_heads,
    )
    if not lean:
        to_own_modules(model)
    if recompute:
        recompute_activations(body_of(model))
    rows, width = 8, 64
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, s.vocab, (rows, width), generator=generator).flatten()
    positions = torch.arange(width).repeat(rows)
    kept = torch.cat([torch.arange(width), *(r * width + torch.arange(shared, width) for r in range(1, rows))])
    number = torch.zeros(rows * width, dtype=torch.int64).scatter_(0, kept, torch.arange(len(kept)))
    first_row = torch.where(positions < shared, positions, torch.arange(rows * width))
    sharing = Sharing(source=number[first_row], kept=kept) if shared else None
    # Of two lengths, as rows are: what attention reads of one length needs no putting together.
    packed = Packed.of([width] * rows if shared else [width + 1] * 4 + [width - 1] * 4, sharing)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(x: Tensor) -> Tensor:
        if (place := x.untyped_storage().data_ptr()) not in weights:
            found[place] = (x.untyped_storage().nbytes(), x)  # alive, so that no other tensor gets its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = through(body_of(model), ids[kept][None], positions[kept][None], packed)[0]
    read = hidden.shape[0]
    p = Pass(rows=rows, read=read, attended=rows * width, scored=0, row=width)
    return sum(size for size, _ in found.values()), p


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_block_keeps_what_is_counted(key_heads: int, lean: bool) -> None:
    one, p = kept_by_autograd(1, key_heads, shared=0, lean=lean)
    two, _ = kept_by_autograd(2, key_heads, shared=0, lean=lean)
    assert p.read == p.attended
    assert block_bytes(replace(shape(1, key_heads), lean=lean), p, FLOAT) == two - one


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_block_of_rows_that_share_a_prompt_keeps_what_is_counted(key_heads: int) -> None:
    one, p = kept_by_autograd(1, key_heads, shared=32)
    two, _ = kept_by_autograd(2, key_heads, shared=32)
    assert p.read == 32 + 8 * 32
    assert block_bytes(shape(1, key_heads), p, FLOAT) == pytest.approx(two - one, rel=0.01)


def test_the_whole_body_keeps_what_is_counted() -> None:
    found, p = kept_by_autograd(3, 2, shared=0)
    assert kept_bytes(SMALL, p, setup()) == pytest.approx(found, rel=0.04)


def test_with_checkpointing_a_block_more_keeps_its_input_and_nothing_else() -> None:
    one, p = kept_by_autograd(1, 2, shared=0, recompute=True)
    three, _ = kept_by_autograd(3, 2, shared=0, recompute=True)
    s = setup("training.activation_checkpointing=true")
    more = kept_bytes(shape(3, 2), p, s) - kept_bytes(shape(1, 2), p, s)
    assert more == three - one == 2 * p.read * SMALL.hidden * FLOAT


def test_weights_moments_and_gradients_by_hand() -> None:
    s = setup("algorithm.adv_estimator=gae")
    by_phase = {peak.phase: peak.parts for peak in peaks(s, ZERO)}
    body, whole = SMALL.body, SMALL.weights
    assert SMALL.tied
    assert body == whole
    for parts in by_phase.values():
        assert parts["weights"] == 4 * (2 * whole + body)  # actor, reference, critic
        assert parts["optimizer"] == 8 * (whole + body)
    assert by_phase["update"]["gradients"] <= 4 * whole
    assert "gradients" not in by_phase["score"]
    rows, places = 64, 16 + 32
    assert by_phase["rollout"]["cache"] == 2 * 3 * rows * 32 * places * 4
    assert by_phase["rollout"]["packed"] == 4 * (SMALL.blocks + SMALL.embedding)


def test_without_a_critic_a_reference_and_a_scorer_there_is_less() -> None:
    bare = setup("algorithm.adv_estimator=reinforce_pp", "algorithm.use_kl_loss=false")
    assert peaks(bare, ZERO)[0].parts["weights"] == 4 * SMALL.weights
    scored = setup(scorer=True)
    assert [peak.phase for peak in peaks(scored)] == ["rollout", "reward", "score", "update"]
    assert peaks(scored)[0].parts["weights"] == peaks(setup())[0].parts["weights"] + 4 * SMALL.body


def test_the_heads_room_does_not_grow_with_the_vocabulary() -> None:
    wide = replace(SMALL, vocab=200_000)
    assert head_room(wide, 1e6) <= 8 * CHUNK_LOGITS
    assert head_room(wide, 3) == 8 * 3 * 200_000
    assert head_room(wide, 1e6) == pytest.approx(head_room(SMALL, 1e6), rel=0.03)


def test_checkpointing_and_smaller_forwards_lower_the_update_and_nothing_else_does() -> None:
    def update(*overrides: str) -> float:
        return highest(setup(*overrides, "training.gradient_accumulation_steps=16"), ZERO).total

    long = "actor_rollout_ref.max_tokens_per_micro_batch=4096"
    whole, recomputed = update(long), update(long, "training.activation_checkpointing=true")
    smaller = update("actor_rollout_ref.max_tokens_per_micro_batch=256")
    assert recomputed < whole
    assert smaller < whole
    assert update(long, "training.lr=1e-3") == whole


def test_ranks_divide_what_is_sharded_and_hold_the_actor_whole_while_they_decode() -> None:
    one = setup(shape=ASSUMED["7b"], gpu_bytes=80e9)
    eight = setup("training.trainer=fsdp", "training.num_processes=8", shape=ASSUMED["7b"], gpu_bytes=80e9)
    a, b = peaks(one)[0].parts, peaks(eight)[0].parts
    for part in ("weights", "optimizer"):
        assert b[part] == a[part] / 8
    assert "process" not in b
    assert b["gathered"] == 4 * ASSUMED["7b"].weights


def test_an_engine_of_its_own_has_its_share_until_all_answers_are_rewarded() -> None:
    words = ("actor_rollout_ref.rollout_provider=vllm", "actor_rollout_ref.vllm.memory_share=0.25")
    s = setup(*words, shape=ASSUMED["1.5b"], gpu_bytes=80e9, scorer=True)
    awake = {peak.phase: peak.parts.get("engine") for peak in peaks(s)}
    assert awake == {"rollout": 20e9, "reward": 20e9, "score": None, "update": None}
    assert "cache" not in peaks(s)[0].parts


def test_holes_are_for_a_c_library_that_keeps_freed_memory() -> None:
    fitted = {**ZERO, "holes_rollout": 2.0, "holes_score": 2.0, "holes_update": 2.0}
    kept, handed_back = setup(), setup("training.keep_freed_memory=false")
    for wide, tight in zip(peaks(kept, fitted), peaks(handed_back, fitted), strict=True):
        assert wide.parts["activations"] == 2 * tight.parts["activations"]
        assert wide.parts["weights"] == tight.parts["weights"]


def test_products_of_every_size_that_a_decode_had_are_kept() -> None:
    def kernels(early: float, *overrides: str) -> float:
        lengths = replace(TEXTS, early=early)
        return peaks(setup(*overrides, lengths=lengths), ZERO)[0].parts.get("process", 0.0) / KERNEL_BYTES

    assert kernels(0.0) == 5  # one size: all rows end together
    ends = 0.5 * 64
    assert kernels(0.5) == pytest.approx(5 * (1 + 32 * (1 - (31 / 32) ** ends)))
    assert kernels(1.0, "actor_rollout_ref.rollout_slots=8") < kernels(1.0)
    large = Lengths(prompt=1.0, longest_prompt=1, response=900.0, longest_response=9000)
    many = setup("actor_rollout_ref.rollout_slots=999", "actor_rollout_ref.rollout_batch_size=640", lengths=large)
    assert peaks(many, ZERO)[0].parts["process"] == 1024 * KERNEL_BYTES
    assert kernels(1.0, "training.dtype=bfloat16") == 0


def test_freed_memory_that_is_kept_has_no_room_for_the_heads_blocks() -> None:
    kept, handed_back = (
        next(p.parts for p in peaks(setup(f"training.keep_freed_memory={on}"), ZERO) if p.phase == "score")
        for on in ("true", "false")
    )
    assert kept["activations"] + kept["head"] > handed_back["activations"] + handed_back.get("head", 0.0)


def test_a_forward_without_gradients_keeps_one_block_at_a_time() -> None:
    deep = replace(SMALL, layers=30)
    assert forward_bytes(deep, 100, FLOAT) == forward_bytes(SMALL, 100, FLOAT)
    assert forward_bytes(SMALL, 200, FLOAT) == 2 * forward_bytes(SMALL, 100, FLOAT)


def test_a_loss_of_whole_rows_takes_more_room_in_the_head() -> None:
    large = Lengths(prompt=100.0, longest_prompt=100, response=900.0, longest_response=900)
    parts = [
        next(p.parts for p in peaks(setup(f"algorithm.policy_loss={loss}", lengths=large), ZERO) if p.phase == "update")
        for loss in ("clip", "gspo")
    ]
    assert parts[1]["head"] > parts[0]["head"]
