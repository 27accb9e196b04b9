"""Engine `vllm`: vLLM in this process, on a copy of the policy's weights that is renewed after every update.

Token ids go in and token ids come out. vLLM draws every token with the request's own seed and gives the log-probability
of the distribution it drew from (`processed_logprobs`: temperature, top_p and top_k are in it). Prompts and answers
share its cache of prefixes, which is emptied whenever weights have landed: what is in it was computed by the old ones.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from klimb.data.chat import decode_response
from klimb.errors import MissingExtra, ModelError
from klimb.malloc import give_back
from klimb.rollout.base import Progress, Request, Sampling
from klimb.types import FinishReason, Sample

BLOCK = 128
"""Tokens in one block of vLLM's cache on a CPU."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # it would report the model and the machine to its makers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are the trainer's too
}
"""What vLLM reads from the environment, unless it is set there."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """folder: the model that training starts from. slots: responses decoded at once; context: most tokens of a prompt
    and its response together; dtype of weights and cache; memory_share: of a GPU's memory, for the engine's weights and
    cache; tensor_parallel: GPUs (on a CPU, processes) that one copy of the weights is spread over; sleeps: give the
    engine's memory to the trainer between rollouts, which vLLM can do on CUDA."""

    folder: Path
    slots: int
    context: int
    dtype: torch.dtype
    memory_share: float
    tensor_parallel: int
    sleeps: bool
    trust_remote_code: bool = False


class VLLMSampler:
    """Samples from a copy of the weights. `load_weights` must be called after each update; nothing else moves them.

    One at a time in a process: close it before the next is made.
    """

    def __init__(self, settings: EngineSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings, self._tokenizer, self._version = settings, tokenizer, 0
        with _untouched():
            vllm = _imported()
            self._params: Any = vllm.SamplingParams
            self._llm: Any = self._started(vllm)
        self._asleep = set[str]()
        self.sleep()

    def _started(self, vllm: Any) -> Any:
        settings = self._settings
        try:
            return vllm.LLM(
                str(settings.folder),
                trust_remote_code=settings.trust_remote_code,
                dtype=str(settings.dtype).removeprefix("torch."),
                max_model_len=settings.context,
                max_num_seqs=settings.slots,
                gpu_memory_utilization=settings.memory_share,
                tensor_parallel_size=settings.tensor_parallel,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # not the folder's: how tokens are drawn is said by each request
                enable_prefix_caching=True,
                enable_sleep_mode=settings.sleeps,
                use_tqdm_on_load=False,
                seed=0,
                **self._by_device(),
            )
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"{settings.folder}: vLLM cannot be started on this model here: {' '.join(str(error).split())[:400]}. "
                "If memory is short, lower actor_rollout_ref.vllm.memory_share or rollout_slots; "
                "actor_rollout_ref.rollout_provider=hf samples without vLLM"
            ) from None

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights into the engine, tied ones given once. They stay the caller's: the engine keeps nothing."""
        self._wake("weights")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._carried(named_tensors)})
        self._llm.apply_model(_pack_head)
        assert self._llm.reset_prefix_cache(), "vLLM kept its prefix cache: answers are still being written"
        self._version = version

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, in the order of the requests."""
        if not requests:
            return []
        self._check_context(requests, sampling)
        self._wake("weights", "kv_cache")
        prompts = [{"prompt_token_ids": list(request.prompt.token_ids)} for request in requests]
        done = self._answers(prompts, [self._asked(request, sampling) for request in requests], progress)
        return [self._sample(request, answer, sampling) for request, answer in zip(requests, done, strict=True)]

    def close(self) -> None:
        """Stop the engine, and with it torch's process group: left to the garbage collector, vLLM would take down the
        group of the engine that came after it."""
        self._llm.llm_engine.engine_core.shutdown()

    def _answers(self, prompts: list[dict[str, list[int]]], asked: list[Any], progress: Progress | None) -> list[Any]:
        """vLLM's answers, in the order of the prompts. It draws from torch's generator, for nothing that counts."""
        self._llm.enqueue(prompts, asked, use_tqdm=False)
        done: dict[int, Any] = {}
        engine = self._llm.llm_engine
        with torch.random.fork_rng(devices=()):
            while engine.has_unfinished_requests():
                finished = {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
                done |= finished
                if progress is not None and finished:
                    progress(len(done), len(prompts))
        return [done[number] for number in sorted(done)]  # vLLM numbers requests as they come

    def _by_device(self) -> dict[str, Any]:
        if not import_module("vllm.platforms").current_platform.is_cpu():
            return {}
        # Compiling takes longer than many a run; a share of the host's memory would be far more than the cache needs.
        return {"enforce_eager": True, "kv_cache_memory_bytes": _cache_bytes(self._settings)}

    def _asked(self, request: Request, sampling: Sampling) -> Any:
        """End ids are klimb's alone (ignore_eos: none of the folder's); a stop string may hold special tokens."""
        return self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sorted(sampling.end_ids),
            ignore_eos=True,
            stop=list(sampling.stop_strings) or None,
            detokenize=bool(sampling.stop_strings),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
        )

    def _sample(self, request: Request, answer: Any, sampling: Sampling) -> Sample:
        prompt, tokens = request.prompt.token_ids, tuple(int(t) for t in answer.token_ids)
        n, reason = len(tokens), answer.finish_reason
        assert reason in ("stop", "length"), f"vLLM ended a response by {reason}"
        assert tuple(answer.logprobs.token_ids[:n]) == tokens, "vLLM gave log-probs of other tokens than it sampled"
        finish: FinishReason = "stop" if reason == "stop" else "length"
        return Sample(
            prompt=request.prompt,
            index=request.index,
            token_ids=(*prompt, *tokens),
            mask=(False,) * len(prompt) + (True,) * n,
            logprobs=(0.0,) * len(prompt) + tuple(answer.logprobs.logprobs[:n]),
            policy_version=(-1,) * len(prompt) + (self._version,) * n,
            finish_reason=finish,
            text=decode_response(self._tokenizer, tokens, sampling.end_ids),
        )

    def _check_context(self, requests: Sequence[Request], sampling: Sampling) -> None:
        longest = max(len(request.prompt.token_ids) for request in requests)
        if longest + sampling.max_tokens > self._settings.context:
            raise ModelError(
                f"a prompt of {longest} tokens and a response of up to {sampling.max_tokens} need "
                f"{longest + sampling.max_tokens} places, but the vllm engine was made for {self._settings.context}; "
                "lower max_tokens or leave long prompts out"
            )

    def _carried(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Any:
        """What goes to the workers. One worker is this process and takes tensors as they are, one by one; several are
        processes of their own, and get them all at once by way of the host's memory."""
        tensors = ((name, tensor.detach()) for name, tensor in named_tensors)
        if self._settings.tensor_parallel == 1:
            return tensors
        return [(name, tensor.to("cpu", self._settings.dtype)) for name, tensor in tensors]

    def _wake(self, *parts: str) -> None:
        """Take memory again for these parts of the engine, from the device: what the trainer's allocator keeps unused
        would be missing there."""
        if asleep := [part for part in parts if part in self._asleep]:
            give_back()
            self._llm.wake_up(tags=asleep)
            self._asleep.difference_update(asleep)

    def sleep(self) -> None:
        """Leave the memory to the trainer. Level 1: weights wait on the host, so that the next rollout finds them."""
        if self._settings.sleeps:
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}


