"""`klimb diagnose` as a user types it, and `klimb train` when an alarm ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from klimb.cli.commands import cli
from klimb.errors import KlimbError
from tests.readers.logs import rows, write_jsonl, write_state
from tests.tiny_runs import build_tiny_model, tiny_tree, write_config, write_inputs


def call(*words: str) -> Result:
    """The command's exit code is what it returns."""
    return CliRunner().invoke(cli, list(words), standalone_mode=False)


def test_a_sound_log(tmp_path: Path) -> None:
    result = call("diagnose", str(write_jsonl(tmp_path / "m.jsonl", rows("verl", False))))
    assert result.return_value == 0
    assert "verl, 17 series up to step 40" in result.output
    assert "nothing wrong was found" in result.output
    assert "repetition needs text/repetition" in result.output
    assert "series without a counterpart: critic/advantages/mean, perf/throughput" in result.output


def test_a_spoiled_log_has_evidence_chart_mechanism_and_remedies_in_their_words(tmp_path: Path) -> None:
    result = call("diagnose", str(write_state(tmp_path / "trainer_state.json", rows("trl", True))))
    assert result.return_value == 3
    out = result.output
    assert "ALARM kl_explosion, steps 20-40" in out
    assert "reached 2 nats per token at step 20" in out
    assert re.search(r"▁+█+  kl/k3, 0.001 to 2", out)
    assert "1. Lower the learning rate: a half of it or less:  learning_rate" in out
    assert "training.lr" not in out


def test_json_is_the_whole_of_it(tmp_path: Path) -> None:
    result = call("diagnose", str(write_jsonl(tmp_path / "m.jsonl", rows("openrlhf", True))), "--json")
    found = json.loads(result.output)
    assert result.return_value == 3
    assert found["source"] == "openrlhf"
    assert found["findings"][0]["code"] == "kl_explosion"
    assert found["findings"][0]["remedies"][0]["setting"] == "--actor_learning_rate"


def test_what_is_no_log_is_an_error_of_the_user(tmp_path: Path) -> None:
    result = call("diagnose", str(tmp_path / "none"))
    assert isinstance(result.exception, KlimbError)
    assert "no such file or folder" in str(result.exception)


def test_names_of_a_file_cannot_reach_the_terminal(tmp_path: Path) -> None:
    table = [row | {"evil\x1b[2J\x07": 1.0} for row in rows("trl", True)]
    out = call("diagnose", str(write_jsonl(tmp_path / "m.jsonl", table))).output
    assert "\x1b" not in out
    assert "evil\\x1b[2J\\x07" in out


def test_help_has_an_example() -> None:
    assert "klimb diagnose runs/quickstart" in call("diagnose", "--help").output


@pytest.mark.parametrize(("action", "code"), [("stop", 3), ("rollback", 3)])
def test_train_ends_with_findings_and_the_report(tmp_path: Path, action: str, code: int) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")
    changes = {
        "training.lr": 1.0,
        "training.total_episodes": 160,
        "diagnostics": {"on_alarm": action, "max_interventions": 1} if action == "rollback" else {"on_alarm": action},
        "training.save_freq": 8,
    }
    config = write_config(tmp_path / "c.yaml", tiny_tree(model, tmp_path / "inputs", tmp_path / "runs", **changes))
    result = call("train", str(config))
    assert result.exception is None, result.output
    assert result.return_value == code
    assert "by an alarm: " in result.output
    assert "Try, in this order:" in result.output
    assert (tmp_path / "runs" / "run" / "report.html").exists()
    if action == "rollback":
        assert "intervention 1: " in result.output
        assert "training.lr=0.25" in result.output
