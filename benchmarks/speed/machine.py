"""What every speed benchmark shares: the model, a timer that knows whether the machine was quiet, one JSON line out.

A timed part during which other processes used the CPU is void: two threads of torch beside a third busy one are many
times slower (LOG.md), so the number would be about the neighbour.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

QUIET = 0.15
"""Cores that others may use."""
VOCAB, PROMPT, NEW = 32_000, 64, 128
MODEL = Path(tempfile.gettempdir()) / "klimb-bench-model"
SCORER = Path(tempfile.gettempdir()) / "klimb-bench-scorer"


@dataclass(frozen=True, kw_only=True)
class Timed:
    seconds: float
    others: float
    """cores used by other processes, mean over the timed part"""

    @property
    def is_void(self) -> bool:
        return self.others > QUIET


def busy_seconds() -> float:
    """CPU seconds that all processes used so far."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Mark:
    """A moment: the clock, and the CPU seconds that all processes and this one had used by then."""

    at: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> Mark:
        return cls(time.perf_counter(), busy_seconds(), time.process_time())

    def until(self, end: Mark) -> Timed:
        seconds = end.at - self.at
        return Timed(seconds=seconds, others=max(0.0, end.busy - self.busy - (end.own - self.own)) / seconds)


def timed(work: Callable[[], Any]) -> Timed:
    start = Mark.now()
    work()
    return start.until(Mark.now())


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def word_tokenizer(vocab: int) -> Any:
    """One token per number: w3, w4 and so on, behind pad, start and end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, vocab)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def build_model(folder: Path, positions: int = 4096) -> Path:
    """A Qwen2-shaped model of 15M random weights (as Llama with biases: transformers gives Qwen2 folders a tokenizer of
    their own) and a tokenizer with one token per number, as a Hugging Face folder."""
    if (folder / "config.json").exists():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        attention_bias=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def build_scorer(model: Path, folder: Path) -> Path:
    """A sequence classifier with one label on a body of the same shape: reward model, and TRL's value model."""
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(model, num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def prompts(count: int, length: int = PROMPT, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count, length), generator=generator).tolist()


def end_ids(mean_length: int | None) -> list[int]:
    """Ids that end a response: none, or so many of a flat distribution that lengths are geometric with this mean."""
    if mean_length is None:
        return []
    generator = torch.Generator().manual_seed(1)
    return sorted((torch.randperm(VOCAB - 3, generator=generator)[: VOCAB // mean_length] + 3).tolist())


def report(name: str, timings: list[Timed], tokens: list[int], **more: float) -> None:
    """One JSON line: median tokens per second of the timings that are not void."""
    rates = sorted(n / t.seconds for n, t in zip(tokens, timings, strict=True) if not t.is_void)
    line = {
        "name": name,
        "tokens_per_s": rates[len(rates) // 2] if rates else None,
        "spread": [rates[0], rates[-1]] if rates else None,
        "valid": len(rates),
        "void": len(timings) - len(rates),
        "others_cores": max(t.others for t in timings),
        "threads": torch.get_num_threads(),
        "peak_mib": peak_mib(),
        **more,
    }
    print(json.dumps(line), flush=True)
