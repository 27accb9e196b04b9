"""From logits to a token: the right distribution, from one number per request and position."""

import math

import pytest
import torch
from torch import Tensor

from klimb.rollout.draw import BLOCK, draw, uniforms

LAST = 1.0 - 2.0**-53


def logits_of(size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def draws(logits: Tensor, count: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
    return draw(logits.expand(count, -1), uniforms(11, count), temperature, top_p, top_k)


@pytest.mark.parametrize("temperature", [0.25, 1.0])
@pytest.mark.parametrize("size", [3, BLOCK, 300, 2 * BLOCK])
def test_tokens_follow_the_softmax(size: int, temperature: float) -> None:
    logits, count = logits_of(size, spread=1.0 if size == 3 else 2.0), 40_000
    token, _ = draws(logits, count, temperature)
    expected = (logits.double() / temperature).softmax(-1) * count
    seen = torch.bincount(token, minlength=size).double()
    # Rare tokens share one cell, as the chi-square test wants at least 5 expected in each.
    rare = expected < 5
    cells = [*zip(seen[~rare].tolist(), expected[~rare].tolist(), strict=True)]
    if float(expected[rare].sum()) >= 5:
        cells.append((float(seen[rare].sum()), float(expected[rare].sum())))
    chi2, freedom = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    assert freedom > 0
    # Wilson-Hilferty: a standard normal number, far beyond 4 only if the distribution is wrong.
    normal = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert -4 < normal < 4


@pytest.mark.parametrize("size", [5, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_the_token_is_that_of_the_cumulative_distribution(size: int) -> None:
    logits, u = logits_of(size), uniforms(3, 2000)
    token, _ = draw(logits.expand(2000, -1), u, 0.7, 1.0, 0)
    ends = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    start = torch.cat([torch.zeros(1, dtype=torch.float64), ends])[token]
    assert (start <= u + 1e-6).all()
    assert (u <= ends[token] + 1e-6).all()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_the_reported_log_probability_is_of_the_distribution_drawn_from(temperature: float) -> None:
    logits = logits_of(300)
    token, logprob = draws(logits, 500, temperature)
    want = (logits.double() / temperature).log_softmax(-1)[token]
    assert logprob.dtype == torch.float32
    assert torch.allclose(logprob.double(), want, atol=2e-6, rtol=1e-6)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.tensor([20.0, 19.5, 3.0], dtype=torch.bfloat16)
    token, logprob = draws(logits, 100, 1.0)
    want = torch.tensor([-0.4740770099, -0.9740770099, -17.474077])
    assert torch.allclose(logprob, want[token], atol=1e-5)


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("edge", [0.0, LAST])
def test_the_edges_of_the_uniform_never_give_an_impossible_token(size: int, edge: float) -> None:
    """A support that starts and ends anywhere, also at the borders of a block."""
    logits = torch.full((size, size), float("-inf"))
    for i in range(size):
        logits[i, i : i + 2] = 0.0
    token, logprob = draw(logits, torch.full((size,), edge, dtype=torch.float64), 1.0, 1.0, 0)
    lowest = torch.arange(size)
    assert torch.equal(token, lowest if edge == 0.0 else (lowest + 1).clamp(max=size - 1))
    assert logprob.isfinite().all()


@pytest.mark.parametrize("top_k", [0, 1, 7, 129])
def test_no_uniform_gives_a_token_outside_the_support(top_k: int) -> None:
    logits = logits_of(500, spread=8.0)
    grid = torch.cat([torch.linspace(0, LAST, 4001, dtype=torch.float64), uniforms(5, 4000)])
    token, logprob = draw(logits.expand(len(grid), -1), grid, 1.0, 1.0, top_k)
    assert logprob.isfinite().all()
    if top_k:
        assert set(token.tolist()) <= set(logits.topk(top_k).indices.tolist())


def test_top_k_renormalises_over_the_k_likeliest() -> None:
    logits = logits_of(300)
    token, logprob = draws(logits, 5000, 0.8, top_k=4)
    best = logits.topk(4)
    assert set(token.tolist()) == set(best.indices.tolist())
    want = dict(zip(best.indices.tolist(), (best.values / 0.8).log_softmax(-1).tolist(), strict=True))
    assert logprob.tolist() == pytest.approx([want[t] for t in token.tolist()], abs=1e-5)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.55, 2), (0.81, 3), (0.96, 4), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    token, logprob = draws(logits, 3000, 1.0, top_p=top_p)
    order = [1, 3, 2, 0][:kept]
    assert set(token.tolist()) == set(order)
    mass = sum([0.05, 0.5, 0.15, 0.3][i] for i in order)
    want = torch.tensor([0.05, 0.5, 0.15, 0.3]).double()[token] / mass
    assert torch.allclose(logprob.double().exp(), want, atol=1e-6)


def test_top_p_looks_at_what_top_k_left() -> None:
    # Of 0.4, 0.3, 0.3 the two likeliest are renormalised to 0.57 and 0.43: at 0.5 only the first is left.
    token, logprob = draws(torch.tensor([0.4, 0.31, 0.29]).log(), 200, 1.0, top_p=0.5, top_k=2)
    assert set(token.tolist()) == {0}
    assert not logprob.any()


def test_greedy_takes_the_lowest_id_of_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 1.0, 5.0]])
    token, logprob = draw(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), 0.0, 0.3, 1)
    assert token.tolist() == [1, 0]
    assert torch.allclose(logprob, logits.log_softmax(-1)[:, [1, 0]].diagonal())


def test_a_token_depends_on_its_own_number_and_logits_alone() -> None:
    rows = torch.stack([logits_of(300, seed) for seed in range(40)])
    u = uniforms(9, 40)
    together, logprob = draw(rows, u, 0.7, 0.9, 50)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(rows[order], u[order], 0.7, 0.9, 50)[0], together[order])
    for i in range(40):
        token, alone = draw(rows[i : i + 1], u[i : i + 1], 0.7, 0.9, 50)
        assert token[0] == together[i]
        assert torch.allclose(alone[0], logprob[i], atol=1e-6)


def test_uniforms_are_a_function_of_the_seed_and_the_position() -> None:
    state = torch.get_rng_state()
    long = uniforms(123, 500)
    assert torch.equal(uniforms(123, 7), long[:7])
    assert torch.equal(uniforms(123, 64), long[:64])
    assert not torch.equal(uniforms(124, 500), long)
    assert long.dtype == torch.float64
    assert ((long >= 0) & (long < 1)).all()
    assert torch.equal(torch.get_rng_state(), state)
