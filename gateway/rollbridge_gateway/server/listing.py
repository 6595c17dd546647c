"""Answers about open transactions: those of every gateway, as leaders have put them on record, and the brokers' own.

A transaction is on record once it has been open for about half a second. Each is listed at one broker's port, so that a
client that asks all brokers hears of it once, and described at all of them. A request is answered for so many ids and
producers at most; the rest is to be asked for again, by the code that brokers use for that, as Java's client does.

Source: KIP-664; ``kafka-transactions.sh`` and Flink's ``TransactionAbortStrategyImpl`` ask these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType
from kio.static.primitive import i32, i64

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.errors import NOTHING_SERVED
from rollbridge.errors import NotFoundError
from rollbridge.metadata.records import TransactionRecord
from rollbridge_gateway.producer.table import (
    TRANSACTIONAL_ID_BYTES_MAX,
    Entry,
    Pair,
    client_name,
    pair_of,
    transactional_id,
)
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.protocol.wire import Head, RawMessage
from rollbridge_gateway.server.cluster import chosen_broker
from rollbridge_gateway.server.context import Services

IDS_MAX: Final = 1_000
"""Most transactional ids that one request has described."""
PRODUCERS_MAX: Final = 100_000
"""Most producers of ours in one answer: each is told of at all partitions that are asked for."""
ONGOING: Final = "Ongoing"
EMPTY: Final = "Empty"
_STATES: Final = frozenset(
    (ONGOING, EMPTY, "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead", "PrepareEpochFence")
)


@dataclass(frozen=True, slots=True)
class Listed:
    """An open transaction of a producer."""

    transactional_id: str
    pair: Pair
    record: TransactionRecord


def open_transactions(server: Services) -> Iterator[Listed]:
    """Yield the open transactions that gateways have begun."""
    try:
        yield from _open_transactions(server)
    except NotFoundError as fault:
        if fault.code != NOTHING_SERVED:  # the first coordinator is still to come
            raise


def _open_transactions(server: Services) -> Iterator[Listed]:
    records = [(record, pair_of(record.label)) for record in server.bridge.admin.transactions()]
    ours = [(record, pair) for record, pair in records if pair is not None]
    hashed = [record.client_name for record, _ in ours if transactional_id(record.client_name) is None]
    entries = dict(zip(hashed, server.register.entries(hashed), strict=True))
    for record, pair in ours:
        entry = entries.get(record.client_name)
        name = transactional_id(record.client_name) if entry is None else entry.transactional_id
        if name is not None:
            yield Listed(name, pair, record)


def listed_at(server: Services, broker: int | None, body: Any) -> list[Listed]:
    """Return our part of the answer to ListTransactions at a broker's port, whatever the client's rights.

    At the first port, for which ``broker`` is None, nothing is listed.
    """
    states, pids = set(map(str, body.state_filters)), set(map(int, body.producer_id_filters))
    least_ms = int(getattr(body, "duration_filter", -1))
    now_ms = wall_ms()
    if broker is None or (states and ONGOING not in states):
        return []
    brokers = server.brokers.addresses
    return [
        item
        for item in open_transactions(server)
        if chosen_broker(item.transactional_id, brokers) == broker
        and (not pids or item.pair.producer_id in pids)
        and (least_ms < 0 or now_ms - item.record.begun_ms >= least_ms)
    ]


def list_transactions(body: Any, theirs: Any, ours: Sequence[Listed]) -> dict[str, Any]:
    """Return the answer to ListTransactions: the broker's, if it was asked, and ours that the client may know of."""
    states = set(map(str, body.state_filters))
    found: list[dict[str, Any]] = []
    if theirs is not None:
        found += [
            {
                "transactional_id": item.transactional_id,
                "producer_id": item.producer_id,
                "transaction_state": item.transaction_state,
            }
            for item in theirs.transaction_states
        ]
    found += [
        {"transactional_id": item.transactional_id, "producer_id": item.pair.producer_id, "transaction_state": ONGOING}
        for item in ours
    ]
    return {
        "error_code": ErrorCode.none if theirs is None else theirs.error_code,
        "unknown_state_filters": sorted(states - _STATES),
        "transaction_states": found,
    }


@dataclass(frozen=True, slots=True)
class Described:
    """Transactional id: its open transaction and the topics of that, and its entry."""

    item: Listed | None
    topics: tuple[str, ...]
    entry: Entry | None


def described_of(server: Services, names: Sequence[str]) -> dict[str, Described]:
    """Return what is known of transactional ids, whatever the client's rights."""
    wanted = set(names)
    ongoing = {item.transactional_id: item for item in open_transactions(server) if item.transactional_id in wanted}
    sound = [name for name in names if 0 < len(name.encode()) <= TRANSACTIONAL_ID_BYTES_MAX]
    entries = dict(zip(sound, server.register.entries([client_name(name) for name in sound]), strict=True))
    topics = {stream: topic for topic, stream in server.topics.known.streams.items()}
    found = {}
    for name in names:
        item = ongoing.get(name)
        streams = () if item is None else tuple(map(str, item.record.streams))
        found[name] = Described(item, tuple(topics.get(stream, stream) for stream in streams), entries.get(name))
    return found


