"""New tokens per second of one engine: 64 prompts of 64 tokens, up to 128 new ones.

python benchmarks/speed/rollout.py klimb|generate|vllm fixed|varied|groups [--repeats 3] [--threads 2]

fixed: nothing ends a response early. varied: geometric lengths, mean 33. groups: 8 prompts, 8 responses each, fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import machine
import torch


def klimb_engine(ends: list[int], per_prompt: int) -> Callable[[int], int]:
    from klimb.malloc import keep_freed_memory
    from klimb.models.load import load_causal_lm, load_tokenizer
    from klimb.rollout.base import Request, Sampling
    from klimb.rollout.hf import HFSampler
    from klimb.types import Prompt

    keep_freed_memory()  # as a run does on a CPU (training.keep_freed_memory)
    model = load_causal_lm(machine.MODEL, False, torch.device("cpu"))
    sampler = HFSampler(model, load_tokenizer(machine.MODEL, False), slots=64)
    sampling = Sampling(temperature=1.0, max_tokens=machine.NEW, end_ids=frozenset(ends))

    def run(seed: int) -> int:
        rows = machine.prompts(64 // per_prompt, seed=seed)
        made = [Prompt(row=i, text="", token_ids=tuple(r), answer=None, source="bench") for i, r in enumerate(rows)]
        requests = [
            Request(prompt=p, index=i * per_prompt + k, seed=1000 * seed + i * per_prompt + k)
            for i, p in enumerate(made)
            for k in range(per_prompt)
        ]
        return sum(s.num_response_tokens for s in sampler.generate(requests, sampling))

    return run


def generate_engine(ends: list[int], per_prompt: int) -> Callable[[int], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(machine.MODEL, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(seed: int) -> int:
        ids = torch.tensor(machine.prompts(64 // per_prompt, seed=seed)).repeat_interleave(per_prompt, dim=0)
        torch.manual_seed(seed)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=machine.NEW,
            eos_token_id=ends or [machine.VOCAB + 1],
            pad_token_id=0,
        )
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(ends or [-1])).long()
        return int((ended.cumsum(1) - ended == 0).sum())  # up to and with the first end id

    return run


def vllm_engine(ends: list[int], per_prompt: int) -> Callable[[int], int]:
    """The whole batch in one call, seeds per request, log-probs of the sampled tokens, as a trainer needs them."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(machine.MODEL), dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True, seed=0)

    def run(seed: int) -> int:
        requests = [{"prompt_token_ids": row} for row in machine.prompts(64 // per_prompt, seed=seed)]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=machine.NEW, n=per_prompt, seed=seed, logprobs=0, detokenize=False,
            stop_token_ids=ends or None, ignore_eos=True,
        )  # fmt: skip
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("klimb", "generate", "vllm"))
    parser.add_argument("kind", choices=("fixed", "varied", "groups"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine.build_model(machine.MODEL)
    ends = machine.end_ids(33 if args.kind == "varied" else None)
    make = {"klimb": klimb_engine, "generate": generate_engine, "vllm": vllm_engine}[args.engine]
    run = make(ends, 8 if args.kind == "groups" else 1)
    run(99)  # warm-up
    timings, tokens = list[machine.Timed](), list[int]()
    for seed in range(args.repeats):
        timings.append(machine.timed(lambda seed=seed: tokens.append(run(seed))))
    machine.report(f"rollout/{args.kind}/{args.engine}", timings, tokens)


if __name__ == "__main__":
    main()
