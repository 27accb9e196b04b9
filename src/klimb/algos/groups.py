"""Rows [B] laid out as one line per group, so that a baseline is a mean over a line."""

import torch
from torch import Tensor


class Groups:
    """[B] <-> [G, N]: G groups, N rows of the largest. No atomic sums: the same bits in any row order.

    groups int64 [B]: ids in any order. valid bool [B]: False = in no baseline, and 0 in every result; its
    reward may be NaN. Within a line rows stand in the order of the batch.
    """

    def __init__(self, groups: Tensor, valid: Tensor | None) -> None:
        order = torch.argsort(groups, stable=True)
        ordered = groups[order]
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        line = torch.empty_like(order)
        line[order] = is_first.cumsum(0) - 1
        sizes = torch.bincount(line)
        starts = sizes.cumsum(0) - sizes
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device) - starts[line[order]]
        self._at = (line, column)
        shape = (len(sizes), int(sizes.max()) if len(sizes) else 1)
        self.present = torch.zeros(shape, dtype=torch.bool, device=groups.device)
        self.present[self._at] = True if valid is None else valid
        self.count = self.present.sum(1, keepdim=True)

    def table(self, x: Tensor) -> Tensor:
        """x [B] as float32 [G, N], 0 where nothing is present."""
        table = torch.zeros(self.present.shape, device=x.device)
        table[self._at] = x.detach().float()
        return torch.where(self.present, table, 0.0)

    def above_lowest(self, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Reward above the group's lowest [G, N], 0 where nothing is present; and the lowest [G, 1].

        A float32 mean of equal numbers is not equal to them. Counted from the lowest, equal rewards are exact
        zeros, and so is their advantage whatever it is divided by.
        """
        table = self.table(rewards)
        lowest = torch.where(self.present, table, torch.inf).amin(1, keepdim=True)
        lowest = torch.where(self.count > 0, lowest, 0.0)
        return torch.where(self.present, table - lowest, 0.0), lowest

    def has_spread(self, rewards: Tensor) -> Tensor:
        """bool [G, 1]: whether two rewards of the group differ; False for a group of one or none."""
        return (self.above_lowest(rewards)[0] > 0).any(dim=1, keepdim=True)

    def total(self, table: Tensor) -> Tensor:
        """Sum of every line, [G, 1], added up in the order of size: the rows' order in the batch rounds nothing."""
        return table.sort(dim=1).values.sum(1, keepdim=True)

    def mean(self, table: Tensor) -> Tensor:
        """Mean over what is present, [G, 1]; 0 in a group without a row."""
        return self.total(table) / self.count.clamp(min=1)

    def centre(self, rewards: Tensor) -> Tensor:
        """Reward minus the group's mean, [G, N]; 0 where nothing is present."""
        above, _ = self.above_lowest(rewards)
        return torch.where(self.present, above - self.mean(above), 0.0)

    def std(self, centred: Tensor) -> Tensor:
        """Sample standard deviation (n - 1) of centred rewards, [G, 1]."""
        return (self.total(centred.square()) / (self.count - 1).clamp(min=1)).sqrt()

    def rows(self, table: Tensor) -> Tensor:
        """[G, N] back to [B]."""
        return table[self._at]
