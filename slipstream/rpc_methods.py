"""What stands around every method of a server: checks of the caller, errors made into statuses, the time it took.

Put around each method once, when it is first called. gRPC's interceptors would do the same anew at every call.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from slipstream import errors, logs
from slipstream.errors import SlipstreamError

Observe = Callable[[str, str, float], None]

STATUS_DETAILS = "grpc-status-details-bin"

log = logs.get("rpc")


class Registrar:
    """Stands in for the server while generated code registers: learns the services' names, and puts `serve` around methods."""

    def __init__(self, server: grpc.aio.Server, serve: Callable[[str, Any], Any]) -> None:
        self._server, self._serve = server, serve
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self.names += [h.service_name() for h in handlers if hasattr(h, "service_name")]
        self._server.add_generic_rpc_handlers([_Methods(h, self._serve) for h in handlers])

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The same methods once more, for a faster look-up. Left out: one way of dispatch is enough."""


class _Methods(grpc.GenericRpcHandler):
    """Methods by name, each made at its first call."""

    def __init__(self, methods: grpc.GenericRpcHandler, serve: Callable[[str, Any], Any]) -> None:
        self._methods, self._serve = methods, serve
        self._served: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method that a call asks for; None when it is of another service."""
        method = handler_call_details.method
        if (served := self._served.get(method)) is None and (found := self._methods.service(handler_call_details)) is not None:
            served = self._served[method] = self._serve(method, found)
        return served


class Boundary:
    """Turns exceptions of handlers into statuses with details, for unary and streaming methods, and times every call."""

    def __init__(self, observe: Observe | None) -> None:
        self._observe = observe

    def around(self, method: str, handler: Any) -> Any:
        """The handler of "/package.Service/Method" with that."""
        inner: Any
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        if inspect.isasyncgenfunction(inner):
            return make(self._stream(method, inner), handler.request_deserializer, handler.response_serializer)
        return make(self._single(method, inner), handler.request_deserializer, handler.response_serializer)

    def _single(self, method: str, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
            started = time.perf_counter()
            try:
                response = await inner(request, context)
            except Exception as error:
                await self._abort(method, context, error, started)
            else:
                self._done(method, "OK", started)
                return response

        return handle

    def _stream(self, method: str, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def handle(request: Any, context: grpc.aio.ServicerContext):
            started = time.perf_counter()
            try:
                async with contextlib.aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await self._abort(method, context, error, started)
            else:
                self._done(method, "OK", started)

        return handle

    async def _abort(self, method: str, context: grpc.aio.ServicerContext, error: Exception, started: float) -> None:
        if isinstance(error, grpc.aio.BaseError):
            self._done(method, "ABORTED_BY_HANDLER", started)
            raise error
        if not isinstance(error, SlipstreamError):
            log.exception(f"{method} failed", error=error)
        status = errors.to_status(error)
        code = errors.grpc_code(status)
        self._done(method, code.name, started)
        await context.abort(code, status.message, ((STATUS_DETAILS, status.SerializeToString()),))

    def _done(self, method: str, code: str, started: float) -> None:
        if self._observe is not None:
            self._observe(method, code, time.perf_counter() - started)
