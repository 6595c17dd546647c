"""The counter of a group's transaction ids: number the group, and check, repair or replace its counter node.

Members of the group write the node, and may write anything. The leader writes its belief about the counter to the
journal before it takes an id for given out, so a later leader knows at least as much. See :mod:`rollbridge.base.ids`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import (
    FIRST_COUNT,
    JUMP,
    NOT_GIVEN_OUT,
    NUMBER_MAX,
    SHARED_MAX,
    START_MAX,
    STRIDE,
    CounterCheckpoint,
    need_number,
    parse_number,
    split_counter,
)
from rollbridge.base.ids import ISSUED_MAX as COUNT_MAX
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group, SetNode
from rollbridge_coordinator.core.effects import EnsureNodes, ReadCounter, Write, confirm_leadership, read_node
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.history.journal import append_journal, refuse

logger = logging.getLogger(__name__)

TRIES: Final = 20
"""Attempts of a conditional write in a row; each fails if a member has written in between."""
SHARED_STRIDE: Final = 1 << 56
"""Largest plausible rise of the shared counter between two checks; a repair raises it by 2^48."""


def open_counter(group: GroupState) -> Steps[None]:
    """Number a group that has no number, and read the ids that its counter has given out.

    Raises:
        RollbridgeError: the nodes were set back with all of ZooKeeper.
        CorruptDataError: the node that only coordinators write holds no number.
    """
    counter = group.counter
    counter.noted = CounterCheckpoint.from_text(group.journal.nodes.get(paths.counter(group.name)))
    record = yield from _record(group)
    if not record.number:
        record = yield from _number(group, record)
    _adopt(group, record)
    yield from look_at_shared(group)
    yield from look_at_counter(group)
    if group.outcome_store is not None:
        group.outcome_store.believe(counter.is_given, counter.bound)


def check_given(group: GroupState, transactions: Iterable[bytes], now_ms: int) -> Steps[None]:
    """Refuse open transactions whose ids were not given out; raise the counter past ids about to be."""
    counter = group.counter
    doubtful = [item for item in transactions if not counter.is_given(item)]
    if any(map(counter.is_ours, doubtful)):
        yield from look_at_counter(group)
        doubtful = [item for item in doubtful if not counter.is_given(item)]
        if any(map(counter.is_ours, doubtful)):
            yield from confirm_leadership()  # a read may be answered by a lagging server, but not after a write
            yield from look_at_counter(group)
    forged = [item for item in doubtful if not counter.is_given(item)]
    ahead = [count for number, count in map(split_counter, forged) if number == counter.number]
    near = [count for count in ahead if count < counter.note.value + JUMP]
    if near:
        yield from _pass_by(group, max(near) + 1)
    for identifier in forged:
        transaction = group.fold.open.get(identifier)
        if transaction is not None and not group.is_rolling(transaction):
            group.fold.refuse(identifier, NOT_GIVEN_OUT, now_ms)
            group.counts["transactions_not_given_out"] += 1


def _pass_by(group: GroupState, free: int) -> Steps[None]:
    """Raise the counter to ``free``, so that no client gets an id that another one has guessed.

    So even if the leader dies before it has refused the forged transactions, their ids are unique.
    """
    path = paths.counter(group.name)
    for _ in range(TRIES):
        found = yield from ReadCounter(path)
        value = None if found is None else parse_number(found[0], free - 1)
        if found is None or value is None:
            return  # the counter has gone on, or is damaged, which the next look finds
        if (yield from Write([SetNode(path, b"%d" % free, found[1])])):
            yield from look_at_counter(group)
            return


def keep_counter(group: GroupState, now_ms: int) -> Steps[None]:
    """Check the counters at intervals, to limit the duration of damage."""
    if group.counter.number and group.housekeeping.is_due("counter", now_ms, group.settings.counter_check_ms):
        yield from look_at_counter(group)
    if group.counter.number and group.housekeeping.is_due("shared counter", now_ms, group.settings.bookkeeping_ms):
        yield from look_at_shared(group)


def look_at_counter(group: GroupState) -> Steps[None]:
    """Read the ids that the group's counter has given out, and repair an impossible value.

    Raises:
        RollbridgeError: the node's version is below the one known, so all of ZooKeeper was set back.
    """
    counter, path = group.counter, paths.counter(group.name)
    for _ in range(TRIES):
        found = yield from ReadCounter(path)
        if found is None:
            yield from EnsureNodes([path])
            continue
        raw, version = found
        value = parse_number(raw, COUNT_MAX, FIRST_COUNT)
        known = _known(group)
        if not raw and not version:  # the node was deleted and has just been created again: its old version is unknown
            logger.warning("counter.missing group=%s node=%s", group.name, path)
            _adopt(group, (yield from _number(group, (yield from _record(group)))))
            continue
        if version < known.version:
            yield from _check_version(group, path, known.version)
            continue
        record = yield from _record(group)
        floor = max(FIRST_COUNT, record.counter_floor, known.value, *_used(group, counter.number))
        if value is not None and floor <= value <= record.counter_ceiling:
            if value > record.counter_floor:  # raise the floor, so that clients never reserve an id twice
                high = value + STRIDE if value > record.counter_ceiling - STRIDE // 2 else record.counter_ceiling
                moved = replace(record, counter_floor=value, counter_ceiling=high)
                if not (yield from Write([SetNode(paths.group(group.name), moved.to_json())])):
                    raise StaleStateError(f"group {group.name} is gone")
            yield from _note(group, known._replace(number=counter.number, value=value, version=version))
            return
        fresh = floor + JUMP
        if fresh + STRIDE > COUNT_MAX:
            _adopt(group, (yield from _number(group, record)))
            continue
        right = replace(record, counter_floor=fresh, counter_ceiling=fresh + STRIDE)
        logger.warning(
            "counter.damaged group=%s node=%s found=%r min=%d max=%d set_to=%d: a member of the group has written it",
            group.name,
            path,
            raw[:40],
            floor,
            record.counter_ceiling,
            fresh,
        )
        if (
            yield from Write([SetNode(paths.group(group.name), right.to_json()), SetNode(path, b"%d" % fresh, version)])
        ):
            group.counts["counters_set_right"] += 1
    logger.warning("counter.contended group=%s node=%s: it is read again later", group.name, path)


def look_at_shared(group: GroupState) -> Steps[None]:
    """Check the shared counter of clients of earlier versions; members of any group may write it.

    Damage to it stops nothing; the counter is raised past the used ids.

    Raises:
        RollbridgeError: the node's version is below the one known.
    """
    found = yield from ReadCounter(paths.TRANSACTION_COUNTER)
    if found is None:
        return
    known = _known(group)
    if found[1] < known.shared_version:
        yield from _check_version(group, paths.TRANSACTION_COUNTER, known.shared_version)
        return
    raw, version = found
    value = parse_number(raw, SHARED_MAX)
    journaled = parse_number(group.journal.nodes.get(paths.TRANSACTION_COUNTER), SHARED_MAX) or 0
    floor = max(journaled, known.shared_value, *_used(group, 0))
    if value is not None and floor <= value and (not known.shared_value or value <= floor + SHARED_STRIDE):
        group.counter.note = known._replace(shared_value=value, shared_version=version)
        return
    fresh = floor + JUMP
    if fresh <= SHARED_MAX and (yield from Write([SetNode(paths.TRANSACTION_COUNTER, b"%d" % fresh, version)])):
        group.counts["counters_set_right"] += 1
        logger.warning(
            "counter.damaged group=%s node=%s found=%r set_to=%d: without clients of earlier versions, close "
            "it with `rollbridge access secure --shared-counter`",
            group.name,
            paths.TRANSACTION_COUNTER,
            raw[:40],
            fresh,
        )


def _known(group: GroupState) -> CounterCheckpoint:
    """Return the certain knowledge of the counter under the group's present number."""
    counter = group.counter
    for note in (counter.note, counter.noted):
        if note is not None and note.number == counter.number:
            return note
    return CounterCheckpoint(counter.number, 0, -1)


