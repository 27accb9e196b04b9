"""From a case and the lengths that its run had to what `klimb plan` says of it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from cases import SIZES, Case, cases, tree

from klimb.config.counts import count
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.estimate.duration import Pace
from klimb.estimate.setup import Lengths, Models, Setup, make_setup
from klimb.estimate.shapes import Shape

KEPT = Path(__file__).with_name("measured.json")
STEPS = 4


def load() -> dict[str, tuple[Case, dict[str, Any]]]:
    """Every case that was measured, with what was kept of it, and the machine's pace.

    That is the median of what the runs with as many ranks measured when they started: a single measurement swings by a
    third on a shared machine, more than a step does."""
    kept = json.loads(KEPT.read_text())
    found = {case.name: (case, kept[case.name]) for case in cases() if case.name in kept}
    paces = {
        ranks: median([m["pace"] for case, m in found.values() if case.ranks == ranks])
        for ranks in {case.ranks for case, _ in found.values()}
    }
    return {name: (case, {**m, "pace": paces[case.ranks]}) for name, (case, m) in found.items()}


def median(measured: list[dict[str, float]]) -> Pace:
    """Of each of its numbers."""
    return Pace(**{name: statistics.median(one[name] for one in measured) for name in measured[0]})


def shape(case: Case) -> Shape:
    s = SIZES[case.size]
    return Shape(
        layers=s.layers,
        hidden=s.hidden,
        intermediate=s.intermediate,
        heads=s.heads,
        key_heads=s.key_heads,
        head_dim=s.hidden // s.heads,
        vocab=s.vocab,
        tied=True,
    )


def setup(case: Case, measured: dict[str, Any]) -> Setup:
    """Lengths as they occurred: the means for time, the longest for memory."""
    config = RunConfig.model_validate_json(json.dumps(tree(case, Path("nowhere"), STEPS)))
    posture = resolve(config)
    lengths = Lengths(
        prompt=measured["prompt"],
        longest_prompt=measured["prompt"],
        response=measured["response_mean"],
        longest_response=measured["response_longest"],
        early=1.0 - measured["truncated"],
    )
    return make_setup(config, posture, count(config, posture), Models(actor=shape(case)), lengths, None)
