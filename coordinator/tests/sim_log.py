"""The commit log's retention in the simulation: what may be deleted of it, and frames of forgotten transactions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from coordinator.tests.sim_actors import Client
from coordinator.tests.sim_world import World
from rollbridge.base.ids import ISSUED_MAX, split_counter
from rollbridge.buffer.frames import FrameHeader, FrameKind
from rollbridge.commitlog.outcomes import EndedIds, decode_ended, ended_key, parse_ended
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.names import GroupName, snapshot_indexes_topic, snapshot_topic

LOG_DEFECTS = ("greedy-log", "deaf-log", "unlisted-outcomes", "early-list", "forgotten-outcomes")
"""All of the log is deleted; what a group has read is not asked; the list of what has ended is not written before, or
before it says so; a new leader does not read it."""
RETENTION_MS = 3_500
HISTORIAN = "historian"
GONE_MAX = 40
"""Ended transactions of which a BEGIN frame may still come, the latest of each client."""


def log_retention_request() -> AdminRequest:
    """Keep the commit log so long, and wait for the historian."""
    return AdminRequest(
        kind=RequestKind.UPDATE_GROUP, retention=Retention(RETENTION_MS, -1, (HISTORIAN,)), created_ms=0
    )


def read_log(world: World, group: GroupName, rng: random.Random) -> None:
    """The historian reads on, and commits."""
    topic = group.commit_log_topic
    if topic in world.topics:
        commits = world.commits.setdefault(HISTORIAN, {})
        read = commits.get(topic, 0)
        assert read >= world.topics[topic].start, f"what {HISTORIAN} has not read of {topic} is gone"
        commits[topic] = rng.randint(read, world.topics[topic].stable_end())


def say_again(world: World, clients: Iterable[Client], rng: random.Random) -> None:
    """A BEGIN frame arrives once more, of a transaction that has ended long ago."""
    client = rng.choice(list(clients))
    ended = [item for item in client.attempts if item is not client.current][-GONE_MAX:]
    if ended:
        attempt = rng.choice(ended)
        name = rng.choice(list(attempt.begin.streams))
        world.said_again.add(attempt.id.bytes)
        client._send(attempt, name, FrameHeader(FrameKind.BEGIN, attempt.id.bytes), attempt.begin.encode())


def listed(world: World, group: GroupName) -> EndedIds:
    """What is written down of ended transactions."""
    topic = group.commit_log_topic
    found = [EndedIds()]
    for name in (snapshot_indexes_topic(group.scope), snapshot_topic(group.scope)):
        value = world.latest(name).get(ended_key(group)) if name in world.topics else None
        with suppress(CorruptDataError):
            log = world.topics[topic]
            found.append(EndedIds.of(decode_ended(value, group, log.id, len(log.entries))))
    return max(found, key=lambda item: item.log_end)


def check_log(world: World, group: GroupName, before: int) -> None:
    """Raise AssertionError if this part of the commit log may not be deleted."""
    log = world.topics[group.commit_log_topic]
    ended = listed(world, group)
    known = Group.from_json(world.nodes[paths.group(group)])
    for offset, entry in enumerate(log.entries[:before]):
        if offset >= log.start and entry.item is not None:
            age_ms = world.clock_ms - entry.appended_ms
            assert age_ms >= RETENTION_MS, f"offset {offset} of the commit log goes {age_ms} ms old"
    for transaction, offset in world.summary(group.commit_log_topic).terminated.items():
        if not _is_given(known, transaction):
            continue  # it may be given out later
        if ended.lost_ms and offset < log.start:
            continue  # a list was lost since: that it has ended is told by when it was begun
        assert offset >= before or transaction in ended, f"nobody knows that {transaction.hex()} has ended"
    read = world.commits.get(HISTORIAN, {}).get(group.commit_log_topic, 0)
    assert read >= before, f"{HISTORIAN} has not read the commit log to {before}"


def _is_given(group: Group, transaction: bytes) -> bool:
    """Whether leaders believe that an id was given out."""
    number, count = split_counter(transaction)
    if number == group.number:
        return count < group.counter_floor
    return count <= ISSUED_MAX and (not number or number in group.former_numbers)


def spoil_list(value: bytes | None, faults: frozenset[str]) -> bytes | None:
    """The list of what has ended as a leader with a defect writes it."""
    if value is None or not faults.intersection(LOG_DEFECTS):
        return value
    try:
        record = parse_ended(value)
    except CorruptDataError:
        return value
    if "unlisted-outcomes" in faults:
        record = replace(record, numbers=())
    if "early-list" in faults:
        numbers = tuple(
            replace(item, starts=item.starts[:-1], lengths=item.lengths[:-1]) if item.starts else item
            for item in record.numbers
        )
        record = replace(record, numbers=numbers)
    return record.encode()