def _used(group: GroupState, number: int) -> list[int]:
    """Return the counts after those of remembered commits; implausible counts are left out."""
    if group.outcome_store is None:
        return [0]
    most = SHARED_MAX // 2 if not number else max(group.counter.ceiling, 1)
    pairs = (split_counter(item.transaction.bytes) for item in group.outcome_store.committed())
    return [0, *(count + 1 for its, count in pairs if its == number and count < most)]


def _note(group: GroupState, note: CounterCheckpoint) -> Steps[None]:
    """Adopt a note, after it was appended to the journal; nothing relies on it earlier."""
    counter = group.counter
    if note != counter.noted:
        yield from append_journal(group, {paths.counter(group.name): note.to_text()})
        counter.noted = note
    counter.note = note


def _check_version(group: GroupState, path: str, version: int) -> Steps[None]:
    """Read a node's version again after a write, because a read may be answered by a lagging server.

    Raises:
        RollbridgeError: the version is below ``version``.
    """
    yield from confirm_leadership()
    found = yield from ReadCounter(path)
    now = -1 if found is None else found[1]
    if now < version:
        yield from refuse(group, [f"node {path} was written {version} times, ZooKeeper knows of {now}"])


def _record(group: GroupState) -> Steps[Group]:
    raw = yield from read_node(paths.group(group.name))
    if raw is None:
        raise StaleStateError(f"group {group.name} is gone")
    record = Group.from_json(raw)
    group.counter.ceiling = record.counter_ceiling
    return record


