"""Keys and values of the rows in flight: a prompt's once, however many responses are written to it.

The rows in use are always the first n, and a row leaves by letting the last one take its place; prompts likewise. The
decode reads a prompt's keys and values once for all its rows (as in Juravsky et al. 2024, arXiv 2402.05099, section 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from klimb.models.attention import Packed

GROWTH = 32
"""Places by which responses grow together."""


@dataclass
class _Layer:
    """Keys and values of one layer: of the prompts [2, prompts, key heads, longest, d], and of the responses, the rows'
    own [2, rows, key heads, length, d]."""

    of_prompts: Tensor
    own: Tensor


@dataclass(frozen=True, kw_only=True)
class _Seats:
    """Where the rows sit. row, prompt and seat (among its prompt's rows), all int64 [n]; dense: they lie prompt after
    prompt, as many of each; seats: of the prompt with most rows."""

    row: Tensor
    prompt: Tensor
    seat: Tensor
    dense: bool
    prompts: int
    seats: int

    @property
    def alone(self) -> bool:
        """Row i is the only one of prompt i."""
        return self.dense and self.seats == 1

    def seated(self, x: Tensor) -> Tensor:
        """[n, key heads, per, c] -> [prompts, key heads, seats x per, c]: the rows of a prompt side by side."""
        if self.alone:
            return x
        if self.dense:
            return x.unflatten(0, (self.prompts, self.seats)).transpose(1, 2).flatten(2, 3)
        table = x.new_zeros(self.prompts, self.seats, *x.shape[1:])
        table[self.prompt, self.seat] = x
        return table.transpose(1, 2).flatten(2, 3)

    def unseated(self, x: Tensor) -> Tensor:
        if self.alone:
            return x
        table = x.unflatten(2, (self.seats, -1)).transpose(1, 2)
        return table.flatten(0, 1) if self.dense else table[self.prompt, self.seat]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One token more for each row. position (in its response): int64 [n], None when the rows are all at the last place;
    width: places of responses that are written to. unseen bool [n, 1, 1, longest + length] over all places there are,
    None when rows see all but those from width on."""

    seats: _Seats
    position: Tensor | None
    width: int
    unseen: Tensor | None


class RowCache:
    """rows: most rows at once; longest: of the prompts; length: places for responses at the start, grown when needed.

    The attention of a decode step. prompt_lengths: of each prompt held; prompt_of, written: prompt and tokens of each
    row in use. key_order: the entries of a head in the steps' queries and keys, where they have another order than the
    model's own; keys of prompts are put into it.
    """

    asked = None  # every row's hidden state is read

    def __init__(self, rows: int, longest: int, length: int, device: torch.device) -> None:
        self._rows, self._longest, self._length, self._device = rows, longest, length, device
        self.key_order: Tensor | None = None
        self._layers: list[_Layer] = []
        self._seats: _Seats | None = None  # until rows come or go
        self._step: _Step | None = None
        self.prompt_lengths, self.prompt_of, self.written = list[int](), list[int](), list[int]()

    def add_prompts(self, lengths: Sequence[int]) -> Reading:
        """The attention that reads these prompts, in this order, into the next free places."""
        first = len(self.prompt_lengths)
        self.prompt_lengths.extend(lengths)
        return Reading(self, first, tuple(lengths))

    def add_rows(self, prompts: Sequence[int]) -> None:
        self.prompt_of.extend(prompts)
        self.written.extend([0] * len(prompts))
        self._seats = None

    def positions(self) -> Tensor:
        """Where each row's next token stands in its sequence, int64 [n]."""
        behind = [self.prompt_lengths[p] + w for p, w in zip(self.prompt_of, self.written, strict=True)]
        return self.ints(behind)

    def begin_step(self) -> None:
        """Make place for one token more in every row."""
        width = max(self.written) + 1
        if width > self._length:
            self._grow(self._length + GROWTH)
        if self._seats is None:
            self._seats = self._take_seats()
        position = None if min(self.written) + 1 == width else self.ints(self.written)
        unseen = None
        if position is not None or min(self.prompt_lengths) < self._longest:
            places = torch.arange(max(self._longest, self._length), device=self._device)
            lengths, written = self.ints(self.prompt_lengths)[self._seats.prompt], self.ints(self.written)
            parts = [places[: self._longest] >= lengths[:, None], places[: self._length] > written[:, None]]
            unseen = torch.cat(parts, dim=1)[:, None, None]
        self._step = _Step(seats=self._seats, position=position, width=width, unseen=unseen)
        self.written = [w + 1 for w in self.written]

    def attend_step(self, layer: int, query: Tensor, key_value: Tensor, scaling: float | None) -> Tensor:
        """One token per row: query [n, heads, d] and key_value [n, 2, key heads, d] -> [n, heads, d].

        All places there are go into the products, and those not written to yet are hidden afterwards: with gaps between
        the rows' keys a product of many rows takes two to three times as long.
        """
        s, kv = self._step, self._layers[layer]
        assert s is not None, "begin_step comes first"
        n, seats = len(query), s.seats
        if s.position is None:
            kv.own[:, :n, :, s.width - 1] = key_value.transpose(0, 1)
        else:
            kv.own[:, seats.row, :, s.position] = key_value
        (keys, values), (prompt_keys, prompt_values) = kv.own[:, :n], kv.of_prompts[:, : seats.prompts]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q = query.unflatten(1, (keys.shape[1], -1))
        of_prompt = seats.unseated(_scores(seats.seated(q), prompt_keys, scale))
        own = _scores(q, keys, scale)
        if s.unseen is None and s.width < self._length:
            own[..., s.width :] = float("-inf")
        scores = torch.cat([of_prompt, own], dim=-1)
        if s.unseen is not None:
            scores = scores.masked_fill_(s.unseen, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        of_prompt, own = weights.split([self._longest, self._length], dim=-1)
        out = seats.unseated(seats.seated(of_prompt) @ prompt_values).flatten(0, 1)
        out.baddbmm_(own.flatten(0, 1), values.flatten(0, 1))
        return out.view(query.shape)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """The same as a model's own modules ask for it: query [n, heads, 1, d] -> [n, 1, heads, d]."""
        key_value = torch.stack([key[:, :, 0].to(value.dtype), value[:, :, 0]], dim=1)
        return self.attend_step(layer, query[:, :, 0], key_value, scaling)[:, None]

    def put(self, layer: int, first: int, lengths: Sequence[int], key: Tensor, value: Tensor) -> None:
        """Keep keys and values [1, key heads, N, d] of prompts that lie end to end, from place `first` on."""
        if layer == len(self._layers):
            self._layers.append(_Layer(self._places(value, self._longest), self._places(value, self._length)))
        if self.key_order is not None:
            key = key[..., self.key_order]
        both = torch.stack([key[0].to(value.dtype), value[0]])
        for place, part in enumerate(both.split(list(lengths), dim=2), start=first):
            self._layers[layer].of_prompts[:, place, :, : part.shape[2]] = part

    def leave(self, row: int) -> None:
        """The last row takes the place of this one; a prompt nobody writes to any more makes way likewise."""
        prompt, last = self.prompt_of[row], len(self.prompt_of) - 1
        if row != last:
            n = self.written[last]
            for kv in self._layers:
                kv.own[:, row, :, :n] = kv.own[:, last, :, :n]
            self.prompt_of[row], self.written[row] = self.prompt_of[last], self.written[last]
        self.prompt_of.pop()
        self.written.pop()
        self._seats = None
        if prompt not in self.prompt_of:
            self._drop_prompt(prompt)

    def _drop_prompt(self, prompt: int) -> None:
        last = len(self.prompt_lengths) - 1
        if prompt != last:
            n = self.prompt_lengths[last]
            for kv in self._layers:
                kv.of_prompts[:, prompt, :, :n] = kv.of_prompts[:, last, :, :n]
            self.prompt_lengths[prompt] = self.prompt_lengths[last]
            self.prompt_of = [prompt if p == last else p for p in self.prompt_of]
        self.prompt_lengths.pop()

    def _take_seats(self) -> _Seats:
        taken, seat = Counter[int](), list[int]()
        for p in self.prompt_of:
            seat.append(taken[p])
            taken[p] += 1
        seats = max(taken.values())
        return _Seats(
            row=torch.arange(len(seat), device=self._device),
            prompt=self.ints(self.prompt_of),
            seat=self.ints(seat),
            dense=self.prompt_of == [i // seats for i in range(len(self.prompt_lengths) * seats)],
            prompts=len(self.prompt_lengths),
            seats=seats,
        )

    def _places(self, like: Tensor, count: int) -> Tensor:
        return like.new_zeros(2, self._rows, like.shape[1], count, like.shape[3])

    def _grow(self, length: int) -> None:
        for kv in self._layers:
            kv.own = pad(kv.own, (0, 0, 0, length - self._length))
        self._length = length

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class Reading:
    """The attention of prompts that lie end to end and go into a cache. asked: the last token of each."""

    def __init__(self, cache: RowCache, first: int, lengths: tuple[int, ...]) -> None:
        self._cache, self._first, self._lengths = cache, first, lengths
        self._packed = Packed.of(lengths)
        self.asked = cache.ints(lengths).cumsum(0) - 1  # what comes behind a prompt is drawn from its last token's

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        self._cache.put(layer, self._first, self._lengths, key, value)
        return self._packed.attend(layer, query, key, value, scaling)


def _scores(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """query [b, key heads, r, d] and keys [b, key heads, c, d] -> scale query keys^T, [b, key heads, r, c]."""
    q, k = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    return torch.baddbmm(q.new_empty(1, 1, 1), q, k, beta=0, alpha=scale).unflatten(0, query.shape[:2])
