"""Real small tokenizers, and settings to vary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from klimb.data.rows import DataSettings

DATA = Path(__file__).parent.parent / "data"
TURNS = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|turn|>", "<|end|>")


def bpe_tokenizer(*, adds_start: bool, adds_end: bool = False, template: str | None = None) -> Any:
    """Byte-level BPE trained on the own rows: <s> is id 1, </s> id 2."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train([str(DATA / "shop.jsonl")], trainer)
    if adds_start or adds_end:
        form = ("<s> " if adds_start else "") + "$A" + (" </s>" if adds_end else "")
        core.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return bpe_tokenizer


@pytest.fixture(scope="session")
def turns() -> str:
    """A chat template that writes no start token."""
    return TURNS


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Adds the start token to text, and its template writes it too."""
    return bpe_tokenizer(adds_start=True, template="{{ bos_token }}" + TURNS)


@pytest.fixture(scope="session")
def number_tokenizer() -> Any:
    """Word level, no template: the text '10 11' is the ids (10, 11)."""
    words = {"<unk>": 0, **{str(n): n for n in range(1, 32)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.fixture
def make_settings() -> Callable[..., DataSettings]:
    def make(**changes: Any) -> DataSettings:
        usual: dict[str, Any] = {
            "prompt_key": "prompt",
            "answer_key": "answer",
            "system_prompt": None,
            "max_prompt_tokens": 1024,
            "overlong": "error",
            "shuffle": True,
        }
        return DataSettings(**{**usual, **changes})

    return make


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `datasets` might cache goes to the test's own folder."""
    import datasets.config

    for name in ("HF_CACHE_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        if hasattr(datasets.config, name):
            monkeypatch.setattr(datasets.config, name, tmp_path / "hf-cache")
