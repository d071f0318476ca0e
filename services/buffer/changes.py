"""Long polls: wait for a topic to change, and look again now and then, because another front may have changed it.

Unblocked by: the ledger's own operations in this process (at once), the slow poll (within SLOW_POLL_S), the end of the wait,
`close()` when the service stops.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from services.buffer.ledger import TOPICS

T = TypeVar("T")
SLOW_POLL_S = 0.5
SHARED = frozenset({"samples", "unscored"})  # topics in which one caller finds nothing exactly when any other would
LONGEST_WAIT_S = 30.0


class Changes:
    """Topics with a counter each. A ticket taken before looking makes sure that no change between is missed."""

    def __init__(self, slow_poll_s: float = SLOW_POLL_S) -> None:
        self._slow_poll_s = slow_poll_s
        self._numbers: dict[str, int] = dict.fromkeys(TOPICS, 0)
        self._waiters: dict[str, set[asyncio.Future[None]]] = {topic: set() for topic in TOPICS}
        self._empty: dict[str, int] = {}  # topic -> its counter when a look left nothing
        self._nothing: dict[str, tuple[float, Any]] = {}  # topic -> when a look found nothing, and its answer
        self.closed = False

    def notify(self, topics: Sequence[str]) -> None:
        """Something became possible in these topics."""
        for topic in topics:
            self._numbers[topic] += 1
            for future in self._waiters[topic]:
                if not future.done():
                    future.set_result(None)

    def close(self) -> None:
        """Let every poll answer now."""
        self.closed = True
        self.notify(TOPICS)

    async def poll(
            self, topic: str, wait_s: float, attempt: Callable[[], Awaitable[T]], ready: Callable[[T], object],
            last: Callable[[T], bool] = lambda answer: False) -> T:
        """`attempt()` until `ready(answer)` or the time is over; then its last answer.

        Where somebody has just found nothing, or taken the `last` there was, and nothing has changed since, the first look is
        saved; to those who do not wait, that somebody's answer is given, for at most one slow poll.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, LONGEST_WAIT_S)
        if topic in SHARED and self._empty.get(topic) == self._numbers[topic]:
            at, nothing = self._nothing.get(topic, (-math.inf, None))
            if wait_s > 0:
                await self.changed(topic, self._numbers[topic], deadline - loop.time())
            elif loop.time() - at < self._slow_poll_s:
                return nothing
        while True:
            ticket = self._numbers[topic]
            answer = await attempt()
            left = deadline - loop.time()
            found = ready(answer)
            if not found or last(answer):
                self._empty[topic] = ticket
                self._nothing.pop(topic, None)
                if not found:
                    self._nothing[topic] = loop.time(), answer
            else:
                self._empty.pop(topic, None)
            if found:
                return answer
            if left <= 0 or self.closed:
                return answer
            await self.changed(topic, ticket, left)

    async def changed(self, topic: str, ticket: int, timeout_s: float) -> int:
        """Wait until the topic's counter is no longer `ticket`, at most one slow poll; returns it."""
        if self._numbers[topic] == ticket and not self.closed:
            future = asyncio.get_running_loop().create_future()
            self._waiters[topic].add(future)
            try:
                async with asyncio.timeout(min(timeout_s, self._slow_poll_s)):
                    await future
            except TimeoutError:
                return self._numbers[topic]
            finally:
                self._waiters[topic].discard(future)
        return self._numbers[topic]

    def ticket(self, topic: str) -> int:
        return self._numbers[topic]
