"""What stands in ZooKeeper is read although a part of it, or who could explain something, cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollbridge.errors import ZooKeeperUnavailableError
from rollbridge.model.names import GroupName
from rollbridge.model.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.zookeeper import metadata
from rollbridge.zookeeper.errors import ZooKeeperDeniedError
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import Watch, Znode

GROUP = GroupName("s", "default")
ANSWER = AdminAnswer(ok=True, answered_ms=1)


def node(value: bytes) -> Znode:
    return Znode(0, 0, 0, 0, value)


class Session:
    """Stands for a session of which some nodes are refused, and others not answered for."""

    is_closed = False

    def __init__(self, denied: str = "") -> None:
        self.denied, self.requests = denied, 0
        self.answer: Znode | None = None
        self.watches: list[Watch] = []

    def get(self, path: str, watch: Watch | None = None) -> Znode | None:
        if watch is not None and self.answer is None:
            self.watches.append(watch)
        return self.answer

    def children(self, path: str) -> list[str]:
        self.answer = node(ANSWER.to_json())
        for watch in self.watches:
            watch()
        raise ZooKeeperUnavailableError(f"ZooKeeper did not answer for {path} in time")

    def get_many(self, paths: Sequence[str]) -> list[Znode | None]:
        self.requests += 1
        if self.denied in paths:
            raise ZooKeeperDeniedError(f"{self.denied} is not yours", path=self.denied, identity="me")
        return [node(path.encode()) for path in paths]

    def delete_soon(self, path: str) -> None:
        pass


def metadata_of(session: Session) -> Metadata:
    stand_in: Any = session
    return Metadata(stand_in)


def test_an_answer_is_taken_although_nobody_can_tell_why_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_TELL_S", 0.0)
    monkeypatch.setattr(metadata, "_CLOSED_LOOK_S", 0.001)
    request = AdminRequest(kind=RequestKind.DELETE_STREAM, stream="s/t", client_name="c", created_ms=1)
    assert metadata_of(Session()).answer_to(GROUP, request, "request-1", 10.0) == ANSWER


def test_of_many_nodes_one_that_is_refused_takes_few_requests() -> None:
    session = Session("/700")
    found = metadata_of(session).get_each([f"/{number}" for number in range(1_000)])
    assert [place for place, item in enumerate(found) if isinstance(item, ZooKeeperDeniedError)] == [700]
    assert [item.value for item in found if isinstance(item, Znode)] == [b"/%d" % n for n in range(1_000) if n != 700]
    assert session.requests < 25
