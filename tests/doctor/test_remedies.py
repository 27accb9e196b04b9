"""What is offered is what this run can do."""

from __future__ import annotations

import pytest

from klimb.doctor.finding import Facts
from klimb.doctor.remedies import memory_remedies

REFUSED = ("training.offload", "training.micro_batch_fallback")


@pytest.mark.parametrize(
    ("config", "several"),
    [
        ({"training": {"trainer": "single"}}, False),
        ({"training": {"trainer": "fsdp"}}, True),
        ({"training": {"trainer": "single"}, "cluster": {"kind": "ray"}}, True),
    ],
)
def test_several_ranks_are_offered_nothing_that_they_refuse(config: dict[str, object], several: bool) -> None:
    overrides = " ".join(remedy.override or "" for remedy in memory_remedies(Facts.of(config), "update"))
    assert [word in overrides for word in REFUSED] == [not several] * 2
    texts = " ".join(remedy.text for remedy in memory_remedies(Facts.of(config), "update"))
    assert ("More ranks" in texts) is several