def asked_of(data: RawMessage, head: Head) -> list[str]:
    """Return the transactional ids that a request has described: the first ones of many."""
    return [str(name) for name in wire.read_body(data, head).transactional_ids[:IDS_MAX]]


def describe_transactions(
    data: RawMessage, head: Head, found: Mapping[str, Described], partitions: Mapping[str, int]
) -> bytes:
    """Return the answer to DescribeTransactions, about ids of ours: a gateway is named as the coordinator of all.

    Args:
        found: Ids of which the client may know.
        partitions: Topics of which it may know, and the number of their partitions: see :func:`with_producers`.
    """
    places = {topic: {"topic": topic, "partitions": range(count)} for topic, count in partitions.items()}
    states = [
        _described(str(name), found.get(str(name)), places)
        if number < IDS_MAX
        else _undescribed(str(name), ErrorCode.coordinator_load_in_progress)
        for number, name in enumerate(wire.read_body(data, head).transactional_ids)
    ]
    return wire.write_answer(head.key, head.version, head.correlation, {"transaction_states": states})


def _undescribed(name: str, code: ErrorCode) -> dict[str, Any]:
    return {"error_code": code, "transactional_id": name, "transaction_start_time": -1}


def _described(name: str, found: Described | None, places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if found is None:
        return _undescribed(name, ErrorCode.transactional_id_authorization_failed)
    item, entry = found.item, found.entry
    if item is not None:
        return {
            "error_code": ErrorCode.none,
            "transactional_id": name,
            "transaction_state": ONGOING,
            "transaction_timeout": timedelta(milliseconds=min(item.record.lease_ms, (1 << 31) - 1)),
            "transaction_start_time": item.record.begun_ms,
            "producer_id": item.pair.producer_id,
            "producer_epoch": item.pair.epoch,
            "topics": [places[topic] for topic in found.topics if topic in places],
        }
    if entry is None:
        return _undescribed(name, ErrorCode.transactional_id_not_found)
    return {
        **_undescribed(name, ErrorCode.none),
        "transaction_state": EMPTY,
        "transaction_timeout": timedelta(milliseconds=max(entry.timeout_ms, 0)),
        "producer_id": entry.pair.producer_id,
        "producer_epoch": entry.pair.epoch,
    }


def with_producers(
    server: Services, body: Any, theirs: Any, virtual: Collection[str], denied: Collection[str], head: Head
) -> bytes:
    """Return a broker's answer to DescribeProducers, with the producers of open transactions of ours.

    Only its gateway knows which partitions a transaction has written to, so it is listed at all partitions of its
    streams' topics.

    Args:
        theirs: The broker's answer about its own topics, with errors for those that the client may not read.
        virtual: Virtual topics that were asked for, and that the client may read.
        denied: Those that it may not read.
    """
    topics = {stream: topic for topic, stream in server.topics.known.streams.items()}
    active: dict[str, list[Any]] = {}
    kind = wire.schema(Api.DESCRIBE_PRODUCERS, 0, EntityType.response)
    producer = _inner(_inner(_inner(kind, "topics"), "partitions"), "active_producers")
    for item in open_transactions(server):
        state = producer(
            producer_id=item.pair.producer_id,
            producer_epoch=i32(item.pair.epoch),
            last_sequence=i32(-1),
            last_timestamp=i64(item.record.begun_ms),
            coordinator_epoch=i32(0),
            current_txn_start_offset=i64(0),
        )
        for stream in item.record.streams:
            active.setdefault(topics.get(str(stream), ""), []).append(state)
    topic_kind = _inner(kind, "topics")
    part_kind = _inner(topic_kind, "partitions")
    left = PRODUCERS_MAX

    def with_ours(name: str, part: Any) -> Any:
        nonlocal left
        ours = active.get(name, ())
        if part.error_code is not ErrorCode.none or not ours:
            return part
        left -= len(ours)
        if left < 0:
            return replace(part, error_code=ErrorCode.not_leader_or_follower, active_producers=())
        return replace(part, active_producers=(*part.active_producers, *ours))

    def part_of(name: str, index: int) -> Any:
        code = ErrorCode.topic_authorization_failed if name in denied else ErrorCode.none
        return part_kind(partition_index=index, error_code=code, error_message=None, active_producers=())

    found = [
        replace(topic, partitions=tuple(with_ours(str(topic.name), part) for part in topic.partitions))
        for topic in theirs.topics
    ]
    found += [
        topic_kind(
            name=topic.name,
            partitions=tuple(
                with_ours(str(topic.name), part_of(str(topic.name), index)) for index in topic.partition_indexes
            ),
        )
        for topic in body.topics
        if str(topic.name) in virtual or str(topic.name) in denied
    ]
    return wire.write_entity(replace(theirs, topics=tuple(found)), head.correlation)


def _inner(kind: type[Any], name: str) -> type[Any]:
    found: type[Any] = kind.__annotations__[name].__args__[0]
    return found
