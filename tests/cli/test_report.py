"""`klimb report` in processes of its own."""

from __future__ import annotations

import signal
import subprocess
import urllib.request
from pathlib import Path

from tests.cli.test_cli import KLIMB, klimb, refused
from tests.report.folders import rows_of, sample, write_run


def test_it_writes_a_page_and_a_picture_and_says_what_it_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(5), [sample(1)], episodes=640)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step"')
    result = klimb("report", folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "tidy: stopped before its end; steps 5, samples 1",
        "note: metrics.jsonl: the last line is cut off and was left out",
        f"wrote {folder}/report.html",
        f"wrote {folder}/report.png",
    ]
    assert (folder / "report.html").stat().st_size > 1e6
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_out_goes_elsewhere_and_leaves_the_run_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    before = sorted(folder.iterdir())
    result = klimb("report", folder, "--out", tmp_path / "x.html")
    assert "tidy: no step finished yet; steps 0, samples 0" in result.stdout
    assert sorted(folder.iterdir()) == before
    assert (tmp_path / "x.png").exists()
    assert "cannot be written" in refused("report", folder, "--out", tmp_path / "nowhere" / "x.html")


def test_serving_prints_its_address_and_ends_quietly(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(3), episodes=640)
    command = [KLIMB, "report", folder, "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    address = next(word for word in first.split() if word.startswith("http://127.0.0.1:"))
    with urllib.request.urlopen(address + "data.json", timeout=30) as answer:
        assert b'"state":"stopped"' in answer.read()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "stopped serving; the run itself goes on\n", "")
    assert not (folder / "report.html").exists()
