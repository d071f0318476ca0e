import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseUnscoredRequest(_message.Message):
    __slots__ = ("worker", "max_samples", "wait")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    max_samples: int
    wait: _duration_pb2.Duration
    def __init__(self, worker: _Optional[str] = ..., max_samples: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnscoredSample(_message.Message):
    __slots__ = ("lease", "task", "transcript")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    lease: _sample_pb2.Lease
    task: _sample_pb2.Task
    transcript: bytes
    def __init__(self, lease: _Optional[_Union[_sample_pb2.Lease, _Mapping]] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ..., transcript: _Optional[bytes] = ...) -> None: ...

class LeaseUnscoredResponse(_message.Message):
    __slots__ = ("samples", "ttl")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[UnscoredSample]
    ttl: _duration_pb2.Duration
    def __init__(self, samples: _Optional[_Iterable[_Union[UnscoredSample, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HeartbeatScoringRequest(_message.Message):
    __slots__ = ("worker", "leases")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    leases: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Lease]
    def __init__(self, worker: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[_sample_pb2.Lease, _Mapping]]] = ...) -> None: ...

class HeartbeatScoringResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class ScoredSample(_message.Message):
    __slots__ = ("lease", "score")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    lease: _sample_pb2.Lease
    score: _sample_pb2.Score
    def __init__(self, lease: _Optional[_Union[_sample_pb2.Lease, _Mapping]] = ..., score: _Optional[_Union[_sample_pb2.Score, _Mapping]] = ...) -> None: ...

class SubmitScoresRequest(_message.Message):
    __slots__ = ("worker", "scores")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    scores: _containers.RepeatedCompositeFieldContainer[ScoredSample]
    def __init__(self, worker: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[ScoredSample, _Mapping]]] = ...) -> None: ...

class SubmitScoresResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...
