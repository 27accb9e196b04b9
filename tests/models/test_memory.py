"""Peak memory of the passes over long rows, each measured in a process of its own."""

import os
import subprocess
import sys

import pytest

from klimb.models.head import CHUNK_LOGITS

PROGRAM = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from klimb.clock import peak_bytes, reset_peak
from klimb.models.attention import NAME, recompute_activations
from klimb.models.forward import backward_scores, token_logprobs
from klimb.models.load import body_of
what, tokens, vocab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=vocab, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
    max_position_embeddings=tokens, tie_word_embeddings=True,
))
model.set_attn_implementation(NAME)
ids = torch.randint(vocab, (1, tokens))
every, mask = torch.ones_like(ids, dtype=torch.bool), torch.arange(tokens)[None] >= 16
def run(ids, every, mask):
    if what == "score":
        return token_logprobs(model, ids, every, mask, 1.0)
    return backward_scores(model, ids, every, mask, 1.0, lambda logprobs, entropy, at: logprobs.sum())
if what == "recompute":
    recompute_activations(body_of(model))
run(ids[:, :64], every[:, :64], mask[:, :64])  # gradients and libraries are there before the measurement
cpu = torch.device("cpu")
reset_peak(cpu)
before = peak_bytes(cpu)
run(ids, every, mask)
print(peak_bytes(cpu) - before)
"""


def peak(what: str, tokens: int, vocab: int = 512) -> float:
    """MiB that a pass over one row needs beside the weights.

    Every tensor of more than a MiB is a mapping of its own here: what a pass holds is measured, and not where the C
    library happened to find room, which differs from start to start by several chunks.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(tokens), str(vocab)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    return int(done.stdout) / 2**20


@pytest.mark.slow
def test_the_log_prob_pass_at_8192_tokens_does_not_grow_with_the_vocabulary() -> None:
    """All logits of 64,000 words would be 2,000 MiB."""
    chunk = CHUNK_LOGITS * 4 / 2**20
    assert peak("score", 8192, 64_000) - peak("score", 8192, 512) < 2 * chunk


@pytest.mark.slow
def test_twice_the_tokens_take_at_most_twice_the_memory_with_activation_checkpointing() -> None:
    short, long = peak("recompute", 4096), peak("recompute", 8192)
    assert long < 2.1 * short  # the measurement itself is good to a few percent
    assert long < 0.75 * peak("update", 8192)
