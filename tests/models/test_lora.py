"""LoRA: one copy of the base for policy and reference, passes that agree with peft's own, merged weights for others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from klimb.algos.kl import estimate
from klimb.config.scale import LoraSettings
from klimb.errors import CheckpointError, ConfigError
from klimb.learn import Roles, score_tokens
from klimb.models.attention import recompute_activations
from klimb.models.forward import backward_scores, can_fuse, token_scores
from klimb.models.load import body_of, critic_from, frozen_copy, head_of
from klimb.models.lora import (
    adapter_off,
    add_lora,
    check_base,
    has_adapter,
    load_adapter,
    merged_weight,
    save_adapter,
    save_plain,
    weights_for_engine,
)
from klimb.models.prepacked import pays
from klimb.rollout.blocks import fits
from klimb.update import update
from tests.models.test_forward import padded
from tests.tiny_models import (
    ARCHITECTURES,
    adamw,
    make_phase,
    make_prompts,
    make_recipe,
    make_requests,
    make_roles,
    sample,
    split_of,
    tiny_model,
    train_batch,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
REWARDS: list[float | None] = [1.0, 0.0, 0.5, 0.2, -0.3, 2.0, -1.0, 0.1]


def with_lora(name: str = "llama", rank: int = 4, seed: int = 0, **settings: Any) -> PreTrainedModel:
    return add_lora(tiny_model(name), LoraSettings(rank=rank, alpha=2 * rank, **settings), seed)


def moved(model: PreTrainedModel, size: float = 0.05) -> PreTrainedModel:
    """The adapter away from zero, as after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_of(model).values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def base_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


def logprobs_of(model: PreTrainedModel) -> Tensor:
    tokens, attention, mask = padded()
    with torch.no_grad():
        return token_scores(model, tokens, attention, mask, 0.7).logprobs


