"""Bytes of one rank by phase and part, counted tensor by tensor; what the phases' peaks are made of.

A part's name says what lies there at the phase's peak: `process` (Python and its libraries, on a CPU), `weights`,
`packed` (copies for decoding), `optimizer`, `gradients`, `activations`, `cache`, `head`, `gathered` (weights that other
ranks hold, brought together), `engine`. docs/plan.md has the formulas beside their reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from klimb.estimate.fitted import FITTED
from klimb.estimate.setup import (
    CHUNK_LOGITS,
    GROWTH,
    PACKED_BACKWARD_TOKENS,
    PACKED_NUMBERS,
    PACKED_TOKENS,
    PREFILL,
    Pass,
    Setup,
)
from klimb.estimate.shapes import Shape

FLOAT = 4
"""Bytes of a master weight, a gradient, a moment and of what norms and the residual stream hold."""
PACKED_PRODUCTS = 5
"""Shapes of products in a decode step: queries with keys and values, output, gate with up, down, and the head."""
KERNEL_BYTES = 568 * 1024
"""Of the code for one size, whatever the matrix (benchmarks/plan/packed_products.py measures it)."""
KERNELS_KEPT = 1024
"""As many oneDNN keeps (its primitive cache's capacity)."""
PARTS = (
    "process",
    "weights",
    "packed",
    "optimizer",
    "gradients",
    "activations",
    "cache",
    "head",
    "gathered",
    "engine",
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The bytes of a phase at its peak, by part."""

    phase: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def peaks(setup: Setup, fitted: Mapping[str, float] = FITTED) -> tuple[Peak, ...]:
    """Of rollout, reward (only with a reward model), score and update, after the first optimizer step."""
    lasting = _lasting(setup, fitted)
    phases = {"rollout": _rollout(setup), "score": _score(setup), "update": _update(setup)}
    if setup.scorer is not None:
        phases = {"rollout": phases["rollout"], "reward": _reward(setup, setup.scorer), **phases}
    return tuple(
        Peak(phase=phase, parts=_together(lasting, _spread(setup, phase, parts, fitted)))
        for phase, parts in phases.items()
    )


def highest(setup: Setup, fitted: Mapping[str, float] = FITTED) -> Peak:
    return max(peaks(setup, fitted), key=lambda peak: peak.total)


def _together(lasting: Mapping[str, float], passing: Mapping[str, float]) -> dict[str, float]:
    both = {part: lasting.get(part, 0.0) + passing.get(part, 0.0) for part in PARTS}
    return {part: size for part, size in both.items() if size > 0}


def _spread(setup: Setup, phase: str, parts: Mapping[str, float], fitted: Mapping[str, float]) -> dict[str, float]:
    """What a phase takes and gives back lies with holes between it where the C library keeps freed memory."""
    if setup.kind != "cpu" or not setup.keeps_freed:
        return dict(parts)
    factor = fitted.get(f"holes_{phase}", 1.0)
    return {part: size if part in ("gradients", "packed") else size * factor for part, size in parts.items()}


def _lasting(s: Setup, fitted: Mapping[str, float]) -> dict[str, float]:
    """What is there in every phase: the weights of all roles, the moments of those that are trained."""
    reference = s.reference if s.adapter is None else None  # with LoRA the actor without its adapter
    roles = [s.adapter or 0, *(shape.weights for shape in (s.actor, reference) if shape is not None)]
    roles += [shape.body for shape in (s.critic, s.scorer) if shape is not None]
    return {
        "process": _process(s, fitted),
        "weights": FLOAT * sum(roles) / s.ranks,
        "optimizer": 0.0 if s.offloads else 2 * FLOAT * trained_weights(s) / s.ranks,
    }


def _process(s: Setup, fitted: Mapping[str, float]) -> float:
    """Python and its libraries, and the code that oneDNN makes for every size of a product on packed weights and keeps:
    with every row that ends the products of a decode step have another size."""
    if s.kind != "cpu":
        return 0.0
    ends, steps = min(s.slots, s.phase) * s.lengths.early, s.lengths.longest_response
    sizes = 1 + steps * (1 - (1 - 1 / steps) ** ends)  # rows that end in one step make one new size together
    kernels = min(KERNELS_KEPT, PACKED_PRODUCTS * sizes) if s.wide == FLOAT else 0
    return fitted["process_bytes"] + KERNEL_BYTES * kernels


def trained_weights(s: Setup) -> int:
    policy = s.actor.weights if s.adapter is None else s.adapter
    return policy + (0 if s.critic is None else s.critic.body)


def _rollout(s: Setup) -> dict[str, float]:
    """The decode's last step, or the reading of the prompts where that takes more; with an engine what that has."""
    if s.engine is not None:
        return {"engine": s.engine}
    a, rows, ln = s.actor, min(s.slots, s.phase), s.lengths
    places = ln.longest_prompt + -(-ln.longest_response // GROWTH) * GROWTH
    cache = 2 * a.layers * rows * a.keys * places * s.wide
    read = max(min(rows / s.per_prompt * ln.prompt, PREFILL[s.kind]), ln.longest_prompt)
    logits = 3 * rows * a.vocab * FLOAT  # logits, probabilities, and those cut into blocks
    numbers = 8 * rows * ln.longest_response
    reading = forward_bytes(a, read, s.wide)
    return {
        "packed": (a.blocks + a.embedding) * (FLOAT if s.kind == "cpu" and s.wide == FLOAT else s.wide),
        "cache": cache,
        "head": logits,
        "activations": reading + numbers,
        "gathered": FLOAT * a.weights if s.ranks > 1 else 0.0,
    }


def _reward(s: Setup, scorer: Shape) -> dict[str, float]:
    """The reward model's forward of its largest batch, padded, in float32, beside an engine, which goes to sleep once
    all answers are rewarded (klimb.phase)."""
    tokens = min(s.phase, s.value_rows) * (s.lengths.longest_prompt + s.lengths.longest_response)
    return {
        "activations": forward_bytes(scorer, min(tokens, max(s.token_budget, 1)), FLOAT),
        "gathered": _gathered(s, scorer),
        "engine": s.engine or 0.0,
    }


def _score(s: Setup) -> dict[str, float]:
    """The forwards without gradients: of the old policy and the reference, and of the critic, whose batches are larger.

    A body is done when its head begins. Where freed memory is kept the head's blocks still find no room in the small
    holes that the body left, so the widest of both count; elsewhere the pass that takes most.
    """
    found = list[tuple[float, float]]()
    if s.old or s.reference is not None:
        found += _logprob_pass(s, s.actor, s.passes(longest=True))
    if s.critic is not None:
        found.append((forward_bytes(s.critic, s.value_pass().read, s.wide), 0.0))
    if not found:
        return {}
    bodies, heads = max(body for body, _ in found), max(head for _, head in found)
    if not s.keeps_freed:
        bodies, heads = max(found, key=sum)
    return {"activations": bodies, "head": heads, "gathered": _gathered(s, s.actor)}


def _logprob_pass(s: Setup, shape: Shape, p: Pass) -> list[tuple[float, float]]:
    """Activations and head while the body runs, and while the head does; its copy is there for all micro-batches."""
    hidden, copy = FLOAT * shape.hidden * (p.read + p.scored), packed_head(shape, p.scored, s)
    return [(forward_bytes(shape, p.read, s.wide), copy), (hidden, head_room(shape, p.scored) + copy)]


def _update(s: Setup) -> dict[str, float]:
    """The actor's optimizer step or the critic's, whichever takes more. Each begins without gradients."""
    found = [_step(s, s.actor, with_head=True)]
    if s.critic is not None:
        found.append(_step(s, s.critic, with_head=False))
    return max(found, key=lambda parts: sum(parts.values()))


def _step(s: Setup, shape: Shape, with_head: bool) -> dict[str, float]:
    """Where a backward begins, all that the forward kept is there, and the gradients of the micro-batches before; where
    the last one ends, all gradients and, beside them, the embedding's newest where it is a table of its own."""
    p, several = s.passes(longest=True), s.micros() > 1
    frozen = with_head and s.adapter is not None
    all_weights = s.adapter or 0 if frozen else shape.weights if with_head else shape.body
    gradients, embedding = FLOAT * all_weights / s.ranks, 0.0 if frozen else FLOAT * shape.embedding
    beginning = {
        "gradients": gradients if several else (embedding / s.ranks if with_head and s.fused else 0.0),
        "activations": kept_bytes(shape, p, s) + backward_bytes(shape, p.read, s),
        "head": head_step(shape, p.scored, s) if with_head else FLOAT * shape.hidden * p.scored,
        "gathered": _gathered(s, shape),
    }
    adds_rows = with_head and s.fused and shape.tied and s.kind == "cpu" and s.ranks == 1
    end = {
        "gradients": gradients,
        "activations": 0.0 if adds_rows else embedding,
        "gathered": _gathered(s, shape),
    }
    moments = FLOAT * 2 * all_weights / s.ranks if s.offloads and s.kind == "cuda" else 0.0
    stepping = {"gradients": gradients, "optimizer": moments}
    return max((beginning, end, stepping), key=lambda parts: sum(parts.values()))


def _gathered(s: Setup, shape: Shape) -> float:
    """Two blocks and the embeddings whole, in the compute dtype, while the rest lies sharded over the ranks; one rank
    with a smaller compute dtype holds its own copy of the matrices."""
    if s.ranks > 1:
        return s.wide * (2 * shape.block + shape.weights - shape.blocks)
    return s.wide * (shape.blocks + shape.embedding) if s.wide < FLOAT else 0.0


def forward_bytes(shape: Shape, tokens: float, wide: int) -> float:
    """A forward without gradients at its widest, inside a feed-forward: residual, its norm, the embedded tokens; gate,
    up and their product; or inside an attention."""
    stream = 3 * shape.hidden * FLOAT
    feed_forward = 3 * shape.intermediate * wide
    attention = (5 * shape.queries + 2 * shape.keys) * wide
    return tokens * (stream + max(feed_forward, attention))


def block_bytes(shape: Shape, p: Pass, wide: int) -> float:
    """What one block's forward keeps for its backward (counted with saved-tensor hooks: tests/estimate/test_memory.py).

    Of every token read: for each of two norms its normalised input, its output for the products behind and, where it is
    not lean, its input; gate, its activation, up and their product; the attention's output. Of every token attended:
    queries, keys, values, the result, its normaliser.
    """
    norms = 2 * shape.hidden * ((1 if shape.lean else 2) * FLOAT + wide) + 2 * FLOAT
    feed_forward = (4 if shape.gated else 6) * shape.intermediate * wide
    read = norms + feed_forward + shape.queries * wide
    attended = (2 * shape.queries + 2 * shape.keys) * wide + shape.heads * FLOAT
    return p.read * read + p.attended * attended


def kept_bytes(shape: Shape, p: Pass, s: Setup) -> float:
    """What the body keeps for its backward: of every block all, or with activation checkpointing its input, and all of
    the one that is computed again."""
    ends = p.read * (3 * shape.hidden + 2 * shape.head_dim) * FLOAT
    if s.checkpointing:
        return shape.layers * p.read * shape.hidden * FLOAT + block_bytes(shape, p, s.wide) + ends
    return shape.layers * block_bytes(shape, p, s.wide) + ends


def backward_bytes(shape: Shape, tokens: float, s: Setup) -> float:
    """Gradients on their way through a block: of product, gate and up, and of the residual stream."""
    return tokens * (3 * shape.intermediate * s.wide + 2 * shape.hidden * FLOAT)


def head_room(shape: Shape, scored: float) -> float:
    """Logits and probabilities of one chunk."""
    return 2 * FLOAT * min(scored, max(1, CHUNK_LOGITS // shape.vocab)) * shape.vocab


def packed_head(shape: Shape, scored: float, s: Setup) -> float:
    """The head once more, in the layout of fast products."""
    packs = s.kind == "cpu" and s.wide == FLOAT and scored >= PACKED_TOKENS and shape.embedding <= PACKED_NUMBERS
    return FLOAT * shape.embedding if packs else 0.0


def head_step(shape: Shape, scored: float, s: Setup) -> float:
    """Hidden states that are scored and their gradients, and the chunk's room: a third block where the logits are
    computed again for a loss of whole rows. For the others a second copy of the head does the backward, in optimizer
    steps that are large enough."""
    room = head_room(shape, scored) * (1.0 if s.fused else 1.5)
    copies = 2 if s.fused and scored * s.micros() >= PACKED_BACKWARD_TOKENS else 1
    return 2 * FLOAT * shape.hidden * scored + room + copies * packed_head(shape, scored, s)
