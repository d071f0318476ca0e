"""Scorers that may hang, in processes of their own, each call under a hard time limit.

consumes: transcripts            produces: one Score each
waits for: a free lane           unblocked by: an answer, or the time limit, which kills the process and starts another

A lane is a task that feeds one process while there is work. Fast scorers get several jobs at once (a pipe round trip costs
more than the score); a call that takes over PATIENCE_S frees its lane for the others, so that one pathological answer delays
the rest by a second, not by the time limit. At most `processes` × MOST processes exist. Nothing starts before the first job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from slipstream.protos.types.v1.sample_pb2 import Score, Transcript

PATIENCE_S = 1.0
MOST = 8
CHUNK_S = 0.02  # as many jobs at once as take about this long
CHUNK = 64
START_S = 60.0  # importing a scorer's module may take this long, once per process
LINE_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class _Job:
    scorer: str
    line: bytes
    answer: asyncio.Future[dict[str, Any]]

    def settle(self, value: dict[str, Any]) -> None:
        if not self.answer.done():  # its caller may be gone
            self.answer.set_result(value)


class _Died(Exception):
    """The process cannot be used any more. An empty reason: it ended by itself."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Process:
    """One scorer process, killed with all that it started.

    subprocess.Popen and a socket pair instead of asyncio's subprocesses: Popen uses vfork, while the fork of uvloop runs the
    handlers of gRPC, which can hang the child before it becomes a process of its own.
    """

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.loaded: set[str] = set()

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds
                [sys.executable, "-m", "services.reward.sandbox_process"], stdin=theirs.fileno(),
                stdout=theirs.fileno(), start_new_session=True)
        return cls(process, *await asyncio.open_connection(sock=ours, limit=LINE_BYTES))

    def send(self, line: bytes) -> None:
        self._writer.write(line)

    async def answer(self) -> dict[str, Any]:
        """The next answer. Raises _Died at the end of the stream."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise _Died("")
        return json.loads(line)

    async def kill(self) -> int:
        """End it and its children; returns the exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        return await asyncio.to_thread(self._process.wait)


