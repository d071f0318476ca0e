"""Channels that prove who calls, and that follow renewed certificates.

consumes      certificates and tokens, as they are when a call starts
produces      calls
waits for     nothing
unblocked by  -

gRPC fixes a channel's certificate when it is made. So a renewed one means a new channel below the same stubs: calls that start
go through the new one, those in flight end on the old one, which is closed after the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from slipstream.tls import Certificates, Pems

Metadata = Sequence[tuple[str, str]]


class RenewingChannel(grpc.aio.Channel):
    """One channel to its users, one real channel per state of the certificates."""

    def __init__(self, certificates: Certificates, make: Callable[[Pems], grpc.aio.Channel]) -> None:
        self._certificates, self._make = certificates, make
        self._pems = certificates.current()
        self._in_flight: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._inner = self._open()

    def _open(self) -> grpc.aio.Channel:
        channel = self._make(self._pems)
        self._in_flight[channel] = 0
        return channel

    def _current(self) -> grpc.aio.Channel:
        """The channel for a call that starts now."""
        pems = self._certificates.current()
        if pems is not self._pems:
            self._pems, old = pems, self._inner
            self._inner = self._open()
            self._close_if_idle(old)
        return self._inner

    def _begin(self, channel: grpc.aio.Channel, call: Any) -> Any:
        """Count a call until it is done."""

        def done(_: object) -> None:
            self._in_flight[channel] -= 1
            if channel is not self._inner:
                self._close_if_idle(channel)

        self._in_flight[channel] += 1
        call.add_done_callback(done)
        return call

    def _close_if_idle(self, channel: grpc.aio.Channel) -> None:
        if self._in_flight.get(channel) == 0:
            del self._in_flight[channel]
            task = asyncio.get_running_loop().create_task(channel.close(), name="close a channel of former certificates")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Close every channel; calls in flight have `grace` seconds."""
        channels = list(self._in_flight)
        self._in_flight = dict.fromkeys(channels, 1 << 30)  # from now on nothing is closed a second time
        await asyncio.gather(*(channel.close(grace) for channel in channels), *self._closing)

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """A method of a stub: made anew below it whenever the channel is."""
        made: list[Any] = [None, None]

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            channel = self._current()
            if made[0] is not channel:
                made[:] = channel, getattr(channel, kind)(*args, **kwargs)
            return self._begin(channel, made[1](*call_args, **call_kwargs))

        return call


class TokenChannel(grpc.aio.Channel):
    """A channel whose calls carry `metadata()`, asked anew for each.

    Not gRPC's interceptors: those add a task and five objects to every call.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[], Metadata]) -> None:
        self._channel, self._metadata = channel, metadata

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata()), **kwargs)

        return call
