"""Files that are cut, empty, mixed up or huge: a right answer or a message, never a traceback."""

from __future__ import annotations

import json
import math
import resource
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
    assert any("name no step" in note for note in found.log.notes)


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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "csv", "one line"])
def test_half_a_gigabyte_is_read_in_bounded_memory(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("m.csv" if form == "csv" else "m.jsonl")
    size = 500 * 2**20
    with path.open("w") as file:
        if form == "one line":
            file.write('{"kl": "' + "x" * size + '"}')
        else:
            block = write_csv(tmp_path / "b.csv", rows("trl", False)) if form == "csv" else None
            lines = block.read_text().splitlines(keepends=True) if block else []
            if lines:
                file.write(lines[0])
            step = 0
            while file.tell() < size:
                for row in rows("trl", False):
                    step += 1
                    row["step"] = step
                    if form == "csv":
                        file.write(",".join(str(v) for v in row.values()) + "\n")
                    else:
                        file.write(json.dumps(row | {"padding": "y" * 2000}) + "\n")
    code = (
        "import resource, sys, click\n"
        "from klimb.cli.commands import cli\n"
        f"try:\n    code = cli.main(['diagnose', {str(path)!r}], standalone_mode=False)\n"
        "except Exception as error:\n    print(type(error).__name__, str(error)[:300]); code = 2\n"
        "print('code', code, 'rss', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True).stdout
    last = out.strip().splitlines()[-1].split()
    assert int(last[-1]) < 1200, out
    assert last[1] == ("2" if form == "one line" else "0"), out
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
