"""What a gateway knows of streams by the names of topics, whoever has been told what by the brokers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.errors import KafkaUnavailableError, RollbridgeError, ZooKeeperUnavailableError
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_gateway.server.handlers import RequestHandler
from rollbridge_gateway.server.topics import REFRESH_S, Topics

STREAM, TOPIC = "sales/orders", "sales.orders"
THERE, MISSING, DENIED = ErrorCode.none, ErrorCode.unknown_topic_or_partition, ErrorCode.topic_authorization_failed


def told(code: ErrorCode, topic: str = TOPIC) -> list[Any]:
    return [SimpleNamespace(name=topic, error_code=code)]


class World:
    """Brokers that say something of the topic, and one stream."""

    def __init__(self, code: ErrorCode) -> None:
        self.code: ErrorCode | None = code
        self.fault: RollbridgeError | None = None
        self.listed = 0
        self.admin = self
        self.topics = Topics(self, self.look)  # type: ignore[arg-type]
        self.topics.read(0)
        self.topics.look()

    def list_streams(self) -> list[StreamConfig]:
        self.listed += 1
        if self.fault is not None:
            raise self.fault
        return [
            StreamConfig(name=StreamName.parse(STREAM), group=GroupName("sales"), created_ms=0, buffer_topic_id="b")
        ]

    def look(self, names: Any) -> list[Any]:
        assert set(names) == {TOPIC}
        if self.code is None:
            raise KafkaUnavailableError("no broker answers")
        return told(self.code)

    @property
    def means_the_stream(self) -> bool:
        known = self.topics.known
        assert (TOPIC in known.virtual) == (TOPIC in known.streams) == (TOPIC not in known.clashes)
        return TOPIC in known.virtual


@pytest.mark.parametrize(
    ("code", "means_the_stream"),
    [
        (THERE, False),
        (ErrorCode.leader_not_available, False),
        (MISSING, True),
        (DENIED, True),
        (ErrorCode.unknown_server_error, True),
    ],
)
def test_the_brokers_topic_wins(code: ErrorCode, means_the_stream: bool) -> None:
    assert World(code).means_the_stream is means_the_stream


def test_what_one_client_sees_counts_for_all_until_brokers_say_otherwise() -> None:
    world = World(DENIED)
    world.topics.saw(told(DENIED))
    world.topics.saw(told(THERE, "another.topic"))
    assert world.means_the_stream
    world.topics.saw(told(THERE))
    for code in (DENIED, None):
        world.code = code
        world.topics.look()
        assert not world.means_the_stream
    world.topics.saw(told(MISSING))
    assert world.means_the_stream
    world.code = THERE
    world.topics.look()
    assert not world.means_the_stream


def test_nobody_who_reads_the_list_waits_for_brokers_that_hang() -> None:
    world = World(THERE)
    world.topics._look = lambda names: pytest.fail("brokers are asked")
    world.topics.read(0)
    assert world.topics.stream_of("another.topic") is None


def test_while_zookeeper_does_not_answer_one_waits_for_it_and_the_others_do_not_wait_in_a_row() -> None:
    world = World(MISSING)
    world.fault, world.listed = ZooKeeperUnavailableError("no answer"), 0
    for _ in range(50):
        with pytest.raises(ZooKeeperUnavailableError):
            world.topics.read(0)
        with pytest.raises(ZooKeeperUnavailableError):
            world.topics.stream_of("another.topic")
    assert world.listed == 1
    assert world.means_the_stream, "the older list is used"
    world.topics._failed_s -= REFRESH_S
    world.fault = None
    world.topics.read(0)
    assert world.listed == 2, "it is asked again, and answers"


@pytest.mark.parametrize(("code", "makes_topics", "is_read_again"), [
    (MISSING, True, True), (MISSING, False, False), (THERE, True, False), (DENIED, True, False),
])  # fmt: skip
def test_what_a_broker_would_make_is_looked_for_among_streams_that_are_younger_than_the_list(
    code: ErrorCode, makes_topics: bool, is_read_again: bool
) -> None:
    world, ages_s = World(MISSING), list[float]()

    async def ask(api: int, version: int, client: None, values: Any) -> Any:
        assert values["allow_auto_topic_creation"] is False
        return SimpleNamespace(topics=told(code, "a.topic"))

    async def upstream() -> Any:
        return SimpleNamespace(ask=ask)

    async def fresh_topics(age_s: float) -> None:
        ages_s.append(age_s)
        assert not world.topics.is_fresh(age_s), "the list that was there is none that may answer"

    server = SimpleNamespace(topics=world.topics, fresh_topics=fresh_topics)
    connection: Any = SimpleNamespace(server=server, upstream=upstream)
    asyncio.run(RequestHandler._look_at_brokers(connection, ["a.topic"], makes_topics=makes_topics))
    assert bool(ages_s) is is_read_again
