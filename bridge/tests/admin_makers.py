"""Admin requests without a server: a ZooKeeper of one stream, to which they are written and then given up."""

from __future__ import annotations

from typing import Any

from rollbridge.client.admin import Admin
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminAnswer, AdminRequest
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName

ORDERS = StreamName("sales", "orders")
GROUP = GroupName("sales")


class Sent(Exception):
    """A request fits its schema, so it would have been put."""


class Stored:
    """ZooKeeper with one stream, to which a request is written and then given up."""

    def ensure_group(self, _: GroupName) -> bool:
        return False

    def name_of(self, name: str) -> StreamName:
        return StreamName.parse(name)

    def stream(self, name: StreamName) -> StreamConfig:
        return StreamConfig(name=name, group=GROUP, created_ms=0, buffer_topic_id="")

    def history(self, *_: object) -> EpochHistory:
        return EpochHistory.create(even_ranges(1), 0)

    def group(self, name: GroupName) -> Group:
        return Group(name=name, created_ms=0)

    def ask(self, _: GroupName, request: AdminRequest, __: float) -> AdminAnswer:
        request.to_json()
        raise Sent


def make_admin() -> Admin:
    stored: Any = Stored()
    return Admin(
        stored,
        forget=lambda _: None,
        offsets=stored,
        sample=stored,
        client_name="c",
        timeout_s=1.0,
        check_open=lambda: None,
    )
