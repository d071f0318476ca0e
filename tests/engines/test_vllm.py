"""What is vLLM's own: the mended reload, a load that fails half-way, the prefix cache, kept caches. Collected for vLLM only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine import Generation, Request
from services.rollout.vllm_checkpoint import checksum
from slipstream.errors import InvalidInput
from slipstream.probes import Probes
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_LENGTH, Span
from tests.engines.conftest import World
from tests.engines.test_contract import LONG, PROMPT, TOLERANCE, all_of, prompts, same

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_without_the_mend_a_reload_scrambles_the_experts(world: World) -> None:
    """The fault that `vllm_moe_reload` is for: the same weights loaded again give other log-probabilities, with no error. With
    the mend they give the same bits. When the first half fails, vLLM has mended itself: remove the file."""
    before = (await all_of(world, [Request(PROMPT, 12, seed=1)]))[0]
    try:
        assert await world.engine._vllm.call("slipstream_mend", False) == [False]
        await world.load(1)
        scrambled = (await all_of(world, [Request(PROMPT, 12, seed=1)]))[0]
        assert world.gaps(PROMPT, scrambled).max() > 1000 * TOLERANCE
    finally:
        assert await world.engine._vllm.call("slipstream_mend", True) == [True]
        await world.load(1)
    assert same((await all_of(world, [Request(PROMPT, 12, seed=1)]))[0], before)


async def test_the_samples_of_a_group_compute_their_prompt_once(world: World) -> None:
    """Eight samples of one prompt: all but the first find its full blocks in the cache."""
    signals = world.engine.signals
    prompts_before, cached_before = signals.prompt_tokens, signals.cached_prompt_tokens
    prompt = LONG[::-1].copy()
    await all_of(world, [Request(prompt, 4, seed=0)])
    await all_of(world, [Request(prompt, 4, seed=1 + i) for i in range(7)])
    assert signals.prompt_tokens - prompts_before == 8 * len(prompt)
    assert signals.cached_prompt_tokens - cached_before == 7 * 64


async def test_a_kept_cache_serves_those_in_flight_only(world: World) -> None:
    """on_swap = "keep": answers in flight go on with the old version's keys and values, which their log-probabilities show; a
    request that comes after the swap sees nothing of it, even behind the same prompt."""
    run, engine = world.run, world.engine
    engine._run = run.model_copy(update={"rollout": run.rollout.model_copy(update={"on_swap": "keep"})})
    try:
        await all_of(world, [Request(LONG, 8, seed=1)])
        preempted = engine.signals.preemptions
        flying = [Request(LONG, 50, seed=10 + i) for i in range(4)]
        answers = [engine.generate(request) for request in flying]
        async for _ in engine.stream(Request(PROMPT, 5)):
            pass
        await world.load(2)
        fresh = (await all_of(world, [Request(LONG, 8, seed=1)]))[0]
        assert fresh.spans == (Span(2, 1, 1, 8),) and world.gaps(LONG, fresh).max() <= TOLERANCE
        kept = [await answer for answer in answers]
        assert all(len(a.tokens) == 50 and [s.version for s in a.spans] == [1, 2] for a in kept)
        assert max(world.gaps(LONG, a)[a.spans[0].length :].max() for a in kept) > 100 * TOLERANCE
        assert max(world.gaps(LONG, a)[: a.spans[0].length].max() for a in kept) <= TOLERANCE
        assert engine.signals.preemptions == preempted  # nobody was computed again
    finally:
        engine._run = run


async def test_a_load_that_fails_half_way_starts_the_engine_anew(world: World) -> None:
    """After the pause there is no way back for the weights: vLLM is started with the old version, the answers in flight and a
    stream that has sent something go on under it, and the version that broke is not tried again."""
    before = (await all_of(world, [Request(PROMPT, 20, seed=1)]))[0]
    whole = [piece async for piece in world.engine.stream(Request(PROMPT, 100, seed=3, routes=True))]
    await world.engine._vllm.call("slipstream_fail_next_load")
    flying = [world.engine.generate(Request(p, 100, seed=i, routes=True)) for i, p in enumerate(prompts(5))]
    pieces: list[Generation] = []
    started = asyncio.Event()

    async def follow() -> None:
        async for piece in world.engine.stream(Request(PROMPT, 100, seed=3, routes=True)):
            pieces.append(piece)
            started.set()

    following = asyncio.ensure_future(follow())
    await started.wait()
    with pytest.raises(InvalidInput, match="half-way"):
        await world.engine.swap(world.version(9), world.tensors[2])
    for prompt, future in zip(prompts(5), flying, strict=True):
        answer = await future
        assert answer.spans == (Span(1, 0, 1, 100),) and answer.finish_reason == FINISH_LENGTH
        assert world.gaps(prompt, answer).max() <= TOLERANCE
        _, routes = world.forward(1, prompt, answer.tokens)
        assert answer.routes is not None and np.array_equal(np.sort(answer.routes, -1), np.sort(routes, -1))
    await following
    tokens = np.concatenate([p.tokens for p in pieces])
    assert len(tokens) == 100 == sum(s.length for p in pieces for s in p.spans)
    joined = Generation(tokens, np.concatenate([p.logprobs for p in pieces]), whole[-1].spans, FINISH_LENGTH)
    joined.spans = (Span(1, 0, 1, 100),)
    assert world.gaps(PROMPT, joined).max() <= TOLERANCE
    assert pieces[-1].routes is not None and pieces[-1].routes.shape == (len(PROMPT) + 99, 2, 2)
    assert same((await all_of(world, [Request(PROMPT, 20, seed=1)]))[0], before)
    with pytest.raises(InvalidInput, match="not tried again"):
        await world.engine.swap(world.version(9), world.tensors[2])
    await world.load(2)
    assert world.engine.version.number == 2


class OtherNodes:
    """Stands in for the group of an engine over several nodes: remembers what the members were to hold, and votes."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.votes = True

    async def prepare(self, version: PolicyVersion, folder: Path, name: str, crc32c: int) -> None:
        assert checksum(str(folder / "versions" / name)) == crc32c
        if not self.votes:
            raise InvalidInput(f"node 1 holds version {version.number} as a file with another checksum", "VOTE")
        self.held.append(name)

    def forget(self, name: str) -> None:
        if name in self.held:
            self.held.remove(name)


