"""Text to tokens and back, on real tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klimb.data.chat import decode_response, encode_prompt, end_ids, readable
from klimb.errors import ConfigError, DataError, ModelError

Make = Callable[..., Any]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("adds_end", [False, True])
@pytest.mark.parametrize("template_writes_start", [True, False])
@pytest.mark.parametrize("prompt", ["hi", CHAT])
def test_case_DT_01_one_start_token_whether_or_not_the_template_writes_it(
    prompt: Any, template_writes_start: bool, adds_end: bool, make_tokenizer: Make, turns: str
) -> None:
    template = ("{{ bos_token }}" if template_writes_start else "") + turns
    tokenizer = make_tokenizer(adds_start=True, adds_end=adds_end, template=template)
    ids = encode_prompt(tokenizer, prompt, None)
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "<s><|turn|>user\nhi<|end|>\n<|turn|>assistant\n"


@pytest.mark.parametrize("text", ["hi", "<s>hi"])
def test_case_DT_01_one_start_token_without_a_template(text: str, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_start=True, adds_end=True)
    ids = encode_prompt(tokenizer, text, None)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 0)
    assert tokenizer.decode(ids) == "<s>hi"


def test_case_DT_01_a_tokenizer_that_adds_no_start_token_gets_none(make_tokenizer: Make, turns: str) -> None:
    plain = make_tokenizer(adds_start=False)
    assert plain.bos_token_id == 1
    assert 1 not in encode_prompt(plain, "hi", None)
    written = make_tokenizer(adds_start=False, template="{{ bos_token }}" + turns)
    assert encode_prompt(written, "hi", None).count(1) == 1


def test_the_template_says_the_same_as_transformers_own_tokenising(chat_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be short."}, *CHAT]
    own = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(chat_tokenizer, messages, None) == tuple(own)


def test_the_system_prompt_goes_in_front_unless_the_row_brings_its_own(chat_tokenizer: Any) -> None:
    system = [{"role": "system", "content": "Be short."}]
    expected = encode_prompt(chat_tokenizer, [*system, *CHAT], None)
    assert encode_prompt(chat_tokenizer, "hi", "Be short.") == expected
    assert encode_prompt(chat_tokenizer, CHAT, "Be short.") == expected
    assert encode_prompt(chat_tokenizer, [*system, *CHAT], "Be long.") == expected
    assert CHAT == [{"role": "user", "content": "hi"}]


def test_messages_and_system_prompts_need_a_template(number_tokenizer: Any) -> None:
    assert encode_prompt(number_tokenizer, "10 11", None) == (10, 11)
    with pytest.raises(DataError, match=r"list of chat messages, but .* no chat template"):
        encode_prompt(number_tokenizer, CHAT, None)
    with pytest.raises(DataError, match=r"data.system_prompt is set, but .* no chat template"):
        encode_prompt(number_tokenizer, "10", "Be short.")
    with pytest.raises(DataError, match="no tokens"):
        encode_prompt(number_tokenizer, "\u00a0", None)


def test_a_template_that_refuses_says_why(make_tokenizer: Make, turns: str) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + turns
    tokenizer = make_tokenizer(adds_start=True, template=template)
    assert encode_prompt(tokenizer, "hi", None)
    with pytest.raises(DataError, match=r"refuses the messages \(roles: system, user\): no system here"):
        encode_prompt(tokenizer, "hi", "Be short.")
    broken = make_tokenizer(adds_start=True, template="{{ messages[0]['content'] + 1 }}")
    with pytest.raises(DataError, match="refuses the messages"):
        encode_prompt(broken, "hi", None)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), after=st.text(max_size=5))
def test_a_response_reads_back_as_it_was_written(text: str, after: str, chat_tokenizer: Any) -> None:
    after = after.encode("utf-8", "ignore").decode()
    ids = chat_tokenizer.encode(text, add_special_tokens=False)
    tail = chat_tokenizer.encode(after, add_special_tokens=False)
    special = {1, 2, 3, 4, 0}
    clean = [token for token in ids if token not in special]
    if clean == ids:
        assert decode_response(chat_tokenizer, ids, {2}) == text
        assert decode_response(chat_tokenizer, [*ids, 2, *tail], {2}) == text
        assert decode_response(chat_tokenizer, [*ids, 4, 2, *tail, 2], {2, 4}) == text


def test_special_tokens_inside_a_response_are_left_out(chat_tokenizer: Any) -> None:
    ids = chat_tokenizer.encode("a<|turn|> b", add_special_tokens=False)
    assert decode_response(chat_tokenizer, ids, {2}) == "a b"
    assert decode_response(chat_tokenizer, [], {2}) == ""
    assert decode_response(chat_tokenizer, [2, 9], {2}) == ""


def test_an_ordinary_token_can_end_a_response_and_is_left_out(chat_tokenizer: Any) -> None:
    (newline,) = chat_tokenizer.encode("\n", add_special_tokens=False)
    ids = chat_tokenizer.encode("one\ntwo", add_special_tokens=False)
    assert decode_response(chat_tokenizer, ids, {newline}) == "one"


@pytest.mark.parametrize(("eos", "ids"), [(None, {2}), (7, {2, 7}), ([7, 9], {2, 7, 9}), ([], {2})])
def test_every_end_id_counts(eos: Any, ids: set[int], chat_tokenizer: Any) -> None:
    assert end_ids(chat_tokenizer, eos, []) == (ids, ())


def test_stop_strings(chat_tokenizer: Any) -> None:
    (newline,) = chat_tokenizer.encode("\n", add_special_tokens=False)
    assert end_ids(chat_tokenizer, None, ["<|end|>", 3]) == ({2, 3, 4}, ())
    assert end_ids(chat_tokenizer, None, ["\n", "\n"]) == ({2, newline}, ("\n",))
    assert end_ids(chat_tokenizer, None, ["Question ?!", "<|end|>"]) == ({2, 4}, ("Question ?!",))


def test_a_stop_string_of_unknown_words_is_no_token(number_tokenizer: Any) -> None:
    assert end_ids(number_tokenizer, None, ["never seen"]) == (frozenset(), ("never seen",))
    assert end_ids(number_tokenizer, None, ["unseen"]) == (frozenset(), ("unseen",))


def test_stops_that_cannot_work(chat_tokenizer: Any, number_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="empty string"):
        end_ids(chat_tokenizer, None, [""])
    size = len(chat_tokenizer)
    for token in (-1, size):
        with pytest.raises(ConfigError, match=rf"token id {token} is outside the vocabulary \(0 to {size - 1}\)"):
            end_ids(chat_tokenizer, None, [token])
    with pytest.raises(ModelError, match=r"Set actor_rollout_ref.stop"):
        end_ids(number_tokenizer, None, [])


def test_what_a_person_reads() -> None:
    assert readable("hi") == "hi"
    assert readable(CHAT) == "hi"
    assert readable([{"role": "system", "content": "Be short."}, *CHAT]) == "system: Be short.\n\nuser: hi"
