"""Concurrent calls become one: what arrives while the ledger is busy goes into its next script, and shares its fsync."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 2  # calls, when much waits


class Fold(Generic[T, R]):
    """Calls `apply(items) -> results` with the lists of all waiting callers joined, one call at a time.

    Nobody is delayed: a call on an idle fold starts at once. Beyond `most_bytes` a longer script saves nothing, and would leave
    this process idle while the server works; when so much waits, it goes on its way while the one before is executed. A
    cancelled caller's items are applied all the same. An error of `apply` goes to each caller whose items were in it.
    """

    def __init__(
            self, apply: Callable[[list[T]], Awaitable[Sequence[R]]], size: Callable[[T], int],
            most_bytes: int = 1 << 20) -> None:
        self._apply, self._size, self._most_bytes = apply, size, most_bytes
        self._waiting: deque[tuple[Sequence[T], int, asyncio.Future[Sequence[R]]]] = deque()
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[T]) -> Sequence[R]:
        if not items:
            return []
        future: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        size = sum(map(self._size, items))
        self._waiting.append((items, size, future))
        self._waiting_bytes += size
        if not self._tasks or (len(self._tasks) < AT_ONCE and self._waiting_bytes >= self._most_bytes):
            self._tasks.add(asyncio.create_task(self._drain(), name="fold"))
        return await future

    async def _drain(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while self._waiting and (len(self._tasks) == 1 or self._waiting_bytes >= self._most_bytes):
                await self._turn()
        finally:
            self._tasks.discard(task)

    async def _turn(self) -> None:
        calls, joined, total = [], [], 0
        while self._waiting and total < self._most_bytes:
            items, size, future = self._waiting.popleft()
            calls.append((len(items), future))
            joined.extend(items)
            total += size
        self._waiting_bytes -= total
        try:
            results = await self._apply(joined)
        except Exception as error:
            for _, future in calls:
                if not future.done():
                    future.set_exception(error)
            return
        start = 0
        for count, future in calls:
            if not future.done():
                future.set_result(results[start:start + count])
            start += count
