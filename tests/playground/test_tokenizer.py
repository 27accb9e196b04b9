import pytest
from transformers import AutoTokenizer

from klimb.playground.tokenizer import encode_prompts, encode_responses, train_tokenizer
from klimb.tasks import load_task


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["12 12 12 12", "word 345345345: 99", "What is 12 + 34?"] * 50
    train_tokenizer([*texts, *(row.prompt for row in load_task("task:instructions").rows("train", 300))], 320, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_digits_are_single_tokens(tokenizer):
    for text in ("345345345", "12 12", "a1b22: 3", "+4 -55"):
        pieces = [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert "".join(pieces) == text
        assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))


@pytest.mark.parametrize("text", ["", "\n\n 1. Fox,\tdog; ", "gr\u00fc\u00dfe \u4f60\u597d \U0001f600", "<b> </b>  a"])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_exactly_one_start_token(tokenizer):
    bos = tokenizer.bos_token_id
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    for ids in (
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
        tokenizer("hi")["input_ids"],
        encode_prompts(tokenizer, ["hi", "longer than that"])[1],
    ):
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_prompt_and_response_are_the_rendered_conversation(tokenizer):
    (prompt,), (response,) = encode_prompts(tokenizer, ["What is 1 + 1?"]), encode_responses(tokenizer, ["ones: 2"])
    chat = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "ones: 2"}]
    assert prompt + response == tokenizer.apply_chat_template(chat, return_dict=False)
    assert response[-1] == tokenizer.eos_token_id


def test_special_tokens_are_distinct(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids += tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    assert len(set(ids)) == 6
    assert len(tokenizer) == 320
