"""docs/doctor.md says what the rules do: every finding, every threshold, every picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from klimb.doctor.limits import LIMITS
from klimb.doctor.remedies import MECHANISM
from klimb.doctor.rules import CODES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", CODES)
def test_every_finding_has_its_section_and_its_picture(code: str) -> None:
    section = TEXT.split(f"\n### {code}\n")[1].split("\n### ")[0].split("\n## ")[0]
    for name, text in MECHANISM.items():
        if name.partition(".")[0] == code:
            assert text in section
    assert "**Try:** " in section
    assert "verl: " in section
    assert "TRL: " in section
    assert f"(doctor/{code}.png)" in section
    assert (DOCS / "doctor" / f"{code}.png").read_bytes().startswith(b"\x89PNG")


def test_every_threshold_is_listed_as_it_is() -> None:
    for name, limit in LIMITS.items():
        assert f"| {name} | {limit.value:g} | {limit.unit} | {limit.source} |" in TEXT
    assert TEXT.count("\n| ") >= len(LIMITS)
