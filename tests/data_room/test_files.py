"""Every reader on real files, and what each says about a file it cannot take."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klimb.data.files import read_rows
from klimb.errors import DataError
from klimb.tasks.table import load_task

DATA = Path(__file__).parent.parent / "data"
RECORDS: list[dict[str, Any]] = [
    {"prompt": "two and two", "answer": 4, "tag": "sum"},
    {"prompt": 'a "quoted", split\nline', "answer": 0.5, "tag": None},
    {"prompt": "\u00fcber", "answer": -7, "tag": "word"},
]
Make = Callable[..., Any]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pq.write_table(
        pa.table({"prompt": [r["prompt"] for r in records], "answer": [str(r["answer"]) for r in records]}), path
    )


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": lambda path, records: path.write_text(json.dumps(records)) and None,
    "data.json": lambda path, records: path.write_text(json.dumps({"data": records})) and None,
    "rows.csv": write_csv,
    "rows.PARQUET": write_parquet,
    "saved": lambda path, records: datasets.Dataset.from_list(
        [{**r, "answer": str(r["answer"])} for r in records]
    ).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path, make_settings: Make) -> None:
    path = tmp_path / name
    WRITERS[name](path, RECORDS)
    rows = read_rows(str(path), "train", make_settings(), needs_answer=True)
    assert [row.prompt for row in rows] == [record["prompt"] for record in RECORDS]
    assert [row.answer for row in rows] == ["4", "0.5", "-7"]
    assert [row.index for row in rows] == [0, 1, 2]
    assert {row.source for row in rows} == {str(path)}
    if "PARQUET" not in name:
        assert [row.extra for row in rows][::2] == [{"tag": "sum"}, {"tag": "word"}]


def test_the_own_shop_rows_read_as_they_are(make_settings: Make) -> None:
    settings = make_settings(prompt_key="question")
    rows = read_rows(str(DATA / "shop.jsonl"), "eval", settings, needs_answer=True)
    assert len(rows) == 12
    assert all(row.answer is not None and "\n#### " in row.answer for row in rows)
    assert "\u201cas long as the sofa\u201d" in str(rows[11].prompt)


def test_chat_messages_of_a_json_file(make_settings: Make) -> None:
    rows = read_rows(str(DATA / "chat.json"), "train", make_settings(prompt_key="messages"), needs_answer=True)
    assert rows[0].prompt == [{"role": "user", "content": "What is 3 plus 4?"}]
    assert [m["role"] for m in rows[1].prompt if isinstance(m, dict)] == ["system", "user", "assistant", "user"]
    assert [(row.answer, row.extra) for row in rows] == [("7", {"level": "easy"}), ("1.5", {"level": "hard"})]


def test_chat_messages_of_parquet_lose_the_fields_that_are_only_filled_up(tmp_path: Path, make_settings: Make) -> None:
    path = tmp_path / "chat.parquet"
    turns = [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "x", "name": "Ada"}]
    pq.write_table(pa.table({"prompt": [turns]}), path)
    (row,) = read_rows(str(path), "train", make_settings(), needs_answer=False)
    assert row.prompt == [{"role": "user", "content": "hi"}, {"role": "user", "content": "x", "name": "Ada"}]
    assert row.answer is None


def test_json_text_in_csv_stays_text_and_numbers_keep_their_spelling(tmp_path: Path, make_settings: Make) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    write_csv(tmp_path / "a.csv", [{"prompt": messages, "answer": "007"}])
    (row,) = read_rows(str(tmp_path / "a.csv"), "train", make_settings(), needs_answer=True)
    assert (row.prompt, row.answer) == (messages, "007")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_endings_and_byte_order_marks(ending: str, mark: bytes, tmp_path: Path, make_settings: Make) -> None:
    lines = ['{"prompt": "one\u2028line", "answer": "1"}', "", '{"prompt": "two", "answer": "2"}', ""]
    (tmp_path / "a.jsonl").write_bytes(mark + ending.join(lines).encode())
    (tmp_path / "a.csv").write_bytes(mark + ending.join(["prompt,answer", "one\u2028line,1", "two,2"]).encode())
    for name in ("a.jsonl", "a.csv"):
        rows = read_rows(str(tmp_path / name), "train", make_settings(), needs_answer=True)
        assert [(row.prompt, row.answer) for row in rows] == [("one\u2028line", "1"), ("two", "2")]


def test_folders_with_splits(tmp_path: Path, make_settings: Make) -> None:
    def part(word: str) -> Any:
        return datasets.Dataset.from_list([{"prompt": word}])

    datasets.DatasetDict({"train": part("t"), "test": part("e")}).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"dev": part("d")}).save_to_disk(str(tmp_path / "dev"))
    settings = make_settings()
    assert read_rows(str(tmp_path / "both"), "train", settings, needs_answer=False)[0].prompt == "t"
    assert read_rows(str(tmp_path / "both"), "eval", settings, needs_answer=False)[0].prompt == "e"
    assert read_rows(str(tmp_path / "dev" / "dev"), "eval", settings, needs_answer=False)[0].prompt == "d"
    with pytest.raises(DataError, match=r"eval or validation or test for data.eval_files; found: dev.*dev/dev"):
        read_rows(str(tmp_path / "dev"), "eval", settings, needs_answer=False)


def test_a_saved_selection_keeps_its_own_order(tmp_path: Path, make_settings: Make) -> None:
    whole = datasets.Dataset.from_list([{"prompt": word} for word in "abcd"])
    whole.select([2, 0]).save_to_disk(str(tmp_path / "some"))
    rows = read_rows(str(tmp_path / "some"), "train", make_settings(), needs_answer=False)
    assert [row.prompt for row in rows] == ["c", "a"]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_case_DT_03_a_missing_column_names_file_column_and_what_is_there(
    split: Any, tmp_path: Path, make_settings: Make
) -> None:
    path = tmp_path / f"{split}.parquet"
    pq.write_table(pa.table({"question": ["q"], "answer": ["a"]}), path)
    with pytest.raises(DataError) as caught:
        read_rows(str(path), split, make_settings(), needs_answer=True)
    message = str(caught.value)
    assert str(path) in message
    assert "'prompt' (data.prompt_key) is missing" in message
    assert "columns found: question, answer." in message


@pytest.mark.parametrize("empty", [None, "", "  \n", []])
def test_case_DT_03_an_empty_prompt_is_named_by_its_row(empty: Any, tmp_path: Path, make_settings: Make) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": empty}, {"prompt": "y"}, {"other": 1}])
    with pytest.raises(DataError, match=r"2 of 4 rows have an empty or missing 'prompt': row 1, 3 \(counted"):
        read_rows(str(tmp_path / "a.jsonl"), "train", make_settings(), needs_answer=False)


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "malformed line": ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', r"a.jsonl, line 3: not valid JSON"),
    "line that is a list": ("a.jsonl", b'{"prompt": "a"}\n["b"]\n', r"line 2: found a list"),
    "number beyond Python": ("a.jsonl", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", r"line 1: not valid JSON"),
    "endless nesting": ("a.jsonl", b'{"prompt": "a"}\n' + b"[" * 200_000, r"line 2: not valid JSON"),
    "malformed json": ("a.json", b'[\n{"prompt": "a"},\n{"prompt" "b"}]', r"a.json, line 3: not valid JSON"),
    "lines named json": ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}', r"name the file .jsonl"),
    "object without data": ("a.json", b'{"rows": []}', r"the keys rows; the file must hold a list"),
    "number": ("a.json", b"3", r"found a int"),
    "list of text": ("a.json", b'["a"]', r"row 0: found a str"),
    "latin-1": ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xfcber"}', r"line 2: byte 0xfc is not UTF-8"),
    "utf-16": ("a.csv", "prompt\nx".encode("utf-16"), r"UTF-16 by its byte order mark"),
    "csv with a loose comma": ("a.csv", b"prompt,answer\na,1\nb, c,2\n", r"line 3: found 3 cells, .* has 2"),
    "csv with an open quote": ("a.csv", b'prompt\n"a\nb', r"line \d: not valid csv"),
    "csv with one name twice": ("a.csv", b"prompt,prompt\na,b\n", r"'prompt' appears twice"),
    "no parquet": ("a.parquet", b"PAR1 and nothing", r"not a readable parquet file"),
    "unknown suffix": ("a.jsnol", b"", r"unknown kind of file \(.jsnol\). Did you mean '.json.?'\? Allowed"),
    "no suffix": ("rows", b"", r"unknown kind of file \(no suffix\). Allowed: .jsonl"),
    "empty jsonl": ("a.jsonl", b"\n", r"no row in it"),
    "empty list": ("a.json", b"[]", r"no row in it"),
    "header only": ("a.csv", b"prompt,answer\n", r"no row in it"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_its_line(case: str, tmp_path: Path, make_settings: Make) -> None:
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(str(tmp_path / name), "train", make_settings(), needs_answer=False)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_lists_its_folder(tmp_path: Path, make_settings: Make) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "old").mkdir()
    with pytest.raises(DataError, match=r"Did you mean 'train.jsonl'\? In .* there is: old/, train.jsonl."):
        read_rows(str(tmp_path / "trian.jsonl"), "train", make_settings(), needs_answer=False)
    with pytest.raises(DataError, match=r"data.eval_files\) does not exist. Did you mean 'old'\?"):
        read_rows(str(tmp_path / "odl" / "deep" / "a.jsonl"), "eval", make_settings(), needs_answer=False)


def test_a_folder_that_datasets_did_not_save(tmp_path: Path, make_settings: Make) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"not saved by datasets.* It holds: a.jsonl"):
        read_rows(str(tmp_path), "train", make_settings(), needs_answer=False)


def test_a_damaged_datasets_folder(tmp_path: Path, make_settings: Make) -> None:
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "d"))
    next((tmp_path / "d").glob("*.arrow")).write_bytes(b"not arrow")
    with pytest.raises(DataError, match="not a readable datasets folder"):
        read_rows(str(tmp_path / "d"), "train", make_settings(), needs_answer=False)
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(DataError, match="not a readable datasets folder"):
        read_rows(str(tmp_path / "d"), "train", make_settings(), needs_answer=False)


@pytest.mark.parametrize("spec", ["task:arithmetic", "task:instructions"])
def test_built_in_tasks_have_two_splits(spec: str, make_settings: Make) -> None:
    train = read_rows(spec, "train", make_settings(), needs_answer=False)
    held_out = read_rows(spec, "eval", make_settings(), needs_answer=False)
    first = load_task(spec).rows("train", 1)[0]
    assert (train[0].prompt, train[0].answer, train[0].extra) == (first.prompt, first.answer, first.extra)
    assert (train[3].source, train[3].index) == (spec, 3)
    assert not {str(row.prompt) for row in train} & {str(row.prompt) for row in held_out}


def test_gym_rows_carry_their_answer(make_settings: Make) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra klimb[gym] is not installed")
    rows = read_rows("gym:leg_counting", "eval", make_settings(), needs_answer=True)
    assert all(row.answer is not None and row.answer.isdigit() for row in rows)


def test_a_task_without_answers_is_refused_where_one_is_compared(make_settings: Make) -> None:
    assert load_task("task:instructions").rows("train", 1)[0].answer is None
    with pytest.raises(DataError, match="task:instructions: this task has no reference answers"):
        read_rows("task:instructions", "train", make_settings(), needs_answer=True)


def test_an_unknown_task_is_refused(make_settings: Make) -> None:
    with pytest.raises(DataError, match="task:arithmetic"):
        read_rows("task:arithmetics", "train", make_settings(), needs_answer=False)