async def test_an_engine_of_several_nodes_goes_back_without_a_new_start(world: World) -> None:
    """Its parts cannot start one by one. A vote that differs refuses a version before the pause; one that fails the canary is
    replaced by the old weights, loaded on all nodes again, and requests in flight go on; each node keeps what serves."""
    engine, nodes = world.engine, OtherNodes()
    engine._vllm._group, vllm = nodes, engine._vllm.llm
    try:
        await world.load(2)
        await world.load(1)
        serving = list(nodes.held)
        assert len(serving) == 1
        before = (await all_of(world, [Request(PROMPT, 20, seed=1)]))[0]
        nodes.votes = False
        with pytest.raises(InvalidInput, match="node 1 holds version 7"):
            await engine.swap(world.version(7), world.tensors[2])
        nodes.votes = True
        assert same((await all_of(world, [Request(PROMPT, 20, seed=1)]))[0], before) and nodes.held == serving
        tokens = np.stack([LONG, LONG[::-1]])
        requests = [Request(p, 100, seed=i) for i, p in enumerate(prompts(6))]
        flying = [engine.generate(request) for request in requests]
        with pytest.raises(InvalidInput, match="does not hold the published weights"):
            wrong = Probes(tokens, np.zeros((2, tokens.shape[1] - 1), np.float32))
            await engine.swap(world.version(6), world.tensors[2], wrong)
        for request, future in zip(requests, flying, strict=True):
            answer = await future
            assert answer.spans == (Span(1, 0, 1, 100),) and world.gaps(request.prompt, answer).max() <= TOLERANCE
        assert engine._vllm.llm is vllm and nodes.held == serving
        assert same((await all_of(world, [Request(PROMPT, 20, seed=1)]))[0], before)
    finally:
        engine._vllm._group = None


async def test_a_version_that_scores_its_probes_otherwise_is_taken_back(world: World) -> None:
    """The canary: the trainer's figures are another model's. The version is refused, and no token of it ever leaves."""
    tokens = np.stack([LONG, LONG[::-1]])
    scored = {}
    for number in (1, 2):
        rows = [world.forward(number, row[:1], row[1:])[0] for row in tokens]
        scored[number] = np.stack([
            np.asarray(r.log_softmax(-1))[np.arange(len(r)), row[1:]] for r, row in zip(rows, tokens, strict=True)])
    await world.engine.swap(world.version(2), world.tensors[2], Probes(tokens, scored[2]))
    await world.engine.swap(world.version(1), world.tensors[1], Probes(tokens, scored[1]))
    requests = [Request(p, 100, seed=i) for i, p in enumerate(prompts(6))]
    flying = [world.engine.generate(request) for request in requests]
    with pytest.raises(InvalidInput, match="does not hold the published weights"):
        await world.engine.swap(world.version(8), world.tensors[2], Probes(tokens, scored[1]))
    for request, future in zip(requests, flying, strict=True):
        answer = await future
        assert answer.spans == (Span(1, 0, 1, 100),) and world.gaps(request.prompt, answer).max() <= TOLERANCE
    assert world.engine.version.number == 1


async def test_sleep_is_asked_for_by_vllms_own_names() -> None:
    """What services/rollout/vllm_process.py and vllm_arguments.py say on a GPU, where a CPU would not complain."""
    import inspect

    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    inspect.signature(AsyncLLM.sleep).bind(None, level=1, mode="keep")
    inspect.signature(AsyncLLM.wake_up).bind(None)
    inspect.signature(AsyncEngineArgs).bind(model="m", enable_sleep_mode=True)
