"""The vLLM engine: AsyncLLM in this process, its scheduler and model in another.

consumes: requests, aborts and swaps    produces: generations, those that one step ends in one call
waits for: vLLM's answers; while weights are exchanged, new requests wait here    unblocked by: a step; the end of the exchange

A swap writes the version as a checkpoint, has the worker read and verify it while decoding goes on, and only then pauses, loads
and resumes. What fails before the pause changes nothing. What fails after it leaves the model between two versions, so vLLM is
started anew with the old one, and the requests in flight begin again behind what their streams have sent.

Cache: with rollout.on_swap = "recompute" the keys and values of all requests are computed anew by the new weights. With "keep"
those in flight go on with theirs, and the prefix cache is salted by the exchange, so that no later request sees an older
version's blocks.

vLLM is imported at the start: this module loads anywhere.
"""
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from services.rollout import vllm_arguments
from services.rollout.concurrency import Load
from services.rollout.engine import Ended, Generation, Request, answered
from services.rollout.group import Group
from services.rollout.vllm_answers import NOTHING, Asked, add_routes, generation, rest, spans_of
from services.rollout.vllm_checkpoint import Checkpoints
from services.rollout.vllm_process import SHUTDOWN_S, VllmProcess
from services.rollout.vllm_signals import Signals
from slipstream import logs
from slipstream.config import RunFile
from slipstream.errors import ConfigError, InvalidInput, SlipstreamError, Unavailable
from slipstream.manifest import RawTensor
from slipstream.probes import Probes
from slipstream.protos.types.v1 import policy_pb2

log = logs.get("rollout")


