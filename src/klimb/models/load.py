"""Role to module: actor, reference, critic. Any Hugging Face causal LM folder will do whose attention
goes through transformers' interface (docs/adr/009).

Weights are held in float32 whatever the folder's dtype: the optimizer's steps at an RL learning rate are
smaller than bfloat16 can resolve. Everything is put into eval mode once and stays there: dropout would make
the ratio of the first minibatch differ from 1.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from klimb.errors import MissingExtra, ModelError
from klimb.models.attention import NAME, admit

VALUE_HEAD = "value_head.safetensors"

# What transformers and safetensors raise on a folder that is missing, damaged or of another kind.
_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


class Critic(nn.Module):
    """A body of its own with a linear value head that starts at zero, so that the first values are 0."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        return self.body.device

    def save(self, folder: Path) -> None:
        """The body as a Hugging Face folder, the head as one safetensors file beside it."""
        self.body.save_pretrained(folder)
        save_file({"weight": self.head.weight.detach(), "bias": self.head.bias.detach()}, folder / VALUE_HEAD)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; a missing pad token is replaced by the end token, which masks never confuse."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no tokenizer can be loaded from this folder: {_first_line(error)}") from None
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"{folder}: the tokenizer has neither a pad nor an end token; set one of them")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills rows; what it is never matters, since everything goes by masks."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def load_causal_lm(folder: Path, trust_remote_code: bool, device: torch.device) -> PreTrainedModel:
    """Float32 weights, klimb's attention, eval mode. Refuses a folder whose weights do not fit its config."""
    model, info = _load(AutoModelForCausalLM, folder, trust_remote_code, "a causal language model")
    # With tied embeddings a classifier fills a language model as well: only its own head is left over.
    if any(str(key).startswith("score.") for key in info["unexpected_keys"]):
        raise ModelError(
            f"{folder}: this is a sequence classifier (it holds score.weight), not a causal language model; "
            "give a language model here, and the classifier as reward_model.model_path"
        )
    cast(nn.Module, model).to(device).eval()
    check_head(model)
    admit(body_of(model))
    return model


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a trained LoRA adapter (a peft folder) merged into its weights, so that a frozen copy of it, the
    reference, has the adapter too: the policy's KL starts at 0."""
    try:
        from peft import PeftModel
    except ImportError:
        raise MissingExtra("peft", "lora", "actor_rollout_ref.adapter_path") from None
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{folder}: no adapter_model.safetensors in this folder; save the adapter by peft's save_pretrained "
            "(older .bin files are pickles, which klimb does not open)"
        )
    if (kind := _peft_type(folder)) != "LORA":
        raise ModelError(f"{folder}: this is a peft folder of type {kind}; klimb merges LORA adapters only")
    device = model.device
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            merged: Any = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except _LOAD_ERRORS as error:
        raise ModelError(f"{folder}: this adapter does not fit the model: {_first_line(error)}") from None
    # peft only warns and leaves what it did not find at zero: the run would start without its adapter.
    if missing := [w for w in caught if "missing adapter keys" in str(w.message)]:
        raise ModelError(f"{folder}: this adapter does not fit the model: {str(missing[0].message)[:300]}")
    whole = cast(PreTrainedModel, merged)
    cast(nn.Module, whole).to(device).requires_grad_(True).eval()
    return whole


def _peft_type(folder: Path) -> str:
    try:
        return str(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("peft_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder}: its adapter_config.json cannot be read: {_first_line(error)}") from None


def _load(auto_class: Any, folder: Path, trust_remote_code: bool, role: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """transformers fills missing weights with random numbers and only warns; here they are refused."""
    disable_progress_bar()  # klimb shows its own; a bar for loading a small folder only scrolls the screen
    try:
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=NAME,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise ModelError(f"{folder}: {role} cannot be loaded from this folder: {_first_line(error)}") from None
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if info["missing_keys"] or info["mismatched_keys"]:
        keys = sorted(str(k) for k in [*info["missing_keys"], *info["mismatched_keys"]])
        raise ModelError(f"{folder}: the weights do not fill {role}; missing or misshapen: {', '.join(keys[:5])}")
    return model, info


def check_head(model: PreTrainedModel) -> None:
    """The passes run the body and the output embedding themselves; refuse a model that does more than that."""
    # A cap shows only on large logits, which a barely trained model does not have: its key is looked at too.
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None) is None:
        ids = torch.arange(1, 5, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            parts = head_of(model)(body_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
        if whole.shape == parts.shape and torch.allclose(whole, parts, atol=1e-4, rtol=1e-4):
            return
    raise ModelError(
        f"{model.config.model_type}: this architecture changes its logits after the output embedding "
        "(soft-capping or scaling), which klimb's chunked head does not do yet"
    )


def body_of(model: PreTrainedModel) -> nn.Module:
    """The transformer without its head."""
    return model.base_model


def head_of(model: PreTrainedModel) -> nn.Module:
    """The output embedding."""
    head = model.get_output_embeddings()
    assert head is not None
    return head


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The reference, when it is the weights that training starts from."""
    return freeze(copy.deepcopy(model))


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def critic_from(model: PreTrainedModel) -> Critic:
    """The actor's body, copied, with a new head."""
    return Critic(copy.deepcopy(cast(PreTrainedModel, model.base_model))).to(model.device).eval()


def load_critic(folder: Path, trust_remote_code: bool, device: torch.device) -> Critic:
    """A body from any folder; its value head too when klimb wrote one there."""
    body, _ = _load(AutoModel, folder, trust_remote_code, "a critic's body")
    admit(body.eval())
    critic = Critic(body)
    if (folder / VALUE_HEAD).is_file():
        try:
            critic.head.load_state_dict(load_file(folder / VALUE_HEAD))
        except _LOAD_ERRORS as error:
            raise ModelError(
                f"{folder / VALUE_HEAD}: this value head does not fit the body beside it: {_first_line(error)}"
            ) from None
    return critic.to(device).eval()


def context_limit(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was built for, or None when its config does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    uses = getattr(model.config.get_text_config(), "use_sliding_window", window is not None)
    return min((n for n in (limit, window if uses else None) if n), default=None)


def model_end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End ids of the generation config; a model may have several."""
    ids = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
