"""The engine seam: token ids in, token ids with log-probabilities out, weights swapped between decode steps.

Axes: P prompt tokens, n generated tokens, L MoE layers (in depth order), K experts per token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from services.rollout.concurrency import Load
from slipstream.errors import SlipstreamError
from slipstream.manifest import RawTensor
from slipstream.probes import Probes
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import Span

_ids = itertools.count(1)


@dataclass(slots=True, eq=False)
class Request:
    """One continuation to generate.

    The i-th new token is drawn with the uniform that (seed, position + i) names, so a resumed answer passes the number of
    tokens it already has as `position` and goes on as if nothing had happened.
    """

    prompt: np.ndarray  # int32 [P], P >= 1
    max_new_tokens: int
    seed: int = 0  # unsigned 64-bit
    temperature: float = 1.0  # log-probabilities are of softmax(logits / temperature)
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    routes: bool = False  # return the experts chosen for each token
    position: int = 0
    id: int = field(default_factory=lambda: next(_ids))  # unique in the process; names the request to abort()


@dataclass(slots=True)
class Generation:
    """What a request became. A stop token is the last of `tokens`."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    spans: tuple[Span, ...]  # policy versions, covering the n tokens in order
    finish_reason: int  # slipstream.types.v1.FinishReason; UNSPECIFIED in the middle of a stream
    routes: np.ndarray | None = None  # uint8 or uint16 [P + n - 1, L, K]


Ended = Callable[[list[tuple[Request, Generation | SlipstreamError]]], None]


def answered(engine: Engine, request: Request) -> asyncio.Future[Generation]:
    """`Engine.generate`, out of the engine's `submit` and `abort`."""
    engine.check(request)
    future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def ended(lot: list[tuple[Request, Generation | SlipstreamError]]) -> None:
        if not future.done():
            answer = lot[0][1]
            future.set_exception(answer) if isinstance(answer, SlipstreamError) else future.set_result(answer)

    future.add_done_callback(lambda f: engine.abort([request.id]) if f.cancelled() else None)
    engine.submit([request], ended)
    return future


class Engine(Protocol):
    """An inference engine. All methods belong to one event loop.

    What every implementation promises: the same (weights, request) gives the same tokens whatever else is running; a failed
    swap leaves the old version serving; a swap drops no request.
    """

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the model; after start."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; after start."""
        ...

    @property
    def version(self) -> policy_pb2.PolicyVersion | None:
        """The policy version that serves; None before start."""
        ...

    @property
    def free_slots(self) -> int:
        """How many more requests would run at once."""
        ...

    @property
    def active(self) -> int:
        """Sequences that are being decoded."""
        ...

    @property
    def load(self) -> Load | None:
        """What the scheduler says of itself, for the bound on samples in hand; None where slots are all that binds."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since start."""
        ...

    async def start(
        self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], version: policy_pb2.PolicyVersion,
        probes: Probes | None = None,
    ) -> None:
        """Build the model from the version's files and load its tensors. Raises InvalidInput for a model it cannot run.

        A version of an adapter has adapter_config.json among its files, and here the tensors of its base before its own.
        """
        ...

    def check(self, request: Request) -> None:
        """Raises InvalidInput for what can never run: empty prompt, prompt over the context, temperature <= 0."""
        ...

    def submit(self, requests: Sequence[Request], ended: Ended) -> None:
        """Generate what was checked. `ended` gets each request once, those that end together in one call, as soon as they do:
        with its generation, also when it was aborted, or with the error of an engine that failed.
        """
        ...

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        """One request, checked; cancelling the future aborts it."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Generation]:
        """Pieces as they come; the last one has the finish reason and the routes. Closing the iterator aborts."""
        ...

    async def swap(
        self, version: policy_pb2.PolicyVersion, tensors: Sequence[RawTensor], probes: Probes | None = None,
    ) -> None:
        """Let `version` generate every token sampled after this returns. Raises InvalidInput and keeps the old one.

        `tensors` are the version's own: of an adapter A and B alone. With `probes`, the engine proves before it goes on that it
        holds what was published; when it does not, that is InvalidInput (CANARY).
        """
        ...

    async def sleep(self) -> None:
        """Give the memory of the devices back: weights, cache. Requests stay as they are, new ones wait, aborts are answered.
        No version is loaded meanwhile.
        """
        ...

    async def wake(self) -> None:
        """Have it again, and go on where it slept, with the same version."""
        ...

    def abort(self, requests: Iterable[int]) -> None:
        """End requests by id: their futures get what was generated so far, finish reason ABORT."""
        ...

    async def stop(self) -> None:
        """Abort everything and free the model. Idempotent."""
        ...
