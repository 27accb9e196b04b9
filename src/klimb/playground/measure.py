"""What the finished playground can do on held-out prompts, measured by sampling from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from klimb.playground.progress import Report
from klimb.playground.reward_model import draw_pairs, score_rows
from klimb.playground.settings import TAUGHT, PlaygroundSettings
from klimb.playground.tokenizer import encode_prompts
from klimb.tasks.base import TaughtTask, Verdict

MAX_NEW_TOKENS = 110


@dataclass(frozen=True, kw_only=True)
class TaskMeasured:
    """Shares in [0, 1] over the held-out prompts of one task.

    sampled_*: at temperature 1; greedy_correct: the likeliest token each time. reward_model_auc: how often the reward
    model puts a right sample above a wrong one, None when all samples are of one kind.
    """

    sampled_correct: float
    sampled_value: float
    greedy_correct: float
    mean_response_tokens: float
    reward_model_auc: float | None


def measure(
    tokenizer: Any,
    sft: LlamaForCausalLM,
    reward_model: LlamaForSequenceClassification,
    settings: PlaygroundSettings,
    report: Report,
) -> dict[str, Any]:
    """A TaskMeasured for each task, and the reward model's accuracy on fresh pairs of prompts not used for SFT."""
    measured: dict[str, Any] = {}
    for i, task in enumerate(TAUGHT):
        report("measuring", i, len(TAUGHT) + 1, task.name)
        measured[task.name] = asdict(_measure_task(task, tokenizer, sft, reward_model, settings))
    report("measuring", len(TAUGHT), len(TAUGHT) + 1, "pairs")
    pairs = draw_pairs(tokenizer, 2 * len(TAUGHT), settings.eval_prompts // 2, settings.seed + 2, split="eval")
    better, worse = (score_rows(reward_model, list(side), tokenizer.pad_token_id) for side in zip(*pairs, strict=True))
    measured["reward_model_pair_accuracy"] = (better > worse).double().mean().item()
    report("measuring", len(TAUGHT) + 1, len(TAUGHT) + 1)
    return measured


def _measure_task(
    task: TaughtTask,
    tokenizer: Any,
    sft: LlamaForCausalLM,
    reward_model: LlamaForSequenceClassification,
    settings: PlaygroundSettings,
) -> TaskMeasured:
    rows = task.rows("eval", settings.eval_prompts)
    prompts = encode_prompts(tokenizer, [row.prompt for row in rows])
    torch.manual_seed(settings.seed)
    sampled = generate(sft, tokenizer, prompts, do_sample=True)
    greedy = generate(sft, tokenizer, prompts, do_sample=False)
    verdicts: list[list[Verdict]] = []
    for responses in (sampled, greedy):
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        verdicts.append([task.score(text, row.answer, row.extra) for text, row in zip(texts, rows, strict=True)])
    whole = [prompt + response for prompt, response in zip(prompts, sampled, strict=True)]
    scores = score_rows(reward_model, whole, tokenizer.pad_token_id)
    right = torch.tensor([verdict.correct for verdict in verdicts[0]])
    return TaskMeasured(
        sampled_correct=right.double().mean().item(),
        sampled_value=sum(verdict.value for verdict in verdicts[0]) / len(rows),
        greedy_correct=sum(verdict.correct for verdict in verdicts[1]) / len(rows),
        mean_response_tokens=sum(map(len, sampled)) / len(rows),
        reward_model_auc=_auc(scores[right], scores[~right]),
    )


def generate(model: Any, tokenizer: Any, prompts: list[list[int]], *, do_sample: bool) -> list[list[int]]:
    """One response a prompt, end token included, at temperature 1 from the whole distribution, or greedily."""
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in prompts])
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    with torch.no_grad():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=(input_ids != pad_id).long(),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=do_sample,
            **sampling,
        )
    rows: list[list[int]] = output[:, width:].tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def _auc(right: torch.Tensor, wrong: torch.Tensor) -> float | None:
    """Area under the ROC curve: the share of (right, wrong) pairs in order, a tie counting half."""
    if not len(right) or not len(wrong):
        return None
    difference = right[:, None] - wrong[None, :]
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()
