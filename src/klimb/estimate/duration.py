"""Seconds of a turn by phase: counted operations over a rate, counted bytes over a bandwidth, calls over a cost each.

Every phase is a sum of three kinds of work, `Work`; a machine is what one unit of each takes, `Speed`. Rewards by
functions, evaluations and saving are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from klimb.estimate.fitted import FITTED
from klimb.estimate.memory import FLOAT, trained_weights
from klimb.estimate.setup import Pass, Setup
from klimb.estimate.shapes import Shape

CALLS_PER_BLOCK = {"decode": 30, "pass": 40}
"""Operations that a block calls, one after another."""
CALLS_AROUND = {"decode": 60, "pass": 120}
"""Those of a step or forward outside its blocks."""
CALLS_PER_RUN = 3
"""Those of the attention of rows of one length, in every block: the kernel and copies around it."""
CALLS_PER_TOKEN = 0.3
"""What Python does for a token that was drawn, in calls."""
HEAD_PASSES = 6
"""Times that all logits are read or written: product, softmax twice, maximum, entropy, gradient."""
DRAW_PASSES = 5
"""The same of a draw: softmax twice, blocks, sums, the copy."""
OPTIMIZER_PASSES = 8
"""Times that a weight's worth of memory goes by in a step: norm and scale of the gradient; weight, two moments and
gradient read, and three of them written."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """products: floating-point operations of matrix products; moved: bytes read or written by all else; calls:
    operations called; exchanged: bytes that ranks send each other."""

    products: float = 0.0
    moved: float = 0.0
    calls: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            products=self.products + other.products,
            moved=self.moved + other.moved,
            calls=self.calls + other.calls,
            exchanged=self.exchanged + other.exchanged,
        )

    def times(self, n: float) -> Work:
        return Work(
            products=self.products * n, moved=self.moved * n, calls=self.calls * n, exchanged=self.exchanged * n
        )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of one unit of each kind of work, of decode steps and of passes over whole rows; link: of a byte between
    ranks."""

    decode_products: float
    decode_bytes: float
    decode_calls: float
    pass_products: float
    pass_bytes: float
    pass_calls: float
    link: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one process on a CPU does in a second. products: floating-point operations of a large product, on all of its
    cores; moved: bytes that an element-wise operation on a large tensor reads and writes; calls: smallest operations,
    one after another. The three differ from CPU to CPU by different factors."""

    products: float
    moved: float
    calls: float

    def on(self, cores: float, measured_on: float) -> Pace:
        """Of a process with other cores than these numbers are of. What is no product is done by one core at a time."""
        one = min(1.0, cores)
        return Pace(products=self.products * cores / measured_on, moved=self.moved * one, calls=self.calls * one)

    def times(self, factor: float) -> Pace:
        return Pace(products=self.products * factor, moved=self.moved * factor, calls=self.calls * factor)


def kept_pace(cores: float, rate: float | None = None, fitted: Mapping[str, float] = FITTED) -> Pace:
    """Of the machine that constants were fitted on, with so many cores. rate: operations per second of another, on as
    many; all else is taken to be as much faster."""
    here = Pace(products=fitted["products_pace"] * cores, moved=fitted["moved_pace"], calls=fitted["calls_pace"])
    return here if rate is None else here.times(rate / here.products)


def cpu_speed(pace: Pace, fitted: Mapping[str, float] = FITTED) -> Speed:
    """Constants say how many times as long a unit of a run's work takes as one of those that a pace is measured by."""
    return Speed(
        decode_products=fitted["decode_products"] / pace.products,
        decode_bytes=fitted["decode_bytes"] / pace.moved,
        decode_calls=fitted["decode_calls"] / pace.calls,
        pass_products=fitted["pass_products"] / pace.products,
        pass_bytes=fitted["pass_bytes"] / pace.moved,
        pass_calls=fitted["pass_calls"] / pace.calls,
        link=fitted["link_bytes"] / pace.moved,
    )


PHASES = ("rollout", "reward", "score", "update")


def work(s: Setup) -> dict[str, tuple[Work, Work]]:
    """Of each phase: what is done in decode steps, and in passes over whole rows."""
    decode, reading = _rollout(s)
    out = {"rollout": (decode, reading), "score": (Work(), _score(s)), "update": (Work(), _update(s))}
    if s.scorer is not None:
        out["reward"] = (Work(), _reward(s, s.scorer))
    return {phase: out[phase] for phase in PHASES if phase in out}


def seconds(s: Setup, speed: Speed) -> dict[str, float]:
    out: dict[str, float] = {}
    for phase, (decode, whole) in work(s).items():
        out[phase] = (
            decode.products * speed.decode_products
            + decode.moved * speed.decode_bytes
            + decode.calls * speed.decode_calls
            + whole.products * speed.pass_products
            + whole.moved * speed.pass_bytes
            + whole.calls * speed.pass_calls
            + (decode.exchanged + whole.exchanged) * speed.link
        )
    return out


