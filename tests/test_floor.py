"""The floor counts the linear layers' products, against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from klimb.config.scale import LoraSettings
from klimb.estimate.duration import Pace
from klimb.floor import Cost, Floor, Work, body_cost, cost_of, measured_pace
from klimb.models.load import body_of, critic_from, head_of
from klimb.models.lora import add_lora
from tests.tiny_models import ARCHITECTURES, tiny_model

PACE = Pace(products=50.0, moved=7.0, calls=3.0)
FLOOR = Floor(pace=PACE, ranks=2, actor=Cost(body=2.0, head=3.0), critic=Cost(body=1.0, head=0.0))


def work(**changes: object) -> Work:
    values = {
        "rollout_read": 10, "rollout_scored": 5, "score_read": 8, "score_scored": 4, "update_read": 6,
        "update_scored": 2, "old": True, "reference": True, "actor_epochs": 1, "critic_epochs": 2,
    }  # fmt: skip
    return Work(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cost_of_a_forward_is_what_torch_counts(name: str) -> None:
    """The attention's products are left out of the floor, so torch is asked for linear layers alone."""
    model = tiny_model(name)
    cost = cost_of(model)
    ids = torch.randint(4, 200, (3, 7))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head_of(model)(body_of(model)(input_ids=ids)[0][:, :2])
    flops = counter.get_flop_counts()["Global"]
    linear = sum(n for operation, n in flops.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert cost.forward(read=21, scored=6) == linear


def test_a_frozen_model_has_one_product_in_the_backward() -> None:
    assert cost_of(tiny_model()).backward == 2.0
    frozen = add_lora(tiny_model(), LoraSettings(rank=1), seed=0)
    assert cost_of(frozen).backward == 1.0
    cheap = Floor(pace=PACE, actor=Cost(body=2.0, head=3.0, backward=1.0), critic=FLOOR.critic)
    assert work().operations(cheap)["update"] == 2 * (2 * 6 + 3 * 2) + 3 * 2 * 6


def test_a_critic_has_a_body_and_no_head() -> None:
    model = tiny_model()
    assert body_cost(critic_from(model).body) == cost_of(model).body


def test_operations_by_hand() -> None:
    got = work().operations(FLOOR)
    assert got == {
        "rollout": 2 * 10 + 3 * 5,
        "score": 2 * (2 * 8 + 3 * 4) + 1 * 8,
        "update": 3 * (1 * (2 * 6 + 3 * 2) + 2 * 6),
    }
    bare = Floor(pace=PACE, actor=FLOOR.actor, critic=None)
    assert work(old=False, actor_epochs=0, critic_epochs=0).operations(bare) == {
        "rollout": 35, "score": 28, "update": 0
    }  # fmt: skip


def test_shares_by_hand() -> None:
    got = FLOOR.shares({"rollout": 100.0, "update": 300.0}, {"rollout": 2.0, "update": 6.0, "eval": 9.0})
    assert got == {
        "perf/floor_share": 4.0 / 8.0,
        "perf/rollout_floor_share": 0.5,
        "perf/update_floor_share": 0.5,
        "perf/rate": 100.0,
        "perf/byte_rate": 7.0,
        "perf/call_rate": 3.0,
    }


def test_the_rate_is_measured() -> None:
    pace = measured_pace(torch.device("cpu"), torch.float32)
    assert 1e8 < pace.products < 1e14
    assert 1e8 < pace.moved < 1e13
    assert 1e3 < pace.calls < 1e8