def _imported() -> Any:
    """The package, with the environment that it reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Weights are handed over as they lie in memory, so the engine must not be another process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        return import_module("vllm")
    except ImportError as error:
        if error.name != "vllm":
            raise
        raise MissingExtra("vllm", "vllm", "actor_rollout_ref.rollout_provider=vllm") from None


@contextmanager
def _untouched() -> Generator[None]:
    """Undo what starting vLLM does to the process around it: libraries to preload in every process that is started from
    now on, no way to set the number of threads, seeds. Its own imports warn of what torch will take away one day."""
    preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


def _pack_head(model: nn.Module) -> None:
    """On a CPU vLLM multiplies by a packed copy of the output embedding. Reloading packs those layers again that were
    given weights under their own name, so not a head that is tied to the input embedding: it would stay the old one."""
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, embedding.ParallelLMHead) and hasattr(layer, "cpu_linear"):
            head: Any = layer
            head.quant_method.process_weights_after_loading(head)


def _cache_bytes(settings: EngineSettings) -> int:
    """Keys and values of as many responses as decode at once, of full length; a set VLLM_CPU_KVCACHE_SPACE wins."""
    loaded: Any = AutoConfig.from_pretrained(
        settings.folder, trust_remote_code=settings.trust_remote_code, local_files_only=True
    )
    config = loaded.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * settings.dtype.itemsize
    blocks = settings.slots * -(-settings.context // BLOCK) + 1
    return blocks * BLOCK * per_token
