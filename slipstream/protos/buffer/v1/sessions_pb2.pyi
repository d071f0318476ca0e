import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("client", "environment", "wait")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    client: str
    environment: str
    wait: _duration_pb2.Duration
    def __init__(self, client: _Optional[str] = ..., environment: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "task", "rollout_address", "ttl")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    session: str
    task: _sample_pb2.Task
    rollout_address: str
    ttl: _duration_pb2.Duration
    def __init__(self, session: _Optional[str] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ..., rollout_address: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HeartbeatSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class HeartbeatSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session", "score", "abandoned")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    session: str
    score: _sample_pb2.Score
    abandoned: str
    def __init__(self, session: _Optional[str] = ..., score: _Optional[_Union[_sample_pb2.Score, _Mapping]] = ..., abandoned: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
