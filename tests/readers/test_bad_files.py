"""Files that are cut, empty, mixed up or huge: a right answer or a message, never a traceback."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from klimb.errors import DataError, KlimbError
from klimb.readers.diagnose import look
from tests.readers.logs import rows, write_csv, write_events, write_jsonl, write_state


def cut(path: Path, share: float = 0.7) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def test_a_cut_jsonl_gives_what_stands_before_the_cut(tmp_path: Path) -> None:
    log = look(cut(write_jsonl(tmp_path / "m.jsonl", rows("trl", False)))).log
    assert 25 <= log.table.last <= 28
    assert log.notes == ("m.jsonl: the last line is cut off and was left out",)


def test_a_cut_csv_gives_what_stands_before_the_cut(tmp_path: Path) -> None:
    assert 25 <= look(cut(write_csv(tmp_path / "m.csv", rows("verl", False)))).log.table.last <= 28


def test_cut_events_give_what_stands_before_the_cut(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "tb", rows("trl", False))
    cut(next(folder.glob("*tfevents*")))
    assert 25 <= look(folder).log.table.last <= 29


def test_a_cut_trainer_state_is_an_error(tmp_path: Path) -> None:
    path = cut(write_state(tmp_path / "trainer_state.json", rows("trl", False)))
    with pytest.raises(DataError, match=r"trainer_state.json: not valid JSON .* may be cut off"):
        look(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.jsonl", b"", "the file is empty"),
        ("m.jsonl", b"\n\n", "no number in it"),
        ("m.jsonl", b"not json\nnor this\n", r"no number in it \(m.jsonl: 2 lines are not readable"),
        ("m.jsonl", b'{"step": 1, "text": "hello"}\n', "no number in it"),
        ("m.jsonl", b'{"step": 1, "apples": 3}\n', "none of its 1 series is known by names of klimb, verl, trl"),
        ("m.csv", b"\x00\x01\x02", "no header"),
        ("m.csv", b"step,reward\n", "no number in it"),
        ("m.json", b"{}", "needed: a list of rows, or a log_history"),
        ("m.json", b"[1, 2]", "no number in it"),
        ("m.json", b"[" * 100_000, "not valid JSON"),
        ("m.txt", b"hello", "its name ends in .txt; needed"),
        ("events.out.tfevents.1", b"garbage that is no record", "no number in it"),
    ],
)
def test_what_is_no_log_is_said(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        look(tmp_path / name)


def test_no_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder; needed: a klimb run folder"):
        look(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no log in it \(it holds: nothing\)"):
        look(tmp_path)


def test_nan_and_infinity_as_text_or_number(tmp_path: Path) -> None:
    table = rows("trl", False)
    texts = ["NaN", "nan", "Infinity", "-inf", math.nan, math.inf]
    for row, text in zip(table[10:], texts, strict=False):
        row["kl"] = text  # type: ignore[assignment]
    for path in (write_jsonl(tmp_path / "m.jsonl", table), write_csv(tmp_path / "m.csv", table)):
        found = {f.code: f for f in look(path).examination.findings}
        assert found["nonfinite"].severity == "alarm"
        assert found["nonfinite"].first == 11


def test_a_restart_counts_from_where_it_began_again(tmp_path: Path) -> None:
    spoiled, sound = rows("trl", True), rows("trl", False)
    log = look(write_jsonl(tmp_path / "m.jsonl", [*spoiled[:30], *sound[15:]]))
    assert not log.examination.has_alarm
    assert any("restarted" in note for note in log.log.notes)


def test_rows_in_no_order_are_sorted(tmp_path: Path) -> None:
    table = rows("trl", True)
    shuffled = [table[(7 * i) % 40] for i in range(40)]
    log = look(write_jsonl(tmp_path / "m.jsonl", shuffled))
    assert log.examination.findings[0].first == 20
    assert any("in no order" in note for note in log.log.notes)


def test_rows_without_a_step_are_counted(tmp_path: Path) -> None:
    table = [{k: v for k, v in row.items() if k != "step"} for row in rows("trl", True)]
    found = look(write_jsonl(tmp_path / "m.jsonl", table))
    assert found.examination.findings[0].first == 20
    assert any("40 rows name no whole step and are counted" in note for note in found.log.notes)


def test_damaged_lines_in_the_middle_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", rows("trl", True))
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:20]
    lines[9] = '"' + "x" * 5_000_000
    path.write_text("\n".join(lines) + "\n")
    found = look(path)
    assert found.examination.findings[0].first == 20
    assert found.log.notes == ("m.jsonl: 2 lines are not readable and left out, the first is line 6",)


def test_odd_values_do_no_harm(tmp_path: Path) -> None:
    table = rows("trl", False)
    table[3] |= {"kl": None, "reward": True, "deep": {"a": {"b": [1, 2]}}, "step": 4}  # type: ignore[dict-item]
    table[4] |= {"step": 1e300}
    table[5] |= {"reward": 10**400}
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    assert look(path).log.table.last >= 39


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", rows("trl", False))
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(KlimbError):
        look(tmp_path / "dir.jsonl")
    assert look(path).log.source == "trl"


def huge(path: Path, form: str, size: int = 500 * 2**20) -> None:
    """A log of that many bytes: rows with a long text beside their numbers, or one line without an end."""
    padding, step = "y" * 2000, 0
    with path.open("w") as file:
        if form == "one line":
            file.write('{"kl": "')
            while file.tell() < size:
                file.write("x" * 2**20)
            file.write('"}')
            return
        table = rows("trl", False)
        if form == "csv":
            file.write(",".join([*table[0], "text"]) + "\n")
        while file.tell() < size:
            for row in table:
                step += 1
                row["step"] = step
                text = (
                    ",".join([*map(str, row.values()), padding]) if form == "csv" else json.dumps(row | {"t": padding})
                )
                file.write(text + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "csv", "one line"])
def test_half_a_gigabyte_is_read_in_bounded_memory(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("m.csv" if form == "csv" else "m.jsonl")
    huge(path, form)
    code = (
        "from klimb.cli.commands import cli\n"
        f"try:\n    code = cli.main(['diagnose', {str(path)!r}], standalone_mode=False)\n"
        "except Exception as error:\n    print(type(error).__name__, str(error)[:300]); code = 2\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:'))\n"
        "print('code', code, 'MiB', int(peak.split()[1]) // 1024)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True).stdout
    path.unlink()
    last = out.strip().splitlines()[-1].split()
    assert int(last[-1]) < 600, out
    assert last[1] == ("2" if form == "one line" else "0"), out


def test_a_summary_row_without_a_step_does_no_harm(tmp_path: Path) -> None:
    table: list[dict[str, float]] = [*rows("trl", True), {"train_runtime": 12.0, "kl": 0.0}]
    found = look(write_jsonl(tmp_path / "m.jsonl", table))
    assert found.examination.findings[0].first == 20
    assert "m.jsonl: 1 rows name no whole step and are left out" in found.log.notes


def test_fractions_of_steps_are_no_steps(tmp_path: Path) -> None:
    table = [row | {"step": 0.01 * i} for i, row in enumerate(rows("trl", True), start=1)]
    assert look(write_jsonl(tmp_path / "m.jsonl", table)).examination.findings[0].first == 20


def test_several_runs_in_one_export_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("Step,good - reward,bad - reward,bad - reward__MIN\n1,1,2,3\n")
    with pytest.raises(DataError, match="2 runs in one file: bad, good"):
        look(path)
    path.write_text("step,kl,reward,kl\n1,9,0,0.1\n")
    with pytest.raises(DataError, match="kl stands twice in the header"):
        look(path)


def test_csv_as_excel_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    lines = ["sep=;", "step;kl;reward_std", *(f"{i};{'2,5' if i > 20 else '0,01'};0,3" for i in range(1, 41))]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = look(path)
    assert (found.examination.findings[0].code, found.examination.findings[0].first) == ("kl_explosion", 21)


def test_a_header_of_one_endless_cell_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("x" * 200_000 + ",step\n1,2\n")
    with pytest.raises(DataError, match=r"m.csv:1: no header of metric names \(field larger"):
        look(tmp_path / "m.csv")


def test_two_runs_in_one_folder_are_refused_and_a_restart_is_one_run(tmp_path: Path) -> None:
    table = rows("trl", True)
    write_events(tmp_path / "two" / "a", table)
    write_events(tmp_path / "two" / "b", rows("trl", False))
    with pytest.raises(DataError, match=r"2 runs, each from its beginning: .*a, .*b. Give one"):
        look(tmp_path / "two")

    def numbered(folder: Path, second: int, part: list[dict[str, float]]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        writer = SummaryWriter(str(folder))
        for row in part:
            for name, value in row.items():
                writer.add_scalar(name, value, int(row["step"]))
        writer.close()
        file = next(folder.glob("*tfevents*"))
        file.rename(folder / f"events.out.tfevents.{second}.host.1.0")

    # transformers names folders by month, so that April comes before March.
    numbered(tmp_path / "one" / "Mar31", 1_700_000_000, table[:25])
    numbered(tmp_path / "one" / "Apr01", 1_700_100_000, table[22:])
    found = look(tmp_path / "one")
    assert found.log.table.last == 40
    assert found.examination.findings[0].first == 20


def test_a_damaged_record_in_an_event_file_is_said(tmp_path: Path) -> None:
    folder = write_events(tmp_path / "tb", rows("trl", True))
    file = next(folder.glob("*tfevents*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    file.write_bytes(bytes(data))
    assert any("damaged or cut off after" in note for note in look(folder).log.notes)


def test_the_state_beside_the_model_is_the_newest(tmp_path: Path) -> None:
    write_state(tmp_path / "exp-1" / "trainer_state.json", rows("trl", True))
    write_state(tmp_path / "exp-1" / "checkpoint-90" / "trainer_state.json", rows("trl", False)[:10])
    write_state(tmp_path / "exp-1" / "checkpoint-\u00b2" / "trainer_state.json", rows("trl", False)[:10])
    assert look(tmp_path / "exp-1").examination.has_alarm
    (tmp_path / "exp-1" / "trainer_state.json").unlink()
    assert look(tmp_path / "exp-1").log.table.last == 10


def test_another_frameworks_folder_is_not_taken_for_a_klimb_run(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", rows("verl", True))
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {model: {path: x}}\n")
    for source in (None, "verl"):
        found = look(tmp_path, source)
        assert found.log.source == "verl"
        assert found.examination.has_alarm


def test_answers_of_a_run_are_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "reward": 0.5, "text": "x"}\n')
    with pytest.raises(DataError, match="the answers of a run, not its metrics; give the run folder"):
        look(tmp_path / "samples.jsonl")


def test_a_klimb_run_without_a_step_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {model_path: x}\n")
    with pytest.raises(DataError, match="without a finished step"):
        look(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 10000000000000000000, "kl/k3": 1.0}\n')
    with pytest.raises(DataError, match="without a finished step"):
        look(tmp_path)


def test_names_and_steps_without_end_are_left_out(tmp_path: Path) -> None:
    table = rows("verl", True)
    odd = {"step": 1, "val-core/" + "/acc/mean@" * 40_000 + "\n": 1.0}
    far = {"step": 2**60, "actor/kl_loss": 1.0}
    path = write_jsonl(tmp_path / "m.jsonl", [*table, odd, far])
    found = look(path)
    assert found.examination.findings[0].first == 20
    assert any("2 values are left out" in note for note in found.log.notes)


def test_a_name_cannot_forge_a_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", [row | {"x\n\nnothing wrong": 1.0} for row in rows("trl", True)])
    assert "x\\n\\nnothing wrong" in look(path).log.unmapped


def test_one_value_that_is_none_switches_no_rule_off(tmp_path: Path) -> None:
    table = [
        {"step": i, "kl/k3": 5.0 if i > 20 else 0.01, "kl/target": 0.1, "policy/ratio_abs_dev": 0.0}
        for i in range(1, 41)
    ]
    table[-1]["kl/target"] = math.nan
    table[5]["policy/skipped_steps"] = math.inf
    codes = [f.code for f in look(write_jsonl(tmp_path / "m.jsonl", table)).examination.findings]
    assert "kl_explosion" in codes