def _adopt(group: GroupState, record: Group) -> None:
    group.counter.number, group.counter.ceiling = record.number, record.counter_ceiling
    group.counter.deleted_streams = frozenset(record.former_numbers)


def _number(group: GroupState, record: Group) -> Steps[Group]:
    """Give the group a number that no group had before, and start its counter.

    The count of a group that was led before begins beyond those in use, because it tells connections apart.
    """
    path = paths.counter(group.name)
    yield from EnsureNodes([paths.GROUP_NUMBERS, path])
    noted = group.counter.noted or CounterCheckpoint(0, 0, -1)
    deleted_streams = tuple(sorted({record.number, *record.former_numbers, noted.number} - {0}))
    while True:
        found = yield from ReadCounter(paths.GROUP_NUMBERS)
        raw, version = found or (b"", -1)
        how = "set it to a number above those of all groups (`number` and `former_numbers` in their nodes)"
        free = need_number(paths.GROUP_NUMBERS, raw, NUMBER_MAX, how) if raw else 1
        number = max([free, *(item + 1 for item in deleted_streams)])
        start = FIRST_COUNT
        if group.journal.nodes:
            shared = parse_number((yield from read_node(paths.TRANSACTION_COUNTER)), SHARED_MAX) or 0
            start = max(min(shared, START_MAX), record.counter_floor, noted.value) + JUMP
        if start + STRIDE > COUNT_MAX:
            start = JUMP
        fresh = replace(
            record, number=number, former_numbers=deleted_streams, counter_floor=start, counter_ceiling=start + STRIDE
        )
        if (
            yield from Write(
                [
                    SetNode(paths.GROUP_NUMBERS, b"%d" % (number + 1), version),
                    SetNode(paths.group(group.name), fresh.to_json()),
                    SetNode(path, b"%d" % start),
                ]
            )
        ):
            logger.info("counter.opened group=%s number=%d", group.name, number)
            return fresh
        if (yield from read_node(paths.group(group.name))) is None:
            raise StaleStateError(f"group {group.name} is gone")
