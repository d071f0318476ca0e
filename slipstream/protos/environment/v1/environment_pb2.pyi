from google.rpc import status_pb2 as _status_pb2
from slipstream.protos.types.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("name", "tasks", "max_episodes", "scorer", "contract")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODES_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tasks: int
    max_episodes: int
    scorer: str
    contract: str
    def __init__(self, name: _Optional[str] = ..., tasks: _Optional[int] = ..., max_episodes: _Optional[int] = ..., scorer: _Optional[str] = ..., contract: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class MessageList(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("text", "messages", "tokens", "conversation", "fork_of")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: MessageList
    tokens: TokenList
    conversation: str
    fork_of: str
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[MessageList, _Mapping]] = ..., tokens: _Optional[_Union[TokenList, _Mapping]] = ..., conversation: _Optional[str] = ..., fork_of: _Optional[str] = ...) -> None: ...

class EpisodeReset(_message.Message):
    __slots__ = ("episode", "task")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    episode: str
    task: _sample_pb2.Task
    def __init__(self, episode: _Optional[str] = ..., task: _Optional[_Union[_sample_pb2.Task, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("episodes",)
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    episodes: _containers.RepeatedCompositeFieldContainer[EpisodeReset]
    def __init__(self, episodes: _Optional[_Iterable[_Union[EpisodeReset, _Mapping]]] = ...) -> None: ...

class ResetResult(_message.Message):
    __slots__ = ("status", "observation", "answer", "scorer", "info_json")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    observation: Observation
    answer: str
    scorer: str
    info_json: str
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., answer: _Optional[str] = ..., scorer: _Optional[str] = ..., info_json: _Optional[str] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ResetResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ResetResult, _Mapping]]] = ...) -> None: ...

class EpisodeStep(_message.Message):
    __slots__ = ("episode", "sequence", "action", "action_tokens", "finish_reason")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    episode: str
    sequence: int
    action: str
    action_tokens: TokenList
    finish_reason: _sample_pb2.FinishReason
    def __init__(self, episode: _Optional[str] = ..., sequence: _Optional[int] = ..., action: _Optional[str] = ..., action_tokens: _Optional[_Union[TokenList, _Mapping]] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[EpisodeStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[EpisodeStep, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("status", "observation", "done", "reward", "components")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    observation: Observation
    done: bool
    reward: float
    components: _containers.ScalarMap[str, float]
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., done: _Optional[bool] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("episodes",)
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    episodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, episodes: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
