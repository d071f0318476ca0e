"""The torch engine: the decoder in a thread of its own, driven from asyncio.

consumes: requests, aborts and swaps, through an inbox    produces: generations, in one call to the event loop per decode step
waits for: the inbox, while nothing is in flight, or asleep
unblocked by: `generate`, `stream`, `swap`, `abort`, `wake`, `stop`

The event loop hands over what it gathered in one of its turns at once, so that a group that arrives together is prompted
together.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.rollout.asleep import Asleep
from services.rollout.decoder import Decoder
from services.rollout.engine import Ended, Generation, Request, answered
from services.rollout.proof import prove, prove_version
from slipstream.config import RunFile
from slipstream.errors import InvalidInput, SlipstreamError, Unavailable
from slipstream.manifest import RawTensor
from slipstream.model import assembled, stop_token_ids
from slipstream.probes import Probes
from slipstream.protos.types.v1 import policy_pb2


@dataclass(slots=True)
class _Swap:
    version: policy_pb2.PolicyVersion
    tensors: Sequence[RawTensor]
    probes: Probes | None
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Abort:
    ids: list[int]


@dataclass(slots=True)
class _Rest:
    """Sleep, or wake."""

    asleep: bool
    done: asyncio.Future[None]


_Order = _Swap | _Abort | _Rest


class TorchEngine:
    """See services.rollout.engine.Engine. `observe(seconds)` is told of every decode step, in the engine's thread."""

    def __init__(self, run: RunFile, observe: Callable[[float], None] | None = None) -> None:
        self._run, self._observe = run, observe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder: Decoder | None = None
        self._thread: threading.Thread | None = None
        self._tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._gathered: list[Request | _Order] = []
        self._inbox: collections.deque[Request | _Order | None] = collections.deque()
        self._wake = threading.Event()
        self._pending: dict[int, tuple[Request, Ended]] = {}
        self._streams: dict[int, tuple[Request, asyncio.Queue[Generation]]] = {}
        self._sent: dict[int, int] = {}  # the thread's: tokens of each stream that went out
        self._asleep: Asleep | None = None  # the thread's
        self._failure: BaseException | None = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    @property
    def version(self) -> policy_pb2.PolicyVersion | None:
        return self._decoder.version if self._decoder else None

    @property
    def free_slots(self) -> int:
        return max(0, self._run.rollout.slots - len(self._pending) - len(self._streams))

    @property
    def active(self) -> int:
        """Sequences that are being decoded."""
        return self._decoder.active if self._decoder else 0

    @property
    def load(self) -> None:
        return None

    @property
    def generated_tokens(self) -> int:
        return self._decoder.generated_tokens if self._decoder else 0

    async def start(
        self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], version: policy_pb2.PolicyVersion,
        probes: Probes | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        first = _Swap(version, tensors, probes, started)
        self._thread = threading.Thread(target=self._main, args=(files, first), name="engine", daemon=True)
        self._thread.start()
        await started

    def check(self, request: Request) -> None:
        self._running()
        assert self._decoder is not None
        self._decoder.check(request)

    def submit(self, requests: Sequence[Request], ended: Ended) -> None:
        self._running()
        self._pending.update((request.id, (request, ended)) for request in requests)
        self._hand_over(*requests)

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        return answered(self, request)

    async def stream(self, request: Request) -> AsyncGenerator[Generation]:
        self.check(request)
        queue: asyncio.Queue[Generation] = asyncio.Queue()  # bounded by the tokens of one answer
        self._streams[request.id] = (request, queue)
        self._hand_over(request)
        try:
            while True:
                piece = await queue.get()
                if piece.finish_reason:
                    del self._streams[request.id]
                    yield piece
                    return
                yield piece
                if self._failure is not None:
                    raise Unavailable(f"the engine failed: {self._failure}", "ENGINE_FAILED") from self._failure
        finally:
            if self._streams.pop(request.id, None):
                self.abort([request.id])

    async def swap(
        self, version: policy_pb2.PolicyVersion, tensors: Sequence[RawTensor], probes: Probes | None = None,
    ) -> None:
        done = self._running().create_future()
        self._hand_over(_Swap(version, tensors, probes, done))
        await done

    async def sleep(self) -> None:
        await self._rest(True)

    async def wake(self) -> None:
        await self._rest(False)

    async def _rest(self, asleep: bool) -> None:
        done = self._running().create_future()
        self._hand_over(_Rest(asleep, done))
        await done

    def abort(self, requests: Iterable[int]) -> None:
        if self._decoder is not None and (ids := list(requests)):
            self._hand_over(_Abort(ids))

    async def stop(self) -> None:
        if self._thread is None or self._loop is None:
            return
        self._flush()
        self._inbox.append(None)
        self._wake.set()
        await self._loop.run_in_executor(None, self._thread.join)
        self._thread = None

    # on the event loop

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._failure is not None:
            raise Unavailable(f"the engine failed: {self._failure}", "ENGINE_FAILED") from self._failure
        if self._decoder is None or self._loop is None or self._thread is None:
            raise Unavailable("no policy version is loaded yet", "NO_VERSION", retry_s=1)
        return self._loop

    def _hand_over(self, *items: Request | _Order) -> None:
        if not self._gathered and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._gathered += items

    def _flush(self) -> None:
        self._inbox.extend(self._gathered)
        self._gathered.clear()
        self._wake.set()

    def _deliver(self, ended: list[tuple[Request, Generation]]) -> None:
        """What one step produced: the answers that ended, and the next pieces of streams."""
        lots: dict[Ended, list[tuple[Request, Generation | SlipstreamError]]] = {}
        for request, generation in ended:
            if asked := self._pending.pop(request.id, None):
                lots.setdefault(asked[1], []).append((request, generation))
            elif stream := self._streams.get(request.id):
                stream[1].put_nowait(generation)
        for tell, lot in lots.items():
            tell(lot)

    def _fail(self, error: BaseException) -> None:
        """The thread has died: nobody may wait for it."""
        self._failure = error
        told = Unavailable(f"the engine failed: {error}", "ENGINE_FAILED")
        pending, self._pending = self._pending, {}
        for request, ended in pending.values():
            ended([(request, told)])
        nothing = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), 0)
        for _, queue in self._streams.values():
            queue.put_nowait(nothing)
        for item in [*self._inbox, *self._gathered]:
            if isinstance(item, _Swap | _Rest) and not item.done.done():
                item.done.set_exception(told)

    # in the engine's thread

    def _main(self, files: Mapping[str, bytes], first: _Swap) -> None:
        assert self._loop is not None
        try:
            decoder = self._build(files, first)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, first.done, error)
            return
        self._decoder = decoder
        self._loop.call_soon_threadsafe(_settle, first.done, None)
        try:
            self._run_steps(decoder)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            raise

    def _build(self, files: Mapping[str, bytes], first: _Swap) -> Decoder:
        run = self._run
        if run.rollout.threads:
            torch.set_num_threads(run.rollout.threads)
        experts = "dense" if run.deterministic else "grouped_mm" if run.model.experts == "auto" else run.model.experts
        model, self._tokenizer, merged = assembled(files, first.tensors, run.model.dtype, experts)
        self._stops = stop_token_ids(self._tokenizer, model)
        decoder = Decoder(
            model, run.rollout.slots, run.rollout.context, deterministic=run.deterministic,
            capture_routes=run.rollout.capture_routes, recompute_on_swap=run.rollout.on_swap == "recompute", merged=merged,
            compiled=run.rollout.compile)
        prove(decoder)
        if first.probes is not None:
            prove_version(decoder, first.tensors, first.probes)
        decoder.version, decoder.loaded = first.version, merged.adapter.tensors() if merged else first.tensors
        return decoder

    def _run_steps(self, decoder: Decoder) -> None:
        assert self._loop is not None
        while True:
            if self._asleep is not None or not (decoder.active or decoder.waiting):
                self._wake.wait()
            self._wake.clear()
            out: list[tuple[Request, Generation]] = []
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, Request):
                    decoder.waiting.append(item)  # checked when it was accepted
                    if item.id in self._streams:
                        self._sent[item.id] = 0
                    continue
                if item is None:
                    out += decoder.abort([r.id for r in decoder.rows.requests] + [r.id for r in decoder.waiting])
                    self._loop.call_soon_threadsafe(self._deliver, self._pieces(decoder, out))
                    return
                out += self._handle(decoder, item)
            if self._asleep is None and (decoder.active or decoder.waiting):
                started = time.perf_counter()
                out += decoder.step()
                if self._observe is not None:
                    self._observe(time.perf_counter() - started)
            if out := self._pieces(decoder, out):
                self._loop.call_soon_threadsafe(self._deliver, out)

    def _handle(self, decoder: Decoder, item: _Order) -> list[tuple[Request, Generation]]:
        if isinstance(item, _Abort):
            return decoder.abort(item.ids)
        assert self._loop is not None
        error: BaseException | None = None
        try:
            if isinstance(item, _Rest):
                self._turn_in(decoder, item.asleep)
            elif self._asleep is not None:
                raise Unavailable("the engine sleeps: no version is loaded before it wakes", "ASLEEP", retry_s=1)
            else:
                tensors, probes = item.tensors, item.probes
                decoder.load(tensors, item.version, lambda: None if probes is None else prove_version(decoder, tensors, probes))
        except SlipstreamError as refused:
            error = refused
        except BaseException as failed:  # the thread ends with it; who waits for this is told first
            self._loop.call_soon_threadsafe(_settle, item.done, Unavailable(f"the engine failed: {failed}", "ENGINE_FAILED"))
            raise
        self._loop.call_soon_threadsafe(_settle, item.done, error)
        return []

    def _turn_in(self, decoder: Decoder, asleep: bool) -> None:
        """Sleep or wake; nothing when it does already."""
        if asleep:
            self._asleep = self._asleep or Asleep(decoder)
        elif self._asleep is not None:
            self._asleep.wake()
            self._asleep = None

    def _pieces(self, decoder: Decoder, ended: list[tuple[Request, Generation]]) -> list[tuple[Request, Generation]]:
        """`ended`, with streams cut down to what did not go out yet, and the new tokens of the streams that go on."""
        if not self._sent:
            return ended
        pieces = [(r, _rest(g, self._sent.pop(r.id))) if r.id in self._sent else (r, g) for r, g in ended]
        for request in [r for r in decoder.rows.requests if r.id in self._sent]:
            piece = decoder.progress(request, self._sent[request.id])
            if piece is not None and len(piece.tokens):
                self._sent[request.id] += len(piece.tokens)
                pieces.append((request, piece))
        return pieces


def _rest(generation: Generation, sent: int) -> Generation:
    """What of a finished answer is left after its first `sent` tokens."""
    spans, skip = [], sent
    for span in generation.spans:
        left = span.length - min(skip, span.length)
        skip -= span.length - left
        if left:
            spans.append(type(span)(span.version, span.step, span.incarnation, left))
    return Generation(
        generation.tokens[sent:], generation.logprobs[sent:], tuple(spans), generation.finish_reason, generation.routes)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if not isinstance(result, BaseException):
        future.set_result(result)
    elif isinstance(result, SlipstreamError):
        future.set_exception(result)
    else:
        future.set_exception(InvalidInput(f"{type(result).__name__}: {result}"))
