from collections.abc import Sequence
from typing import NamedTuple

from kazoo.security import ACL

class Auth(NamedTuple):
    auth_type: int
    scheme: str
    auth: str

class Connect(NamedTuple):
    protocol_version: int
    last_zxid_seen: int
    time_out: int
    session_id: int
    passwd: bytes
    read_only: bool | None

class Create(NamedTuple):
    path: str
    data: bytes
    acl: Sequence[ACL]
    flags: int

class MultiHeader(NamedTuple):
    type: int
    done: bool
    err: int | None

    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> tuple[MultiHeader, int]: ...

class GetData:
    type: int

    def __init__(self, path: str, watcher: object) -> None: ...
    def serialize(self) -> bytearray: ...

class GetChildren:
    type: int

    def __init__(self, path: str, watcher: object) -> None: ...
    def serialize(self) -> bytearray: ...

CloseInstance: object

def read_buffer(bytes: bytes, offset: int) -> tuple[bytes, int]: ...
def read_string(buffer: bytes, offset: int) -> tuple[str, int]: ...