class VllmEngine:
    """See services.rollout.engine.Engine. `observe(seconds)` is told of every step."""

    extension = "services.rollout.vllm_worker.WorkerExtension"

    def __init__(self, run: RunFile, observe: Callable[[float], None] | None = None, group: Group | None = None) -> None:
        self._run, self._observe, self._group = run, observe, group
        self.signals = Signals()
        self._vllm: VllmProcess | None = None
        self._checkpoints: Checkpoints | None = None
        self._shape: Mapping[str, Any] = {}
        self._path = ""  # the checkpoint of the version that serves
        self._exchange = 0  # counts loads; vLLM stamps it on tokens
        self._versions: dict[int, policy_pb2.PolicyVersion] = {}  # by exchange, as far back as requests in flight reach
        self._serving: policy_pb2.PolicyVersion | None = None
        self._broken: set[int] = set()  # versions whose load failed half-way
        self._tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._asked: dict[int, Asked] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open, self._swapping = asyncio.Event(), asyncio.Lock()
        self._done: list[tuple[Asked, Generation, str]] = []
        self._news, self._quiet = asyncio.Event(), asyncio.Event()
        self._fetching = asyncio.Lock()  # of routes, from the vLLM that has them
        self._failure: BaseException | None = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    @property
    def version(self) -> policy_pb2.PolicyVersion | None:
        return self._serving

    @property
    def free_slots(self) -> int:
        return max(0, self._run.rollout.slots - len(self._asked))

    @property
    def active(self) -> int:
        return len(self._asked)

    @property
    def load(self) -> Load:
        return self.signals.load(self._exchange)

    @property
    def generated_tokens(self) -> int:
        return self.signals.generated_tokens

    async def start(
        self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], version: policy_pb2.PolicyVersion,
        probes: Probes | None = None,
    ) -> None:
        if self._run.deterministic:
            raise ConfigError(
                'rollout.engine = "vllm" with schedule.deterministic: vLLM\'s kernels depend on batch mates; set '
                'rollout.engine = "torch", or schedule.deterministic = false')
        shape = json.loads(files.get("config.json", b"{}"))
        self._shape = shape.get("text_config", shape)
        try:
            self._checkpoints = await asyncio.to_thread(
                Checkpoints, files, sum(t.size for t in tensors), self._run.rollout.vllm.adapters == "slots")
            self._path, crc32c = await asyncio.to_thread(self._checkpoints.write, tensors, "0.safetensors")
            self._tokenizer, self._stops = await asyncio.to_thread(self._checkpoints.tokenizer, files)
            own = self._run, self._checkpoints, self._shape, self.extension, self.signals, self._observe, self._group
            self._vllm = VllmProcess(*own)
            await self._vllm.spread(version, self._path, crc32c)
            await self._vllm.start(self._path, self._exchange)
            await self._vllm.prove(self._path, self._exchange)
            await self._vllm.score(probes)
        except BaseException:
            await self.stop()
            raise
        self._versions[self._exchange] = self._serving = version
        self._spawn(self._deliver())
        self._open.set()

    def check(self, request: Request) -> None:
        self._running()
        vllm_arguments.check(self._run, request, int(self._shape["vocab_size"]))

    def submit(self, requests: Sequence[Request], ended: Ended) -> None:
        self._running()
        for request in requests:
            self._ask(Asked(request, ended, self._exchange))

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        return answered(self, request)

    async def stream(self, request: Request) -> AsyncGenerator[Generation]:
        self.check(request)
        asked = Asked(request, None, self._exchange)
        self._ask(asked)
        try:
            while True:
                piece = await asked.pieces.get()
                if isinstance(piece, SlipstreamError):
                    raise piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            self.abort([request.id])

    def abort(self, requests: Iterable[int]) -> None:
        found = [asked for id in requests if (asked := self._asked.get(id)) is not None and not asked.aborted]
        for asked in found:
            asked.aborted = True
        with_vllm = [str(asked.request.id) for asked in found if asked.collector is not None]
        if with_vllm and self._vllm is not None:
            self._spawn(self._vllm.llm.abort(with_vllm))
        for asked in found:
            if asked.collector is None:  # vLLM has not heard of it, or is away
                asyncio.get_running_loop().call_soon(self._tell, [(asked, NOTHING)])

    async def swap(
        self, version: policy_pb2.PolicyVersion, tensors: Sequence[RawTensor], probes: Probes | None = None
    ) -> None:
        self._running()
        async with self._swapping:
            if version.number in self._broken:
                raise InvalidInput(
                    f"policy version {version.number} failed after its load began before: it is not tried again, the "
                    "trainer's next one will be", "BROKEN_VERSION")
            assert self._checkpoints is not None and self._vllm is not None
            path, crc32c = await asyncio.to_thread(self._checkpoints.write, tensors, f"{self._exchange + 1}.safetensors")
            try:
                await self._vllm.spread(version, path, crc32c)
                await self._vllm.call("slipstream_verify", path, crc32c)
                await self._vllm.trial(path, probes)
            except Exception as error:
                self._vllm.drop(path)
                told = InvalidInput(f"policy version {version.number} cannot be read back: {error}", "CHECKPOINT")
                raise error if isinstance(error, SlipstreamError) else told from error
            await self._replace(version, path, probes)

    async def sleep(self) -> None:
        async with self._swapping:
            if self._vllm is not None:
                await self._vllm.sleep()

    async def wake(self) -> None:
        async with self._swapping:
            if self._vllm is not None:
                await self._vllm.wake()

    async def stop(self) -> None:
        self.abort(list(self._asked))
        if self._vllm is not None and self._failure is None and self._asked:
            try:
                async with asyncio.timeout(SHUTDOWN_S):
                    await self._quiet.wait()
            except TimeoutError:
                log.warning("vLLM did not end its requests", requests=len(self._asked))
        for asked in list(self._asked.values()):
            self._tell([(asked, NOTHING)])
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._vllm is not None:
            await self._vllm.stop()
            self._vllm = None
        if self._checkpoints is not None:
            await asyncio.to_thread(self._checkpoints.close)
            self._checkpoints = None

    # requests

    def _running(self) -> None:
        if self._failure is not None:
            raise Unavailable(f"the engine failed: {self._failure}", "ENGINE_FAILED") from self._failure
        if self._serving is None or self._checkpoints is None:
            raise Unavailable("no policy version is loaded yet", "NO_VERSION", retry_s=1)

    def _ask(self, asked: Asked) -> None:
        self._asked[asked.request.id] = asked
        self._quiet.clear()
        self._spawn(self._serve(asked))

    async def _serve(self, asked: Asked) -> None:
        """Bring a request to its end, through restarts of vLLM."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asked.collector = None
        while asked.request.id in self._asked:
            await self._open.wait()
            if asked.aborted or self._vllm is None:
                return
            life = self._vllm.life
            try:
                await self._run_once(asked, self._vllm, life)
                return
            except EngineDeadError as error:
                if self._vllm is not None and self._vllm.life == life:
                    self._fail(error)
                    return
                asked.collector = None
            except Exception as error:  # vLLM's own refusal: nothing that `check` knows
                self._tell([(asked, InvalidInput(f"vLLM refused a request: {error}", "REQUEST"))])
                return

    async def _run_once(self, asked: Asked, vllm: VllmProcess, life: int) -> None:
        """Raises EngineDeadError when vLLM died, or began another life."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        kind = RequestOutputKind.FINAL_ONLY if asked.ended is not None else RequestOutputKind.DELTA
        request = rest(asked.request, asked.sent)
        params = SamplingParams(**vllm_arguments.sampling(self._run, request), output_kind=kind)
        prompt = tokens_input(request.prompt.tolist(), cache_salt=str(self._exchange))
        llm = vllm.llm
        asked.collector = collector = await llm.add_request(str(request.id), prompt, params, lora_request=vllm.lora)
        if asked.aborted:
            await llm.abort([str(request.id)])
        told = 0
        while True:
            output = await collector.get()
            completion = output.outputs[0]
            if output.finished:
                self._finish(asked, generation(completion, told, spans_of(completion), self._versions), collector.request_id)
                return
            if len(completion.token_ids):
                state = llm.output_processor.request_states.get(collector.request_id)
                piece = generation(completion, told, list(state.weight_version_starts) if state else [], self._versions)
                await self._open.wait()  # not before the version that sampled it is known to be good
                if self._vllm is None or vllm.life != life:
                    raise EngineDeadError()
                told += len(piece.tokens)
                asked.sent.append(piece)
                asked.pieces.put_nowait(piece)

    def _finish(self, asked: Asked, answer: Generation, internal_id: str) -> None:
        self._done.append((asked, answer, internal_id))
        self._news.set()

    async def _deliver(self) -> None:
        """Answers, as they come; those of one step at once, with their routes."""
        while True:
            await self._news.wait()
            await self._open.wait()
            self._news.clear()
            done, self._done = self._done, []
            try:
                async with self._fetching:
                    lost = await self._add_routes(done)
            except Exception as error:
                self._fail(error)
                return
            for asked in lost:
                self._spawn(self._serve(asked))
            self._tell([(asked, answer) for asked, answer, _ in done if asked not in lost])

    async def _add_routes(self, done: list[tuple[Asked, Generation, str]]) -> list[Asked]:
        """Fetch, or let the worker forget, the routes of requests that have ended: those whose routes are gone."""
        ran = [(asked, answer, id) for asked, answer, id in done if id]
        if not self._run.rollout.capture_routes or not ran:
            return []
        assert self._vllm is not None
        found, lost = (await self._vllm.call("slipstream_routes", [id for _, _, id in ran]))[0], []
        for (asked, answer, _), rows in zip(ran, found, strict=True):
            if not add_routes(asked, answer, rows):
                lost.append(asked)
        return lost

    def _tell(self, ended: Sequence[tuple[Asked, Generation | SlipstreamError]]) -> None:
        lots: dict[Ended, list[tuple[Request, Generation | SlipstreamError]]] = {}
        for asked, answer in ended:
            if self._asked.pop(asked.request.id, None) is None:
                continue
            if asked.ended is None:
                asked.pieces.put_nowait(answer)
            else:
                lots.setdefault(asked.ended, []).append((asked.request, answer))
        if not self._asked:
            self._quiet.set()
            self.signals.rest()
        for tell, lot in lots.items():
            tell(lot)

    def _fail(self, error: BaseException) -> None:
        """vLLM has died by itself: nobody may wait for it."""
        if self._failure is None:
            self._failure = error
            self._tell([(a, Unavailable(f"the engine failed: {error}", "ENGINE_FAILED")) for a in self._asked.values()])

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    # versions

    async def _replace(self, version: policy_pb2.PolicyVersion, path: str, probes: Probes | None) -> None:
        """Exchange the weights for a verified checkpoint. Raises InvalidInput; the old version serves then.

        No answer leaves here until the new version has proved itself, so one that does not leaves no trace.
        """
        assert self._checkpoints is not None and self._vllm is not None
        exchange, recompute = self._exchange + 1, self._run.rollout.on_swap == "recompute"
        self._open.clear()
        try:  # tokens of the new version may come before this goes on: its name has to be known by then
            await self._vllm.load(path, exchange, recompute, lambda: self._versions.update({exchange: version}))
            await self._vllm.score(probes)
        except Exception as error:
            log.error("a load went wrong or half-way: vLLM is started anew", version=version.number, error=str(error))
            self._broken.add(version.number)
            self._vllm.drop(path)
            await self._start_anew(exchange)
            told = InvalidInput(f"policy version {version.number} failed half-way through its load: {error}", "LOAD")
            raise error if isinstance(error, InvalidInput) else told from error
        else:
            self._exchange = exchange
            self._serving = version
            self._forget_versions()
            self._vllm.drop(self._path)
            self._path = path
        finally:
            self._open.set()

    def _forget_versions(self) -> None:
        """Versions that no request in flight can have been sampled by."""
        oldest = min((asked.since for asked in self._asked.values()), default=self._exchange)
        for exchange in [e for e in self._versions if e < oldest]:
            del self._versions[exchange]

    async def _start_anew(self, bad: int) -> None:
        """A vLLM that serves the old version. What was in flight begins again, and what has tokens of the exchange `bad`.

        Raises Unavailable when vLLM does not start any more: the engine has failed.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._vllm is not None
        version = self._versions.pop(bad, None)
        done, self._done = self._done, []
        ended = {asked.request.id for asked, _, _ in done}
        for asked, answer, name in done:
            if version is not None and any(span.version == version.number for span in answer.spans):
                self._spawn(self._serve(asked))
            else:
                self._finish(asked, answer, name)
        for asked in self._asked.values():
            if asked.collector is not None and asked.request.id not in ended:
                asked.collector.put(EngineDeadError())
                asked.collector = None
        try:
            async with self._fetching:
                await self._vllm.go_back(self._path, self._exchange)
        except Exception as error:
            self._fail(error)
            raise
