"""A swap that lies is undone: whatever an engine does wrong while it loads, the old version serves on, bit for bit.

Faults are planted between the published tensors and the model: a tensor left as it was, one of another version, rows or experts
in another order, a single element; fifty of them, over every tensor. Clean swaps raise no alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout import decoder
from services.rollout.engine import Request
from services.rollout.torch_engine import TorchEngine
from services.trainer.probes import Prober
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import assembled, cooked, raw
from slipstream.probes import Probes
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.rollout_runs import run_file, weights

PROMPT = np.array([3, 9, 12, 4], np.int32)
Fault = Callable[[RawTensor, RawTensor], RawTensor]


def _rows(tensor: RawTensor, order: Callable[[np.ndarray], np.ndarray]) -> RawTensor:
    values = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    return RawTensor(tensor.name, tensor.dtype, tensor.shape, np.ascontiguousarray(order(values)).tobytes())


def _one_element(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.flat[changed.size // 2] += 0.01
    return changed


FAULTS: tuple[Fault, ...] = (
    lambda new, old: old,  # never written
    lambda new, old: _rows(new, lambda v: np.roll(v, 1, 0)),  # experts, or rows, in another order
    lambda new, old: _rows(new, lambda v: v[::-1]),
    lambda new, old: _rows(new, lambda v: np.concatenate([v[:len(v) // 2], _half(old, v)])),  # written half way
    lambda new, old: _rows(new, _one_element),
)


def _half(old: RawTensor, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(old.data, "<f4").reshape(like.shape)[len(like) // 2:]


def _moved(tensors: Sequence[RawTensor], by: float) -> list[RawTensor]:
    return [raw(t.name, cooked(t).clone() * (1 + by)) for t in tensors]


def _probes(run: Any, files: Any, tensors: Sequence[RawTensor]) -> Probes:
    model, tokenizer, _ = assembled(files, tensors, run.model.dtype, "grouped_mm")
    return Prober(model.eval(), len(tokenizer), 0).score()


async def test_every_planted_fault_is_refused_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_file(tmp_path)
    files, first = weights(run)
    engine, honest, caught = TorchEngine(run), decoder.load_state, 0
    await engine.start(files, first, PolicyVersion(number=1), _probes(run, files, first))
    answer = (await engine.generate(Request(PROMPT, 6, seed=5))).logprobs
    second = _moved(first, 0.05)
    probes = _probes(run, files, second)
    for number in range(50):
        n, fault = number % len(first), FAULTS[number % len(FAULTS)]
        wrong = fault(second[n], first[n])
        if bytes(wrong.data) == bytes(second[n].data):  # a single row in another order
            wrong = FAULTS[0](second[n], first[n])
        lies = iter([True])

        def load(model: Any, tensors: Sequence[RawTensor]) -> None:
            honest(model, [*tensors[:n], wrong, *tensors[n + 1:]] if next(lies, False) else tensors)  # noqa: B023

        monkeypatch.setattr(decoder, "load_state", load)
        with pytest.raises(InvalidInput, match="engine") as refused:
            await engine.swap(PolicyVersion(number=2 + number), second, probes)
        caught += refused.value.reason == "CANARY"
        assert engine.version is not None and engine.version.number == 1
    assert caught == 50
    assert (await engine.generate(Request(PROMPT, 6, seed=5))).logprobs.tobytes() == answer.tobytes()
    monkeypatch.setattr(decoder, "load_state", honest)
    for number in range(50):  # clean ones, there and back
        tensors = (first, second)[number % 2]
        await engine.swap(PolicyVersion(number=100 + number), tensors, _probes(run, files, tensors) if number < 2 else None)
        if number % 2 == 0:
            assert (await engine.generate(Request(PROMPT, 6, seed=5))).logprobs.tobytes() == answer.tobytes()
    await engine.stop()


async def test_probes_of_other_weights_refuse_the_right_bytes(tmp_path: Path) -> None:
    """Bytes that are whole and an engine that does not compute what the trainer computes with them."""
    run = run_file(tmp_path)
    files, first = weights(run)
    engine = TorchEngine(run)
    await engine.start(files, first, PolicyVersion(number=1))
    with pytest.raises(InvalidInput, match="probe tokens"):
        await engine.swap(PolicyVersion(number=2), first, _probes(run, files, _moved(first, 0.05)))
    await engine.stop()
