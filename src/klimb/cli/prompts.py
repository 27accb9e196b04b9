"""How long the prompts are, told by the first of them, without a model library."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from klimb.config.schema import RunConfig
from klimb.errors import KlimbError
from klimb.tasks.table import load_task

LOOKED_AT = 200
"""Prompts that are looked at."""


def lengths(config: RunConfig, model: Path) -> tuple[float, int] | None:
    """Mean and longest tokens of the first prompts, without what a chat template puts around them. None where they or
    the tokenizer cannot be read cheaply: only tasks and jsonl are, with a tokenizer.json."""
    texts = _texts(config)
    file = model / "tokenizer.json"
    if not texts or not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing narrower for a damaged file; training says what is wrong with it
        return None
    counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    return sum(counts) / len(counts), max(counts)


def _texts(config: RunConfig) -> list[str]:
    for spec in config.data.train_files:
        try:
            if spec.startswith("task:"):
                return [row.prompt for row in load_task(spec).rows("train", LOOKED_AT)]
            path = Path(spec).expanduser()
            if path.suffix.lower() == ".jsonl" and path.is_file():
                with path.open(encoding="utf-8-sig") as file:
                    rows = [json.loads(line) for line in islice(file, LOOKED_AT) if line.strip()]
                return [text for row in rows if (text := _text(row, config.data.prompt_key))]
        except (OSError, ValueError, KlimbError):
            return []
    return []


def _text(row: Any, key: str) -> str:
    """A prompt's text; of messages the contents of all."""
    found = row.get(key) if isinstance(row, dict) else None
    if isinstance(found, list):
        return "\n".join(str(m.get("content", "")) for m in found if isinstance(m, dict))
    return found if isinstance(found, str) else ""
