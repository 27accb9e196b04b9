"""Limits on prompts, and the stream the loop draws from."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klimb.data.prompts import PromptStream, build_prompts, check_context, fingerprint
from klimb.data.rows import RawRow
from klimb.errors import CheckpointError, ConfigError, DataError
from klimb.types import Prompt

Make = Callable[..., Any]
# The rows of DT-02; the number tokenizer reads them as these very ids.
TEXTS = ("1 2 3", "10 11 12 13 14 15", "4 5 6 7")
# Seed 0, six prompts, two epochs.
ORDER_OF_SEED_0 = [3, 2, 1, 0, 4, 5, 4, 5, 1, 2, 0, 3]


def raw(texts: tuple[Any, ...]) -> list[RawRow]:
    return [RawRow(source="f.jsonl", index=i, prompt=text, answer=str(i)) for i, text in enumerate(texts)]


def prompts(n: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(row=i, text=str(i), token_ids=(i, 1), answer=None, source="f") for i in range(n))


def test_case_DT_02_error_names_row_length_and_limit(number_tokenizer: Any, make_settings: Make) -> None:
    settings = make_settings(max_prompt_tokens=4, overlong="error")
    with pytest.raises(DataError, match=r"f.jsonl, row 1: the prompt has 6 tokens, data.max_prompt_tokens is 4"):
        build_prompts(raw(TEXTS), number_tokenizer, settings)


def test_case_DT_02_drop_keeps_the_others_and_says_so(
    number_tokenizer: Any, make_settings: Make, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(max_prompt_tokens=4, overlong="drop")
    with caplog.at_level(logging.WARNING, "klimb"):
        kept, counts = build_prompts(raw(TEXTS), number_tokenizer, settings)
    assert [prompt.row for prompt in kept] == [0, 2]
    assert [prompt.token_ids for prompt in kept] == [(1, 2, 3), (4, 5, 6, 7)]
    assert "1 of 3 dropped" in caplog.text
    assert (counts.rows, counts.kept, counts.dropped, counts.truncated, counts.longest) == (3, 2, 1, 0, 4)


@pytest.mark.parametrize(("policy", "ids"), [("truncate_left", (12, 13, 14, 15)), ("truncate_right", (10, 11, 12, 13))])
def test_case_DT_02_truncation_keeps_the_named_end(
    policy: str, ids: tuple[int, ...], number_tokenizer: Any, make_settings: Make, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(max_prompt_tokens=4, overlong=policy)
    with caplog.at_level(logging.WARNING, "klimb"):
        kept, counts = build_prompts(raw(TEXTS), number_tokenizer, settings)
    assert [prompt.token_ids for prompt in kept] == [(1, 2, 3), ids, (4, 5, 6, 7)]
    assert kept[1].text == TEXTS[1]
    assert f"1 of 3 cut at the {policy.removeprefix('truncate_')}" in caplog.text
    assert (counts.dropped, counts.truncated, counts.longest) == (0, 1, 4)


def test_case_DT_02_prompt_plus_response_over_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 \+ 5 > 8"):
        check_context(4, 5, 8)
    check_context(4, 4, 8)
    check_context(4, 5, None)


def test_nothing_left_is_refused(number_tokenizer: Any, make_settings: Make) -> None:
    with pytest.raises(DataError, match="no prompt is left of 3 rows"):
        build_prompts(raw(TEXTS), number_tokenizer, make_settings(max_prompt_tokens=2, overlong="drop"))
    with pytest.raises(DataError, match="there are no rows"):
        build_prompts([], number_tokenizer, make_settings())


def test_a_row_that_cannot_be_encoded_is_named(number_tokenizer: Any, make_settings: Make) -> None:
    rows = raw(("1 2", [{"role": "user", "content": "3"}]))
    with pytest.raises(DataError, match=r"f.jsonl, row 1: the prompt is a list of chat messages"):
        build_prompts(rows, number_tokenizer, make_settings())


def test_rows_of_several_files_are_numbered_through(chat_tokenizer: Any, make_settings: Make) -> None:
    rows = [*raw(("a", "b")), RawRow(source="g.csv", index=0, prompt="c", answer=None, extra={"k": 1})]
    kept, counts = build_prompts(rows, chat_tokenizer, make_settings(system_prompt="Be short."))
    assert [(p.row, p.source, p.text, p.answer) for p in kept] == [
        (0, "f.jsonl", "a", "0"),
        (1, "f.jsonl", "b", "1"),
        (2, "g.csv", "c", None),
    ]
    assert kept[2].extra == {"k": 1}
    assert counts.longest == max(len(p.token_ids) for p in kept)
    assert "Be short." in chat_tokenizer.decode(kept[0].token_ids)


@settings(deadline=None)
@given(
    size=st.integers(1, 12),
    takes=st.lists(st.integers(0, 30), max_size=8),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_any_split_of_takes_gives_the_same_sequence(size: int, takes: list[int], seed: int, shuffle: bool) -> None:
    data = prompts(size)
    parts, whole = PromptStream(data, seed, shuffle), PromptStream(data, seed, shuffle)
    taken = [prompt.row for n in takes for prompt in parts.take(n)]
    assert taken == [prompt.row for prompt in whole.take(sum(takes))]
    assert parts.state_dict() == whole.state_dict()
    assert parts.epoch == pytest.approx(sum(takes) / size)
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 12), before=st.integers(0, 40), after=st.integers(0, 40), shuffle=st.booleans())
def test_a_restored_stream_goes_on_where_it_stood(size: int, before: int, after: int, shuffle: bool) -> None:
    stream = PromptStream(prompts(size), 3, shuffle)
    stream.take(before)
    saved = json.loads(json.dumps(stream.state_dict()))
    restored = PromptStream(prompts(size), 3, shuffle)
    restored.take(5)
    restored.load_state_dict(saved)
    assert [p.row for p in restored.take(after)] == [p.row for p in stream.take(after)]
    assert restored.epoch == stream.epoch


def test_case_CR_01_resume_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    straight = PromptStream(prompts(8), 0, True)
    steps = [[p.row for p in straight.take(4)] for _ in range(4)]
    stream = PromptStream(prompts(8), 0, True)
    for _ in range(2):
        stream.take(4)
    saved = stream.state_dict()
    assert (saved["epoch"], saved["position"], stream.epoch) == (1, 0, 1.0)
    resumed = PromptStream(prompts(8), 0, True)
    resumed.load_state_dict(saved)
    after = [[p.row for p in resumed.take(4)] for _ in range(2)]
    assert after == steps[2:]
    assert sorted(after[0] + after[1]) == list(range(8))
    assert resumed.epoch == 2.0


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int) -> list[int]:
        return [p.row for p in PromptStream(prompts(6), seed, True).take(12)]

    # Literals: a change of numpy or of klimb that moved these would break every resume.
    assert order(0) == ORDER_OF_SEED_0
    assert order(0)[:6] != order(0)[6:]
    assert order(0) != order(1)
    assert [p.row for p in PromptStream(prompts(6), 9, False).take(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_every_order_of_an_epoch_is_about_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(100):
        stream = PromptStream(prompts(3), seed, True)
        for _ in range(12):
            order = tuple(p.row for p in stream.take(3))
            counts[order] = counts.get(order, 0) + 1
    # 1200 draws of 6 orders: 200 each, standard deviation 13.
    assert len(counts) == 6
    assert all(145 < count < 255 for count in counts.values())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptStream(prompts(7), 0, True), r"num_prompts = 8, this run has 7: the data files have gained or lost"),
        (
            PromptStream((*prompts(7), replace(prompts(1)[0], row=7)), 0, True),
            r"fingerprint = .* tokens or answers have changed",
        ),
        (PromptStream(prompts(8), 1, True), r"seed = 0, this run has 1"),
        (PromptStream(prompts(8), 0, False), r"shuffle = True, this run has False"),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptStream, message: str) -> None:
    stream = PromptStream(prompts(8), 0, True)
    stream.take(3)
    with pytest.raises(CheckpointError, match=message):
        other.load_state_dict(stream.state_dict())
    assert other.epoch == 0.0


@pytest.mark.parametrize(
    "damage", [{"position": 8}, {"position": -1}, {"epoch": -1}, {"epoch": 0.5}, {"position": None}]
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    stream = PromptStream(prompts(8), 0, True)
    with pytest.raises(CheckpointError, match="damaged: epoch"):
        stream.load_state_dict({**stream.state_dict(), **damage})


def test_the_fingerprint_sees_tokens_and_answers_and_not_paths() -> None:
    one = prompts(2)
    assert fingerprint(one) == fingerprint([replace(p, source="elsewhere") for p in one])
    assert fingerprint(one) != fingerprint([one[0], replace(one[1], answer="4")])
    assert fingerprint(one) != fingerprint([one[0], replace(one[1], token_ids=(9,))])
    assert fingerprint(one) != fingerprint(one[::-1])


def test_a_stream_needs_prompts() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream((), 0, True)