class Sandbox:
    """A pool of scorer processes. Use as an async context manager; leaving it kills them."""

    def __init__(self, processes: int = 1, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self.kills = 0
        self._processes = max(1, processes)
        self._queue: deque[_Job] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._slow = 0  # lanes whose current call has taken over PATIENCE_S
        self._idle: list[_Process] = []
        self._seconds: dict[str, float] = {}  # scorer → moving average of a call

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all processes; what is being scored is cancelled."""
        while self._queue:
            self._queue.popleft().answer.cancel()
        for lane in list(self._lanes):
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._idle))

    async def score(self, transcript: Transcript) -> tuple[Score, float]:
        """One score and the seconds that it took.

        A time-out, an exception, a dead process and a value that is not finite are failures in it.
        """
        try:
            info = json.loads(transcript.info_json) if transcript.info_json else {}
        except json.JSONDecodeError as error:
            return Score(failure=f"info_json is not JSON: {error}"), 0.0
        value = await self._submit(transcript.scorer, {
            "prompt": transcript.prompt, "response": transcript.response, "answer": transcript.answer, "info": info,
            "timeout_s": self.timeout_s})
        score = Score(
            scalar=value.get("scalar", 0.0), per_turn=value.get("per_turn", ()), components=value.get("components", {}),
            failure=value.get("failure", ""))
        return score, value.get("seconds", self.timeout_s)

    async def load(self, scorer: str) -> str:
        """Import a scorer; the reason why it cannot be, or nothing."""
        return (await self._submit(scorer, {"load": True, "timeout_s": START_S})).get("failure", "")

    async def _submit(self, scorer: str, job: dict[str, Any]) -> dict[str, Any]:
        self._queue.append(waiting := _Job(scorer, _line(scorer, job), asyncio.get_running_loop().create_future()))
        self._open_lanes()
        return await waiting.answer

    def _open_lanes(self) -> None:
        while (len(self._lanes) - self._slow < self._processes and len(self._lanes) < self._processes * MOST
               and len(self._queue) > len(self._lanes) - self._slow):
            self._lanes.add(asyncio.create_task(self._lane(), name="scoring lane"))

    async def _lane(self) -> None:
        """Feed one process until the queue is empty or this lane is one too many."""
        process: _Process | None = None
        try:
            while self._queue and len(self._lanes) - self._slow <= self._processes:
                chunk = self._next_chunk()
                try:
                    if process is None:
                        process = self._idle.pop() if self._idle else await _Process.start()
                    await self._run(process, chunk)
                except _Died as death:
                    status = await process.kill() if process is not None else 0
                    process = None
                    self._after_death(chunk, death, status)
                except (OSError, ValueError) as error:
                    for job in chunk:
                        job.settle({"failure": f"sandbox: {type(error).__name__}: {error}"})
                except asyncio.CancelledError:
                    for job in chunk:
                        job.answer.cancel()
                    raise
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._lanes.discard(task)  # in the same breath as the look at the queue: a job that comes now opens a new lane
            if process is not None:
                if task.cancelling() or len(self._idle) >= self._processes:
                    await process.kill()
                else:
                    self._idle.append(process)

    def _next_chunk(self) -> deque[_Job]:
        """The next jobs of one scorer: one, or as many as are known to take CHUNK_S together."""
        first = self._queue.popleft()
        chunk = deque([first])
        share = 1 + len(self._queue) // self._processes
        most = min(CHUNK, int(CHUNK_S / self._seconds.get(first.scorer, CHUNK_S)), share)
        while len(chunk) < most and self._queue and self._queue[0].scorer == first.scorer:
            chunk.append(self._queue.popleft())
        return chunk

    async def _run(self, process: _Process, chunk: deque[_Job]) -> None:
        """Settle the jobs of a chunk one by one. Raises _Died when the process has to be replaced; chunk[0] is where it was."""
        scorer = chunk[0].scorer
        if scorer not in process.loaded:  # so that an import does not count as a slow call
            process.send(_line(scorer, {"load": True, "timeout_s": START_S}))
            await self._answer(process, chunk, START_S)
            process.loaded.add(scorer)
        process.send(b"".join(job.line for job in chunk))
        while chunk:
            started = time.perf_counter()
            value, surplus = await self._answer(process, chunk, self.timeout_s)
            chunk.popleft().settle(value)
            took = time.perf_counter() - started
            self._seconds[scorer] = max(1e-5, 0.8 * self._seconds.get(scorer, took) + 0.2 * took)
            if surplus:  # the process still holds lines of jobs that others do now
                raise _Died("")

    async def _answer(self, process: _Process, chunk: deque[_Job], limit_s: float) -> tuple[dict[str, Any], bool]:
        """The next answer, and whether the jobs behind it were given to other lanes meanwhile."""
        patience_s = min(PATIENCE_S, limit_s / 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await process.answer(), False
        surplus = len(chunk) > 1
        while len(chunk) > 1:
            self._queue.appendleft(chunk.pop())
        self._slow += 1
        self._open_lanes()
        try:
            async with asyncio.timeout(limit_s - patience_s):
                return await process.answer(), surplus
        except TimeoutError:
            raise _Died(f"timeout after {limit_s:g} s") from None
        finally:
            self._slow -= 1

    def _after_death(self, chunk: deque[_Job], death: _Died, status: int) -> None:
        """The job that was running has failed; those behind it go back to the front of the queue."""
        self.kills += 1
        if chunk:
            ended = f"died: the scorer ended its process, {f'signal {-status}' if status < 0 else f'exit status {status}'}"
            chunk.popleft().settle({"failure": death.reason or ended})
        while chunk:
            self._queue.appendleft(chunk.pop())


def _line(scorer: str, job: dict[str, Any]) -> bytes:
    return json.dumps({"scorer": scorer, **job}).encode() + b"\n"
