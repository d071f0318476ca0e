import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Balance(_message.Message):
    __slots__ = ("run", "taken", "ledger_epoch", "sequence", "incarnation", "draws", "lost_draws", "group_size", "groups_per_batch", "samples", "groups", "dropped", "outstanding", "budget", "bytes", "reserved_bytes", "quota_bytes", "published_step", "numbered_batch", "committed_batch", "low_water_mark", "sample_leases", "scoring_leases", "expired", "rejected")
    class SamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SampleLeasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ScoringLeasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ExpiredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    LEDGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    LOST_DRAWS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_BATCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOW_WATER_MARK_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_LEASES_FIELD_NUMBER: _ClassVar[int]
    SCORING_LEASES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    taken: _timestamp_pb2.Timestamp
    ledger_epoch: int
    sequence: int
    incarnation: int
    draws: int
    lost_draws: int
    group_size: int
    groups_per_batch: int
    samples: _containers.ScalarMap[str, int]
    groups: _containers.ScalarMap[str, int]
    dropped: _containers.ScalarMap[str, int]
    outstanding: int
    budget: int
    bytes: int
    reserved_bytes: int
    quota_bytes: int
    published_step: int
    numbered_batch: int
    committed_batch: int
    low_water_mark: int
    sample_leases: _containers.ScalarMap[str, int]
    scoring_leases: _containers.ScalarMap[str, int]
    expired: _containers.ScalarMap[str, int]
    rejected: _containers.ScalarMap[str, int]
    def __init__(self, run: _Optional[str] = ..., taken: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ledger_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., incarnation: _Optional[int] = ..., draws: _Optional[int] = ..., lost_draws: _Optional[int] = ..., group_size: _Optional[int] = ..., groups_per_batch: _Optional[int] = ..., samples: _Optional[_Mapping[str, int]] = ..., groups: _Optional[_Mapping[str, int]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., outstanding: _Optional[int] = ..., budget: _Optional[int] = ..., bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., published_step: _Optional[int] = ..., numbered_batch: _Optional[int] = ..., committed_batch: _Optional[int] = ..., low_water_mark: _Optional[int] = ..., sample_leases: _Optional[_Mapping[str, int]] = ..., scoring_leases: _Optional[_Mapping[str, int]] = ..., expired: _Optional[_Mapping[str, int]] = ..., rejected: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GetBalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBalanceResponse(_message.Message):
    __slots__ = ("balance",)
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    balance: Balance
    def __init__(self, balance: _Optional[_Union[Balance, _Mapping]] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("id", "draw", "index", "reason", "environment", "generated_tokens", "ledger_epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    DRAW_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    draw: int
    index: int
    reason: str
    environment: str
    generated_tokens: int
    ledger_epoch: int
    def __init__(self, id: _Optional[str] = ..., draw: _Optional[int] = ..., index: _Optional[int] = ..., reason: _Optional[str] = ..., environment: _Optional[str] = ..., generated_tokens: _Optional[int] = ..., ledger_epoch: _Optional[int] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("letters",)
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    def __init__(self, letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ...) -> None: ...
