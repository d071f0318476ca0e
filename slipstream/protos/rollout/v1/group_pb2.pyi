from google.rpc import status_pb2 as _status_pb2
from slipstream.protos.types.v1 import policy_pb2 as _policy_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("node", "instance")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    node: int
    instance: str
    def __init__(self, node: _Optional[int] = ..., instance: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("order", "prepare", "launch", "forget")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    order: int
    prepare: Prepare
    launch: Launch
    forget: Forget
    def __init__(self, order: _Optional[int] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., launch: _Optional[_Union[Launch, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("version", "folder", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    folder: str
    name: str
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., folder: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Launch(_message.Message):
    __slots__ = ("address", "port")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    address: str
    port: int
    def __init__(self, address: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("node", "order", "status", "crc32c")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    node: int
    order: int
    status: _status_pb2.Status
    crc32c: int
    def __init__(self, node: _Optional[int] = ..., order: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
