"""How much a caller may ask: calls and bytes a minute, by name. Over it, RESOURCE_EXHAUSTED says when to come back.

A bucket holds one minute's worth and fills evenly. Answers are counted, too, after they were given: a large one is paid by a
wait before the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import Exhausted, InvalidInput

MINUTE_S = 60.0
MOST_CALLERS = 10_000  # remembered; the one that was silent the longest is forgotten, and starts with a full bucket


@dataclass(slots=True)
class _Bucket:
    calls: float
    bytes: float
    at: float


class Quotas:
    """The buckets of one server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, name: str, calls_per_minute: int, bytes_per_minute: int, size: int) -> None:
        """Count one call of `size` bytes; 0 = no limit. Raises Exhausted (with retry_s), or InvalidInput when it never fits."""
        if bytes_per_minute and size > bytes_per_minute:
            raise InvalidInput(
                f"a message of {size} bytes is over the quota of {name}, {bytes_per_minute} bytes a minute: send less at once, "
                "or raise it (--bytes-per-minute of a token, the table security of the run file)", "MESSAGE_OVER_QUOTA",
                name=name, bytes=size)
        bucket = self._filled(name, calls_per_minute, bytes_per_minute)
        waits = (
            ("calls", calls_per_minute, (1 - bucket.calls) / (calls_per_minute or 1)),
            ("bytes", bytes_per_minute, (size - bucket.bytes) / (bytes_per_minute or 1)))
        for what, limit, minutes in waits:
            if limit and minutes > 1e-9:
                raise Exhausted(
                    f"{name} has used its quota of {limit} {what} a minute: come back in {minutes * MINUTE_S:.1f} s",
                    "QUOTA", minutes * MINUTE_S, name=name, quota=f"{limit} {what} a minute")
        bucket.calls -= 1
        bucket.bytes -= size

    def charge(self, name: str, size: int) -> None:
        """Count the bytes of an answer."""
        if (bucket := self._buckets.get(name)) is not None:
            bucket.bytes -= size

    def _filled(self, name: str, calls: int, size: int) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(calls, size, now)
            if len(self._buckets) > MOST_CALLERS:
                self._buckets.popitem(last=False)
        minutes = (now - bucket.at) / MINUTE_S
        bucket.calls = min(calls, bucket.calls + minutes * calls)
        bucket.bytes = min(size, bucket.bytes + minutes * size)
        bucket.at = now
        self._buckets.move_to_end(name)
        return bucket
