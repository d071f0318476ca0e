import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from slipstream.protos.types.v1 import policy_pb2 as _policy_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_OUTDATED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_OUTDATED: Outcome

class LeaseSamplesRequest(_message.Message):
    __slots__ = ("worker", "max_samples", "wait", "loaded_version", "run_file_hash")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FILE_HASH_FIELD_NUMBER: _ClassVar[int]
    worker: str
    max_samples: int
    wait: _duration_pb2.Duration
    loaded_version: int
    run_file_hash: str
    def __init__(self, worker: _Optional[str] = ..., max_samples: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., loaded_version: _Optional[int] = ..., run_file_hash: _Optional[str] = ...) -> None: ...

class SampleLease(_message.Message):
    __slots__ = ("lease", "task", "group_size", "seed", "min_step", "pinned_version", "partial", "evaluation")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_STEP_FIELD_NUMBER: _ClassVar[int]
    PINNED_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    lease: _sample_pb2.Lease
    task: _sample_pb2.Task
    group_size: int
    seed: int
    min_step: int
    pinned_version: _policy_pb2.PolicyVersion
    partial: bytes
    evaluation: bool
    def __init__(self, lease: _Optional[_Union[_sample_pb2.Lease, _Mapping]] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ..., group_size: _Optional[int] = ..., seed: _Optional[int] = ..., min_step: _Optional[int] = ..., pinned_version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., partial: _Optional[bytes] = ..., evaluation: _Optional[bool] = ...) -> None: ...

class LeaseSamplesResponse(_message.Message):
    __slots__ = ("leases", "ttl", "waiting_for", "newest_version", "finished")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[SampleLease]
    ttl: _duration_pb2.Duration
    waiting_for: str
    newest_version: _policy_pb2.PolicyVersion
    finished: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[SampleLease, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting_for: _Optional[str] = ..., newest_version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., finished: _Optional[bool] = ...) -> None: ...

class HeartbeatSamplesRequest(_message.Message):
    __slots__ = ("worker", "leases")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    leases: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Lease]
    def __init__(self, worker: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[_sample_pb2.Lease, _Mapping]]] = ...) -> None: ...

class HeartbeatSamplesResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class SubmittedSample(_message.Message):
    __slots__ = ("lease", "body", "crc32c", "tokens", "generated_tokens", "oldest_step", "newest_step", "score", "transcript", "failure")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    lease: _sample_pb2.Lease
    body: bytes
    crc32c: int
    tokens: int
    generated_tokens: int
    oldest_step: int
    newest_step: int
    score: _sample_pb2.Score
    transcript: bytes
    failure: str
    def __init__(self, lease: _Optional[_Union[_sample_pb2.Lease, _Mapping]] = ..., body: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., oldest_step: _Optional[int] = ..., newest_step: _Optional[int] = ..., score: _Optional[_Union[_sample_pb2.Score, _Mapping]] = ..., transcript: _Optional[bytes] = ..., failure: _Optional[str] = ...) -> None: ...

class SubmitSamplesRequest(_message.Message):
    __slots__ = ("worker", "samples")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    samples: _containers.RepeatedCompositeFieldContainer[SubmittedSample]
    def __init__(self, worker: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SubmittedSample, _Mapping]]] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("status", "outcome")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    outcome: Outcome
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ...) -> None: ...

class SubmitSamplesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...

class StreamSamplesRequest(_message.Message):
    __slots__ = ("worker", "samples")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    samples: _containers.RepeatedCompositeFieldContainer[SubmittedSample]
    def __init__(self, worker: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SubmittedSample, _Mapping]]] = ...) -> None: ...

class StreamSamplesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...

class PartialSample(_message.Message):
    __slots__ = ("lease", "body", "crc32c", "release")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _sample_pb2.Lease
    body: bytes
    crc32c: int
    release: bool
    def __init__(self, lease: _Optional[_Union[_sample_pb2.Lease, _Mapping]] = ..., body: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., release: _Optional[bool] = ...) -> None: ...

class SubmitPartialsRequest(_message.Message):
    __slots__ = ("worker", "partials")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    partials: _containers.RepeatedCompositeFieldContainer[PartialSample]
    def __init__(self, worker: _Optional[str] = ..., partials: _Optional[_Iterable[_Union[PartialSample, _Mapping]]] = ...) -> None: ...

class SubmitPartialsResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...

class ReleaseSamplesRequest(_message.Message):
    __slots__ = ("worker", "leases")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    leases: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Lease]
    def __init__(self, worker: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[_sample_pb2.Lease, _Mapping]]] = ...) -> None: ...

class ReleaseSamplesResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[_status_pb2.Status]
    def __init__(self, statuses: _Optional[_Iterable[_Union[_status_pb2.Status, _Mapping]]] = ...) -> None: ...
