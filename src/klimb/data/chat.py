"""The only place where text becomes tokens and tokens become text.

A chat template may or may not write the start token, and a tokenizer may or may not add one: prompts leave
here with exactly the tokens the tokenizer puts in front of any text, once. Response tokens are never made
from text; they are only read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from klimb.data.rows import ChatPrompt, Message
from klimb.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: ChatPrompt,
    system_prompt: str | None,
    start: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """What the model reads for one prompt. start: `start_ids` of the tokenizer, for whoever encodes many.

    With a chat template, text is one user message, and the template is applied up to the place where the
    model's answer begins. Without one, text is tokenised as it stands. system_prompt goes in front of messages
    that do not begin with a system message of their own.
    Raises DataError: messages or a system prompt without a chat template, a template that refuses the messages,
    no tokens at all.
    """
    if tokenizer.chat_template is None:
        text = _plain_text(prompt, system_prompt)
    else:
        text = _apply_template(tokenizer, _as_messages(prompt, system_prompt))
    ids = _text_ids(tokenizer, text)
    if not ids:
        raise DataError("the tokenizer makes no tokens of this prompt. Take the row out of the file.")
    start = start_ids(tokenizer) if start is None else start
    return ids if ids[: len(start)] == start else start + ids


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_ids: Iterable[int]) -> str:
    """Text of sampled tokens up to the first end id, without it and without special tokens.

    ids: the masked-in tokens of one response, in order.
    """
    ends = frozenset(end_ids)
    length = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    text = tokenizer.decode(list(ids[:length]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return cast("str", text)


def end_ids(
    tokenizer: PreTrainedTokenizerBase, eos: int | Sequence[int] | None, stop: Sequence[str | int]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The token ids that end a response, and the strings that end it.

    eos: `eos_token_id` of the model's generation config, one or several. stop: `actor_rollout_ref.stop`.
    The tokenizer's own end token always counts. A stop string that is one token becomes an id. If it is ordinary
    text it stays a string as well, since other tokens can spell it too ("\\n" inside "\\n\\n"); a special token
    cannot be spelled otherwise.
    Raises ConfigError for a stop that is empty or outside the vocabulary, ModelError when nothing ends a response.
    """
    given = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if isinstance(tokenizer.eos_token_id, int):
        given.append(tokenizer.eos_token_id)
    ids = set(given)
    strings: list[str] = []
    for item in stop:
        if isinstance(item, int):
            if not 0 <= item < len(tokenizer):
                raise ConfigError(
                    f"actor_rollout_ref.stop: token id {item} is outside the vocabulary (0 to {len(tokenizer) - 1})."
                )
            ids.add(item)
            continue
        if not item:
            raise ConfigError("actor_rollout_ref.stop: found an empty string; it would end every response at once.")
        token = _single_token(tokenizer, item)
        if token is not None:
            ids.add(token)
        if token is None or not _is_special(tokenizer, token):
            strings.append(item)
    if not ids and not strings:
        raise ModelError(
            "neither the model's generation config nor its tokenizer names an end token, so no response would "
            "ever end before max_tokens. Set actor_rollout_ref.stop to the string or token id that ends an answer."
        )
    return frozenset(ids), tuple(dict.fromkeys(strings))


def readable(prompt: ChatPrompt) -> str:
    """A prompt as a person reads it in logs: the text itself, or one paragraph per message."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _plain_text(prompt: ChatPrompt, system_prompt: str | None) -> str:
    if system_prompt is not None:
        raise DataError(
            "data.system_prompt is set, but the model's tokenizer has no chat template to put it in. "
            "Write it into the prompts, or use a model with a chat template."
        )
    if isinstance(prompt, str):
        return prompt
    raise DataError(
        "the prompt is a list of chat messages, but the model's tokenizer has no chat template. "
        "Use text prompts, or a model with a chat template."
    )


def _as_messages(prompt: ChatPrompt, system_prompt: str | None) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        # Templates refuse by raise_exception (a TemplateError), or fail in an expression of their own.
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the tokenizer's chat template refuses the messages (roles: {roles}): {error}. "
            "Change the roles or data.system_prompt to what the template allows."
        ) from error
    return cast("str", text)


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer by default puts in front of any text, seen on a probe.

    bos_token_id would not do: many tokenizers name a start token that they never add. What a tokenizer
    appends (an end token) has no place in a prompt.
    """
    probe = "a"
    bare = tuple(tokenizer.encode(probe, add_special_tokens=False))
    full = tuple(tokenizer.encode(probe))
    for length in range(len(full) - len(bare) + 1):
        if bare and full[length : length + len(bare)] == bare:
            return full[:length]
    return ()


def _is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and bool(added.special)


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The one token that spells `text` exactly, or None. An unknown token spells something else."""
    ids = _text_ids(tokenizer, text)
    if len(ids) != 1:
        return None
    spelled = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return ids[0] if spelled == text else None
