from google.rpc import status_pb2 as _status_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreTranscriptsRequest(_message.Message):
    __slots__ = ("transcripts",)
    TRANSCRIPTS_FIELD_NUMBER: _ClassVar[int]
    transcripts: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Transcript]
    def __init__(self, transcripts: _Optional[_Iterable[_Union[_sample_pb2.Transcript, _Mapping]]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("status", "score")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    score: _sample_pb2.Score
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., score: _Optional[_Union[_sample_pb2.Score, _Mapping]] = ...) -> None: ...

class ScoreTranscriptsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...
