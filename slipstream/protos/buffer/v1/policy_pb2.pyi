import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from slipstream.protos.types.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveVersionRequest(_message.Message):
    __slots__ = ("incarnation", "step")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ReserveVersionResponse(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class PublishVersionRequest(_message.Message):
    __slots__ = ("version", "next_step")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    next_step: int
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., next_step: _Optional[int] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ("deletable", "next_number")
    DELETABLE_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    deletable: _containers.RepeatedCompositeFieldContainer[_policy_pb2.PolicyVersion]
    next_number: int
    def __init__(self, deletable: _Optional[_Iterable[_Union[_policy_pb2.PolicyVersion, _Mapping]]] = ..., next_number: _Optional[int] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_policy_pb2.PolicyVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[_policy_pb2.PolicyVersion, _Mapping]]] = ...) -> None: ...

class HoldVersionRequest(_message.Message):
    __slots__ = ("version", "reader", "ttl")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    version: int
    reader: str
    ttl: _duration_pb2.Duration
    def __init__(self, version: _Optional[int] = ..., reader: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HoldVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
