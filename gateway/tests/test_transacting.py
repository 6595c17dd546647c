"""Requests of one connection are carried out in their order, whatever has to be asked for before."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.kafka.records import BatchBuilder, stamp
from rollbridge_gateway.producer.procedures import GroupCommit, IdState, OffsetToCommit, Written
from rollbridge_gateway.producer.table import NOBODY
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.context import Homes
from rollbridge_gateway.server.topics import KnownTopic
from rollbridge_gateway.server.transacting import Transacting

TOPIC = "sales.orders"


class Rights:
    """Rights that are looked up with the first request, slowly, and known from then on."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_known = False

    def knows(self, transactional_id: str, topics: Any = ()) -> bool:
        return self.is_known

    async def check(self, transactional_id: str, topics: Any = (), group: str | None = None) -> dict[str, ErrorCode]:
        self.asked += 1
        mine = self.asked
        for _ in range(10 if mine > 1 else 3):  # the second one's answer comes late, when the third one need not ask
            await asyncio.sleep(0)
        self.is_known = True
        return {}


class Producers:
    """Notes what is carried out, and how many batches it was given."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.recoveries: list[bool] = []
        self.users: Counter[str] = Counter()

    async def run(self, name: str, make: Any, *, writes: bool = False, takes_over: Any = None) -> Any:
        given = make(IdState()).gi_frame.f_locals
        if "is_recovery" in given:
            self.recoveries.append(given["is_recovery"])
            return NOBODY
        self.sequences.append(given["batches"][0].first)
        await asyncio.sleep(0)
        return Written([None], None)

    async def settled(self, ticket: object) -> None:
        await asyncio.sleep(0)


class Server:
    """What requests use of a gateway."""

    def __init__(self) -> None:
        self.producers = Producers()
        self.refused: list[str] = []
        self.topics = self
        self.partitions = 8
        self.known = KnownTopic({TOPIC: "sales/orders"}, frozenset((TOPIC,)), {TOPIC: f"{TOPIC}.b"}, {}, {}, {}, {})

    def count_written(self, batches: Any, faults: Any) -> None:
        pass

    def is_chosen(self, client_id: str | None) -> bool:
        return True

    def count_refusal(self, api: int, code: str) -> None:
        self.refused.append(code)


def produce(sequence: int, *, acks: int = -1) -> bytes:
    """A Produce request of one record."""
    builder = BatchBuilder(1_000)
    builder.append(0, b"k", b"v")
    batch = stamp(builder.build(), producer_id=1 << 62, producer_epoch=0, base_sequence=sequence)
    values = {
        "transactional_id": "id",
        "acks": acks,
        "topic_data": [{"name": TOPIC, "partition_data": [{"index": 0, "records": batch}]}],
    }
    return wire.write_request(Api.PRODUCE, 12, sequence, "c", values)


def test_a_request_that_need_not_ask_does_not_overtake_one_that_must() -> None:
    server: Any = Server()
    rights: Any = Rights()

    async def run() -> None:
        transacting = Transacting(server, rights, lambda: None)
        tasks = []
        for sequence in range(20):
            data = produce(sequence)
            tasks.append(asyncio.create_task(transacting.produce(data, wire.read_head(data))))
            await asyncio.sleep(0)
        for sequence, task in enumerate(tasks):
            answer = await task
            assert answer is not None
            assert int.from_bytes(answer[:4], "big") == sequence

    asyncio.run(run())
    assert server.producers.sequences == list(range(20))


@pytest.mark.parametrize("is_right", [True, False])
def test_who_wants_no_answer_loses_the_connection_with_what_is_refused(is_right: bool) -> None:
    server: Any = Server()
    rights: Any = Rights()
    ends: list[None] = []
    data = bytearray(produce(0, acks=0))
    if not is_right:
        data[data.rindex(b"\2k") + 1] ^= 1  # the checksum of the batch does not fit any more

    async def run() -> None:
        transacting = Transacting(server, rights, lambda: ends.append(None))
        assert await transacting.produce(bytes(data), wire.read_head(bytes(data))) is None

    asyncio.run(run())
    assert server.producers.sequences == ([0] if is_right else [])
    assert len(ends) == (0 if is_right else 1)


def test_an_end_is_a_recovery_if_nobody_who_is_connected_has_asked_for_more() -> None:
    """A producer's connection to its coordinator may be closed as idle while it writes on others for hours."""
    server: Any = Server()
    rights: Any = Rights()
    rights.is_known = True

    async def run() -> None:
        writing, ending = (Transacting(server, rights, lambda: None) for _ in range(2))
        data = produce(0)
        await writing.produce(data, wire.read_head(data))
        values = {"transactional_id": "id", "producer_id": 1 << 62, "producer_epoch": 0, "committed": True}
        end = wire.write_request(Api.END_TXN, 1, 1, "c", values)
        await ending.end(end, wire.read_head(end))
        writing.leave()
        writing.leave()
        await ending.end(end, wire.read_head(end))

    asyncio.run(run())
    assert server.producers.recoveries == [False, True]
    assert not server.producers.users


