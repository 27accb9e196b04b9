"""The playground's tokenizer: byte-level BPE in which every digit is its own token, with a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# A word takes the space before it and a colon after it; digits, newlines and other spaces stand alone, so that a
# merge can never join two digits or a digit and its surroundings.
_PIECES = r"\n| ?[A-Za-z]+:?|[0-9]| ?[^A-Za-z0-9\s]+|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Learn the merges from `texts` and save a tokenizer that AutoTokenizer opens.

    Plain text gets the start token from the tokenizer itself, a conversation from the template: the two must not
    be combined, as with most Hugging Face chat models.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as a user's message, start token and the assistant's marker included."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def encode_responses(tokenizer: Any, responses: Sequence[str]) -> list[list[int]]:
    """Token ids of each response, with the end token."""
    rows = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    return [[*row, tokenizer.eos_token_id] for row in rows]
