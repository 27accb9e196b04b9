"""What makes a run fit: in the article's order, as overrides that do what their numbers say."""

from __future__ import annotations

import shlex

import pytest

from klimb.config.load import with_overrides
from klimb.config.schema import RunConfig
from klimb.doctor.finding import Facts
from klimb.doctor.remedies import memory_remedies
from klimb.estimate.changes import changes, enough_ranks, on_ranks
from klimb.estimate.forecast import Machine, bounded, setup_of
from klimb.estimate.memory import highest, peaks
from klimb.estimate.setup import Lengths, Models, Setup
from klimb.estimate.shapes import ASSUMED

from .setups import config

LONG = Lengths(prompt=512.0, longest_prompt=1024, response=1024.0, longest_response=2048)
CARD_BYTES = 80 * 2.0**30
CARD = Machine(gpu_bytes=CARD_BYTES)
EIGHT = (
    "training.trainer=fsdp",
    "training.num_processes=8",
    "actor_rollout_ref.max_tokens=2048",
    "actor_rollout_ref.rollout_provider=vllm",
)


def of_size(name: str, machine: Machine = CARD):
    def make(c: RunConfig) -> Setup:
        return setup_of(c, Models(actor=ASSUMED[name]), bounded(LONG), machine)

    return make


def test_a_run_that_fits_needs_no_change() -> None:
    make = of_size("1.5b")
    assert changes(config(*EIGHT), make, highest(make(config(*EIGHT))).total) == []


@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_changes_come_in_order_and_each_override_does_what_is_said(dynamic: str) -> None:
    c, make = config(*EIGHT, f"actor_rollout_ref.use_dynamic_bsz={dynamic}"), of_size("7b")
    limit = 30 * 2.0**30
    found = changes(c, make, limit)
    keys = [change.remedy.keys[0].rpartition(".")[2] for change in found if change.available]
    smaller = "max_tokens_per_micro_batch" if dynamic == "true" else "micro_batch_size"
    assert keys[:2] == ["activation_checkpointing", smaller]
    last = highest(make(c)).total
    for change in found:
        assert change.after.total <= last
        last = change.after.total
        if change.remedy.override is not None:
            c = with_overrides(c, shlex.split(change.remedy.override))
            assert highest(make(c)).total == pytest.approx(last)


def test_nothing_more_is_tried_once_it_fits() -> None:
    c, make = config(*EIGHT), of_size("7b")
    first = highest(make(with_overrides(c, ["training.activation_checkpointing=true"]))).total
    (only,) = changes(c, make, first)
    assert only.remedy.override == "training.activation_checkpointing=true"
    assert only.after.total <= first


def test_the_optimizer_on_the_host_comes_after_the_forwards_and_not_with_fsdp_in_this_version() -> None:
    found = changes(config(*EIGHT), of_size("7b"), 1.0)
    texts = [change.remedy.text for change in found]
    assert [change.available for change in found].count(False) == 1
    assert "not with fsdp in this version" in texts[-1]
    assert texts[0] == memory_remedies(Facts(), "update")[0].text


def test_a_rollout_that_is_too_large_decodes_fewer_at_once_first() -> None:
    wide = ("actor_rollout_ref.rollout_slots=256", "actor_rollout_ref.rollout_batch_size=256")
    c, make = config(*wide, "actor_rollout_ref.max_tokens=2048"), of_size("1.5b")
    limit = 0.9 * next(peak.total for peak in peaks(make(c)) if peak.phase == "rollout")
    found = changes(c, make, limit)
    assert found[0].remedy.override is not None
    assert found[0].remedy.override.startswith("actor_rollout_ref.rollout_slots=")
    fewer = make(with_overrides(c, [found[0].remedy.override]))
    assert next(peak.total for peak in peaks(fewer) if peak.phase == "rollout") <= limit


def test_more_gpus_hold_what_fewer_do_not() -> None:
    single = config("actor_rollout_ref.max_tokens=2048")
    make = of_size("7b")
    assert highest(make(single)).total > CARD_BYTES
    ranks = enough_ranks(single, make, CARD_BYTES)
    assert ranks in (2, 4, 8)
    assert enough_ranks(single, make, 1.0) is None


ON_RAY = ("cluster.kind=ray", "cluster.num_workers=2", "actor_rollout_ref.max_tokens=2048")


def test_ranks_on_ray_are_counted_by_rays_own_key() -> None:
    local, on_ray = config(*ON_RAY[2:], "training.trainer=fsdp", "training.num_processes=2"), config(*ON_RAY)
    make = of_size("7b")
    assert highest(make(on_ray)).total == highest(make(local)).total > 60 * 2.0**30
    ranks = enough_ranks(on_ray, make, 60 * 2.0**30)
    assert ranks == enough_ranks(local, make, 60 * 2.0**30)
    assert ranks is not None
    assert with_overrides(on_ray, on_ranks(ranks, on_ray=True)).num_ranks == ranks


def test_the_optimizer_on_the_host_is_not_offered_on_ray() -> None:
    (offload,) = [c for c in changes(config(*ON_RAY), of_size("7b"), 1.0) if "moments" in c.remedy.text]
    assert not offload.available
    assert offload.remedy.override is None
