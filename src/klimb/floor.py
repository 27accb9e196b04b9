"""How near a turn comes to the least time its matrix products need on this machine.

The floor counts the products of the models' linear layers only, at the rate of a product measured when the run starts:
no attention, no element-wise work, no padding. A share of 0.6 means that all the rest took two thirds as long again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from klimb.estimate.duration import Pace
from klimb.models.load import body_of, head_of

SIDE = {"cpu": 768, "cuda": 8192}
"""Of the square matrices of the product that is timed."""
NUMBERS = {"cpu": 2**23, "cuda": 2**26}
"""In the tensor whose element-wise operation is timed: more than caches hold."""
CALLS = 500
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Floating-point operations of one forward: of the body per token read, of the head per token scored.

    backward: of a backward, in forwards; a frozen weight has no gradient of its own, which saves one of two products.
    """

    body: float
    head: float
    backward: float = 2.0

    def forward(self, read: int, scored: int) -> float:
        return self.body * read + self.head * scored


@dataclass(frozen=True, kw_only=True)
class Floor:
    """pace: of this rank; ranks: how many there are; actor, critic: what a forward of theirs costs."""

    pace: Pace
    actor: Cost
    critic: Cost | None
    ranks: int = 1

    @property
    def rate(self) -> float:
        """Operations per second of large products, of all ranks together."""
        return self.pace.products * self.ranks

    def shares(self, work: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """`perf/floor_share` of all parts in work (operations) together, `perf/<part>_floor_share` of each, the rate
        they are taken at, `perf/rate`, and this rank's `perf/byte_rate` and `perf/call_rate`."""
        least = {part: operations / self.rate for part, operations in work.items()}
        spent = {part: max(seconds.get(part, 0.0), 1e-9) for part in work}
        each = {f"perf/{part}_floor_share": least[part] / spent[part] for part in work}
        together = sum(least.values()) / sum(spent.values())
        paces = {"perf/rate": self.rate, "perf/byte_rate": self.pace.moved, "perf/call_rate": self.pace.calls}
        return {"perf/floor_share": together, **each, **paces}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a turn had to compute. *_read: tokens through a body; *_scored: positions through the head.

    old: whether the old policy's forward was made, reference: whether there is one; actor_epochs, critic_epochs: the
    update's passes.
    """

    rollout_read: int
    rollout_scored: int
    score_read: int
    score_scored: int
    update_read: int
    update_scored: int
    old: bool
    reference: bool
    actor_epochs: int
    critic_epochs: int

    def operations(self, floor: Floor) -> dict[str, float]:
        """By part of the turn."""
        actor, critic = floor.actor, floor.critic or Cost(body=0.0, head=0.0)
        update = self.actor_epochs * (1 + actor.backward) * actor.forward(self.update_read, self.update_scored)
        update += self.critic_epochs * (1 + critic.backward) * critic.forward(self.update_read, 0)
        score = (self.old + self.reference) * actor.forward(self.score_read, self.score_scored)
        return {
            "rollout": actor.forward(self.rollout_read, self.rollout_scored),
            "score": score + critic.forward(self.score_read, 0),
            "update": update,
        }


def cost_of(model: PreTrainedModel) -> Cost:
    """Two operations per weight of a matrix and token; looking up an embedding costs none."""
    head = cast(nn.Parameter, head_of(model).weight)
    backward = 2.0 if head.requires_grad else 1.0
    return Cost(body=body_cost(body_of(model)), head=2.0 * _matrix(head), backward=backward)


def body_cost(body: nn.Module) -> float:
    looked_up = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
    return 2.0 * sum(_matrix(p) for p in body.parameters() if id(p) not in looked_up)


def _matrix(parameter: object) -> int:
    return parameter.numel() if isinstance(parameter, Tensor) and parameter.dim() == 2 else 0


def measured_pace(device: torch.device, dtype: torch.dtype) -> Pace:
    """The best of a few tries of each, a fraction of a second in all."""
    n, numbers = SIDE.get(device.type, SIDE["cpu"]), NUMBERS.get(device.type, NUMBERS["cpu"])
    a = torch.ones(n, n, device=device, dtype=dtype)
    many, out = torch.ones(numbers, device=device), torch.empty(numbers, device=device)
    few = torch.ones(64, device=device)

    def calls() -> None:
        for _ in range(CALLS):
            few.add_(0.0)

    def best(work: Callable[[], object]) -> float:
        return min(_seconds(work, device) for _ in range(REPEATS + 1))

    return Pace(
        products=2.0 * n**3 / best(lambda: a @ a),
        moved=2.0 * out.nbytes / best(lambda: torch.mul(many, 2.0, out=out)),
        calls=CALLS / best(calls),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