def by_peft(rank: int = 4, seed: int = 0) -> Any:
    """The same adapter, put there by peft's public wrapper, and moved likewise."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(tiny_model(), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    return moved(model)  # type: ignore[arg-type]


# What is trained, and from where


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_adapter_starts_at_zero_and_only_it_is_trained(name: str) -> None:
    plain, model = tiny_model(name), with_lora(name)
    assert torch.equal(logprobs_of(model), logprobs_of(plain))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == adapter_of(model).keys()
    assert trained
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert type(model) is type(plain)
    assert type(body_of(model)) is type(body_of(plain))
    assert head_of(model) is model.get_output_embeddings()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_the_adapter_off_it_is_the_base_to_the_last_bit_and_afterwards_the_policy_again(name: str) -> None:
    plain, model = tiny_model(name), moved(with_lora(name))
    with_it = logprobs_of(model)
    assert not torch.allclose(with_it, logprobs_of(plain), atol=1e-3)
    with adapter_off(model):
        assert torch.equal(logprobs_of(model), logprobs_of(plain))
    assert torch.equal(logprobs_of(model), with_it)
    assert all(p.requires_grad for p in adapter_of(model).values())
    with pytest.raises(ZeroDivisionError), adapter_off(model):
        _ = 1 / 0
    assert torch.equal(logprobs_of(model), with_it), "an error inside leaves it on too"


def test_the_first_matrices_are_a_function_of_the_seed_and_disturb_no_other_stream() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, same, other = (adapter_of(with_lora(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_rank_and_alpha_do_what_they_say() -> None:
    model = with_lora(rank=3)
    assert {min(p.shape) for p in adapter_of(model).values()} == {3}
    one, two = (
        moved(add_lora(tiny_model(), LoraSettings(rank=4, alpha=alpha, target_modules=("q_proj",)), 0))
        for alpha in (4, 8)
    )
    name, base = "model.layers.0.self_attn.q_proj", tiny_model().get_submodule("model.layers.0.self_attn.q_proj")
    first, second = (merged_weight(m.get_submodule(name)) - base.weight for m in (one, two))
    assert torch.allclose(2 * first, second, atol=1e-5)


def test_target_modules_are_last_names_or_whole_ones() -> None:
    model = with_lora(target_modules=("q_proj", "model.layers.1.mlp.up_proj"))
    layers = {name.rpartition(".lora_")[0] for name in adapter_of(model)}
    assert layers == {
        *(f"model.layers.{i}.self_attn.q_proj" for i in range(2)),
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("word", ["q_prj", "lm_head", "embed_tokens", "proj", "mlp"])
def test_a_target_that_is_no_linear_layer_of_the_body_is_refused_with_those_there_are(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_lora(target_modules=("q_proj", word))
    message = str(error.value)
    assert message.startswith(f"actor_rollout_ref.lora.target_modules names {word}, ")
    assert "there are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj. Name some of these" in message


# Passes and gradients


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_log_probs_and_gradients_are_those_of_peft_and_the_whole_logits(fused: bool, checkpointing: bool) -> None:
    mine, theirs = moved(with_lora()), by_peft()
    if checkpointing:
        recompute_activations(body_of(mine))
    (tokens, attention, mask), weights = padded(), torch.linspace(-1, 1, 40)
    n = int(mask.sum())
    slow = []
    for row, real in zip(tokens, attention, strict=True):  # one row at a time, without padding, all logits
        logits = theirs(input_ids=row[real][None]).logits[0] / 0.7
        slow.append(logits[:-1].log_softmax(-1).gather(-1, row[real][1:, None]).squeeze(-1))
    wanted = torch.cat([r[m[a][1:]] for r, m, a in zip(slow, mask, attention, strict=True)])
    (weights[:n] * wanted).sum().backward()
    assert can_fuse(mine)
    if fused:
        got = backward_scores(mine, tokens, attention, mask, 0.7, lambda lp, h, at: (weights[:n][at] * lp).sum())
    else:
        got = token_scores(mine, tokens, attention, mask, 0.7)
        (weights[:n] * got.logprobs[mask]).sum().backward()
    assert torch.allclose(got.logprobs[mask], wanted, atol=1e-5)
    pairs = list(zip(adapter_of(mine).items(), adapter_of(theirs).values(), strict=True))
    assert len(pairs) == 28
    mine_flat = torch.cat([p.grad.flatten() for (_, p), _ in pairs if p.grad is not None])
    theirs_flat = torch.cat([p.grad.flatten() for _, p in pairs if p.grad is not None])
    assert float((mine_flat - theirs_flat).norm() / theirs_flat.norm()) < 1e-6
    assert all(p.grad is None for name, p in mine.named_parameters() if "lora_" not in name), "the head's too"


def test_the_frozen_head_takes_no_memory_for_a_gradient() -> None:
    model, (tokens, attention, mask) = with_lora(), padded()
    backward_scores(model, tokens, attention, mask, 1.0, lambda lp, h, at: lp.sum())
    assert head_of(model).weight.grad is None


def roles_of(model: PreTrainedModel, critic: bool = False) -> Roles:
    return Roles(actor=model, reference=model, critic=critic_from(tiny_model()) if critic else None)


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("explicit", [True, False])
def test_first_ratio_one_kl_zero_then_the_policy_moves_and_the_reference_stays(estimator: str, explicit: bool) -> None:
    model = with_lora()
    roles, base = roles_of(model, critic=estimator == "gae"), base_of(model)
    place = {"kl_in_loss": True} if explicit else {"kl_in_reward": True}
    recipe = make_recipe(adv_estimator=estimator, explicit=explicit, **place)
    batch = make_phase(model, REWARDS)
    epochs = split_of(batch, step=4, micro=2)
    before, metrics = score_tokens(batch, epochs[0], roles, recipe)
    assert before.ref_logprobs is not None
    assert torch.equal(
        before.ref_logprobs, score_tokens(batch, epochs[0], make_roles(tiny_model(), True), recipe)[0].ref_logprobs
    )
    if explicit:
        assert metrics["kl/k3"] == 0.0
        assert metrics["kl/k1"] == 0.0
    train = train_batch(batch, epochs, roles, recipe, kl_coef=0.1)
    actor = adamw(model, lr=1e-2)
    critic = None if roles.critic is None else adamw(roles.critic, lr=1e-2)
    measured = update(actor, critic, train, epochs, recipe, 0.1)
    assert measured["policy/skipped_steps"] == 0
    assert measured["policy/grad_norm"] > 0
    if explicit:
        assert measured["policy/first_ratio_dev_max"] == 0.0
    after, metrics = score_tokens(batch, epochs[0], roles, recipe)
    assert torch.equal(after.ref_logprobs, before.ref_logprobs)
    assert not torch.equal(logprobs_of(model), logprobs_of(tiny_model()))
    if explicit:
        assert metrics["kl/k3"] > 0.0
    now = base_of(model)
    assert all(torch.equal(now[name], base[name]) for name in base), "the base never changes"
    assert all(bool((p != 0).any()) for p in adapter_of(model).values()), "every adapter does"


def test_the_update_is_that_of_a_slow_version_by_peft_with_a_reference_of_its_own() -> None:
    """GRPO with KL in the loss, one optimizer step, plain SGD maths on whole logits."""
    mine, theirs, reference = moved(with_lora()), by_peft(), tiny_model()
    batch = make_phase(mine, REWARDS)
    recipe = make_recipe(kl_in_loss=True, kl_loss_estimator="k3+")
    epochs = split_of(batch, step=8, micro=3)
    train = train_batch(batch, epochs, roles_of(mine), recipe)
    mask = train.mask

    def slow(model: Any) -> Tensor:
        out = torch.zeros(mask.shape)
        for i, real in enumerate(batch.attention):
            logits = model(input_ids=batch.tokens[i, real][None]).logits[0]
            found = logits[:-1].log_softmax(-1).gather(-1, batch.tokens[i, real][1:, None]).squeeze(-1)
            out[i] = out[i].masked_scatter(real & (real.cumsum(0) > 1), found)
        return out * mask

    logprobs = slow(theirs)
    with torch.no_grad():
        ref = slow(reference)
    assert train.ref_logprobs is not None
    assert torch.allclose(train.ref_logprobs[mask], ref[mask], atol=1e-5)
    policy = -((logprobs - logprobs.detach()).exp() * train.advantages)[mask].sum() / mask.sum()
    kl = estimate("k3+", logprobs, ref)[mask].sum() / mask.sum()
    (policy + 0.3 * kl).backward()
    wanted = torch.cat([p.grad.flatten() for p in adapter_of(theirs).values() if p.grad is not None])

    seen: list[Tensor] = []
    actor = adamw(mine, lr=1e-3)

    def keep(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for p in adapter_of(mine).values() if p.grad is not None]))

    actor.optimizer.register_step_pre_hook(keep)
    measured = update(actor, None, train, epochs, recipe, 0.3)
    assert len(seen) == 1
    assert float((seen[0] - wanted).norm() / wanted.norm()) < 1e-6
    assert measured["policy/grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)


def test_in_bfloat16_the_adapter_starts_at_zero_too_and_is_near_float32() -> None:
    """The compute dtype of a GPU, on a CPU; adapters and moments stay float32."""
    (tokens, attention, mask), model, plain = padded(), with_lora(), tiny_model()
    with torch.no_grad():
        of_base = token_scores(plain, tokens, attention, mask, 0.7, torch.bfloat16).logprobs
        assert torch.equal(token_scores(model, tokens, attention, mask, 0.7, torch.bfloat16).logprobs, of_base)
    moved(model)
    backward_scores(model, tokens, attention, mask, 0.7, lambda lp, h, at: lp.sum(), torch.bfloat16)
    rough = torch.cat([p.grad.flatten() for p in adapter_of(model).values() if p.grad is not None])
    model.zero_grad()
    backward_scores(model, tokens, attention, mask, 0.7, lambda lp, h, at: lp.sum())
    exact = torch.cat([p.grad.flatten() for p in adapter_of(model).values() if p.grad is not None])
    assert rough.dtype == torch.float32
    assert float((rough - exact).norm() / exact.norm()) < 0.1


# Sampling


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("packed", [True, False])
def test_the_sampler_agrees_with_the_trainer(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By packed blocks with merged weights, by packed layers, and through the modules as on a GPU."""
    model = moved(with_lora(name))
    assert pays(model, torch.float32), "else this tests one way only"
    assert fits(body_of(model)) == (name in ("llama", "qwen2"))
    if not packed:
        monkeypatch.setattr("klimb.rollout.hf.pays", lambda *_: False)
    found = sample(model, make_requests(make_prompts([3, 7, 5, 4]), 4), temperature=0.7, max_tokens=12)
    from_base = sample(tiny_model(name), make_requests(make_prompts([3, 7, 5, 4]), 4), temperature=0.7, max_tokens=12)
    assert [s.token_ids for s in found] != [s.token_ids for s in from_base]
    for s in found:
        tokens, mask = torch.tensor([s.token_ids]), torch.tensor([s.mask])
        with torch.no_grad():
            scores = token_scores(model, tokens, torch.ones_like(mask), mask, 0.7)
        assert torch.allclose(scores.logprobs[mask], torch.tensor([s.logprobs])[mask], atol=1e-5)


