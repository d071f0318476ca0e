from slipstream.protos.types.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class DrawId(_message.Message):
    __slots__ = ("ledger_epoch", "number")
    LEDGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ledger_epoch: int
    number: int
    def __init__(self, ledger_epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SampleId(_message.Message):
    __slots__ = ("draw", "index")
    DRAW_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    draw: DrawId
    index: int
    def __init__(self, draw: _Optional[_Union[DrawId, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("sample", "attempt")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sample: SampleId
    attempt: int
    def __init__(self, sample: _Optional[_Union[SampleId, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("environment", "index", "seed")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    environment: str
    index: int
    seed: int
    def __init__(self, environment: _Optional[str] = ..., index: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "step", "incarnation", "length")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    incarnation: int
    length: int
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., incarnation: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("turn", "length")
    TURN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    turn: int
    length: int
    def __init__(self, turn: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("dtype", "shape", "data", "object")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    dtype: _tensor_pb2.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    object: _tensor_pb2.ObjectRef
    def __init__(self, dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., object: _Optional[_Union[_tensor_pb2.ObjectRef, _Mapping]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("tokens", "loss_mask_runs", "logprobs", "versions", "routes", "parent", "fork_point", "turns")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_RUNS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FORK_POINT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    tokens: _tensor_pb2.Tensor
    loss_mask_runs: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _tensor_pb2.Tensor
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    routes: Routes
    parent: int
    fork_point: int
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., loss_mask_runs: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., parent: _Optional[int] = ..., fork_point: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("scalar", "per_turn", "per_token", "components", "failure")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    PER_TURN_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    scalar: float
    per_turn: _containers.RepeatedScalarFieldContainer[float]
    per_token: _tensor_pb2.Tensor
    components: _containers.ScalarMap[str, float]
    failure: str
    def __init__(self, scalar: _Optional[float] = ..., per_turn: _Optional[_Iterable[float]] = ..., per_token: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., components: _Optional[_Mapping[str, float]] = ..., failure: _Optional[str] = ...) -> None: ...

class Transcript(_message.Message):
    __slots__ = ("prompt", "response", "answer", "scorer", "info_json")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    response: str
    answer: str
    scorer: str
    info_json: str
    def __init__(self, prompt: _Optional[str] = ..., response: _Optional[str] = ..., answer: _Optional[str] = ..., scorer: _Optional[str] = ..., info_json: _Optional[str] = ...) -> None: ...

class SampleBody(_message.Message):
    __slots__ = ("segments", "finish_reason", "info_json")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    finish_reason: FinishReason
    info_json: str
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., info_json: _Optional[str] = ...) -> None: ...
