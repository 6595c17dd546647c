"""Answers about open transactions: those of every gateway, as leaders have put them on record, beside the brokers' own.

A transaction is on record once it has been open for about half a second. Each is told of by one broker's port, the one
that FindCoordinator names, as by one coordinator in Kafka.

Source: KIP-664; ``kafka-transactions.sh`` and Flink's ``TransactionAbortStrategyImpl`` ask these.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType
from kio.static.primitive import i32, i64

from rollbridge.errors import NothingServedError
from rollbridge.model.records import TransactionRecord
from rollbridge_gateway import wire
from rollbridge_gateway.cluster import chosen_broker
from rollbridge_gateway.entries import Entry
from rollbridge_gateway.identity import TRANSACTIONAL_ID_BYTES_MAX, Pair, client_name, pair_of, transactional_id
from rollbridge_gateway.shell.parts import Services
from rollbridge_gateway.versions import Api

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
    with suppress(NothingServedError):
        yield from _open_transactions(server)


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


def list_transactions(server: Services, broker: int | None, body: Any, theirs: Any) -> dict[str, Any]:
    """Return the answer to ListTransactions at a broker's port: what the broker lists, and what is ours of it.

    Args:
        server: The gateway.
        broker: The broker; None at the first port, at which nothing is listed.
        body: The request.
        theirs: The broker's answer; None if it was not asked.
    """
    states, pids = set(map(str, body.state_filters)), set(map(int, body.producer_id_filters))
    least_ms = int(getattr(body, "duration_filter", -1))
    now_ms = int(time.time() * 1000)
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
    if broker is not None and (not states or ONGOING in states):
        brokers = server.brokers.addresses
        found += [
            {
                "transactional_id": item.transactional_id,
                "producer_id": item.pair.producer_id,
                "transaction_state": ONGOING,
            }
            for item in open_transactions(server)
            if chosen_broker(item.transactional_id, brokers) == broker
            and (not pids or item.pair.producer_id in pids)
            and (least_ms < 0 or now_ms - item.record.begun_ms >= least_ms)
        ]
    return {
        "error_code": ErrorCode.none if theirs is None else theirs.error_code,
        "unknown_state_filters": sorted(states - _STATES),
        "transaction_states": found,
    }


def describe_transactions(server: Services, body: Any) -> Any:
    """Return the answer to DescribeTransactions, about ids of ours: a gateway is named as the coordinator of all."""
    names = [str(name) for name in body.transactional_ids]
    wanted = set(names)
    ongoing = {item.transactional_id: item for item in open_transactions(server) if item.transactional_id in wanted}
    sound = [name for name in names if 0 < len(name.encode()) <= TRANSACTIONAL_ID_BYTES_MAX]
    entries = dict(zip(sound, server.register.entries([client_name(name) for name in sound]), strict=True))
    kind = wire.schema(Api.DESCRIBE_TRANSACTIONS, 0, EntityType.response)
    states = [_described(server, name, ongoing.get(name), entries.get(name)) for name in names]
    return wire.build(kind, {"transaction_states": states})


def _described(server: Services, name: str, item: Listed | None, entry: Entry | None) -> dict[str, Any]:
    # kio declares the start as a time, so what has none gets the first one there is; Kafka says -1.
    start = datetime.fromtimestamp(0, UTC)
    if item is not None:
        topics = {stream: topic for topic, stream in server.topics.known.streams.items()}
        return {
            "error_code": ErrorCode.none,
            "transactional_id": name,
            "transaction_state": ONGOING,
            "transaction_timeout": timedelta(milliseconds=min(item.record.lease_ms, (1 << 31) - 1)),
            "transaction_start_time": datetime.fromtimestamp(item.record.begun_ms / 1000, UTC),
            "producer_id": item.pair.producer_id,
            "producer_epoch": item.pair.epoch,
            "topics": [{"topic": topics.get(str(stream), str(stream))} for stream in item.record.streams],
        }
    if entry is None:
        return {
            "error_code": ErrorCode.transactional_id_not_found,
            "transactional_id": name,
            "transaction_start_time": start,
        }
    return {
        "error_code": ErrorCode.none,
        "transactional_id": name,
        "transaction_state": EMPTY,
        "transaction_timeout": timedelta(milliseconds=max(entry.timeout_ms, 0)),
        "transaction_start_time": start,
        "producer_id": entry.pair.producer_id,
        "producer_epoch": entry.pair.epoch,
    }


def with_producers(server: Services, body: Any, theirs: Any, virtual: Collection[str]) -> Any:
    """Return a broker's answer to DescribeProducers, with the producers of open transactions of ours.

    Which partitions a transaction has written to is known to nobody but its gateway, so it is told of at all partitions
    of its streams' topics.
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
            last_timestamp=i64(-1),
            coordinator_epoch=i32(0),
            current_txn_start_offset=i64(0),
        )
        for stream in item.record.streams:
            active.setdefault(topics.get(str(stream), ""), []).append(state)
    found = [
        replace(
            topic,
            partitions=tuple(
                replace(part, active_producers=(*part.active_producers, *active.get(str(topic.name), ())))
                for part in topic.partitions
            ),
        )
        for topic in theirs.topics
    ]
    topic_kind = _inner(kind, "topics")
    part_kind = _inner(topic_kind, "partitions")
    found += [
        topic_kind(
            name=topic.name,
            partitions=tuple(
                part_kind(
                    partition_index=index,
                    error_code=ErrorCode.none,
                    error_message=None,
                    active_producers=tuple(active.get(str(topic.name), ())),
                )
                for index in topic.partition_indexes
            ),
        )
        for topic in body.topics
        if str(topic.name) in virtual
    ]
    return replace(theirs, topics=tuple(found))


def _inner(kind: type[Any], name: str) -> type[Any]:
    found: type[Any] = kind.__annotations__[name].__args__[0]
    return found
