"""The frames of one stream: handled as they come, several at a time, and answered in their order.

Consumes: frames of one call. Produces: one answer for each.
Waits for: frames; the handling of the oldest one. Unblocked by: a frame; its end; the end of the call, with which whatever is
unanswered is let go. No more is read while over MOST_BYTES wait for their answers: gRPC holds the caller back meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
MOST_BYTES = 8 << 20


async def answered(
        frames: AsyncIterator[bytes], handle: Callable[[bytes], Coroutine[Any, Any, T]], most_bytes: int = MOST_BYTES,
) -> AsyncGenerator[T, None]:
    """`await handle(frame)` of each frame, in order. An error of one ends it all, once those before it have been answered."""
    waiting: asyncio.Queue[tuple[int, asyncio.Task[T]] | None] = asyncio.Queue()
    room, held = asyncio.Event(), 0

    async def read() -> None:
        nonlocal held
        try:
            async for frame in frames:
                held += len(frame)
                waiting.put_nowait((len(frame), asyncio.create_task(handle(frame), name="frame")))
                while held > most_bytes:
                    room.clear()
                    await room.wait()
        finally:
            waiting.put_nowait(None)

    tasks: list[asyncio.Task[Any]] = [reader := asyncio.create_task(read(), name="read frames")]
    try:
        while (item := await waiting.get()) is not None:
            size, task = item
            tasks.append(task)
            answer = await task
            tasks.pop()
            held -= size
            room.set()
            yield answer
        await reader  # raises what ended it
    finally:
        while not waiting.empty():
            if (item := waiting.get_nowait()) is not None:
                tasks.append(item[1])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
