"""report.png."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from klimb.errors import KlimbError, MissingExtra
from klimb.report.files import read_run
from klimb.report.picture import write_picture
from tests.report.folders import rows_of, write_run


@pytest.mark.parametrize("steps", [0, 1, 20, 300])
def test_a_picture_of_any_run(tmp_path: Path, steps: int) -> None:
    rows = rows_of(steps) if steps else []
    if steps > 5:
        rows[3]["kl/k3"] = rows[4]["reward/mean"] = "nan"
    run = read_run(write_run(tmp_path / "run", rows, name="a $dollar$ <b>name</b> \ud800\u6f22\n" * 9))
    write_picture(run, tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") >= 1600


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", []))
    with pytest.raises(KlimbError, match="cannot be written: No such file"):
        write_picture(run, tmp_path / "nowhere" / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'klimb\[report\]'"):
        write_picture(read_run(write_run(tmp_path / "run", [])), tmp_path / "a.png")
