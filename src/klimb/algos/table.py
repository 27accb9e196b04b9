"""Estimators by the name the config gives them: one line each, from a phase to raw advantages."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from klimb.algos import advantage
from klimb.algos.ops import replace


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What an estimator may read of a phase. B rows, T tokens.

    rewards [B, T] token rewards, KL included where it is placed there; mask bool [B, T] the tokens that are trained on;
    alive bool [B] the rows that count in a baseline, also those that no token is trained of; groups int64 [B];
    lengths int64 [B] sampled tokens; values [B, T] and last_values [B], None without a critic; greedy_totals [B], None
    unless the estimator asks for greedy responses; gamma, lam, norm_by_std: the settings of `algorithm`.
    """

    rewards: Tensor
    mask: Tensor
    alive: Tensor
    groups: Tensor
    lengths: Tensor
    values: Tensor | None = None
    last_values: Tensor | None = None
    greedy_totals: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True

    @property
    def totals(self) -> Tensor:
        """[B]: the episode's reward after shaping."""
        return self.rewards.sum(dim=1)

    def on_tokens(self, per_row: Tensor) -> Tensor:
        """[B] -> [B, T], on every token that is trained on."""
        return replace(per_row[:, None].expand(self.mask.shape), self.mask)


def _gae(p: Phase) -> Tensor:
    assert p.values is not None, "gae needs a critic"
    return advantage.gae(p.rewards, p.values, p.mask, p.gamma, p.lam, p.last_values)[0]


def _remax(p: Phase) -> Tensor:
    assert p.greedy_totals is not None, "remax needs greedy responses"
    return advantage.remax(p.rewards, p.greedy_totals, p.mask)


# Raw advantages [B, T]. The training layer whitens those of gae, reinforce_pp and reinforce_pp_baseline.
ADVANTAGES: dict[str, Callable[[Phase], Tensor]] = {
    "gae": _gae,
    "grpo": lambda p: p.on_tokens(advantage.grpo(p.totals, p.groups, p.norm_by_std, p.alive)),
    "rloo": lambda p: p.on_tokens(advantage.rloo(p.totals, p.groups, p.alive)),
    "reinforce_pp": lambda p: advantage.reinforce_pp(p.rewards, p.mask, p.gamma),
    "reinforce_pp_baseline": lambda p: p.on_tokens(advantage.grpo(p.totals, p.groups, False, p.alive)),
    "remax": _remax,
    "opo": lambda p: p.on_tokens(advantage.opo(p.totals, p.lengths, p.groups, p.alive)),
    "grpo_passk": lambda p: p.on_tokens(advantage.grpo_passk(p.totals, p.groups, p.alive)),
    "maxrl": lambda p: p.on_tokens(advantage.maxrl(p.totals, p.groups, p.alive)),
}
