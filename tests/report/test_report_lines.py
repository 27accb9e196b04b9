"""jsonl as it is found, and which samples are kept."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from klimb.report import lines
from klimb.report.lines import Lines, choose, number, read_samples, spread, whole
from tests.report.folders import line, sample


def read(path: Path) -> tuple[list[dict[str, object]], list[str]]:
    found = Lines(path)
    return [item for _, item in found.objects()], found.notes


def test_a_whole_file_has_no_notes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read(path) == ([{"a": 1}, {"a": 2}], [])
    assert read(tmp_path / "missing.jsonl") == ([], [])


@pytest.mark.parametrize("end", ['{"a": ', '{"a": "grü'.encode()[:-1].decode("latin-1"), "{"])
def test_a_cut_last_line_is_left_out_and_told(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + end.encode("latin-1"))
    assert read(path) == ([{"a": 1}], ["a.jsonl: the last line is cut off and was left out"])


def test_damage_in_the_middle_is_counted_and_placed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n' + b"[" * 200_000 + b'\n{"a": 2}\n')
    items, notes = read(path)
    assert items == [{"a": 1}, {"a": 2}]
    assert notes == ["a.jsonl: 3 lines are not readable and left out, the first is line 2"]


def test_numbers_of_the_log() -> None:
    assert number(3) == 3.0
    assert math.isnan(number("nan") or 0.0)
    assert number("-inf") == -math.inf
    assert number(10**400) == math.inf
    assert number("seven") is None
    assert number(None) is None
    assert whole(7.0) == 7
    assert whole("nan") is None
    assert whole(1.5) is None


def test_samples_get_every_field_of_its_type(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    odd = {"step": 3, "response": 5, "parts": [1], "correct": "yes", "reward": "nan", "answer": 976}
    path.write_text(line(sample(1)) + line(odd) + line({"step": "x", "response": ""}) + line({"step": 1}))
    samples, notes = read_samples(path)
    assert samples[0] == sample(1)
    assert math.isnan(samples[1].pop("reward"))
    assert samples[1] == {
        "step": 3,
        "kind": "train",
        "row": 0,
        "index": 0,
        "prompt": "",
        "response": "5",
        "answer": "976",
        "parts": {},
        "correct": None,
        "failure": None,
        "finish_reason": "",
        "num_tokens": 0,
    }
    assert notes == ["samples.jsonl: 2 lines are not readable and left out"]


def test_a_large_file_keeps_whole_histories_extremes_and_both_ends() -> None:
    evals = [i % 10 == 0 for i in range(10_000)]  # 1,000 held-out answers to 4 prompts, the rest training
    rows = [(i // 10) % 4 if evals[i] else i for i in range(10_000)]
    rewards = [0.5] * 10_000
    rewards[4321], rewards[5678], rewards[777] = 9.0, -9.0, math.nan
    kept = choose(rows, rewards, evals, limit=1000)
    assert len(kept) == 1000
    assert kept == sorted(set(kept))
    assert [sum(evals[i] and rows[i] == prompt for i in kept) for prompt in range(4)] == [250, 250, 0, 0]
    assert {4321, 5678, 1, 9999} <= set(kept)
    gaps = [b - a for a, b in pairwise(kept)]
    assert max(gaps) < 100


def test_one_endless_history_is_spread() -> None:
    kept = choose([0] * 500, [1.0] * 500, [True] * 500, limit=50)
    assert len(kept) == 50
    assert (kept[0], kept[-1]) == (0, 499)


def test_spread() -> None:
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread(range(101), 3) == [0, 50, 100]
    assert spread([1, 2, 3], 1) == [3]
    assert spread([1, 2, 3], 0) == []


def test_long_texts_are_cut_to_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "TEXT", 1000)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(line(sample(i, prompt="short", response="x" * 2000)) for i in range(3)))
    samples, notes = read_samples(path)
    assert samples[0]["prompt"] == "short"
    assert samples[0]["response"] == "x" * 328 + " [... 1,672 more characters]"
    assert notes == ["samples.jsonl: prompts and responses longer than 328 characters are cut in the report"]


def test_only_kept_samples_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "KEPT", 10)
    monkeypatch.setattr(choose, "__defaults__", (10,))
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(line(sample(i, row=i)) for i in range(100)))
    samples, notes = read_samples(path)
    assert len(samples) == 10
    assert (samples[0]["step"], samples[-1]["step"]) == (0, 99)
    assert notes == ["samples.jsonl: 10 of 100 samples are shown, spread over the run"]
