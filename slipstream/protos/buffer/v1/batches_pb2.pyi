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

class TakeIncarnationRequest(_message.Message):
    __slots__ = ("above", "checkpoint_batch", "checkpoint_epoch", "checkpoint_sequence")
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    above: int
    checkpoint_batch: int
    checkpoint_epoch: int
    checkpoint_sequence: int
    def __init__(self, above: _Optional[int] = ..., checkpoint_batch: _Optional[int] = ..., checkpoint_epoch: _Optional[int] = ..., checkpoint_sequence: _Optional[int] = ...) -> None: ...

class TakeIncarnationResponse(_message.Message):
    __slots__ = ("incarnation", "ledger_epoch", "numbered_batch", "committed_batch", "ledger_sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_BATCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BATCH_FIELD_NUMBER: _ClassVar[int]
    LEDGER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    ledger_epoch: int
    numbered_batch: int
    committed_batch: int
    ledger_sequence: int
    def __init__(self, incarnation: _Optional[int] = ..., ledger_epoch: _Optional[int] = ..., numbered_batch: _Optional[int] = ..., committed_batch: _Optional[int] = ..., ledger_sequence: _Optional[int] = ...) -> None: ...

class LeaseBatchRequest(_message.Message):
    __slots__ = ("incarnation", "batch", "wait", "bodies_up_to_bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    BODIES_UP_TO_BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    batch: int
    wait: _duration_pb2.Duration
    bodies_up_to_bytes: int
    def __init__(self, incarnation: _Optional[int] = ..., batch: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., bodies_up_to_bytes: _Optional[int] = ...) -> None: ...

class BatchMember(_message.Message):
    __slots__ = ("sample", "body", "score", "oldest_step", "newest_step", "tokens", "generated_tokens")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample: _sample_pb2.SampleId
    body: _tensor_pb2.ObjectRef
    score: _sample_pb2.Score
    oldest_step: int
    newest_step: int
    tokens: int
    generated_tokens: int
    def __init__(self, sample: _Optional[_Union[_sample_pb2.SampleId, _Mapping]] = ..., body: _Optional[_Union[_tensor_pb2.ObjectRef, _Mapping]] = ..., score: _Optional[_Union[_sample_pb2.Score, _Mapping]] = ..., oldest_step: _Optional[int] = ..., newest_step: _Optional[int] = ..., tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class BatchGroup(_message.Message):
    __slots__ = ("draw", "task", "group_size", "members", "lag", "mask_below_step", "no_signal")
    DRAW_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    MASK_BELOW_STEP_FIELD_NUMBER: _ClassVar[int]
    NO_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    draw: _sample_pb2.DrawId
    task: _sample_pb2.Task
    group_size: int
    members: _containers.RepeatedCompositeFieldContainer[BatchMember]
    lag: int
    mask_below_step: int
    no_signal: bool
    def __init__(self, draw: _Optional[_Union[_sample_pb2.DrawId, _Mapping]] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ..., group_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[BatchMember, _Mapping]]] = ..., lag: _Optional[int] = ..., mask_below_step: _Optional[int] = ..., no_signal: _Optional[bool] = ...) -> None: ...

class DropDecision(_message.Message):
    __slots__ = ("draw", "reason")
    DRAW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    draw: _sample_pb2.DrawId
    reason: str
    def __init__(self, draw: _Optional[_Union[_sample_pb2.DrawId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("run", "batch", "groups", "drops", "log_key", "ledger_sequence", "numbered_unix_ms", "next_draw", "live_draws")
    RUN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    LOG_KEY_FIELD_NUMBER: _ClassVar[int]
    LEDGER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAW_FIELD_NUMBER: _ClassVar[int]
    LIVE_DRAWS_FIELD_NUMBER: _ClassVar[int]
    run: str
    batch: int
    groups: _containers.RepeatedCompositeFieldContainer[BatchGroup]
    drops: _containers.RepeatedCompositeFieldContainer[DropDecision]
    log_key: str
    ledger_sequence: int
    numbered_unix_ms: int
    next_draw: int
    live_draws: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., batch: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[BatchGroup, _Mapping]]] = ..., drops: _Optional[_Iterable[_Union[DropDecision, _Mapping]]] = ..., log_key: _Optional[str] = ..., ledger_sequence: _Optional[int] = ..., numbered_unix_ms: _Optional[int] = ..., next_draw: _Optional[int] = ..., live_draws: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseBatchResponse(_message.Message):
    __slots__ = ("batch", "waiting_for", "checkpoint_now", "finished", "bodies")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_NOW_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    batch: Batch
    waiting_for: str
    checkpoint_now: bool
    finished: bool
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, batch: _Optional[_Union[Batch, _Mapping]] = ..., waiting_for: _Optional[str] = ..., checkpoint_now: _Optional[bool] = ..., finished: _Optional[bool] = ..., bodies: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadBatchRequest(_message.Message):
    __slots__ = ("batch", "samples")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    batch: int
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.SampleId]
    def __init__(self, batch: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[_sample_pb2.SampleId, _Mapping]]] = ...) -> None: ...

class BatchBody(_message.Message):
    __slots__ = ("sample", "body", "crc32c")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    sample: _sample_pb2.SampleId
    body: bytes
    crc32c: int
    def __init__(self, sample: _Optional[_Union[_sample_pb2.SampleId, _Mapping]] = ..., body: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReadBatchResponse(_message.Message):
    __slots__ = ("bodies",)
    BODIES_FIELD_NUMBER: _ClassVar[int]
    bodies: _containers.RepeatedCompositeFieldContainer[BatchBody]
    def __init__(self, bodies: _Optional[_Iterable[_Union[BatchBody, _Mapping]]] = ...) -> None: ...

class CommitBatchesRequest(_message.Message):
    __slots__ = ("incarnation", "through_batch", "checkpoint_key")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    THROUGH_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_KEY_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    through_batch: int
    checkpoint_key: str
    def __init__(self, incarnation: _Optional[int] = ..., through_batch: _Optional[int] = ..., checkpoint_key: _Optional[str] = ...) -> None: ...

class CommitBatchesResponse(_message.Message):
    __slots__ = ("committed_batch",)
    COMMITTED_BATCH_FIELD_NUMBER: _ClassVar[int]
    committed_batch: int
    def __init__(self, committed_batch: _Optional[int] = ...) -> None: ...
