"""The learned reward on tiny random models: what it reads, where it reads the score, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_samples import make_sample
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    PreTrainedTokenizerFast,
)

from klimb.errors import ModelError
from klimb.models.attention import NAME
from klimb.reward.model import RewardModel, RewardModelSettings, same_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrst"]


def make_tokenizer(words: list[str], template: str | None = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.index("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, "num_labels": 1, "pad_token_id": 0, **changes})


def save(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(WORDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("llama"), LlamaForSequenceClassification(llama()), tokenizer)


def make(folder: str, policy: Any, **settings: Any) -> RewardModel:
    return RewardModel(RewardModelSettings(path=folder, **settings), policy_tokenizer=policy)


def alone(folder: str, ids: list[int]) -> float:
    """The score by transformers' own forward, one row, no padding."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


SAMPLES = [make_sample(response_ids=tuple(4 + (7 * i + j) % 20 for j in range(1 + 5 * i % 13))) for i in range(11)]


def test_score_is_read_at_the_last_real_token_whatever_the_batch(folder: str, tokenizer: Any) -> None:
    wide = [o.value for o in make(folder, tokenizer).score(SAMPLES)]
    one_by_one = [make(folder, tokenizer, batch_size=1).score([sample])[0].value for sample in SAMPLES]
    small = [o.value for o in make(folder, tokenizer, batch_size=3, max_tokens=32).score(SAMPLES)]
    backwards = [o.value for o in make(folder, tokenizer).score(SAMPLES[::-1])][::-1]
    expected = [alone(folder, list(sample.token_ids)) for sample in SAMPLES]
    assert len(set(expected)) == len(SAMPLES), "rows must differ for this to show anything"
    for got in (wide, one_by_one, small, backwards):
        assert got == pytest.approx(expected, abs=1e-5)


def test_a_response_that_ends_in_the_pad_id_is_read_to_its_end(folder: str, tokenizer: Any) -> None:
    sample = make_sample(response_ids=(4, 5, 0))
    longer = make_sample(response_ids=(4, 5, 6, 7, 8))
    (got, _) = make(folder, tokenizer).score([sample, longer])
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([[*sample.token_ids]])).last_hidden_state
        assert got.value == pytest.approx(float(model.score(hidden[0, -1])), abs=1e-5)


def test_case_TR_01_a_cut_off_answer_is_never_overwritten(folder: str, tokenizer: Any) -> None:
    cut_off = make_sample(response_ids=(5, 6, 7, 8), finish_reason="length")
    ended = make_sample(response_ids=(5, 6, 7, 2), finish_reason="stop")
    before = cut_off.token_ids, cut_off.mask
    plain = make(folder, tokenizer).score([cut_off, ended])
    assert plain[0].value == pytest.approx(alone(folder, [1, 3, 5, 6, 7, 8]), abs=1e-5)
    appended = make(folder, tokenizer, append_end=True).score([cut_off, ended])
    assert appended[0].value == pytest.approx(alone(folder, [1, 3, 5, 6, 7, 8, 2]), abs=1e-5)
    assert appended[1].value == pytest.approx(alone(folder, [1, 3, 5, 6, 7, 2]), abs=1e-5)
    assert (cut_off.token_ids, cut_off.mask) == before == ((1, 3, 5, 6, 7, 8), (False, False, True, True, True, True))


def test_equal_tokenizers_share_ids_and_others_get_text(folder: str, tokenizer: Any) -> None:
    other = make_tokenizer([*WORDS[:4], *WORDS[:3:-1]])
    assert same_tokenizer(tokenizer, make_tokenizer(WORDS))
    assert not same_tokenizer(tokenizer, other)
    sample = make_sample(" c d", prompt="a b", response_ids=(20, 21))
    by_ids = make(folder, tokenizer)
    assert by_ids.token_ids
    assert by_ids.score([sample])[0].value == pytest.approx(alone(folder, [1, 3, 20, 21]), abs=1e-5)
    by_text = make(folder, other)
    assert not by_text.token_ids
    assert by_text.score([sample])[0].value == pytest.approx(alone(folder, [1, 4, 5, 6, 7]), abs=1e-5)


