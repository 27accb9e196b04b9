"""The learned reward: a sequence classifier with one label that reads prompt and response.

What it reads are the token ids that were sampled, when its tokenizer is the policy's; otherwise the texts, put
through its own chat template if it has one, else joined. Nothing is ever put in place of a sampled token; an
end token may be appended to an answer cut off at the limit, for a model that was trained with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from klimb.errors import ModelError
from klimb.models.attention import NAME, admit
from klimb.models.forward import end_states
from klimb.models.load import context_limit
from klimb.models.sharded import release, run
from klimb.offload import HOST, at_work
from klimb.ranks import ALONE, Ranks
from klimb.reward.base import Outcome, failed, valued
from klimb.types import Sample


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings:
    """path: a Hugging Face folder. batch_size, max_tokens: rows, and rows times longest row, per forward.

    append_end: an answer that was cut off gets the model's end token appended before it is read. offload: the model
    waits in the host's memory between batches of samples.
    """

    path: str
    batch_size: int = 512
    max_tokens: int = 16_384
    trust_remote_code: bool = False
    append_end: bool = False
    offload: bool = False


class RewardModel:
    """A reward component without verdicts. Read `token_ids` to see whether it reads ids or text."""

    verifies = False

    def __init__(
        self,
        settings: RewardModelSettings,
        *,
        policy_tokenizer: Any,
        device: torch.device | str = "cpu",
        name: str = "model",
        weight: float = 1.0,
        ranks: Ranks = ALONE,
        divide: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        """Load in float32. divide: shards the model among the ranks, in place. Raises ModelError for a folder that
        holds no trained scorer with one label."""
        self.name = name
        self.weight = weight
        self._settings = settings
        self._device = torch.device(device)
        self._tokenizer = _load_tokenizer(settings)
        self._model, self._ranks = load_scorer(settings), ranks if divide is not None else ALONE
        self.token_ids = same_tokenizer(policy_tokenizer, self._tokenizer)
        self._limit = getattr(self._model.config, "max_position_embeddings", None)
        rows = int(self._model.get_input_embeddings().weight.shape[0])
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= rows:
            raise ModelError(
                f"{settings.path}: the tokenizer has the token id {largest}, the model has embeddings for {rows} "
                "ids only. Save the tokenizer the model was trained with beside it."
            )
        if divide is not None:
            divide(self._model)
        else:
            self._model.to(HOST if settings.offload else self._device)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One score per sample, in order and independent of how rows are batched (float32 rounding apart)."""
        rows = [self._ids(sample) for sample in samples]
        starts = [len(s.prompt.token_ids) if self.token_ids else len(row) for s, row in zip(samples, rows, strict=True)]
        outcomes: list[Outcome | None] = [self._unreadable(row) for row in rows]
        readable = [i for i, outcome in enumerate(outcomes) if outcome is None]
        with at_work(self._model, self._device if self._settings.offload else None):
            for batch in (batches := self._batches(rows, readable)):
                scores = self._forward([rows[i] for i in batch], [starts[i] for i in batch])
                for i, score in zip(batch, scores, strict=True):
                    outcomes[i] = valued(score)
            self._keep_in_step(len(batches))
        return [outcome for outcome in outcomes if outcome is not None]

    def _keep_in_step(self, done: int) -> None:
        """As many forwards as the rank that had most: its layers are gathered with this one's help."""
        most = self._ranks.largest({"batches": done})["batches"]
        for _ in range(int(most) - done):
            self._forward([[0]], [0])
        if self._model is not None:
            release(self._model)

    def close(self) -> None:
        """Free the weights; the component cannot score afterwards."""
        self._model = None

    def _ids(self, sample: Sample) -> list[int]:
        ids = list(sample.token_ids) if self.token_ids else self._retokenized(sample)
        end = self._tokenizer.eos_token_id
        cut_off = sample.finish_reason == "length"
        if self._settings.append_end and cut_off and end is not None and ids and ids[-1] != end:
            ids.append(int(end))
        return ids

    def _retokenized(self, sample: Sample) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            return list(tokenizer(sample.prompt.text + sample.text)["input_ids"])
        messages = [
            {"role": "user", "content": sample.prompt.text},
            {"role": "assistant", "content": sample.text},
        ]
        # The template writes the start token itself; the tokenizer must not add a second one.
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _unreadable(self, ids: list[int]) -> Outcome | None:
        if not ids:
            return failed("error", "prompt and response are no tokens for the reward model")
        if self._limit is not None and len(ids) > self._limit:
            return failed("error", f"{len(ids)} tokens; the reward model reads {self._limit} at most")
        return None

    def _batches(self, rows: Sequence[list[int]], chosen: Sequence[int]) -> list[list[int]]:
        """Longest first, so that rows of like length share a batch and the largest batch comes first."""
        padded = _has_plain_head(self._model)
        batches: list[list[int]] = []
        longest = 0
        for i in sorted(chosen, key=lambda i: (-len(rows[i]), i)):
            room = (
                bool(batches)
                and len(batches[-1]) < self._settings.batch_size
                and (len(batches[-1]) + 1) * longest <= self._settings.max_tokens
                and (padded or len(rows[i]) == longest)
            )
            if room:
                batches[-1].append(i)
            else:
                batches.append([i])
                longest = len(rows[i])
        return batches

    @torch.no_grad()
    def _forward(self, rows: Sequence[list[int]], starts: Sequence[int]) -> list[float]:
        """Rows of ids -> their scores. starts: where each row's response begins; what is before may be shared."""
        model = self._model
        assert model is not None, "the reward model is closed"
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        place, ends = torch.arange(tokens.shape[1])[None, :], (lengths - 1)[:, None]
        # The last token is always read, also of a response without one.
        mask = ((place >= torch.tensor(starts)[:, None]) | (place == ends)) & (place <= ends)
        tokens, attention, mask = (x.to(self._device) for x in (tokens, place <= ends, mask))
        if not _has_plain_head(model):
            # Its own pooling is kept; rows of one length need no padding, which it might read past.
            return _flat(model(input_ids=tokens, attention_mask=attention.long()).logits)
        if model.config._attn_implementation == NAME:
            return _flat(model.score(end_states(model, tokens, attention, mask)))
        hidden = run(model, _body, model.base_model, tokens, attention.long())
        # transformers looks for the last token that is not the pad id, which is wrong where a model ends
        # with its pad id or has none; the lengths know.
        return _flat(model.score(hidden[torch.arange(len(rows)), lengths - 1]))


