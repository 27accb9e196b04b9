"""Counted work, held against the count that a run makes of itself, and how it scales."""

from __future__ import annotations

from dataclasses import replace

import pytest

from klimb.estimate.duration import CALLS_PER_TOKEN, Pace, Speed, Work, cpu_speed, kept_pace, seconds, work
from klimb.estimate.gpus import gpu_speed
from klimb.floor import Cost, Floor
from klimb.floor import Work as TurnWork

from .setups import SMALL, TEXTS, setup

PACE = Pace(products=1e10, moved=1e9, calls=1e5)

ONLY_PRODUCTS = Speed(
    decode_products=1.0,
    decode_bytes=0.0,
    decode_calls=0.0,
    pass_products=1.0,
    pass_bytes=0.0,
    pass_calls=0.0,
    link=0.0,
)


def test_products_are_those_that_a_run_counts_and_those_of_attention() -> None:
    """floor.py leaves attention out: it is small beside the matrices, and never negative."""
    s = setup("training.gradient_accumulation_steps=4", "algorithm.adv_estimator=gae")
    assert s.old
    scored, read = 64 * 20, 64 * 30
    turn = TurnWork(
        rollout_read=read,
        rollout_scored=scored,
        score_read=read,
        score_scored=scored,
        update_read=read,
        update_scored=scored,
        old=True,
        reference=True,
        actor_epochs=1,
        critic_epochs=1,
    )
    cost = Cost(body=2.0 * SMALL.blocks, head=2.0 * SMALL.embedding)
    floor = Floor(pace=PACE, actor=cost, critic=Cost(body=2.0 * SMALL.blocks, head=0.0))
    counted, own = seconds(s, ONLY_PRODUCTS), turn.operations(floor)
    for phase in ("rollout", "score", "update"):
        assert own[phase] <= counted[phase] <= 1.2 * own[phase]


def test_checkpointing_costs_a_forward_of_the_blocks_more() -> None:
    plain, again = (
        work(setup(f"training.activation_checkpointing={on}", "algorithm.adv_estimator=reinforce_pp"))["update"][1]
        for on in ("false", "true")
    )
    forward = 2.0 * SMALL.blocks * 64 * 30
    assert again.products - plain.products == pytest.approx(forward, rel=0.15)
    assert again.calls == pytest.approx(plain.calls * 4 / 3)


def test_two_epochs_take_twice_the_update() -> None:
    one, two = (seconds(setup(f"algorithm.ppo_epochs={n}"), cpu_speed(PACE)) for n in (1, 2))
    assert two["update"] == pytest.approx(2 * one["update"])
    assert two["score"] == one["score"]


def test_fewer_slots_make_more_steps() -> None:
    few, many = (work(setup(f"actor_rollout_ref.rollout_slots={n}"))["rollout"][0] for n in (8, 64))
    assert few.products == many.products
    drawn = CALLS_PER_TOKEN * 64 * 20
    assert few.calls - drawn == pytest.approx((many.calls - drawn) * (64 * 20 / 8) / 32)


def test_rows_of_different_lengths_take_more_calls() -> None:
    even, varied = (work(setup(lengths=replace(TEXTS, early=early)))["score"][1] for early in (0.0, 1.0))
    assert varied.calls > even.calls
    assert varied.products == even.products


def test_a_faster_machine_takes_less_of_everything_and_more_cores_only_of_products() -> None:
    s = setup()
    slow, fast, wide = (seconds(s, cpu_speed(pace)) for pace in (PACE, PACE.times(2.0), PACE.on(2, 1)))
    for phase in slow:
        assert fast[phase] == pytest.approx(slow[phase] / 2)
        assert fast[phase] < wide[phase] < slow[phase]
    assert PACE.on(0.5, 1) == PACE.times(0.5)
    assert PACE.on(0.5, 2) == Pace(products=PACE.products / 4, moved=PACE.moved / 2, calls=PACE.calls / 2)


def test_each_kind_of_work_is_taken_at_a_pace_of_its_own() -> None:
    """Twice the pace of one kind halves its part, and leaves the others as they are."""
    s, constants = setup(), {"decode_products": 1.0, "decode_bytes": 2.0, "decode_calls": 3.0, "link_bytes": 4.0}
    constants |= {"pass_products": 5.0, "pass_bytes": 6.0, "pass_calls": 7.0}
    got = cpu_speed(Pace(products=10.0, moved=20.0, calls=40.0), constants)
    assert got == Speed(
        decode_products=0.1, decode_bytes=0.1, decode_calls=0.075, pass_products=0.5, pass_bytes=0.3,
        pass_calls=0.175, link=0.2,
    )  # fmt: skip
    total = sum(seconds(s, cpu_speed(PACE)).values())
    parts = sum(total - sum(seconds(s, cpu_speed(replace(PACE, **{kind: 1e30}))).values()) for kind in vars(PACE))
    assert parts == pytest.approx(total, rel=1e-6)


def test_a_rate_alone_stands_for_all_of_a_machine() -> None:
    kept = {"products_pace": 10.0, "moved_pace": 20.0, "calls_pace": 40.0}
    assert kept_pace(2, None, kept) == Pace(products=20.0, moved=20.0, calls=40.0)
    assert kept_pace(2, 60.0, kept) == Pace(products=60.0, moved=60.0, calls=120.0)


def test_ranks_send_each_other_what_each_lacks() -> None:
    one, two = setup(), setup("training.trainer=fsdp", "training.num_processes=2")
    assert all(part.exchanged == 0 for parts in work(one).values() for part in parts)
    assert work(two)["update"][1].exchanged > 0
    assert work(two)["rollout"][0].products == work(one)["rollout"][0].products / 2


def test_a_gpu_is_taken_at_a_share_of_what_is_published() -> None:
    s = setup(gpu_bytes=80e9, lengths=TEXTS)
    plain, twice = seconds(s, gpu_speed()), seconds(s, gpu_speed(624e12))
    for phase, value in twice.items():
        assert value < plain[phase]
    assert gpu_speed(separate_engine=True).decode_calls == 0


def test_work_adds_up_and_multiplies() -> None:
    a = Work(products=1, moved=2, calls=3, exchanged=4)
    assert a + a == a.times(2) == Work(products=2, moved=4, calls=6, exchanged=8)
