"""A preallocated key/value cache whose rows stand at different positions.

transformers' static cache has one position for all rows, and its dynamic cache is concatenated anew for every
token (docs/adr/002). Here row i's next token goes to its own position, the rows in use are always the first n,
and a row leaves by letting the last one take its place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """Keys and values [rows, heads, length, dim] of one layer."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self._cache.rows, self._cache.length
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append one token to each of the first n rows at its own position; return what those rows may see."""
        assert self.keys is not None and self.values is not None and key_states.shape[2] == 1
        n, cache = key_states.shape[0], self._cache
        where = (cache.row_index[:n], slice(None), cache.position[:n])
        self.keys[where] = key_states[:, :, 0]
        self.values[where] = value_states[:, :, 0]
        return self.keys[:n, :, : cache.visible], self.values[:n, :, : cache.visible]

    def put(self, row: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill rows [R] from the start with keys and values [R, heads, t, dim] of their prompts."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None and self.values is not None
        self.keys[row, :, : keys.shape[2]] = keys
        self.values[row, :, : values.shape[2]] = values

    def move(self, source: int, target: int, length: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def grow(self, length: int) -> None:
        if self.keys is None or self.values is None:
            return
        extra = (0, 0, 0, length - self.keys.shape[2])
        self.keys = torch.nn.functional.pad(self.keys, extra)
        self.values = torch.nn.functional.pad(self.values, extra)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.visible, 0

    def get_seq_length(self) -> int:
        return self._cache.visible - 1

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """All layers, with the position of each row's next token.

    position int64 [rows]; visible: how many places the longest row in use reaches, the new token included.
    """

    def __init__(self, num_layers: int, rows: int, length: int, device: torch.device) -> None:
        self.rows, self.length, self.visible = rows, length, 1
        self.row_index = torch.arange(rows, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_layers = [RowLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def reserve(self, longest: int) -> None:
        """Make place for rows of this length and show that many places; grows by half, rarely."""
        self.visible = longest
        if longest > self.length:
            self.length = max(longest, self.length + self.length // 2)
            for layer in self.row_layers:
                layer.grow(self.length)

    def replace(self, target: int, source: int) -> None:
        """Row `target` becomes row `source`."""
        length = int(self.position[source])
        for layer in self.row_layers:
            layer.move(source, target, length)
        self.position[target] = self.position[source]