def test_nothing_is_begun_for_a_client_that_has_left() -> None:
    """It has asked for the same elsewhere, and perhaps for something else after it."""
    server: Any = Server()
    rights: Any = Rights()
    rights.is_known = True

    async def run() -> bytes | None:
        transacting = Transacting(server, rights, lambda: None)
        transacting.has_left = True
        data = produce(0)
        return await transacting.produce(data, wire.read_head(data))

    assert asyncio.run(run()) is not None
    assert server.producers.sequences == []
    assert server.refused == ["not_leader_or_follower"]


# Offsets


class OffsetProducers(Producers):
    """Notes the offsets that a request commits."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[GroupCommit] = []

    async def run(self, name: str, make: Any, *, writes: bool = False, takes_over: Any = None) -> Any:
        self.committed.append(make(IdState()).gi_frame.f_locals["offsets"])


class OffsetServer(Server):
    """One that knows no stream to begin a transaction with."""

    def __init__(self) -> None:
        super().__init__()
        self.producers: OffsetProducers = OffsetProducers()
        self.brokers = SimpleNamespace(versions={})

    def homes(self, client_id: str) -> Homes:
        return Homes([], are_sure=False)


class SomeRights(Rights):
    """The right to read all topics but one."""

    async def without(self, right: Any, topics: set[str]) -> dict[str, ErrorCode]:
        return {topic: ErrorCode.topic_authorization_failed for topic in topics if topic == "hidden"}

    async def missing(self, operation: int, places: Any) -> set[tuple[str, int]]:
        return {where for where in places if where[1] == 99}

    async def upstream(self) -> None:
        """Nobody asks there for offsets of somebody outside of the group."""


def commit_offsets(version: int, *parts: tuple[str, int, dict[str, Any]]) -> tuple[OffsetServer, dict[Any, ErrorCode]]:
    """Have a gateway carry out a TxnOffsetCommit; what it noted, and the code of each partition."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for topic, number, said in parts:
        topics.setdefault(topic, []).append({"partition_index": number, "committed_offset": number, **said})
    values = {
        "transactional_id": "id",
        "group_id": "group",
        "producer_id": 1 << 62,
        "producer_epoch": 0,
        "topics": [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()],
    }
    data = wire.write_request(Api.TXN_OFFSET_COMMIT, version, 1, "c", values)
    server, rights = OffsetServer(), SomeRights()

    async def run() -> bytes:
        transacting = Transacting(server, rights, lambda: None)  # type: ignore[arg-type]
        return await transacting.commit_offsets(data, wire.read_head(data))

    answer = wire.read_answer(asyncio.run(run()), Api.TXN_OFFSET_COMMIT, version)
    return server, {
        (str(topic.name), int(part.partition_index)): part.error_code
        for topic in answer.topics
        for part in topic.partitions
    }


@pytest.mark.parametrize("version", range(6))
def test_offsets_keep_what_is_committed_beside_them(version: int) -> None:
    epoch = {"committed_leader_epoch": 7} if version >= 2 else {}
    server, codes = commit_offsets(
        version, ("a", 0, {"committed_metadata": "größe\0", **epoch}), ("a", 1, {"committed_metadata": None})
    )
    assert set(codes.values()) == {ErrorCode.none}
    [commit] = server.producers.committed
    assert commit.offsets == {
        ("a", 0): OffsetToCommit(0, 7 if epoch else -1, "größe\0"),
        ("a", 1): OffsetToCommit(1, -1, ""),
    }


def test_of_a_request_the_offsets_are_taken_whose_metadata_a_broker_takes() -> None:
    large = {"committed_metadata": "x" * 4_097}
    server, codes = commit_offsets(
        5,
        ("a", 0, large),
        ("a", 1, {"committed_metadata": "x" * 4_096}),
        ("a", 99, {}),
        ("hidden", 0, large),
        ("hidden", 1, {}),
    )
    assert codes == {
        ("a", 0): ErrorCode.offset_metadata_too_large,
        ("a", 99): ErrorCode.unknown_topic_or_partition,
        ("a", 1): ErrorCode.none,
        ("hidden", 0): ErrorCode.topic_authorization_failed,
        ("hidden", 1): ErrorCode.topic_authorization_failed,
    }
    [commit] = server.producers.committed
    assert set(commit.offsets) == {("a", 1)}
    assert Counter(server.refused) == {
        "offset_metadata_too_large": 1,
        "topic_authorization_failed": 1,
        "unknown_topic_or_partition": 1,
    }
    server, codes = commit_offsets(5, ("a", 0, large))
    assert (server.producers.committed, codes) == ([], {("a", 0): ErrorCode.offset_metadata_too_large})
