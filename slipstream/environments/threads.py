"""Threads for user code that blocks. Unlike those of concurrent.futures they do not hold up the end of the process.

consumes: calls        produces: futures of the caller's event loop
waits for: calls       unblocked by: a call, or `stop`, once the call in progress returns
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_Work = tuple[Callable[[], Any], asyncio.Future[Any]]


class DaemonThreads:
    """At most `most` threads, started when needed. A call that never returns keeps its thread until the process ends."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0  # calls handed over and not finished; touched by the event loop's thread only

    async def run(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, or what it raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._busy += 1
        if self._busy > self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._calls.put((partial(contextvars.copy_context().run, call), answer))
        try:
            return await answer
        finally:
            self._busy -= 1

    def stop(self) -> None:
        """Idle threads end now, busy ones after their call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            call, answer = work
            try:
                value, error = call(), None
            except Exception as raised:
                value, error = None, raised
            except BaseException as raised:  # SystemExit of user code ends its call, not our thread
                value, error = None, RuntimeError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                answer.get_loop().call_soon_threadsafe(_settle, answer, value, error)


def _settle(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if answer.done():  # its caller is gone
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)