def test_case_DT_01_its_own_chat_template_gets_one_start_token(tmp_path: Path, folder: str, tokenizer: Any) -> None:
    template = "<s>{% for m in messages %} {{ 'q' if m.role == 'user' else 'r' }} {{ m.content }}{% endfor %} </s>"
    chat = make_tokenizer(WORDS, template)
    model = LlamaForSequenceClassification.from_pretrained(folder)
    chat_folder = save(tmp_path / "chat", model, chat)
    other = make_tokenizer([*WORDS[:4], *WORDS[:3:-1]])
    got = make(chat_folder, other).score([make_sample("c", prompt="a b")])
    q, r = WORDS.index("q"), WORDS.index("r")
    assert got[0].value == pytest.approx(alone(folder, [1, q, 4, 5, r, 6, 2]), abs=1e-5)


def test_rows_beyond_its_context_fail_alone(folder: str, tokenizer: Any) -> None:
    got = make(folder, tokenizer).score([make_sample(response_ids=(4,) * 63), make_sample()])
    assert got[0].failure is not None
    assert "65 tokens; the reward model reads 64" in got[0].failure.detail
    assert got[1].value is not None


def test_non_finite_scores_are_failures(tmp_path: Path, tokenizer: Any) -> None:
    model = LlamaForSequenceClassification(llama())
    model.score.weight.data.fill_(float("nan"))
    got = make(save(tmp_path, model, tokenizer), tokenizer).score([make_sample()])
    assert got[0].failure is not None
    assert got[0].failure.kind == "non_finite"


def test_half_precision_folders_are_read_in_float32(tmp_path: Path, folder: str, tokenizer: Any) -> None:
    model = LlamaForSequenceClassification.from_pretrained(folder).to(torch.bfloat16)
    half = save(tmp_path, model, tokenizer)
    got = make(half, tokenizer).score(SAMPLES[:3])
    widened = LlamaForSequenceClassification.from_pretrained(half, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [float(widened(torch.tensor([s.token_ids])).logits) for s in SAMPLES[:3]]
    assert [o.value for o in got] == pytest.approx(expected, abs=1e-5)


def test_other_bodies(tmp_path: Path, tokenizer: Any) -> None:
    gpt2 = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=1, pad_token_id=0)
    )
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            num_labels=1,
        )
    )
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, "pad_token_id": 0}
    caps = {"attn_logit_softcapping": 0.01, "final_logit_softcapping": None, "sliding_window": 64}
    capped = Gemma2ForSequenceClassification(Gemma2Config(**sizes, **heads, **caps, max_position_embeddings=64))
    windows = MistralForSequenceClassification(MistralConfig(**sizes, **heads, sliding_window=4))
    for name, model, end_to_end in (
        ("gpt2", gpt2, True),
        ("bert", bert, False),
        ("soft-capped", capped, False),
        ("a window of 4", windows, False),
    ):
        scorer = make(save(tmp_path / name, model, tokenizer), tokenizer)
        assert (scorer._model.config._attn_implementation == NAME) == end_to_end, name
        with torch.no_grad():
            expected = [float(model.eval()(torch.tensor([s.token_ids])).logits) for s in SAMPLES]
        assert [o.value for o in scorer.score(SAMPLES)] == pytest.approx(expected, abs=1e-5), name


def test_refusals(tmp_path: Path, tokenizer: Any) -> None:
    headless = save(tmp_path / "causal", LlamaForCausalLM(llama()), tokenizer)
    with pytest.raises(ModelError, match=r"no weights for score\.weight(.|\n)*LlamaForCausalLM"):
        make(headless, tokenizer)
    two = save(tmp_path / "two", LlamaForSequenceClassification(llama(num_labels=2)), tokenizer)
    with pytest.raises(ModelError, match="2 labels"):
        make(two, tokenizer)
    with pytest.raises(ModelError, match="no folder"):
        make(str(tmp_path / "absent"), tokenizer)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="no tokenizer that loads"):
        make(str(empty), tokenizer)
    tokenizer.save_pretrained(empty)
    with pytest.raises(ModelError, match="does not load as a sequence classifier"):
        make(str(empty), tokenizer)
    small = save(tmp_path / "small", LlamaForSequenceClassification(llama(vocab_size=10)), tokenizer)
    with pytest.raises(ModelError, match="token id 23, the model has embeddings for 10"):
        make(small, tokenizer)
