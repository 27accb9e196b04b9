"""Seconds and peak memory of whole steps, rollout to update, of one library: 64 episodes of 64 + 128 tokens.

python benchmarks/speed/step.py klimb grpo|ppo [--posture explicit|cached] [--steps 3] [--threads 2]
python benchmarks/speed/step.py trl grpo|ppo          # in trl's own environment: see requirements-trl-*.txt

grpo: 8 prompts x 8 answers, a reference, one optimizer step a phase. ppo: 64 prompts, actor, critic, reference and
reward model, one epoch, one optimizer step. Micro-batches of 16 rows, nothing ends a response early. --minibatches n:
n optimizer steps a phase. The first step warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import machine
import torch
from machine import MODEL, SCORER

EPISODES, GROUP, MICRO = 64, 8, 16
TOKENS = EPISODES * (machine.PROMPT + machine.NEW)


class Watch:
    """Looks ten times a second (at fifty it takes 3% from both threads) at the resident memory (klimb sets the kernel's
    own mark back for every part) and, when told of a file, at its size: a new line ends a step."""

    def __init__(self) -> None:
        self.peak, self.file, self._lines = 0, Path(), 0
        self._marks = [machine.Mark.now()]
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.peak = max(self.peak, pages * 4096)
            if self.file.is_file() and (lines := self.file.read_bytes().count(b"\n")) > self._lines:
                self._lines = lines
                self.mark()
            time.sleep(0.1)

    def mark(self) -> None:
        """A step has ended."""
        self._marks.append(machine.Mark.now())

    def timings(self) -> list[machine.Timed]:
        """Of every step but the first."""
        return [start.until(end) for start, end in zip(self._marks[1:], self._marks[2:], strict=False)]


def reward_of_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(c)) % 7) for c in completions]


def rows_of(args: argparse.Namespace) -> list[str]:
    count = EPISODES // (GROUP if args.kind == "grpo" else 1) * (args.steps + 1)
    return [" ".join(f"w{i}" for i in row) for row in machine.prompts(count)]


def run_klimb(args: argparse.Namespace, watch: Watch, folder: Path) -> dict[str, float]:
    import klimb

    data, reward = folder / "prompts.jsonl", folder / "reward.py"
    data.write_text("".join(json.dumps({"prompt": row, "answer": "0"}) + "\n" for row in rows_of(args)))
    reward.write_text("def length(prompt, response, answer):\n    return float(len(response) % 7)\n")
    is_grpo = args.kind == "grpo"
    config = {
        "actor_rollout_ref": {
            "model_path": str(MODEL), "rollout_batch_size": EPISODES, "rollouts_per_prompt": GROUP if is_grpo else 1,
            "temperature": 1.0, "max_tokens": machine.NEW, "use_dynamic_bsz": False,
        },
        "algorithm": {"use_pf_ppo": args.posture == "explicit", "adv_estimator": "grpo" if is_grpo else "gae"},
        "reward_model": {"functions": [{"name": f"{reward}:length"}]} if is_grpo else {"model_path": str(SCORER)},
        "data": {"train_files": [str(data)], "eval_files": []},
        "training": {
            "micro_batch_size": MICRO, "gradient_accumulation_steps": EPISODES // MICRO // args.minibatches,
            "lr": 1e-6, "total_episodes": EPISODES * (args.steps + 1), "save_freq": 10**9,
        },
        "logging": {"tensorboard": False},
        "run": {"dir": str(folder / "runs"), "name": "bench"},
    }  # fmt: skip
    watch.file = folder / "runs" / "bench" / "metrics.jsonl"
    klimb.train(klimb.RunConfig.model_validate(config))
    rows = [json.loads(line) for line in watch.file.read_text().splitlines()][1:]
    names = ("time/rollout", "time/reward", "time/score", "time/update", "perf/floor_share", "perf/rollout_floor_share")
    names += ("perf/score_floor_share", "perf/update_floor_share", "memory/rollout_peak", "memory/score_peak")
    found = {n: sorted(row[n] for row in rows if n in row) for n in (*names, "memory/update_peak")}  # not all in all
    return {name: values[len(values) // 2] for name, values in found.items() if values}


def marking(watch: Watch) -> Any:
    """A callback of TRL's trainers."""
    from transformers import TrainerCallback

    class Marking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.mark()

    return Marking()


def run_trl_grpo(args: argparse.Namespace, watch: Watch, folder: Path) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=EPISODES // MICRO, num_generations=GROUP, max_completion_length=machine.NEW,
        temperature=1.0, beta=0.02, learning_rate=1e-6, max_steps=args.steps + 1, save_strategy="no", report_to=[],
        logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), reward_funcs=reward_of_length,
        args=settings, train_dataset=Dataset.from_dict({"prompt": rows_of(args)}),
        processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"), callbacks=[marking(watch)],
    )  # fmt: skip
    trainer.train()
    return {}


def run_trl_ppo(args: argparse.Namespace, watch: Watch, folder: Path) -> dict[str, float]:
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def scorer() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(SCORER, num_labels=1, dtype=torch.float32)

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    settings = PPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=EPISODES // MICRO, num_ppo_epochs=1, num_mini_batches=1,
        total_episodes=EPISODES * (args.steps + 1), response_length=machine.NEW, temperature=1.0,
        learning_rate=1e-6, num_sample_generations=0, save_strategy="no", report_to=[], gradient_checkpointing=False,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": [tokenizer(row)["input_ids"] for row in rows_of(args)]})
    trainer = PPOTrainer(
        args=settings, processing_class=tokenizer, model=policy(), ref_model=policy(), reward_model=scorer(),
        value_model=scorer(), train_dataset=data, eval_dataset=data.select(range(EPISODES)), callbacks=[marking(watch)],
    )  # fmt: skip
    trainer.train()
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("klimb", "trl"))
    parser.add_argument("kind", choices=("grpo", "ppo"))
    parser.add_argument("--posture", choices=("explicit", "cached"), default="explicit")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine.build_scorer(machine.build_model(MODEL), SCORER)
    run = run_klimb if args.library == "klimb" else run_trl_grpo if args.kind == "grpo" else run_trl_ppo
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        more = run(args, watch, Path(folder))
    timings, name = watch.timings(), f"step/{args.kind}/{args.library}"
    if args.library == "klimb":
        name += f"-{args.posture}" + (f"-{args.minibatches}" if args.minibatches > 1 else "")
    seconds = sorted(t.seconds for t in timings)[len(timings) // 2]
    machine.report(name, timings, [TOKENS] * len(timings), seconds=seconds, resident_mib=watch.peak / 2**20, **more)


if __name__ == "__main__":
    main()
