"""What a row must hold."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from klimb.data.rows import checked_rows
from klimb.errors import DataError

Make = Callable[..., Any]


def check(record: dict[str, Any], settings: Any, needs_answer: bool) -> Any:
    return checked_rows([record], "f.jsonl", list(record), settings, needs_answer)[0]


@pytest.mark.parametrize(
    ("value", "answer"), [("x", "x"), (3, "3"), (2.5, "2.5"), (Decimal("1.20"), "1.20"), (10**30, "1" + "0" * 30)]
)
def test_answers_become_text(value: Any, answer: str, make_settings: Make) -> None:
    assert check({"prompt": "p", "answer": value}, make_settings(), True).answer == answer


@pytest.mark.parametrize("value", [None, "", " ", float("nan")])
def test_an_empty_answer_is_refused_only_where_it_is_read(value: Any, make_settings: Make) -> None:
    with pytest.raises(DataError, match=r"f.jsonl, row 0: 'answer' \(data.answer_key\) is empty"):
        check({"prompt": "p", "answer": value}, make_settings(), True)
    assert check({"prompt": "p", "answer": value}, make_settings(), False).answer in (None, value)


@pytest.mark.parametrize("value", [True, {"truth": "4"}, ["4"]])
def test_an_answer_of_another_kind(value: Any, make_settings: Make) -> None:
    with pytest.raises(DataError, match=rf"is a {type(value).__name__}; it must be text or a number"):
        check({"prompt": "p", "answer": value}, make_settings(), True)
    row = check({"prompt": "p", "answer": value}, make_settings(), False)
    assert (row.answer, row.extra) == (None, {"answer": value})


def test_a_missing_answer_column_matters_only_where_it_is_read(make_settings: Make) -> None:
    record = {"prompt": "p", "anwser": "4"}
    with pytest.raises(DataError, match=r"'answer' .*found: prompt, anwser. Did you mean 'anwser'\?"):
        check(record, make_settings(), True)
    row = check(record, make_settings(), False)
    assert (row.answer, row.extra) == (None, {"anwser": "4"})


USER = {"role": "user", "content": "hi"}
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "number": (4, r"row 0: 'prompt' \(data.prompt_key\) is a int; it must be text or a list of messages"),
    "object": ({"role": "user", "content": "hi"}, r"is a dict; it must be text or a list of messages"),
    "list of text": (["hi"], r"row 0, message 0: found a str"),
    "no role": ([{"content": "hi"}], r"message 0: role is None; allowed: system"),
    "misspelt role": ([USER, {"role": "usr", "content": "hi"}], r"message 1: role is 'usr'; .* mean 'user'\?"),
    "role that is a number": ([{"role": 1, "content": "hi"}], r"role is 1;"),
    "content in parts": ([{"role": "user", "content": [{"type": "text"}]}], r"content is a list; .*must be text"),
    "no content": ([{"role": "user"}], r"content is a NoneType"),
    "answered already": ([USER, {"role": "assistant", "content": "ho"}], r"last message .* role 'assistant'"),
    "ends with the system": ([{"role": "system", "content": "x"}], r"must be from user or tool"),
    "empty last message": ([{"role": "user", "content": " "}], r"last message of 'prompt' is empty"),
    "half a pair in text": ("ab\ud800", r"row 0: 'prompt' holds half of a surrogate pair .* character 2"),
    "half a pair in a message": ([{"role": "user", "content": "\udfff"}], r"message 0: 'content' holds half"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_says_what_is_wrong(case: str, make_settings: Make) -> None:
    prompt, message = BAD_PROMPTS[case]
    with pytest.raises(DataError, match=message) as caught:
        check({"prompt": prompt}, make_settings(), False)
    assert str(caught.value).startswith("f.jsonl, row 0")


def test_a_tool_may_have_the_last_word(make_settings: Make) -> None:
    turns = [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}]
    assert check({"prompt": turns}, make_settings(), False).prompt == turns
