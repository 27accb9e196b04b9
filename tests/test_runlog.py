"""The log files: cut back on resume, honest about NaN, safe whatever a model wrote."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from klimb.config.schema import LoggingConfig
from klimb.errors import KlimbError, MissingExtra
from klimb.runlog import RunLog, json_line, sample_row
from klimb.types import Prompt, Sample, Scored

OFF = LoggingConfig(tensorboard=False)


def scored(text: str, reward: float | None = 0.5, parts: dict[str, float] | None = None) -> Scored:
    prompt = Prompt(row=7, text="2+2=", token_ids=(1, 2), answer="4", source="here")
    sample = Sample(
        prompt=prompt,
        index=3,
        token_ids=(1, 2, 5, 6),
        mask=(False, False, True, True),
        logprobs=(0.0, 0.0, -0.5, -0.1),
        policy_version=(-1, -1, 0, 0),
        finish_reason="stop",
        text=text,
    )
    rewards = () if reward is None else ((3, reward),)
    return Scored(sample=sample, rewards=rewards, parts=parts or {}, correct=True, failure=None)


def opened(folder: Path, config: LoggingConfig = OFF, offsets: dict[str, int] | None = None, step: int = 0) -> RunLog:
    log = RunLog(folder, config, "run", {"lr": 1.0})
    log.begin(offsets or {}, step)
    return log


def rows(place: Path) -> list[dict[str, Any]]:
    with place.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def test_metrics_are_one_line_a_phase(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.metrics({"step": 1, "kl/k3": 0.02})
    log.metrics({"step": 2, "kl/k3": 0.03})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "kl/k3": 0.02}, {"step": 2, "kl/k3": 0.03}]


def test_numbers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    values = {"step": 1, "a": 0.1 + 0.2, "b": 5e-324, "c": 1.7976931348623157e308, "d": -0.0}
    opened(tmp_path).metrics(values)
    assert rows(tmp_path / "metrics.jsonl")[0] == values
    assert math.copysign(1, rows(tmp_path / "metrics.jsonl")[0]["d"]) == -1


def test_what_is_not_finite_is_written_by_name(tmp_path: Path) -> None:
    opened(tmp_path).metrics({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": "nan", "b": "inf", "c": "-inf"}\n'
    opened(tmp_path).samples(1, [scored("x", reward=math.nan, parts={"regex": math.inf})])
    assert rows(tmp_path / "samples.jsonl")[0]["reward"] == "nan"
    assert rows(tmp_path / "samples.jsonl")[0]["parts"] == {"regex": "inf"}


def test_a_resume_cuts_the_files_back_to_the_checkpoint(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.offsets() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    log.metrics({"step": 1, "a": 1.0})
    log.samples(1, [scored("Grüße, 世界")])
    kept = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    offsets = log.offsets()
    assert offsets == {name: len(data) for name, data in kept.items()}
    log.metrics({"step": 2, "a": 2.0})
    log.samples(2, [scored("lost"), scored("too")])
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a"')  # killed in the middle of a line
    again = opened(tmp_path, offsets=offsets, step=1)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    again.metrics({"step": 2, "a": 2.5})
    assert [row["a"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0, 2.5]


def test_a_start_from_nothing_empties_the_files(tmp_path: Path) -> None:
    opened(tmp_path).metrics({"step": 1})
    opened(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "samples.jsonl").exists()


def test_offsets_beyond_the_file_do_not_pad_it(tmp_path: Path) -> None:
    """The log was lost, the checkpoint was not."""
    opened(tmp_path, offsets={"metrics.jsonl": 1000, "samples.jsonl": 1000}, step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


HOSTILE = {
    "terminal controls": "\x1b[2J\x1b]0;owned\x07 \x9b31m",
    "null and delete": "a\x00b\x7f",
    "line ends": "one\ntwo\r\nthree\x0bfour\x85five\u2028six\u2029",
    "a page's end": "</script><script>alert(1)</script>",
    "json": '"}, {"step": 99}\n{"step": 100}',
    "direction": "\u202eabc\u2066",
    "lone surrogates": "\ud800 and \udfff",
    "other planes": "\U0001f600 é 世界",
    "markup": "[bold red]x[/] [link=file:///]y[/link]",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_stays_one_line_and_reads_back_the_same(tmp_path: Path, text: str) -> None:
    log = opened(tmp_path)
    log.samples(1, [scored(text), scored("after")])
    data = (tmp_path / "samples.jsonl").read_bytes()
    written = data.decode("utf-8")
    assert len(written.splitlines()) == 2, "also for readers that split at every kind of line end"
    assert not set(map(ord, written)) & ({*range(32), *range(0x7F, 0xA0)} - {10})
    assert [row["response"] for row in rows(tmp_path / "samples.jsonl")] == [text, "after"]


def test_other_languages_stay_readable() -> None:
    assert json_line({"a": "é 世界"}) == '{"a": "é 世界"}\n'


def test_a_sample_row_holds_what_a_reader_asks_for() -> None:
    assert sample_row(4, scored("four", parts={"exact": 1.0}), "eval") == {
        "step": 4,
        "kind": "eval",
        "row": 7,
        "index": 3,
        "prompt": "2+2=",
        "response": "four",
        "answer": "4",
        "reward": 0.5,
        "parts": {"exact": 1.0},
        "correct": True,
        "failure": None,
        "finish_reason": "stop",
        "num_tokens": 2,
    }
    assert sample_row(4, scored("x", reward=None), "train")["reward"] is None


def test_no_samples_no_line(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.samples(1, [])
    assert (tmp_path / "samples.jsonl").read_bytes() == b""


def test_tensorboard_reads_the_events_back(tmp_path: Path) -> None:
    log = opened(tmp_path, LoggingConfig())
    for step in (1, 2, 3):
        log.metrics({"step": step, "kl/k3": 0.01 * step, "bad": math.nan})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["kl/k3"]
    found = [(e.step, e.value) for e in events.Scalars("kl/k3")]
    assert found == [(1, pytest.approx(0.01)), (2, pytest.approx(0.02)), (3, pytest.approx(0.03))]


def test_tensorboard_drops_the_steps_that_a_resume_does_again(tmp_path: Path) -> None:
    log = opened(tmp_path, LoggingConfig())
    for step in (1, 2, 3):
        log.metrics({"step": step, "a": float(step)})
    log.close()
    for place in (tmp_path / "tensorboard").iterdir():
        os.utime(place, (1, 1))
    again = opened(tmp_path, LoggingConfig(), offsets={}, step=1)
    again.metrics({"step": 2, "a": 20.0})
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_missing_names_its_extra(tmp_path: Path, service: str) -> None:
    log = RunLog(tmp_path, LoggingConfig.model_validate({"tensorboard": False, service: "project"}), "run", {})
    with pytest.raises(
        MissingExtra, match=rf"logging\.{service} needs .*'{service}'.*pip install 'klimb\[{service}\]'"
    ):
        log.begin({}, 0)


def test_a_full_disk_is_told_without_a_traceback(tmp_path: Path) -> None:
    log = opened(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(KlimbError, match=r"metrics\.jsonl: cannot be written: No space left.*newest checkpoint"):
        log.metrics({"step": 1})
