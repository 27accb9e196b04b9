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
    """Prompts [prompts, key heads, longest, d] and responses [rows, key heads, length, d] of one layer."""

    prompt_keys: Tensor
    prompt_values: Tensor
    keys: Tensor
    values: Tensor


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
    row in use.
    """

    asked = None  # every row's hidden state is read

    def __init__(self, rows: int, longest: int, length: int, device: torch.device) -> None:
        self._rows, self._longest, self._length, self._device = rows, longest, length, device
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One token per row: query [n, heads, 1, d] -> [n, 1, heads, d].

        All places there are go into the products, and those not written to yet are hidden afterwards: with gaps between
        the rows' keys a product of many rows takes two to three times as long.
        """
        s, kv = self._step, self._layers[layer]
        assert s is not None, "begin_step comes first"
        n, seats = len(query), s.seats
        if s.position is None:
            kv.keys[:n, :, s.width - 1] = key[:, :, 0]
            kv.values[:n, :, s.width - 1] = value[:, :, 0]
        else:
            kv.keys[seats.row, :, s.position] = key[:, :, 0]
            kv.values[seats.row, :, s.position] = value[:, :, 0]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        of_prompt = seats.unseated(_scores(seats.seated(q), kv.prompt_keys[: seats.prompts], scale))
        own = _scores(q, kv.keys[:n], scale)
        if s.unseen is None and s.width < self._length:
            own[..., s.width :] = float("-inf")
        scores = torch.cat([of_prompt, own], dim=-1)
        if s.unseen is not None:
            scores = scores.masked_fill_(s.unseen, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        of_prompt, own = weights.split([self._longest, self._length], dim=-1)
        out = seats.unseated(seats.seated(of_prompt) @ kv.prompt_values[: seats.prompts]).flatten(0, 1)
        out.baddbmm_(own.flatten(0, 1), kv.values[:n].flatten(0, 1))
        return out.view(n, 1, -1, query.shape[-1])

    def put(self, layer: int, first: int, lengths: Sequence[int], key: Tensor, value: Tensor) -> None:
        """Keep keys and values [1, key heads, N, d] of prompts that lie end to end, from place `first` on."""
        if layer == len(self._layers):
            self._layers.append(self._new_layer(key, value))
        kv = self._layers[layer]
        parts = zip(key[0].split(list(lengths), dim=1), value[0].split(list(lengths), dim=1), strict=True)
        for place, (k, v) in enumerate(parts, start=first):
            kv.prompt_keys[place, :, : k.shape[1]] = k
            kv.prompt_values[place, :, : v.shape[1]] = v

    def leave(self, row: int) -> None:
        """The last row takes the place of this one; a prompt nobody writes to any more makes way likewise."""
        prompt, last = self.prompt_of[row], len(self.prompt_of) - 1
        if row != last:
            n = self.written[last]
            for kv in self._layers:
                kv.keys[row, :, :n] = kv.keys[last, :, :n]
                kv.values[row, :, :n] = kv.values[last, :, :n]
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
                kv.prompt_keys[prompt, :, :n] = kv.prompt_keys[last, :, :n]
                kv.prompt_values[prompt, :, :n] = kv.prompt_values[last, :, :n]
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

    def _new_layer(self, key: Tensor, value: Tensor) -> _Layer:
        def places(like: Tensor, count: int) -> Tensor:
            return like.new_zeros(self._rows, like.shape[1], count, like.shape[3])

        return _Layer(
            prompt_keys=places(key, self._longest),
            prompt_values=places(value, self._longest),
            keys=places(key, self._length),
            values=places(value, self._length),
        )

    def _grow(self, length: int) -> None:
        for kv in self._layers:
            kv.keys = pad(kv.keys, (0, 0, 0, length - self._length))
            kv.values = pad(kv.values, (0, 0, 0, length - self._length))
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