def test_sampling_leaves_every_weight_as_it_is() -> None:
    model = moved(with_lora())
    before = copy.deepcopy(model.state_dict())
    sample(model, make_requests(make_prompts([3, 7]), 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Weights for others


def test_an_engine_gets_the_weights_of_a_plain_model() -> None:
    for name in ARCHITECTURES:
        plain, model = tiny_model(name), moved(with_lora(name))
        weights = dict(weights_for_engine(model))
        assert list(weights) == [n for n, _ in plain.named_parameters()]
        plain.load_state_dict(weights, strict=False)
        assert torch.allclose(logprobs_of(plain), logprobs_of(model), atol=1e-5)
    plain = tiny_model()
    for (name, tensor), (other, parameter) in zip(weights_for_engine(plain), plain.named_parameters(), strict=True):
        assert name == other
        assert tensor is parameter, "without LoRA nothing is copied"


def test_weights_are_merged_one_at_a_time() -> None:
    weights = weights_for_engine(moved(with_lora()))
    assert isinstance(weights, Iterator)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_folder_opens_in_transformers_and_has_the_files_of_a_plain_model(
    tmp_path: Path, name: str, tied: bool
) -> None:
    plain = tiny_model(name, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path / "plain")
    model = moved(add_lora(copy.deepcopy(plain), LoraSettings(rank=4, alpha=8), 0))
    save_plain(model, tmp_path / "merged")
    want, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "merged"))
    assert got.keys() == want.keys()
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {p.name for p in (tmp_path / "plain").iterdir()}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[5, 9, 30, 77]])
    with torch.no_grad():
        assert torch.allclose(opened(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_adapter_folder_opens_in_peft_and_comes_back_to_the_last_bit(tmp_path: Path, name: str) -> None:
    model = moved(with_lora(name))
    save_adapter(model, tmp_path / "adapter")
    opened = PeftModel.from_pretrained(tiny_model(name), str(tmp_path / "adapter")).eval()
    ids = torch.tensor([[5, 9, 30, 77]])
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)
    fresh = with_lora(name, seed=9)
    load_adapter(fresh, tmp_path / "adapter")
    assert all(torch.equal(p, adapter_of(model)[n]) for n, p in adapter_of(fresh).items())


def test_an_adapter_for_other_layers_and_another_base_are_refused(tmp_path: Path) -> None:
    model = moved(with_lora())
    save_adapter(model, tmp_path / "adapter")
    save_plain(model, tmp_path / "actor")
    with pytest.raises(CheckpointError, match="for other layers"):
        load_adapter(with_lora(target_modules=("q_proj",)), tmp_path / "adapter")
    check_base(model, tmp_path / "actor")
    other = add_lora(tiny_model(seed=1), LoraSettings(rank=4, alpha=8), 0)
    load_adapter(other, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"model_path \(or adapter_path\) holds other weights"):
        check_base(other, tmp_path / "actor")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(model, tmp_path / "adapter")


def test_a_plain_model_has_no_adapter() -> None:
    plain = tiny_model()
    assert not has_adapter(plain)
    assert has_adapter(with_lora())
    assert not has_adapter(frozen_copy(plain))


def test_memory_of_the_backward_has_no_gradient_of_the_base() -> None:
    """Weights that are trained have a gradient and, in the optimizer, two moments; those of the base have neither."""
    model = with_lora()
    batch, recipe = make_phase(model, REWARDS), make_recipe()
    epochs = split_of(batch, step=8, micro=4)
    actor = adamw(model, lr=1e-3)
    update(actor, None, train_batch(batch, epochs, roles_of(model), recipe), epochs, recipe, 0.0)
    kept = sum(t.numel() for state in actor.optimizer.state.values() for t in state.values() if t.dim())
    adapter = sum(p.numel() for p in adapter_of(model).values())
    assert kept == 2 * adapter
    assert adapter < sum(p.numel() for p in model.parameters()) / 4


def test_chunks_of_the_head_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved(with_lora())
    whole = logprobs_of(model)
    monkeypatch.setattr("klimb.models.head.CHUNK_LOGITS", 3 * head_of(model).weight.shape[0])
    assert torch.allclose(logprobs_of(model), whole, atol=1e-6)
