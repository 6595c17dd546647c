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
