"""The playground's SFT model: a small Llama taught on noisy demonstrations of both tasks.

It makes mistakes because its teachers do, not because it cannot add: the right path is the likeliest one at every
token, so that reinforcement learning can climb by preferring it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from klimb.playground.progress import Report, TrainerReport
from klimb.playground.settings import TAUGHT, PlaygroundSettings
from klimb.playground.tokenizer import encode_prompts, encode_responses
from klimb.tasks.base import Split, TaskRow, TaughtTask

MAX_POSITIONS = 1024
CLEAN_SHARE = 0.55
# Which task each batch is of, in turn: the lists take more learning than the sums.
CYCLE = (0, 1, 0, 1, 1)


def new_model(tokenizer: Any, settings: PlaygroundSettings) -> LlamaForCausalLM:
    """An untrained model for the tokenizer, its weights a function of the seed."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def draw_rows(num_batches: int, batch: int, seed: int, split: Split = "train") -> list[tuple[TaughtTask, TaskRow]]:
    """Rows of a split for batches of one task each, the tasks in turn: rows of one task are of about one length.

    Each task's rows come in shuffled order, and start over when they run out.
    """
    rng = Random(f"playground rows {seed}")
    streams: list[list[TaskRow]] = []
    for task in TAUGHT:
        rows = task.rows(split, None)
        stream: list[TaskRow] = []
        while len(stream) < num_batches * batch:
            stream += rng.sample(rows, len(rows))
        streams.append(stream)
    kinds = [CYCLE[i % len(CYCLE)] for i in range(num_batches) for _ in range(batch)]
    return [(TAUGHT[kind], streams[kind].pop()) for kind in kinds]


def train_sft(tokenizer: Any, settings: PlaygroundSettings, folder: Path, report: Report) -> LlamaForCausalLM:
    """Train on fresh responses, each seen once, with the loss on response and end token; save model and tokenizer."""
    drawn = draw_rows(settings.sft_steps, settings.sft_batch, settings.seed)
    rng = Random(f"playground demonstrations {settings.seed}")
    prompts = encode_prompts(tokenizer, [row.prompt for _, row in drawn])
    # The first steps show the clean way, from which a small model learns it in fewer steps than through the slips.
    num_clean = int(CLEAN_SHARE * len(drawn))
    responses = encode_responses(
        tokenizer,
        [
            task.clean(row, rng) if i < num_clean else task.demonstration(row, rng)
            for i, (task, row) in enumerate(drawn)
        ],
    )
    model = new_model(tokenizer, settings)
    trainer = Trainer(
        model=model,
        args=training_arguments(folder, settings.sft_steps, settings.sft_batch, settings.sft_lr, settings.seed),
        train_dataset=cast(Any, list(zip(prompts, responses, strict=True))),
        data_collator=_collate(tokenizer.pad_token_id),
        callbacks=[TrainerReport("SFT model", report)],
    )
    run_quietly(trainer)
    model.eval()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def training_arguments(folder: Path, steps: int, batch: int, lr: float, seed: int) -> TrainingArguments:
    """Cosine schedule with a short warm-up, on the CPU, no files, no trackers."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        seed=seed,
        use_cpu=True,
        report_to=[],
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=10,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def run_quietly(trainer: Trainer) -> None:
    """Train without the Trainer's own prints; the report says what there is to say."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Right-padded int64 [B, T]."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _collate(pad_id: int) -> Callable[[list[tuple[list[int], list[int]]]], dict[str, Tensor]]:
    def collate(pairs: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        tokens = [prompt + response for prompt, response in pairs]
        labels = [[-100] * len(prompt) + response for prompt, response in pairs]
        input_ids = pad(tokens, pad_id)
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != pad_id).long(),
            "labels": pad(labels, -100),
        }

    return collate
