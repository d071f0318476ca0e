import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from slipstream.protos.types.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "max_new_tokens", "temperature", "seed", "stop_token_ids", "return_routes", "session", "greedy")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    prompt: _tensor_pb2.Tensor
    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    return_routes: bool
    session: str
    greedy: bool
    def __init__(self, prompt: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., return_routes: _Optional[bool] = ..., session: _Optional[str] = ..., greedy: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("tokens", "logprobs", "versions", "finish_reason", "routes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    tokens: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    versions: _containers.RepeatedCompositeFieldContainer[_sample_pb2.VersionSpan]
    finish_reason: _sample_pb2.FinishReason
    routes: _sample_pb2.Routes
    def __init__(self, tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[_sample_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ..., routes: _Optional[_Union[_sample_pb2.Routes, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "handed_back")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HANDED_BACK_FIELD_NUMBER: _ClassVar[int]
    finished: int
    handed_back: int
    def __init__(self, finished: _Optional[int] = ..., handed_back: _Optional[int] = ...) -> None: ...
