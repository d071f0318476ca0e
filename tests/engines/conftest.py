"""One engine for the whole contract suite, with two versions to go between.

Which one: SLIPSTREAM_TEST_ENGINE, torch when it is not set; torch:all with rollout.compile = "all". `make test-vllm` sets it to
vllm and runs this folder in an environment of its own; an engine starts once, because vLLM takes half a minute for it.

Axes: P prompt tokens, n generated tokens, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.rollout.engine import Generation
from services.rollout.routes import RouteCapture
from services.rollout.service import engine_of
from slipstream.config import RunFile
from slipstream.manifest import RawTensor
from slipstream.model import load_state, skeleton
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.rollout_runs import run_file, weights

ENGINE, _, COMPILE = os.environ.get("SLIPSTREAM_TEST_ENGINE", "torch").partition(":")
SLOTS, CONTEXT = 16, 128
if ENGINE != "vllm":
    collect_ignore = ["test_vllm.py", "test_vllm_adapter.py", "test_vllm_speculation.py", "test_vllm_suffix.py"]


class World:
    """The engine under test and what it should do: transformers' models of versions 1 and 2."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.engine: Any = engine_of(run)
        self.files, first = weights(run, 1)
        self.tensors: dict[int, list[RawTensor]] = {1: first, 2: weights(run, 2)[1]}
        self.models: dict[int, Any] = {}
        for number, tensors in self.tensors.items():
            self.models[number] = skeleton(self.files)[0]
            load_state(self.models[number], tensors)
        self._captures = {number: RouteCapture(model) for number, model in self.models.items()}

    @staticmethod
    def version(number: int) -> PolicyVersion:
        return PolicyVersion(number=number, step=number - 1, incarnation=1)

    async def load(self, number: int) -> None:
        await self.engine.swap(self.version(number), self.tensors[number])

    @torch.inference_mode()
    def forward(self, number: int, prompt: np.ndarray, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """One full pass, no cache: (logits fp32 [n, V] of the generated tokens, routes [P+n-1, L, K])."""
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None, :-1]
        with self._captures[number]:
            logits = self.models[number](input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        return logits, self._captures[number].take().numpy()

    def gaps(self, prompt: np.ndarray, answer: Generation, temperature: float = 1.0) -> np.ndarray:
        """|engine - forward| of each token's log-probability, under the version that its span names, float [n]."""
        found, start = np.zeros(len(answer.tokens)), 0
        for span in answer.spans:
            logits, _ = self.forward(span.version, prompt, answer.tokens)
            chosen = torch.from_numpy(answer.tokens).long()[:, None]
            expected = torch.log_softmax(logits / temperature, -1).gather(1, chosen)[:, 0]
            own = slice(start, start + span.length)
            found[own] = np.abs(expected.numpy() - answer.logprobs)[own]
            start += span.length
        assert start == len(answer.tokens) == len(answer.logprobs)
        return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The engine, started with version 1."""
    world = World(run_file(
        Path(tmp_path_factory.mktemp("engine")), rollout={
            "engine": ENGINE, "compile": COMPILE or "auto", "slots": SLOTS, "context": CONTEXT, "capture_routes": True,
            "on_swap": "recompute"}))
    start(world)
    await world.engine.start(world.files, world.tensors[1], world.version(1))
    yield world
    await world.engine.stop()


def start(world: World) -> None:
    """What the tests of one engine need of it before it starts."""
    if ENGINE == "vllm":
        world.engine.extension = "tests.engines.faulty_worker.FaultyExtension"


@pytest_asyncio.fixture(loop_scope="session")
async def world(shared: World) -> AsyncIterator[World]:
    """The engine on version 1 with nothing in flight, and left so."""
    if shared.engine.version.number != 1:
        await shared.load(1)
    yield shared
    assert shared.engine.free_slots == SLOTS, "a test left requests in flight"
