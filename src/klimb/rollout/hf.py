"""Engine `hf`: continuous batching in process, on the actor's own weights. No copy, no sync.

A fixed number of rows decode together. Finished rows leave at once, the last row takes their place, waiting
requests enter when enough rows are free. A prompt asked for several times is read, and kept, once. The log-probability
of each sampled token is recorded as it is drawn; token ids are kept exactly, never made again from text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klimb.cut import cut
from klimb.data.chat import decode_response
from klimb.errors import ModelError
from klimb.models.attention import through
from klimb.models.forward import autocast
from klimb.models.load import body_of, context_limit, head_of
from klimb.models.prepacked import PackedLinear, pays, prepacked
from klimb.rollout.base import Progress, Request, Sampling
from klimb.rollout.blocks import Blocks, fits
from klimb.rollout.cache import GROWTH, RowCache
from klimb.rollout.draw import draw, uniforms
from klimb.types import FinishReason, Sample

PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Prompt tokens read in one forward, unless one prompt alone is longer; on a CPU few enough to stay in its caches."""


@dataclass
class _Row:
    """A response being written. uniforms: one number for each of its tokens."""

    request: Request
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


class HFSampler:
    """Samples from a transformers model that somebody else trains."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._slots, self._dtype = slots, dtype
        self._version = 0

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """The weights are shared, so only the version changes; nothing is cached between calls of `generate`."""
        self._version = version

    def sleep(self) -> None:
        """The weights are in use elsewhere, and caches end with `generate`."""

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, in the order of the requests."""
        if not requests:
            return []
        decoder = _Decoder(self._model, self._tokenizer, sampling, min(self._slots, len(requests)), requests)
        waiting, done = deque(requests), dict[int, Sample]()
        with autocast(self._model.device, self._dtype), _stepping(self._model, self._dtype, decoder):
            while waiting or decoder.rows:
                free = decoder.slots - len(decoder.rows)
                if waiting and (free >= min(len(waiting), max(1, decoder.slots // 4)) or not decoder.rows):
                    finished = decoder.admit([waiting.popleft() for _ in range(min(free, len(waiting)))])
                else:
                    finished = decoder.step()
                for row, reason in finished:
                    done[row.request.index] = self._sample(row, reason, sampling)
                if progress is not None and finished:
                    progress(len(done), len(requests))
        return [done[request.index] for request in requests]

    def close(self) -> None:
        """Nothing is held but the model, which is the caller's."""

    def _sample(self, row: _Row, reason: FinishReason, sampling: Sampling) -> Sample:
        prompt, n = row.request.prompt.token_ids, len(row.tokens)
        return Sample(
            prompt=row.request.prompt,
            index=row.request.index,
            token_ids=(*prompt, *row.tokens),
            mask=(False,) * len(prompt) + (True,) * n,
            logprobs=(0.0,) * len(prompt) + tuple(row.logprobs),
            policy_version=(-1,) * len(prompt) + (self._version,) * n,
            finish_reason=reason,
            text=decode_response(self._tokenizer, row.tokens, sampling.end_ids),
        )


class _Decoder:
    """The rows in flight: row i of the cache belongs to rows[i]."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        slots: int,
        requests: Sequence[Request],
    ) -> None:
        self._body, self._head, self._tokenizer, self._sampling = body_of(model), head_of(model), tokenizer, sampling
        self.slots, self.rows = slots, list[_Row]()
        device = model.device
        longest = max(len(r.prompt.token_ids) for r in requests)
        limit = context_limit(model)
        if limit is not None and longest + sampling.max_tokens > limit:
            # Beyond it a window of attention, which the cache does not have, or no positions at all.
            raise ModelError(
                f"a prompt of {longest} tokens and a response of up to {sampling.max_tokens} need "
                f"{longest + sampling.max_tokens} places, but the model has {limit}; lower max_tokens or leave "
                "long prompts out"
            )
        self.cache = RowCache(slots, longest, min(GROWTH, sampling.max_tokens), device)
        self._last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._device = device
        self.logits_of: Callable[[Tensor, Tensor, RowCache], Tensor] = self.through_modules
        self._tail = max((len(s.encode()) for s in sampling.stop_strings), default=0) + 8

    def admit(self, requests: list[Request]) -> list[tuple[_Row, FinishReason]]:
        """Read the prompts, each distinct one once, and draw every request's first token."""
        by_prompt: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            by_prompt.setdefault(request.prompt.token_ids, []).append(request)
        start, logits = len(self.rows), list[Tensor]()
        left = sorted(by_prompt, key=len, reverse=True)
        for size in cut([len(p) for p in left], PREFILL_TOKENS.get(self._device.type, 8192)):
            prompts, left = left[:size], left[size:]
            logits.append(self._read(prompts, [by_prompt[p] for p in prompts]))
        return self._append(torch.cat(logits), start)

    def step(self) -> list[tuple[_Row, FinishReason]]:
        """One more token for every row."""
        n, positions = len(self.rows), self.cache.positions()
        self.cache.begin_step()
        return self._append(self.logits_of(self._last[:n], positions, self.cache), 0)

    def through_modules(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """The model's own modules, for one token per row: tokens and positions [n] -> logits [n, V]."""
        return self._head(through(self._body, tokens[:, None], positions[:, None], cache)[:, 0])

    def _read(self, prompts: list[tuple[int, ...]], groups: list[list[Request]]) -> Tensor:
        """Keys and values of the prompts into the cache; logits [requests, V] behind each request's prompt."""
        first, lengths = len(self.cache.prompt_lengths), [len(p) for p in prompts]
        tokens = torch.tensor([t for p in prompts for t in p], device=self._device)
        positions = torch.cat([torch.arange(n, device=self._device) for n in lengths])
        hidden = through(self._body, tokens[None], positions[None], self.cache.add_prompts(lengths))[0]
        source = torch.tensor([i for i, group in enumerate(groups) for _ in group], device=self._device)
        self.cache.add_rows([first + i for i, group in enumerate(groups) for _ in group])
        for request in (request for group in groups for request in group):
            self.rows.append(_Row(request, uniforms(request.seed, self._sampling.max_tokens).numpy()))
        return self._head(hidden)[source]

    def _append(self, logits: Tensor, start: int) -> list[tuple[_Row, FinishReason]]:
        """Draw a token for rows from `start` on, then let finished rows leave."""
        rows, s = self.rows[start:], self._sampling
        uniform = torch.tensor([row.uniforms.item(len(row.tokens)) for row in rows], dtype=torch.float64)
        tokens, logprobs = draw(logits, uniform, s.temperature, s.top_p, s.top_k)
        self._last[start : len(self.rows)] = tokens
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        finished: list[tuple[_Row, FinishReason]] = []
        for i in range(len(self.rows) - 1, start - 1, -1):
            reason = self._finish(self.rows[i])
            if reason is not None:
                finished.append((self.rows[i], reason))
                self._leave(i)
        return finished

    def _finish(self, row: _Row) -> FinishReason | None:
        s = self._sampling
        if row.tokens[-1] in s.end_ids:
            return "stop"
        if s.stop_strings:
            text = str(self._tokenizer.decode(row.tokens[-self._tail :], clean_up_tokenization_spaces=False))
            if any(stop in text for stop in s.stop_strings):
                return "stop"
        return "length" if len(row.tokens) >= s.max_tokens else None

    def _leave(self, i: int) -> None:
        """The last row takes the place of row i."""
        self.cache.leave(i)
        last = len(self.rows) - 1
        if i != last:
            self._last[i] = self._last[last]
            self.rows[i] = self.rows[last]
        self.rows.pop()


@contextmanager
def _stepping(model: PreTrainedModel, dtype: torch.dtype, decoder: _Decoder) -> Generator[None]:
    """Let the decoder's steps go the fastest way that this model and device have."""
    body, head, rows = body_of(model), head_of(model), decoder.slots
    if not pays(model, dtype):
        yield
    elif fits(body) and type(head) is nn.Linear:
        blocks, packed_head = Blocks(body, rows), PackedLinear.of([head], rows)
        decoder.cache.key_order = blocks.key_order
        decoder.logits_of = lambda tokens, positions, cache: packed_head(blocks(tokens, positions, cache))
        yield
    else:
        with prepacked(model, rows):
            yield
