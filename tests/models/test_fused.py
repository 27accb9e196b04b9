"""The backward that never computes logits twice, against the one by autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from klimb.models.forward import backward_scores, can_fuse, token_scores
from klimb.models.load import head_of
from tests.models.test_forward import padded
from tests.tiny_models import ARCHITECTURES, tiny_model

WEIGHTS = torch.randn(40, generator=torch.Generator().manual_seed(1))

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    # log-probs, entropies, weights of the tokens -> loss
    "linear": lambda lp, h, w: (w * lp).sum(),
    "exponential": lambda lp, h, w: (w * (0.1 * lp).exp()).sum(),
    "entropy": lambda lp, h, w: (w * h).sum(),
    "both": lambda lp, h, w: (w * (lp.square() - 0.3 * h)).sum(),
}


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_scores_and_gradients_are_autograds(name: str, loss: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, attention, mask) = tiny_model(name), padded()
    assert can_fuse(model)
    monkeypatch.setattr("klimb.models.head.CHUNK_LOGITS", chunk * head_of(model).weight.shape[0])
    n = int(mask.sum())
    slow = token_scores(model, tokens, attention, mask, 0.7)
    LOSSES[loss](slow.logprobs[mask], slow.entropy[mask], WEIGHTS[:n]).backward()
    want = gradients(model)
    cut: list[slice] = []

    reads = loss in {"entropy", "both"}

    def of_slice(logprobs: Tensor, entropy: Callable[[], Tensor], /, *, at: slice) -> Tensor:
        cut.append(at)
        return LOSSES[loss](logprobs, entropy() if reads else logprobs, WEIGHTS[:n][at])

    got = backward_scores(model, tokens, attention, mask, 0.7, of_slice)
    assert len(cut) == -(-n // chunk)
    assert torch.allclose(got.logprobs, slow.logprobs, atol=1e-6)
    assert torch.allclose(got.entropy, slow.entropy, atol=1e-5)
    assert not got.logprobs.requires_grad
    found = gradients(model)
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert torch.allclose(found[key], value, atol=1e-5 * float(value.abs().max()) + 1e-7), key


def test_gradients_are_added_to_those_of_earlier_micro_batches() -> None:
    model, (tokens, attention, mask) = tiny_model(), padded()

    def run(rows: slice) -> None:
        backward_scores(model, tokens[rows], attention[rows], mask[rows], 1.0, lambda lp, h, at: lp.sum())

    run(slice(0, 3))
    whole = gradients(model)
    run(slice(0, 1))
    run(slice(1, 3))
    for key, value in gradients(model).items():
        assert torch.allclose(value, whole[key], atol=1e-4 * float(whole[key].abs().max()))


class Called(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_has_its_rows_added_and_no_table_of_zeros(tied: bool) -> None:
    """Tokens occur several times, within a row and in two micro-batches."""
    model, (tokens, attention, mask) = tiny_model(tie_word_embeddings=tied), padded()
    tokens[:, 2:4] = 7
    for sign in (1.0, -0.5):
        (sign * token_scores(model, tokens, attention, mask, 1.0).logprobs).sum().backward()
    want = gradients(model)
    with Called() as called:
        for sign in (1.0, -0.5):
            backward_scores(model, tokens, attention, mask, 1.0, lambda lp, h, at, sign=sign: (sign * lp).sum())
    assert ("embedding_dense_backward" in called.names) != tied
    assert not model.get_input_embeddings().sparse
    found = gradients(model)
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key].layout == torch.strided
        assert torch.allclose(found[key], value, atol=1e-5 * float(value.abs().max())), key


def test_a_loss_that_reads_neither_gives_no_gradient() -> None:
    model, (tokens, attention, mask) = tiny_model(), padded()
    backward_scores(model, tokens, attention, mask, 1.0, lambda lp, h, at: 0.0 * lp.sum())
    assert not any(value.any() for value in gradients(model).values())


def test_no_token_gives_no_gradient() -> None:
    model, (tokens, attention, mask) = tiny_model(), padded()
    got = backward_scores(model, tokens, attention, torch.zeros_like(mask), 1.0, lambda lp, h, at: lp.sum())
    assert not got.logprobs.any()
    assert not any(value.any() for value in gradients(model).values())


def test_bfloat16_is_near() -> None:
    model, (tokens, attention, mask) = tiny_model(), padded()
    backward_scores(model, tokens, attention, mask, 1.0, lambda lp, h, at: lp.sum())
    want = gradients(model)
    backward_scores(model, tokens, attention, mask, 1.0, lambda lp, h, at: lp.sum(), torch.bfloat16)
    for key, value in gradients(model).items():
        assert value.dtype == torch.float32
        assert float((value - want[key]).norm()) < 0.1 * float(want[key].norm()), key


def test_a_head_of_another_kind_goes_the_long_way() -> None:
    model = tiny_model()
    assert can_fuse(model)
    head = nn.Linear(32, 10, bias=True)
    model.set_output_embeddings(head)
    assert not can_fuse(model)
