"""Tiny random models, a byte tokenizer, and phases sampled from them: real parts, small enough for every test."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from klimb.batch import Minibatch, Split, collate, split_phase
from klimb.config.facts import ESTIMATORS
from klimb.learn import Roles, estimate_advantages, score_tokens
from klimb.models.attention import NAME
from klimb.models.family import take_over
from klimb.models.load import body_of, critic_from, frozen_copy
from klimb.recipe import Recipe
from klimb.rollout.base import Request, Sampling
from klimb.rollout.hf import HFSampler
from klimb.types import Batch, Prompt, Sample, Scored, TrainBatch
from klimb.update import Schedule, Trainable, make_trainable

CPU = torch.device("cpu")
SPECIALS = ["<pad>", "<s>", "</s>", "<end>"]
PAD, BOS, EOS, END = range(4)
VOCAB = 256 + len(SPECIALS)

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
_IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **kw: LlamaForCausalLM(
        LlamaConfig(**{**_SIZES, **_IDS, "intermediate_size": 64, "num_key_value_heads": 2, **kw})
    ),
    "qwen2": lambda **kw: Qwen2ForCausalLM(
        Qwen2Config(**{**_SIZES, **_IDS, "intermediate_size": 64, "num_key_value_heads": 2, **kw})
    ),
    "gpt2": lambda **kw: GPT2LMHeadModel(
        GPT2Config(**{**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **kw})
    ),
    "gptneox": lambda **kw: GPTNeoXForCausalLM(GPTNeoXConfig(**{**_SIZES, **_IDS, "intermediate_size": 64, **kw})),
}


def tiny_model(name: str = "llama", seed: int = 0, scale: float = 12.0, **changes: Any) -> PreTrainedModel:
    """Random weights, matrices scaled up so that the distributions have peaks; eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peaked(ARCHITECTURES[name](**changes), scale)


def peaked(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(scale)
    model.set_attn_implementation(NAME)
    take_over(body_of(model))  # as models are loaded
    return model.eval()


def to_own_modules(model: PreTrainedModel) -> PreTrainedModel:
    """As transformers built it, where klimb's blocks had taken over."""
    for layer in model.model.layers:
        del layer.__dict__["forward"]
    del body_of(model).__dict__["klimb_answers_where_asked"]
    return model


def byte_tokenizer(with_pad: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte: any text can be spelled, and most random id sequences are not valid UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>" if with_pad else None,
        additional_special_tokens=["<end>"],
    )


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(len(SPECIALS), VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [
        Prompt(row=i, text=f"prompt {i}", token_ids=tuple(ids), answer=None, source="tiny")
        for i, ids in enumerate(rows)
    ]


def make_requests(prompts: Sequence[Prompt], per_prompt: int = 1, seed: int = 0) -> list[Request]:
    return [
        Request(prompt=p, index=i * per_prompt + k, seed=1000 * seed + i * per_prompt + k)
        for i, p in enumerate(prompts)
        for k in range(per_prompt)
    ]


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_tokens": 12, "end_ids": frozenset({EOS}), **changes})


def sample(model: PreTrainedModel, requests: Sequence[Request], slots: int = 8, **changes: Any) -> list[Sample]:
    return HFSampler(model, byte_tokenizer(), slots).generate(requests, sampling(**changes))


def scored(samples: Sequence[Sample], rewards: Sequence[float | None]) -> list[Scored]:
    """None: the episode failed."""
    return [
        Scored(
            sample=s,
            rewards=() if value is None else ((len(s.token_ids) - 1, value),),
            parts={},
            correct=None,
            failure=None if value is not None else "error: made up",
        )
        for s, value in zip(samples, rewards, strict=True)
    ]


def make_recipe(**changes: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "explicit": True,
        "temperature": 1.0,
        "dtype": torch.float32,
        "adv_estimator": "grpo",
        "norm_by_std": True,
        "gamma": 1.0,
        "lam": 0.95,
        "policy_loss": "clip",
        "loss_args": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": 3.0},
        "loss_agg": "token-mean",
        "max_tokens": 12,
        "entropy_coef": 0.0,
        "value_clip": None,
        "kl_in_reward": False,
        "kl_in_loss": False,
        "kl_reward_estimator": "k1",
        "kl_loss_estimator": "k3+",
        "max_grad_norm": 1e9,
    }
    facts = ESTIMATORS[changes.get("adv_estimator", defaults["adv_estimator"])]
    return Recipe(**{**defaults, "whiten": facts.whitened, **changes})


def make_phase(model: PreTrainedModel, rewards: Sequence[float | None], per_prompt: int = 4, **changes: Any) -> Batch:
    """A phase of len(rewards) episodes that the model sampled itself, with responses of different lengths."""
    prompts = make_prompts([3, 7, 2, 5, 9, 4][: -(-len(rewards) // per_prompt)])
    requests = make_requests(prompts, per_prompt)[: len(rewards)]
    ends = frozenset({EOS, *range(40, 70)})  # many, so that lengths differ
    samples = sample(model, requests, **{"end_ids": ends, **changes})
    return collate(scored(samples, rewards), PAD)


def make_roles(model: PreTrainedModel, reference: PreTrainedModel | bool = False, critic: bool = False) -> Roles:
    ref = frozen_copy(model) if reference is True else reference or None
    return Roles(actor=model, reference=ref, critic=critic_from(model) if critic else None)


def split_of(batch: Batch, step: int, micro: int, budget: int | None = None, epochs: int = 1) -> list[list[Minibatch]]:
    split = Split(rows_per_step=step, rows_per_micro=None if budget else micro, budget=budget, epochs=epochs)
    return split_phase(batch.attention.sum(dim=1), batch.group, split, seed=3)


def train_batch(
    batch: Batch, epochs: Sequence[Sequence[Minibatch]], roles: Roles, recipe: Recipe, kl_coef: float = 0.0
) -> TrainBatch:
    ready, _ = score_tokens(batch, epochs[0], roles, recipe)
    return estimate_advantages(ready, recipe, kl_coef)[0]


def apart_roles() -> Roles:
    """Actor, a reference that differs from it, and a critic of its own whose head is not zero."""
    critic = critic_from(tiny_model(seed=2))
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 0.3)
    return Roles(actor=tiny_model(), reference=frozen_copy(tiny_model(seed=1)), critic=critic)


def adamw(module: torch.nn.Module, lr: float, kind: str = "constant", steps: int = 1, warmup: int = 0) -> Trainable:
    return make_trainable(module, Schedule(peak=lr, kind=kind, num_steps=steps, warmup=warmup), weight_decay=0.0)


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])
