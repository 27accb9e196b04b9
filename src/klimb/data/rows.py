"""What a row of data must hold, whatever kind of file it came from.

A reader hands over records (one dict per row); `checked_rows` finds prompt and answer in them, refuses
what cannot be trained on, and names file and row. Rows are counted from 0.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, cast

from klimb.errors import DataError

Overlong = Literal["error", "drop", "truncate_left", "truncate_right"]
Message = dict[str, Any]
ChatPrompt = str | list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool")
LAST_ROLES = ("user", "tool")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The `data` section of the config, as far as this room reads it.

    prompt_key, answer_key: names of columns. system_prompt: put before every prompt that brings none of its
    own; None = none. max_prompt_tokens: limit on a prompt's tokens, template and start token included.
    overlong: what happens to a prompt above the limit. shuffle: a new order in every epoch.
    """

    prompt_key: str
    answer_key: str
    system_prompt: str | None
    max_prompt_tokens: int
    overlong: Overlong
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.max_prompt_tokens > 0, "config must refuse a limit below 1"


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """One row before tokenisation.

    source: the file or task, as the config spells it. index: the row's number within that source, from 0.
    prompt: text, or messages {role, content, ...}. answer: None where the row has none. extra: other columns.
    """

    source: str
    index: int
    prompt: ChatPrompt
    answer: str | None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def nearest(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the closest of `names`, or nothing when none is close."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def checked_rows(
    records: Sequence[Mapping[str, Any]],
    source: str,
    columns: Sequence[str],
    settings: DataSettings,
    needs_answer: bool,
) -> list[RawRow]:
    """Records of one source as rows.

    columns: the names found in the file, in its order. needs_answer: whether a reward reads the answer;
    without one, the answer column may be absent or hold anything.
    Raises DataError: a column is missing, the source is empty, or a row has no usable prompt or answer.
    """
    if not records:
        raise DataError(f"{source}: there is no row in it. Give a file with at least one prompt.")
    _require(settings.prompt_key, "data.prompt_key", source, columns)
    if needs_answer:
        _require(settings.answer_key, "data.answer_key", source, columns)
    _refuse_empty_prompts(records, source, settings.prompt_key)
    return [_row(record, index, source, settings, needs_answer) for index, record in enumerate(records)]


def _require(column: str, key: str, source: str, columns: Sequence[str]) -> None:
    if column not in columns:
        found = ", ".join(columns) or "none"
        raise DataError(
            f"{source}: column '{column}' ({key}) is missing; columns found: {found}."
            f"{nearest(column, columns)} Set {key} to one of them, or rename the column in the file."
        )


def _refuse_empty_prompts(records: Sequence[Mapping[str, Any]], source: str, key: str) -> None:
    empty = [index for index, record in enumerate(records) if _is_empty(record.get(key))]
    if empty:
        shown = ", ".join(str(index) for index in empty[:10]) + (", ..." if len(empty) > 10 else "")
        raise DataError(
            f"{source}: {len(empty)} of {len(records)} rows have an empty or missing '{key}': "
            f"row {shown} (counted from 0). Fill them or take them out of the file."
        )


def _is_empty(prompt: object) -> bool:
    if isinstance(prompt, str):
        return not prompt.strip()
    if isinstance(prompt, float):
        return math.isnan(prompt)
    return prompt is None or (isinstance(prompt, list) and not prompt)


def _row(record: Mapping[str, Any], index: int, source: str, settings: DataSettings, needs_answer: bool) -> RawRow:
    where = f"{source}, row {index}"
    prompt = _checked_prompt(record[settings.prompt_key], where, settings.prompt_key)
    extra = {k: v for k, v in record.items() if k not in (settings.prompt_key, settings.answer_key)}
    value = record.get(settings.answer_key)
    try:
        answer = _checked_answer(value, where, settings.answer_key, needs_answer)
    except DataError:
        if needs_answer:
            raise
        answer, extra[settings.answer_key] = None, value
    return RawRow(source=source, index=index, prompt=prompt, answer=answer, extra=extra)


def _checked_answer(value: object, where: str, key: str, needs_answer: bool) -> str | None:
    if isinstance(value, str):
        _refuse_broken_text(value, where, key)
        if value.strip() or not needs_answer:
            return value
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if is_number and not (isinstance(value, float) and math.isnan(value)):
        return str(value)
    if value is None or isinstance(value, str | float):
        if not needs_answer:
            return None
        raise DataError(
            f"{where}: '{key}' (data.answer_key) is empty, and a reward of this run compares with it. "
            "Fill it, or take the row out of the file."
        )
    raise DataError(
        f"{where}: '{key}' (data.answer_key) is a {type(value).__name__}; it must be text or a number. "
        "Point data.answer_key at a column that holds the solution itself."
    )


def _checked_prompt(value: object, where: str, key: str) -> ChatPrompt:
    if isinstance(value, str):
        _refuse_broken_text(value, where, key)
        return value
    if isinstance(value, list):
        items = cast("list[object]", value)
        messages = [_checked_message(item, f"{where}, message {i}") for i, item in enumerate(items)]
        last = messages[-1]
        if last["role"] not in LAST_ROLES:
            raise DataError(
                f"{where}: the last message of '{key}' has role '{last['role']}'; the policy answers, so the "
                f"last message must be from {' or '.join(LAST_ROLES)}. Cut the messages after the question."
            )
        if not last["content"].strip():
            raise DataError(f"{where}: the last message of '{key}' is empty. Fill it or remove the row.")
        return messages
    raise DataError(
        f"{where}: '{key}' (data.prompt_key) is a {type(value).__name__}; it must be text or a list of "
        "messages like {'role': 'user', 'content': '...'}."
    )


def _checked_message(item: object, where: str) -> Message:
    """Fields that are None are left out: columnar files fill every message up to the same fields."""
    if not isinstance(item, dict):
        raise DataError(f"{where}: found a {type(item).__name__}; a message is an object with 'role' and 'content'.")
    message = {str(k): v for k, v in cast("dict[object, Any]", item).items() if v is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise DataError(f"{where}: role is {role!r}; allowed: {', '.join(ROLES)}.{hint}")
    if not isinstance(content, str):
        raise DataError(
            f"{where}: content is a {type(content).__name__}; it must be text (images and lists of parts "
            "are not supported)."
        )
    _refuse_broken_text(content, where, "content")
    return message


def _refuse_broken_text(text: str, where: str, key: str) -> None:
    """JSON can spell half of a surrogate pair; neither a tokenizer nor a UTF-8 file takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: '{key}' holds half of a surrogate pair ({text[error.start]!r}) at character "
            f"{error.start}. Remove it from the text."
        ) from None
