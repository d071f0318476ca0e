from slipstream.protos.types.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetProgressResponse(_message.Message):
    __slots__ = ("step", "steps", "incarnation", "checkpoint_step", "published", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    incarnation: int
    checkpoint_step: int
    published: _policy_pb2.PolicyVersion
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., incarnation: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., published: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RequestCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestCheckpointResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...
