"""Events: a synchronous call has none to wait for."""

from __future__ import annotations

from collections.abc import Callable


class EventHandle:
    """What `capture` returns in V2."""

    def __init__(self, arrive: Callable[[], None] | None = None) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


class EventOverlap:
    """Of a call: `event` is None when it was synchronous, and then there is nothing to wait for."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None, "nothing to wait for: the call was synchronous"
        self.event.current_stream_wait()
