"""Tokens per second of the policy's update: 32 rows, 64 prompt tokens, GRPO with clip and KL, one optimizer step.

python benchmarks/speed/update.py klimb|plain fixed|varied [--repeats 3] [--threads 2] [--model FOLDER]

klimb: `klimb.update.update` as a run calls it. plain: forward with full logits, log-softmax, the same loss, AdamW.
fixed: 128 response tokens; varied: 8 to 128. Also the share of the floor: the linear layers' products at the rate of a
product measured in this run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from torch import Tensor

ROWS, MICRO = 32, 16


def rows(varied: bool) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, attention, mask [32, 192], right-padded."""
    generator = torch.Generator().manual_seed(0)
    width = machine.PROMPT + machine.NEW
    lengths = torch.randint(8, 129, (ROWS,), generator=generator) if varied else torch.full((ROWS,), machine.NEW)
    place = torch.arange(width)
    attention = place < machine.PROMPT + lengths[:, None]
    tokens = torch.randint(3, machine.VOCAB, (ROWS, width), generator=generator).masked_fill(~attention, 0)
    return tokens, attention, attention & (place >= machine.PROMPT)


def klimb_update(folder: Path, varied: bool) -> Callable[[], None]:
    from klimb.batch import Split, forward_lengths, split_phase
    from klimb.malloc import keep_freed_memory
    from klimb.models.load import load_causal_lm
    from klimb.recipe import Recipe
    from klimb.types import TrainBatch
    from klimb.update import Schedule, make_trainable, update

    keep_freed_memory()  # as a run does on a CPU (training.keep_freed_memory)
    model = load_causal_lm(folder, False, torch.device("cpu"))
    actor = make_trainable(model, Schedule(peak=1e-6, kind="constant", num_steps=1, warmup=0), 0.01)
    tokens, attention, mask = rows(varied)
    ids, noise = torch.arange(ROWS), torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    batch = TrainBatch(
        tokens=tokens, attention=attention, mask=mask, sampler_logprobs=noise - 10, rewards=torch.zeros(ROWS),
        cut_off=torch.zeros(ROWS, dtype=torch.bool), group=ids, row_id=ids, source_row=ids,
        policy_version=torch.zeros_like(tokens), correct=torch.full((ROWS,), -1), old_logprobs=(noise - 10) * mask,
        ref_logprobs=(noise - 10) * mask, values=None, advantages=noise, returns=None,
    )  # fmt: skip
    recipe = Recipe(
        explicit=True, temperature=1.0, dtype=torch.float32, adv_estimator="grpo", whiten=False, norm_by_std=True,
        gamma=1.0, lam=1.0, policy_loss="clip",
        loss_args={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": 3.0}, loss_agg="token-mean",
        max_tokens=machine.NEW, entropy_coef=0.0, value_clip=None, kl_in_reward=False, kl_in_loss=True,
        kl_reward_estimator="k1", kl_loss_estimator="k3+", max_grad_norm=1.0,
    )  # fmt: skip
    split = Split(rows_per_step=ROWS, rows_per_micro=None, budget=MICRO * 192, epochs=1)
    return lambda: [
        None,
        update(actor, None, batch, split_phase(forward_lengths(batch), batch.group, split, 0), recipe, 0.1),
    ][0]


def plain_update(folder: Path, varied: bool) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens, attention, mask = rows(varied)
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    total = float(mask.sum())

    def run() -> None:
        for at in range(0, ROWS, MICRO):
            part = slice(at, at + MICRO)
            logits = model(input_ids=tokens[part], attention_mask=attention[part].long()).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, tokens[part][:, 1:, None]).squeeze(-1)
            inside, old = mask[part][:, 1:], noise[part][:, 1:] - 10
            ratio = (chosen - old).clamp(-20, 20).exp()
            loss = torch.maximum(-ratio * noise[part][:, 1:], -ratio.clamp(0.8, 1.2) * noise[part][:, 1:])
            loss = loss + 0.1 * (chosen - old).square() / 2
            (torch.where(inside, loss, 0.0).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def floor_seconds(folder: Path, varied: bool) -> float:
    from klimb.floor import cost_of, measured_pace
    from klimb.models.load import load_causal_lm

    _, attention, mask = rows(varied)
    cost = cost_of(load_causal_lm(folder, False, torch.device("cpu")))
    pace = measured_pace(torch.device("cpu"), torch.float32)
    return 3 * cost.forward(int(attention.sum()), int(mask.sum())) / pace.products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("klimb", "plain"))
    parser.add_argument("kind", choices=("fixed", "varied"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=machine.MODEL)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model == machine.MODEL:
        machine.build_model(machine.MODEL)
    varied = args.kind == "varied"
    before = floor_seconds(args.model, varied)
    run = (klimb_update if args.engine == "klimb" else plain_update)(args.model, varied)
    run()
    timings = [machine.timed(run) for _ in range(args.repeats)]
    least = min(before, floor_seconds(args.model, varied))  # a product that a neighbour slowed down is no floor
    count = int(rows(varied)[1].sum())
    best = sorted(t.seconds for t in timings)[len(timings) // 2]
    machine.report(f"update/{args.kind}/{args.engine}", timings, [count] * len(timings), floor_share=least / best)


if __name__ == "__main__":
    main()
