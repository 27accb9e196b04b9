"""Every framework in every form that it comes in: sound runs are sound, spoiled ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from klimb.readers.diagnose import diagnose, look
from klimb.readers.names import FRAMEWORKS
from klimb.readers.settings import SETTINGS
from tests.readers.logs import rows, write_csv, write_events, write_jsonl, write_state

FORMS: dict[str, Callable[[Path, str, bool], Path]] = {
    "jsonl": lambda place, source, bad: write_jsonl(place / "m.jsonl", rows(source, bad)),
    "csv": lambda place, source, bad: write_csv(place / "m.csv", rows(source, bad)),
    "wandb": lambda place, source, bad: write_csv(place / "w.csv", rows(source, bad), run="brave-night-7"),
    "events": lambda place, source, bad: write_events(place / "tb", rows(source, bad)),
    "state": lambda place, source, bad: write_state(place / "checkpoint-40" / "trainer_state.json", rows(source, bad)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["verl", "trl", "openrlhf"])
def test_the_fault_is_found_and_the_sound_run_is_not_blamed(form: str, source: str, tmp_path: Path) -> None:
    sound = look(FORMS[form](tmp_path, source, False))
    assert sound.log.source == source
    assert not sound.examination.has_alarm
    assert sound.log.table.last == 40
    spoiled = look(FORMS[form](tmp_path, source, True))
    first = spoiled.examination.findings[0]
    assert (first.code, first.severity, first.first) == ("kl_explosion", "alarm", 20)


def test_verls_own_file_nests_its_row(tmp_path: Path) -> None:
    found = diagnose(write_jsonl(tmp_path / "metrics.jsonl", rows("verl", True), nested=True))
    assert (found[0].code, found[0].first) == ("kl_explosion", 20)


def test_names_are_mapped_and_the_rest_is_listed(tmp_path: Path) -> None:
    log = look(write_jsonl(tmp_path / "m.jsonl", rows("verl", False))).log
    assert log.mapping["actor/kl_loss"] == "kl/k3"
    assert log.mapping["val-core/openai/gsm8k/acc/mean@1"] == "eval/accuracy"
    assert set(log.unmapped) == {"perf/throughput", "critic/advantages/mean", "training/epoch"}
    memory = log.table.curve("memory/update_peak")
    assert memory is not None
    assert memory.values[0] == 40.5 * 2**30


def test_missing_series_are_said(tmp_path: Path) -> None:
    found = look(write_jsonl(tmp_path / "m.jsonl", rows("openrlhf", False)))
    missing = {m.code for m in found.examination.missing}
    assert {"entropy_collapse", "truncation", "repetition", "reward_hacking"} <= missing


def test_as_json_it_is_json(tmp_path: Path) -> None:
    found = look(write_jsonl(tmp_path / "m.jsonl", rows("trl", True))).as_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["findings"][0]["code"] == "kl_explosion"
    assert again["findings"][0]["remedies"][1]["setting"] == "beta (GRPO), kl_coef (PPO)"


def test_ppo_of_trl_gives_kl_per_answer(tmp_path: Path) -> None:
    table = [
        {"objective/kl": 0.05 * s if s < 20 else 90.0, "objective/scores": 1.0, "policy/approxkl_avg": 0.001, "step": s}
        for s in range(1, 41)
    ]
    found = look(write_jsonl(tmp_path / "m.jsonl", table))
    assert found.log.source == "trl"
    assert "kl/per_episode" in found.log.table.curves
    first = found.examination.findings[0]
    assert (first.code, first.first) == ("kl_explosion", 20)
    assert "90 nats per answer" in first.evidence


def test_a_wrong_source_is_an_error_that_names_what_is_there(tmp_path: Path) -> None:
    from klimb.errors import DataError

    path = write_jsonl(tmp_path / "m.jsonl", rows("trl", False))
    with pytest.raises(DataError, match=r"none of its 1\d series is known by the names of klimb. Found: .*kl"):
        diagnose(path, "klimb")


def test_tables_name_only_series_that_the_rules_or_the_report_know() -> None:
    known = set(FRAMEWORKS["klimb"]) | {"policy/clip_fraction", "value/clip_fraction", "mismatch/logprob_diff_mean"}
    known |= {"kl/per_episode", "mismatch/probs_diff_max"}
    for table in FRAMEWORKS.values():
        assert {name.ours for name in table.values()} <= known
    assert set(SETTINGS) == {"verl", "trl", "openrlhf"}


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
def test_logs_that_trl_wrote(trainer: str) -> None:
    """Forty steps of TRL's own trainers on the playground (benchmarks/doctor/trl_logs.py), at a rate that learns and
    at 40 times it."""
    sound = look(DATA / f"trl-{trainer}-sound.json")
    assert sound.log.source == "trl"
    assert not sound.examination.findings
    spoiled = look(DATA / f"trl-{trainer}-spoiled.json").examination.findings
    codes = [finding.code for finding in spoiled[:2]]
    assert "kl_explosion" in codes
    assert all(finding.first <= 4 for finding in spoiled[:2])
