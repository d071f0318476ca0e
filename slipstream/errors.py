"""The error model: four kinds, sorted at the boundary, and their gRPC form.

| kind                | who acts          | retry            | gRPC code                             |
|---------------------|-------------------|------------------|---------------------------------------|
| InvalidInput        | the caller        | never            | INVALID_ARGUMENT, NOT_FOUND, ...      |
| Unavailable         | nobody            | after retry_s    | UNAVAILABLE, RESOURCE_EXHAUSTED       |
| LostWork (fenced)   | the caller stops  | never            | FAILED_PRECONDITION, ALREADY_EXISTS   |
| anything else: a bug| a developer       | never            | INTERNAL                              |

Every status carries google.rpc.ErrorInfo: `reason` is an UPPER_SNAKE constant, `metadata` names field and value. ConfigError is
for people at a command line: one line, no traceback.
"""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "slipstream"


class SlipstreamError(Exception):
    """Base. `code` is a google.rpc code, `reason` an UPPER_SNAKE constant, `metadata` names fields and values."""

    code: int = code_pb2.INTERNAL

    def __init__(self, message: str, reason: str = "", retry_s: float | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).__name__.upper()
        self.retry_s = retry_s
        self.metadata = {k: str(v) for k, v in metadata.items()}


class ConfigError(SlipstreamError):
    """A run file or command line that cannot be used: printed as one line."""

    code = code_pb2.INVALID_ARGUMENT


class InvalidInput(SlipstreamError):
    """The caller sent something malformed. Never retry."""

    code = code_pb2.INVALID_ARGUMENT


class NotFound(InvalidInput):
    """The named thing does not exist."""

    code = code_pb2.NOT_FOUND


class OutOfRange(InvalidInput):
    """The number is outside of what exists."""

    code = code_pb2.OUT_OF_RANGE


class Fenced(SlipstreamError):
    """A newer attempt or incarnation has taken over. Stop working on it."""

    code = code_pb2.FAILED_PRECONDITION


class Conflict(SlipstreamError):
    """The same key exists with other contents."""

    code = code_pb2.ALREADY_EXISTS


class Unavailable(SlipstreamError):
    """Transient: retry after `retry_s`."""

    code = code_pb2.UNAVAILABLE


class Exhausted(Unavailable):
    """No room: retry after `retry_s`."""

    code = code_pb2.RESOURCE_EXHAUSTED


_BY_CODE: dict[int, type[SlipstreamError]] = {
    kind.code: kind for kind in (InvalidInput, NotFound, OutOfRange, Fenced, Conflict, Unavailable, Exhausted)
}


def to_status(error: BaseException | None) -> status_pb2.Status:
    """An error as google.rpc.Status with details; None is OK."""
    if error is None:
        return status_pb2.Status()
    if not isinstance(error, SlipstreamError):
        return status_pb2.Status(code=code_pb2.INTERNAL, message=f"{type(error).__name__}: {error}")
    status = status_pb2.Status(code=error.code, message=error.message)
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_s * 1000))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> SlipstreamError | None:
    """The error that a status stands for; None when it is OK."""
    if status.code == code_pb2.OK:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_s = retry.retry_delay.ToMilliseconds() / 1000
    kind = _BY_CODE.get(status.code, SlipstreamError)
    error = kind(status.message, info.reason, retry_s, **dict(info.metadata))
    error.code = status.code
    return error


def from_rpc_error(error: grpc.aio.AioRpcError) -> SlipstreamError:
    """A failed call as our error. Transport failures (UNAVAILABLE, DEADLINE_EXCEEDED) become Unavailable."""
    for key, value in tuple(error.trailing_metadata() or ()):
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            ours = from_status(status_pb2.Status.FromString(value))
            if ours is not None:
                return ours
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return Unavailable(details or code.name, reason=code.name)
    other = SlipstreamError(f"{code.name}: {details}", reason=code.name)
    other.code = code.value[0]
    return other


def grpc_code(status: status_pb2.Status) -> grpc.StatusCode:
    """The grpc enum member of a google.rpc code."""
    return next(c for c in grpc.StatusCode if c.value[0] == status.code)


def _pack(status: status_pb2.Status, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