def _rollout(s: Setup) -> tuple[Work, Work]:
    """Decode steps of as many rows as there are slots, and the reading of every prompt once."""
    a, ln, answers = s.actor, s.lengths, s.phase + (s.prompts if s.greedy else 0)
    rows = min(s.slots, answers)
    tokens = answers * ln.response
    steps = max(float(ln.longest_response), tokens / rows)
    matrices = a.blocks + a.embedding
    keys = 2 * a.layers * a.keys * s.wide
    cache = keys * tokens * (ln.prompt / s.per_prompt + ln.response / 2)
    attention = 4 * a.layers * a.queries * tokens * (ln.prompt + ln.response / 2)
    decode = Work(
        products=2.0 * matrices * tokens + attention,
        moved=steps * matrices * s.wide + cache + tokens * (DRAW_PASSES * a.vocab * FLOAT + _stream(a, s.wide)),
        calls=steps * (a.layers * CALLS_PER_BLOCK["decode"] + CALLS_AROUND["decode"]) + CALLS_PER_TOKEN * tokens,
    )
    read = s.prompts * ln.prompt
    whole = Pass(rows=s.prompts, read=read, attended=read, scored=s.phase, row=ln.prompt)
    if s.ranks > 1:  # the whole model is brought together once, for all steps
        decode += Work(exchanged=FLOAT * a.weights)
    return decode, _forward(a, whole, s, scored=s.prompts)


def _score(s: Setup) -> Work:
    """The old policy's and the reference's forwards, cut as the update is, and the critic's."""
    p, out = s.passes(longest=False), Work()
    forwards = s.micros() * s.steps
    if logprob_passes := s.old + (s.reference is not None):
        out += _forward(s.actor, p, s, scored=p.scored).times(forwards * logprob_passes)
    if s.critic is not None:
        out += _forward(s.critic, p, s, scored=0).times(forwards)
    return out


def _reward(s: Setup, scorer: Shape) -> Work:
    tokens = s.phase * s.episode()
    return _forward(scorer, Pass(rows=s.phase, read=tokens, attended=tokens, scored=0, row=s.episode()), s, scored=0)


def _update(s: Setup) -> Work:
    """Forward and backward of every micro-batch, and the optimizer's steps, for actor and critic."""
    p, n = s.passes(longest=False), s.epochs * s.steps
    out = _backward(s.actor, p, s, scored=p.scored)
    if s.critic is not None:
        out += _backward(s.critic, p, s, scored=0)
    stepping = Work(moved=OPTIMIZER_PASSES * FLOAT * trained_weights(s) / s.ranks)
    return out.times(s.micros() * n) + stepping.times(n)


def _forward(shape: Shape, p: Pass, s: Setup, scored: float) -> Work:
    """One forward over p. What every operation writes is read again once. Rows of one length are attended together."""
    runs = 1 + (p.rows - 1) * s.lengths.early
    return Work(
        products=2.0 * shape.blocks * p.read + 2.0 * shape.embedding * scored + _attention(shape, p),
        moved=2 * shape.layers * p.read * _stream(shape, s.wide) + HEAD_PASSES * FLOAT * shape.vocab * scored,
        calls=shape.layers * (CALLS_PER_BLOCK["pass"] + CALLS_PER_RUN * runs) + CALLS_AROUND["pass"],
        exchanged=_others(shape, s),
    )


def _backward(shape: Shape, p: Pass, s: Setup, scored: float) -> Work:
    """Forward and backward: twice the products, twice the bytes, twice the calls again; with checkpointing the blocks'
    forward once more. The gradients of micro-batches are added up, weight by weight."""
    again = 0 if s.fused else 1  # a loss of whole rows has the logits computed a second time
    head = Work(
        products=2.0 * shape.embedding * scored * (3 + again),
        moved=HEAD_PASSES * FLOAT * shape.vocab * scored * (1 + again),
    )
    body = _forward(shape, p, s, scored=0)
    return body.times(3.0 + s.checkpointing) + head + Work(moved=3 * FLOAT * shape.weights)


def _attention(shape: Shape, p: Pass) -> float:
    """Scores and sums of values, of the half that a causal mask leaves."""
    return 2.0 * shape.layers * shape.queries * p.attended * p.row


def _stream(shape: Shape, wide: int) -> float:
    """Bytes per token and block of what its operations write."""
    return (8 * shape.hidden) * FLOAT + (5 * shape.queries + 2 * shape.keys + 4 * shape.intermediate) * wide


def _others(shape: Shape, s: Setup) -> float:
    """Weights that lie with other ranks, once."""
    return FLOAT * shape.weights * (s.ranks - 1) / s.ranks
