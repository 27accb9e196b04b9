"""The playground's reward model: a sequence classifier with one output, trained on pairs.

Bradley-Terry loss on (better, worse) responses to one prompt: Ouyang et al. 2022 (arXiv 2203.02155), equation 1;
the term that centres the scores on 0 is Eisenstein et al. 2023 (arXiv 2312.09244), equation 2.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer

from klimb.playground.corrupt import draw_pair
from klimb.playground.progress import Report, TrainerReport
from klimb.playground.settings import PlaygroundSettings
from klimb.playground.sft import draw_rows, pad, run_quietly, training_arguments
from klimb.playground.tokenizer import encode_prompts, encode_responses
from klimb.tasks.base import Split

CENTRING = 0.01
DENSE_WEIGHT = 1.0
# Worse responses that lose their end token, as one does that ran into the length limit.
UNFINISHED_SHARE = 0.05

Pair = tuple[list[int], list[int]]


def draw_pairs(tokenizer: Any, num_batches: int, batch: int, seed: int, *, split: Split = "train") -> list[Pair]:
    """Token rows (better, worse), prompt included, for batches of one task each."""
    drawn = draw_rows(num_batches, batch, seed, split)
    rng = Random(f"playground pairs {seed}")
    # Rows stand in blocks of one task, so the row before, or for a block's first its last, is of the same task.
    others = [drawn[i - 1 if i % batch else i + batch - 1][1] for i in range(len(drawn))]
    texts = [draw_pair(task, row, other, rng) for (task, row), other in zip(drawn, others, strict=True)]
    prompts = encode_prompts(tokenizer, [row.prompt for _, row in drawn])
    better = encode_responses(tokenizer, [text for text, _ in texts])
    worse = encode_responses(tokenizer, [text for _, text in texts])
    worse = [row[:-1] if len(row) > 1 and rng.random() < UNFINISHED_SHARE else row for row in worse]
    return [(p + good, p + bad) for p, good, bad in zip(prompts, better, worse, strict=True)]


class PairTrainer(Trainer):
    """Minimises the mean over pairs of -log sigmoid(better - worse) + CENTRING * (better + worse)^2.

    The score that counts is the last token's. The loss is also taken, by DENSE_WEIGHT, between the scores that the head
    gives at every position from the pair's first difference on: so the model is told where a slip stands, and learns
    in a few hundred steps.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """inputs: the better responses, then the worse ones, [2 P, T]."""
        hidden = model.model(**inputs).last_hidden_state
        better, worse = model.score(hidden)[..., 0].float().chunk(2)  # [P, T]
        better_mask, worse_mask = inputs["attention_mask"].bool().chunk(2)
        better_ids, worse_ids = inputs["input_ids"].chunk(2)
        apart = (better_ids != worse_ids).cumsum(1) > 0
        both = apart & better_mask & worse_mask
        dense = -(logsigmoid(better - worse) * both).sum(1) / both.sum(1).clamp(min=1)
        last_better, last_worse = _last(better, better_mask), _last(worse, worse_mask)
        final = -logsigmoid(last_better - last_worse) + CENTRING * (last_better + last_worse) ** 2
        loss = (final + DENSE_WEIGHT * dense).mean()
        return (loss, {"logits": torch.cat([last_better, last_worse])}) if return_outputs else loss


def _last(scores: Tensor, mask: Tensor) -> Tensor:
    """The score of the last real token [P], rows being right-padded."""
    return scores.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]


def new_reward_model(sft: LlamaForCausalLM) -> LlamaForSequenceClassification:
    """The SFT model's body with a head of zeros."""
    config = type(sft.config).from_dict(sft.config.to_dict())
    config.num_labels = 1
    config.architectures = None
    model = LlamaForSequenceClassification(config)
    cast(Any, model.model).load_state_dict(sft.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return model


def train_reward_model(
    tokenizer: Any, sft: LlamaForCausalLM, settings: PlaygroundSettings, folder: Path, report: Report
) -> LlamaForSequenceClassification:
    """A `new_reward_model` trained on fresh pairs; saved to folder with the tokenizer."""
    torch.manual_seed(settings.seed + 1)
    model = new_reward_model(sft)
    pairs = draw_pairs(tokenizer, settings.rm_steps, settings.rm_pairs, settings.seed + 1)
    trainer = PairTrainer(
        model=model,
        args=training_arguments(folder, settings.rm_steps, settings.rm_pairs, settings.rm_lr, settings.seed + 1),
        train_dataset=cast(Any, pairs),
        data_collator=lambda rows: _both(rows, tokenizer.pad_token_id),
        callbacks=[TrainerReport("reward model", report)],
    )
    run_quietly(trainer)
    model.requires_grad_(True)
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def score_rows(model: LlamaForSequenceClassification, rows: list[list[int]], pad_id: int, batch: int = 64) -> Tensor:
    """Scores [B] of whole token rows."""
    scores: list[Tensor] = []
    with torch.no_grad():
        for i in range(0, len(rows), batch):
            inputs = _inputs(rows[i : i + batch], pad_id)
            scores.append(model(**inputs).logits[:, 0].float())
    return torch.cat(scores)


def _inputs(rows: list[list[int]], pad_id: int) -> dict[str, Tensor]:
    input_ids = pad(rows, pad_id)
    return {"input_ids": input_ids, "attention_mask": (input_ids != pad_id).long()}


def _both(pairs: list[Pair], pad_id: int) -> dict[str, Tensor]:
    return _inputs([better for better, _ in pairs] + [worse for _, worse in pairs], pad_id)
