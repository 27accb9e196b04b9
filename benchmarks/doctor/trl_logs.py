"""Logs of TRL's own trainers on the playground, sound and spoiled, for `klimb diagnose`.

python benchmarks/doctor/trl_logs.py grpo sound      # in trl's environment: benchmarks/speed/requirements-trl-grpo.txt
python benchmarks/doctor/trl_logs.py ppo spoiled     # ... requirements-trl-ppo.txt
klimb diagnose runs/trl/grpo-spoiled

sound: a rate that learns. spoiled: 40 times it. Needs a built playground (klimb prepare playground), and nothing of
klimb but its task, which is plain Python.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

PLAYGROUND = Path.home() / ".cache" / "klimb" / "playground"
RATE, TOO_HIGH, STEPS, EPISODES, GROUP = 1e-4, 40, 40, 32, 8


def task_rows(count: int) -> list[Any]:
    from klimb.tasks.arithmetic import Arithmetic

    return Arithmetic().rows("train", count)


def grpo(rate: float, folder: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from klimb.tasks.arithmetic import Arithmetic

    task, rows = Arithmetic(), task_rows(STEPS * EPISODES // GROUP)

    def right(completions: list[Any], answer: list[str], a: list[int], b: list[int], **_: Any) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        cells = zip(texts, answer, a, b, strict=True)
        return [task.score(text, ans, {"a": x, "b": y}).value for text, ans, x, y in cells]

    settings = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=EPISODES // 2,
        gradient_accumulation_steps=1, steps_per_generation=2, num_generations=GROUP, max_completion_length=64,
        temperature=1.0, beta=0.05, learning_rate=rate, max_steps=2 * STEPS, save_strategy="no", report_to=[],
        logging_steps=2, gradient_checkpointing=False,
    )  # fmt: skip
    data = [{"prompt": [{"role": "user", "content": r.prompt}], "answer": r.answer, **r.extra} for r in rows]
    model = AutoModelForCausalLM.from_pretrained(PLAYGROUND / "sft", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PLAYGROUND / "sft", padding_side="left")
    shown = Dataset.from_list(data)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=settings,
        train_dataset=shown,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def ppo(rate: float, folder: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(PLAYGROUND / "sft", dtype=torch.float32)

    def scorer() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            PLAYGROUND / "reward_model", num_labels=1, dtype=torch.float32
        )

    tokenizer = AutoTokenizer.from_pretrained(PLAYGROUND / "sft", padding_side="left")
    settings = PPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=EPISODES,
        gradient_accumulation_steps=1, num_ppo_epochs=2, num_mini_batches=2, total_episodes=EPISODES * STEPS,
        response_length=56, temperature=1.0, learning_rate=rate, num_sample_generations=0, save_strategy="no",
        report_to=[], gradient_checkpointing=False, stop_token="eos", missing_eos_penalty=1.0,
    )  # fmt: skip
    chats = [[{"role": "user", "content": row.prompt}] for row in task_rows(EPISODES * STEPS)]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    data = Dataset.from_dict({"input_ids": ids})
    trainer = PPOTrainer(
        args=settings, processing_class=tokenizer, model=policy(), ref_model=policy(), reward_model=scorer(),
        value_model=scorer(), train_dataset=data, eval_dataset=data.select(range(EPISODES)),
    )  # fmt: skip
    trainer.train()
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=("grpo", "ppo"))
    parser.add_argument("how", choices=("sound", "spoiled"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path("runs/trl") / f"{args.trainer}-{args.how}"
    folder.mkdir(parents=True, exist_ok=True)
    (grpo if args.trainer == "grpo" else ppo)(RATE * (TOO_HIGH if args.how == "spoiled" else 1), folder)
    print(f"wrote {folder / 'trainer_state.json'}")


if __name__ == "__main__":
    main()