def _body(body: Any, tokens: Tensor, attention: Tensor) -> Tensor:
    return body(input_ids=tokens, attention_mask=attention, use_cache=False).last_hidden_state


def _flat(logits: Tensor) -> list[float]:
    return [float(x) for x in logits.float().reshape(-1).cpu()]


def _has_plain_head(model: Any) -> bool:
    """Whether the model scores a token by a linear `score` on the body's output, as decoder classifiers do."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear) and model.base_model is not model


def load_scorer(settings: RewardModelSettings) -> Any:
    """The folder's sequence classifier in float32, in evaluation mode, without gradients.

    Raises ModelError when there is no such folder, when weights are missing (a causal language model has no
    score head: it would be random), or when it has not exactly one label.
    """
    path = settings.path
    if not Path(path).is_dir():
        raise ModelError(
            f"reward_model.model_path: there is no folder '{path}'. Give a folder saved by save_pretrained."
        )
    classes: Any = AutoModelForSequenceClassification
    try:
        model, info = classes.from_pretrained(
            path,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"reward_model.model_path: '{path}' does not load as a sequence classifier: {error}"
        ) from error
    missing: list[str] = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"reward_model.model_path: '{path}' holds no weights for {', '.join(missing[:4])}"
            f"{' and more' if len(missing) > 4 else ''}, so its scores would be random. It was saved as "
            f"{', '.join(model.config.architectures or ['an unnamed class'])}; a reward model is saved from a "
            "trained ...ForSequenceClassification with num_labels 1."
        )
    if model.config.num_labels != 1:
        raise ModelError(
            f"reward_model.model_path: '{path}' has {model.config.num_labels} labels; a reward is one number, so "
            "it needs num_labels 1."
        )
    model.eval().requires_grad_(False)
    if _has_plain_head(model):
        _read_end_to_end(model)
    return model


def _read_end_to_end(model: Any) -> None:
    """Let rows lie end to end where the architecture can, and none is longer than a window of its attention; padded
    batches do for the others."""
    own = model.config._attn_implementation
    if context_limit(model) != getattr(model.config, "max_position_embeddings", None):
        return
    try:
        model.set_attn_implementation(NAME)
        admit(model.base_model)
    except (ModelError, ValueError, AttributeError):
        model.set_attn_implementation(own)


def _load_tokenizer(settings: RewardModelSettings) -> Any:
    if not Path(settings.path).is_dir():
        raise ModelError(
            f"reward_model.model_path: there is no folder '{settings.path}'. Give a folder saved by save_pretrained."
        )
    classes: Any = AutoTokenizer
    try:
        return classes.from_pretrained(
            settings.path, local_files_only=True, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"reward_model.model_path: '{settings.path}' has no tokenizer that loads ({error}). Save the one the "
            "model was trained with into the folder."
        ) from error


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether token ids mean the same to both: equal vocabularies and equal start, end and unknown ids."""
    ids = ("bos_token_id", "eos_token_id", "unk_token_id")
    return one.get_vocab() == other.get_vocab() and all(getattr(one, x) == getattr(other, x) for x in ids)
