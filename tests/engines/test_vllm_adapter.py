"""Adapters on vLLM: versions are A and B alone, the engine samples from the model that they make. Collected for vLLM only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.rollout.engine import Generation, Request
from services.rollout.service import engine_of
from services.rollout.vllm_adapter import MergedAdapter, places
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import ADAPTER_FILE, bare, load_state, skeleton
from slipstream.probes import Probes
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import Span
from tests.engines.conftest import CONTEXT, SLOTS
from tests.engines.test_contract import LONG, PROMPT, TOLERANCE, prompts, same
from tests.rollout_runs import MODEL, run_file, weights

pytestmark = pytest.mark.asyncio(loop_scope="session")
RANK = 4
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DENSE = {"build": MODEL["build"] | {
    "model_type": "llama", "config": {k: v for k, v in MODEL["build"]["config"].items() if k not in OF_EXPERTS}}}


class Adapted:
    """An engine on adapters 1 and 2 of one base, and transformers' models of what they make."""

    def __init__(self, folder: Path, how: str) -> None:
        """Merged, attention and experts; or in slots, attention of a model without experts: what a CPU can run."""
        lora = {"rank": RANK, "targets": ["attention"] if how == "slots" else ["attention", "experts"]}
        run = run_file(folder, model={**(DENSE if how == "slots" else MODEL), "lora": lora}, rollout={
            "engine": "vllm", "slots": SLOTS, "context": CONTEXT, "vllm": {"adapters": how}})
        self.how = how
        plain, self.base = weights(run, 1)
        outline = skeleton(plain)[0].to("meta")
        told = {
            "r": RANK, "lora_alpha": 8, "target_modules": [n for n, _ in outline.named_modules() if n.endswith(PARTS)],
            "target_parameters": [n for n, p in outline.named_parameters() if p.ndim == 3]}
        self.files = {**plain, ADAPTER_FILE: json.dumps(told).encode()}
        merge = MergedAdapter(self.files, self.base, outline)
        self.own = {number: _adapter(told, outline, seed=number) for number in (1, 2)}
        self.models: dict[int, Any] = {}
        for number, own in self.own.items():
            self.models[number] = skeleton(plain)[0]
            load_state(self.models[number], merge.merged(own))
        self.engine: Any = engine_of(run)

    @torch.inference_mode()
    def logprobs(self, number: int, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """float32 [n] of the generated tokens, in one full pass."""
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
        logits = self.models[number](input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
        return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def gap(self, prompt: np.ndarray, answer: Generation) -> float:
        """The largest |engine - forward|, each token by the version that its span names."""
        found, start = 0.0, 0
        for span in answer.spans:
            own = slice(start, start + span.length)
            expected = self.logprobs(span.version, prompt, answer.tokens)
            found, start = max(found, float(np.abs(expected - answer.logprobs)[own].max())), start + span.length
        return found

    def probes(self, number: int) -> Probes:
        tokens = np.stack([LONG[:20], LONG[20:40]])
        return Probes(tokens, np.stack([self.logprobs(number, row[:1], row[1:]) for row in tokens]))


def _adapter(told: dict[str, Any], outline: Any, seed: int) -> list[RawTensor]:
    """Random A and B for each place, large enough to be seen."""
    generator, shapes, own = torch.Generator().manual_seed(seed), dict(outline.named_parameters()), []
    for name, place in places(told, outline).items():
        *_, outputs, inputs = shapes[place.weight].shape
        rank = RANK * max(1, place.experts)
        for part, shape in ((".lora_A.weight", (rank, inputs)), (".lora_B.weight", (outputs, rank))):
            own.append(bare(name + part, torch.randn(shape, generator=generator) * 0.15))
    return own


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number=number, step=number - 1, incarnation=1)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["merged", "slots"])
async def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    adapted = Adapted(tmp_path_factory.mktemp("adapter"), request.param)
    await adapted.engine.start(adapted.files, [*adapted.base, *adapted.own[1]], version(1), adapted.probes(1))
    yield adapted
    await adapted.engine.stop()


async def test_adapters_are_versions(adapted: Adapted) -> None:
    """Log-probabilities are those of transformers' model with W + s B A, to 1e-5; a swap in the middle of answers changes the
    adapter and nothing else; back to the first one, every bit is as before."""
    engine, ask = adapted.engine, Request(PROMPT, 16, seed=3)
    first = await engine.generate(ask)
    assert first.spans == (Span(1, 0, 1, 16),) and adapted.gap(PROMPT, first) <= TOLERANCE
    apart = np.abs(adapted.logprobs(2, PROMPT, first.tokens) - first.logprobs).max()
    assert apart > 0.1  # the two adapters differ
    flying = [(p, engine.generate(Request(p, 90, seed=i))) for i, p in enumerate(prompts(6))]
    async for _ in engine.stream(Request(PROMPT, 5)):
        pass
    await engine.swap(version(2), adapted.own[2], adapted.probes(2))
    crossed = 0
    for prompt, future in flying:
        answer = await future
        crossed += [s.version for s in answer.spans] == [1, 2]
        assert adapted.gap(prompt, answer) <= (TOLERANCE if len(answer.spans) == 1 else 5)  # a kept cache is of both
    assert crossed
    second = await engine.generate(Request(PROMPT, 16, seed=3))
    assert second.spans == (Span(2, 1, 1, 16),) and adapted.gap(PROMPT, second) <= TOLERANCE
    await engine.swap(version(1), adapted.own[1], adapted.probes(1))
    assert same(await engine.generate(Request(PROMPT, 16, seed=3)), first)


async def test_an_adapter_that_does_not_fit_or_is_another_leaves_the_old_one(adapted: Adapted) -> None:
    """A missing matrix is refused before the pause; one adapter under another's name is found by the canary."""
    engine = adapted.engine
    before = await engine.generate(Request(PROMPT, 12, seed=1))
    with pytest.raises(InvalidInput, match="lacks tensor base_model.model"):
        await engine.swap(version(5), adapted.own[2][:-1])
    assert same(await engine.generate(Request(PROMPT, 12, seed=1)), before)
    exchange = engine._exchange
    with pytest.raises(InvalidInput, match="does not hold the published weights"):
        await engine.swap(version(6), adapted.own[2], adapted.probes(1))
    assert engine.version.number == 1
    assert same(await engine.generate(Request(PROMPT, 12, seed=1)), before)
    if adapted.how == "slots":  # it was tried beside the one that served: nothing was paused, nothing started anew
        assert engine._exchange == exchange and not engine._broken
        assert set(await engine._vllm.llm.list_loras()) == {1}
