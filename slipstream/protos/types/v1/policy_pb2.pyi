from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyVersion(_message.Message):
    __slots__ = ("number", "step", "incarnation", "manifest_key", "manifest_crc32c")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_CRC32C_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: int
    incarnation: int
    manifest_key: str
    manifest_crc32c: int
    def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., incarnation: _Optional[int] = ..., manifest_key: _Optional[str] = ..., manifest_crc32c: _Optional[int] = ...) -> None: ...
