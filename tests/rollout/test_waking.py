"""An engine that wakes takes memory from the GPU: what trainers keep unused has gone back before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from klimb.ranks import ALONE
from klimb.rollout import remote, vllm
from klimb.rollout.remote import RemoteSampler
from klimb.rollout.vllm import EngineSettings, VLLMSampler
from tests.tiny_models import byte_tokenizer, make_prompts, make_requests, sampling

SETTINGS = EngineSettings(
    folder=Path("none"),
    slots=4,
    context=64,
    dtype=torch.float32,
    memory_share=0.5,
    tensor_parallel=1,
    sleeps=True,
)


def test_ranks_give_back_before_their_engines_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    said: list[str] = []

    def call(sampler: RemoteSampler, name: str, *_: Any) -> list[Any]:
        said.append(name)
        return []

    monkeypatch.setattr(remote, "_actor", lambda width: object())
    monkeypatch.setattr(remote, "give_back", lambda: said.append("give back"))
    monkeypatch.setattr(RemoteSampler, "_call", call)
    sampler = RemoteSampler(SETTINGS, byte_tokenizer(), ALONE)
    sampler.load_weights(iter(()), 1)
    sampler.generate(make_requests(make_prompts([3])), sampling())
    sampler.sleep()
    assert said == ["start", "give back", "load_weights", "give back", "generate", "sleep"]


class Sleeper:
    """Of vLLM what sleeping and waking ask for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def sleep(self, level: int) -> None:
        self.said.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.said.append("wake " + " ".join(tags))

    def collective_rpc(self, name: str, kwargs: Any) -> None:
        self.said.append(name)

    def apply_model(self, _: Any) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True


def test_an_engine_alone_gives_back_before_it_wakes_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Sleeper()

    class Package:
        SamplingParams = None

        @staticmethod
        def LLM(*_: Any, **__: Any) -> Sleeper:
            return engine

    monkeypatch.setattr(vllm, "_imported", lambda: Package)
    monkeypatch.setattr(VLLMSampler, "_by_device", lambda self: {})
    monkeypatch.setattr(vllm, "give_back", lambda: engine.said.append("give back"))
    sampler = VLLMSampler(SETTINGS, byte_tokenizer())
    sampler.load_weights(iter(()), 1)
    sampler.load_weights(iter(()), 2)
    assert engine.said == ["sleep", "give back", "wake weights", "reload_weights", "reload_weights"]
