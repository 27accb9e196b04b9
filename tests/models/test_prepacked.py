"""Packed weights: the same numbers, for the time of a rollout only."""

import pytest
import torch

from klimb.models import prepacked as module
from klimb.models.load import head_of
from klimb.models.prepacked import PackedLinear, is_available, pays, prepacked
from tests.tiny_models import ARCHITECTURES, VOCAB, tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_same_inside(name: str) -> None:
    model = tiny_model(name)
    ids = torch.randint(5, VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        with prepacked(model, rows=3):
            packed = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    assert torch.allclose(packed, plain, atol=2e-5, rtol=1e-5)
    assert torch.equal(after, plain)


def test_inside_the_layers_run_on_the_packed_weights() -> None:
    """The copy is of the weights when it was made: what is changed later is not seen inside, and seen afterwards."""
    assert is_available()
    model = tiny_model()
    head = head_of(model)
    x = torch.ones(2, 32)
    with torch.inference_mode():
        before = head(x)
        with prepacked(model, rows=2):
            head.weight.mul_(2)  # type: ignore[operator]
            assert torch.allclose(head(x), before, atol=1e-5)
        assert torch.allclose(head(x), 2 * before, atol=1e-4)


def test_an_error_inside_leaves_no_packed_layer() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="stop"), prepacked(model, rows=2):
        raise RuntimeError("stop")
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)])
def test_layers_of_one_input_are_one_product(biases: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, n, bias=b) for n, b in zip((24, 8), biases, strict=True)]
    x, other = torch.randn(5, 16), torch.randn(5, 32)
    with torch.inference_mode():
        packed, want = PackedLinear.of(layers, 5), torch.cat([layer(x) for layer in layers], dim=1)
        assert torch.allclose(packed(x), want, atol=1e-6)
        assert torch.allclose(packed.plus(x, other), want + other, atol=1e-6)


def test_packing_is_for_float32_on_a_cpu_that_has_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert pays(model, torch.float32)
    assert not pays(model, torch.bfloat16)
    assert not pays(model.to("meta"), torch.float32)

    def gone() -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "_operators", gone)
    is_available.cache_clear()
    assert not pays(tiny_model(), torch.float32)
    is_available.cache_clear()


def test_looking_whether_there_are_operators_moves_no_generator() -> None:
    is_available.cache_clear()
    before = torch.get_rng_state()
    is_available()
    assert torch.equal(torch.get_rng_state(), before)
