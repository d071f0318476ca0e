"""A thousand swaps under load: no request fails, every token names the version that sampled it, memory stays flat."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine import Generation, Request
from services.rollout.torch_engine import TorchEngine
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_LENGTH
from tests.rollout_runs import run_file, weights

SWAPS, TOKENS, BYTES_MORE = 1000, 30, 40 << 20
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


async def test_a_thousand_swaps_under_load(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    files, first = weights(run)
    _, second = weights(run, seed=1)
    engine = TorchEngine(run)
    await engine.start(files, first, PolicyVersion(number=1, step=1))
    answers: list[Generation] = []
    going = True

    async def ask(seed: int) -> None:
        while going:
            answers.append(await engine.generate(Request(np.array([3, 9, 12], np.int32), TOKENS, seed=seed)))
            seed += 1000

    asking = [asyncio.create_task(ask(seed)) for seed in range(16)]
    early = 0
    for number in range(2, SWAPS + 2):
        await engine.swap(PolicyVersion(number=number, step=number), (first, second)[number % 2])
        await asyncio.sleep(0)
        if number == SWAPS // 5:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early) * 1024
    going = False
    await asyncio.gather(*asking)
    await engine.stop()
    assert len(answers) > 40 and grown < BYTES_MORE, (len(answers), grown)
    for answer in answers:
        versions = [span.version for span in answer.spans]
        assert answer.finish_reason == FINISH_LENGTH and sum(span.length for span in answer.spans) == TOKENS
        assert versions == sorted(set(versions)) and np.isfinite(answer.logprobs).all()
    assert any(len(answer.spans) > 3 for answer in answers)
