from typing import NamedTuple

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
