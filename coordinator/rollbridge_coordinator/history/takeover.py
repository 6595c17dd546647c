"""Takeover: fence the old leader, restore the state of the group, and finish what the old leader left.

The order matters: the controller epoch has been raised before, which every later ZooKeeper write checks; then the Kafka
transactional ids are taken, which fences the old leader in Kafka and aborts its open transactions; only then the logs
are read, because no other leader can change them any more.

The state comes from the snapshots of the buffers, and from reading the buffers and the commit log from there; or from
the warm tail of a standby.

Source: PDP-24 (the temporary node), PIP-196 (recovery; the format without segments is read where there is no index);
Kafka's controller epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.owners import Fences
from rollbridge.buffer.replay import (
    BufferPlaces,
)
from rollbridge.buffer.state import LateBegin
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import EpochTransition
from rollbridge.metadata.records import Group, SetNode
from rollbridge.stream.names import GroupName, Partition
from rollbridge_coordinator.commit.large import load_merging
from rollbridge_coordinator.commit.outcomes import open_preserver
from rollbridge_coordinator.commit.refusals import unsealed_fault
from rollbridge_coordinator.commit.roll import resume_roll
from rollbridge_coordinator.core.effects import (
    CreateTopics,
    EffectRefusedError,
    EndOffsets,
    EnsureNodes,
    LogSummary,
    Now,
    ReadChildren,
    ReadCommitLog,
    ReadEnded,
    ReadNodes,
    ReadOrders,
    StartOffsets,
    TakeIdentity,
    TopicIds,
    Write,
    confirm_leadership,
    read_children,
    read_node,
)
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import commit_log_topic_spec
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.daemon.succession import Times
from rollbridge_coordinator.history.commit_log import learn_ended, load_log, may_have_ended, restore_ended
from rollbridge_coordinator.history.counters import look_at_counter, look_at_shared, open_counter
from rollbridge_coordinator.history.journal import (
    check_birth,
    check_journal,
    check_mark,
    keep_journal,
    open_journal,
    refuse,
)
from rollbridge_coordinator.history.sessions import load_sessions
from rollbridge_coordinator.history.snapshots import (
    drop_aborted,
    restore_ongoing,
    restore_snapshots,
)
from rollbridge_coordinator.streams.pending_changes import halt, load_suspended, put_aside, read_change, take_up
from rollbridge_coordinator.streams.scale import finish_scale
from rollbridge_coordinator.streams.unled import end_lost, ensure_slots, load_streams, show_unled

# The warm tail: what a standby has read of a group's buffers and commit log, so that a takeover reads only the rest.
#
# A takeover folds the buffers from the latest snapshots on, and leaves out what has an outcome. A standby does the same
# all the time, only in another order: an outcome can be read after the frames, and then takes the transaction out
# again. The result is the same state, because both logs only grow and ``read_committed`` shows nothing that is
# taken back; so whatever a leader appended in a round that it did not commit, a standby has never seen.
#
# One thing is not in the logs in time: the sessions of clients. A leader that takes over knows them all
# before it reads, and does not hear the ends that older ones asked for. A standby may have heard one. If such a
# transaction has no outcome yet, the tail is not used. Neither is it if it does not reach back as far as the snapshots,
# or forward to them, or has followed other topics; then the takeover reads everything, as without a standby.


class WarmTail:
    """The state of one standby for one group. Not thread-safe.

    Attributes:
        fold: Fold of the frames read, without transactions whose outcome was read.
        log_end: The next offset of the commit log to read.
        epochs: Leader epochs of the last frames read, by buffer partition.
    """

    def __init__(self, fold: BufferFold, terminated: dict[bytes, int], places: BufferPlaces, start: int) -> None:
        """Begin where a takeover would.

        Args:
            fold: An empty fold that drops the frames of the transactions in ``terminated``.
            terminated: An empty dictionary.
            places: The group's buffer partitions.
            start: Offset from which the commit log will be followed, see :func:`rollbridge.buffer.replay.log_start`.
        """
        # The number of open ones depends on how far the commit log was read; the leader's bound is checked later.
        # So is the memory that all of them take; a standby gives up beyond the leader's bound.
        self._held_bytes_max = fold.limits.held_bytes_max
        fold.limits = replace(fold.limits, open_transactions_max=sys.maxsize, held_bytes_max=sys.maxsize)
        fold.late = {}
        fold.fences = Fences(replaying=True)
        fold.positions = {partition: place.floor for partition, place in places.items()}
        self.fold = fold
        self.log_end = start
        self.epochs: dict[Partition, int] = {}
        self._places = dict(places)
        self._floors = dict(fold.positions)
        self._log_start = start
        self._terminated = terminated
        self._aborted: set[bytes] = set()
        self._begun: set[bytes] = set()
        for partition, place in places.items():
            for item in place.ongoing.transactions if place.ongoing is not None else ():
                fold.restore(place.stream, partition, item)
                self._begun.add(item.id)  # only those are written down that have a BEGIN record

    @property
    def log_start(self) -> int:
        """Offset of the commit log from which on outcomes are held."""
        return self._log_start

    @property
    def partitions(self) -> Collection[Partition]:
        return self._places.keys()

    @property
    def is_full(self) -> bool:
        """True if the tail takes more memory than a leader may hold."""
        return self.fold.held_bytes + self.fold.late_bytes > self._held_bytes_max

    def __len__(self) -> int:
        return len(self._terminated) + len(self.fold.open)

    def follow(self, said: LogSummary) -> None:
        """Add the next records of the commit log."""
        for transaction, offset in said.terminated.items():
            self._terminated[transaction] = offset
            self.fold.conclude(transaction)
        self._aborted |= said.aborted
        self._begun |= said.begun
        self._begun.difference_update(said.terminated)
        self.log_end = max(self.log_end, said.end)

    def trim(self, places: BufferPlaces, start: int) -> bool:
        """Drop what new snapshots cover; return False if the group's buffers differ, so that a new tail is needed.

        Args:
            places: The present buffer partitions.
            start: Offset from which the commit log would be followed now.
        """
        if {item: place.topic_id for item, place in places.items()} != self._topic_ids():
            return False
        if any(place.floor < self._floors[item] or place.floor > self._read_to(item) for item, place in places.items()):
            return False
        if start < self._log_start:
            return False
        self._floors = {item: place.floor for item, place in places.items()}
        self._log_start = start
        old = list(takewhile(lambda item: self._terminated[item] < start, self._terminated))
        for transaction in old:
            del self._terminated[transaction]
            self._aborted.discard(transaction)
            self.fold.forget_late(transaction)
        self.fold.ages.tidy()
        return True

    def fits(self, topic_ids: Mapping[Partition, str], needed: Mapping[Partition, int], start: int) -> bool:
        """Return True if a takeover can continue from here.

        Args:
            topic_ids: Kafka's id of the buffer of each partition of the group.
            needed: Offset from which the takeover would fold each.
            start: Offset from which the commit log has everything that the snapshots lack.
        """
        known = self._topic_ids()
        if any(topic_ids.get(item) != topic_id for item, topic_id in known.items()):
            return False
        if len(topic_ids) > len(known) and self._log_start > start:
            return False
        return all(self._floors[item] <= needed[item] <= self._read_to(item) for item in known)

    def contradicts(self, fences: Fences) -> bool:
        """Return True if the tail has an end without an outcome that the clients' sessions, now known, rule out.

        True also if a rolling commit is under way: its record says whose request counted.
        """
        return bool(fences.decided_before) or any(
            fences.holds_off(item.ended_by) or self.fold.fences.holds_off(item.ended_by)
            for item in (*self.fold.decided.values(), *self.fold.lines.held())
        )

    def hand_over(self, cold: BufferFold, since: int) -> LogSummary:
        """Make :attr:`fold` the leader's fold in place of an empty one; return the summary of the commit log.

        Args:
            cold: The leader's fold, into which nothing has been folded; the tail does not contradict its fences.
            since: Offset before which the commit log holds no outcome of a transaction that began after an open one.
        """
        fold = self.fold
        fold.limits = cold.limits
        cold.fences.learn(fold.fences)
        fold.fences = cold.fences
        fold.positions = {**cold.positions, **fold.positions}
        for item in fold.open.values():
            item.log_position = since
        fold.ages.tidy()
        return LogSummary(self._terminated, frozenset(self._begun), frozenset(self._aborted), self.log_end)

    def _topic_ids(self) -> dict[Partition, str]:
        return {item: place.topic_id for item, place in self._places.items()}

    def _read_to(self, partition: Partition) -> int:
        return self.fold.positions.get(partition, 0)


# Restore


def finish_restore(group: GroupState) -> Steps[None]:
    """Settle transactions found in the rest of the buffers, which are folded up to the takeover's ends."""
    summary, group.snapshots.summary = group.snapshots.summary, LogSummary({}, frozenset())
    late = group.fold.late or {}
    for transaction, offset in summary.terminated.items():
        begun = late.get(transaction)
        if begun is not None:
            _note_late(group, transaction, begun, offset, is_aborted=transaction in summary.aborted)
    _drop_ended(group)
    yield from drop_aborted(group, list(group.fold.open.values()))
    learn_ended(group, summary.terminated)
    group.fold.caught_up()
    group.fold.log_position = summary.end


def _drop_ended(group: GroupState) -> None:
    """Drop transactions that seem open but ended before the part of the commit log that was read.

    Where others have deleted that part, drop what may have ended: a transaction on record without a request for its end
    is open.
    """
    ended = group.fold.ended
    assert ended is not None
    for transaction in [
        item.id
        for item in group.fold.open.values()
        if item.id in ended
        or ended.is_lost(item.id, item.begun_ms, item.begin.client_name)
        or may_have_ended(group, item.id, item.begin.client_name, is_open=item.state is State.OPEN)
    ]:
        group.fold.discard(transaction)
        group.counts["transactions_ended_long_ago"] += 1


def _note_late(group: GroupState, transaction: bytes, begun: LateBegin, offset: int, *, is_aborted: bool) -> None:
    """Note an outcome from the commit log whose transaction appeared again in the buffers."""
    identifier = TransactionId.from_bytes(transaction)
    for partition in group.buffers_of(identifier, begun.streams):
        known = group.snapshots.partitions[partition]
        if offset >= known.log_end:
            known.changes += 1
            if is_aborted:
                position = group.fold.positions.get(partition, 0)
                known.aborted.add(transaction, begun.first_offsets.get(partition, position), position)


ORDERS_READ: Final = 100_000
"""Outcomes at the end of the commit log that are read for commit numbers, if any commit waits for earlier ones."""

NOTHING_UNREADABLE: Final[Mapping[str, str]] = {}
MakeFold = Callable[[Collection[bytes]], BufferFold]
"""Factory of an empty fold that drops frames of the transactions in a collection, which may grow until it folds."""


def take_over(
    name: GroupName,
    controller_epoch: int,
    make_fold: MakeFold,
    settings: LeaderSettings,
    *,
    replication_factor: int = -1,
    tail: WarmTail | None = None,
    unreadable: Mapping[str, str] = NOTHING_UNREADABLE,
    times: Times | None = None,
) -> Steps[tuple[GroupState, dict[Partition, int]]]:
    """Become the leader of a group.

    Args:
        tail: Tail that a standby has followed, used if it fits; the caller must not use it afterwards.
        unreadable: Buffers that earlier takeovers of this process could not read, with the reasons.
        times: Difference of ZooKeeper's clock; none by default.

    Returns:
        State of the group, and the buffer offsets to fold before :func:`finish_pending`.

    Raises:
        CorruptDataError: an internal topic was deleted and created again.
        RollbridgeError: ZooKeeper was set back.
    """
    yield from TakeIdentity(name)
    yield from EnsureNodes(paths.group_skeleton(name))
    outcome_store, journal = yield from open_preserver(name, settings, replication_factor)
    terminated: dict[bytes, int] = {}
    group = GroupState(name, controller_epoch, make_fold(terminated), settings)
    group.times = times or Times()
    group.outcome_store = outcome_store
    group.journal.nodes = journal
    yield from _check_commit_log(group, replication_factor)
    yield from check_mark(group)
    yield from load_streams(group, unreadable)
    yield from check_journal(group, next_epoch=group.controller_epoch)
    yield from open_counter(group)
    yield from ensure_slots(group)
    yield from load_suspended(group)
    yield from load_merging(group)
    raw = yield from read_node(paths.scaling(name))
    yield from _load_records(group)
    yield from load_sessions(group)
    yield from confirm_leadership()
    yield from _read_logs(group, terminated, replication_factor, tail)
    if raw is not None:
        yield from _finish(group, paths.scaling(name), raw)
    ends = yield from EndOffsets(sorted(group.partitions()))
    return group, dict(ends)


def finish_pending(group: GroupState) -> Steps[None]:
    """Finish the rolling commit of an earlier leader, once the buffers are folded up to the takeover's offsets."""
    group.fold.fresh = list(group.fold.open)  # checked with the first work, after the pending rolling commit
    yield from finish_restore(group)
    if group.fold.lines:
        # Commits wait for earlier ones of their connections, which may have an outcome and not be read again.
        group.fold.learn_order((yield from ReadOrders(group.commit_log, ORDERS_READ)))
    raw = yield from read_node(paths.committing(group.name))
    yield from confirm_leadership()
    if raw is not None:
        yield from _finish(group, paths.committing(group.name), raw)
    waiting = yield from end_lost(group, group.times.stamp((yield from Now())))
    yield from show_unled(group)
    for name, stream in group.streams.items():
        if stream.history.unsealed() and group.waits.faults.get(name) is None:
            group.waits.faults.restore(name, unsealed_fault(0))
    group.fold.fences.caught_up()
    gone = [item for item in group.records.recorded if item not in group.fold.open and item not in waiting]
    group.records.finished.extend(gone)
    group.records.recorded.difference_update(gone)
    group.records.begun &= group.fold.open.keys()
    yield from open_journal(group)


def _finish(group: GroupState, node: str, raw: bytes) -> Steps[None]:
    """Finish a change that an earlier leader had begun; suspend it if that is impossible now."""
    work = yield from read_change(group, node, raw)
    if work is None:
        return
    if not group.unled.keys().isdisjoint(work.streams):
        take_up(group, (yield from put_aside(group, node, work)), work)
        return
    try:
        if isinstance(work, EpochTransition):
            yield from finish_scale(group, work, node)
        else:
            yield from resume_roll(group, node, work)
    except (EffectRefusedError, CorruptDataError) as fault:
        yield from halt(group, node, work, fault)


def check_again(group: GroupState) -> Steps[None]:
    """Compare ZooKeeper with the journal and the counters in the middle of a term, after a lost connection.

    A ZooKeeper that was set back meanwhile may still know the session.

    Raises:
        RollbridgeError: ZooKeeper has lost something that it knew.
        StaleStateError: ZooKeeper holds a change that this leader has finished, or lacks one that it has not.
    """
    yield from keep_journal(group)  # so that the journal holds all that this leader has written to ZooKeeper
    yield from check_journal(group, next_epoch=group.controller_epoch + 1)
    yield from look_at_counter(group)
    yield from look_at_shared(group)
    under_way = yield from ReadNodes([paths.committing(group.name), paths.scaling(group.name)])
    known = None if group.waits.lingering is None else group.waits.lingering.committing.to_json()
    parent = paths.pending_changes(group.name)
    halted = {f"{parent}/{title}" for title in (yield from read_children(parent))}
    expected = {paths.committing(group.name): known, paths.scaling(group.name): None}
    if under_way != expected or halted != group.waits.pending_changes.keys():
        raise StaleStateError(f"ZooKeeper does not hold what the leader of {group.name} has under way")


def _read_logs(
    group: GroupState, terminated: dict[bytes, int], replication_factor: int, tail: WarmTail | None
) -> Steps[None]:
    """Load the snapshots of the buffers, and the part of the commit log that neither they nor the tail cover.

    Its outcomes are put into ``terminated``, by which the fold drops frames.

    Raises:
        StaleStateError: the log, or records of it, were deleted meanwhile.
    """
    group.snapshots.replication_factor = replication_factor
    start, lists, log_end = yield from restore_snapshots(group)
    first = group.housekeeping.starts[group.commit_log, 0]
    ended = group.fold.ended = yield from restore_ended(group, lists, first, log_end)
    summary = yield from _go_on(group, start, tail)
    followed = tail.partitions if tail is not None and summary is not None else ()
    if summary is None:
        again = min(start - group.settings.outcomes_again, ended.log_end)
        summary = yield from ReadCommitLog(group.commit_log, max(again, first))
        terminated.update(summary.terminated)
        group.fold.late, group.fold.late_streams = {}, group.streams.keys()
    elif tail is not None and tail.log_start > ended.log_end:
        ended.merge((yield from ReadEnded(group.commit_log, ended.log_end, tail.log_start)))
    starts = yield from StartOffsets([(group.commit_log, 0)])
    ids = yield from TopicIds([group.commit_log])
    if starts[group.commit_log, 0] > first or ids.get(group.commit_log) != group.log.topic_id:
        raise StaleStateError(f"commit log {group.commit_log}, or records of it, were deleted while it was read")
    group.fold.ended = ended
    group.fold.log_position = start
    group.records.begun = set(summary.begun)
    restore_ongoing(group, summary.terminated, followed)
    group.snapshots.summary = summary


def _go_on(group: GroupState, start: int, tail: WarmTail | None) -> Steps[LogSummary | None]:
    """Continue from a tail that fits; return the summary of the commit log to its end, None without such a tail."""
    if tail is None:
        return None
    topic_ids = {
        partition: item.config.buffer_topic_id for item in group.streams.values() for partition in item.partitions()
    }
    first = group.housekeeping.starts[group.commit_log, 0]
    if tail.log_end >= first and tail.fits(topic_ids, group.fold.positions, start):
        tail.follow((yield from ReadCommitLog(group.commit_log, tail.log_end)))
        if len(tail.fold.open) <= group.fold.limits.open_transactions_max and not tail.contradicts(group.fold.fences):
            known = group.snapshots.partitions.values()
            # Begin where the recorded ongoing transactions began, which is before the start.
            since = min([start, *(item.needed.log_position for item in known if item.spared is not None)])
            summary = tail.hand_over(group.fold, since)
            group.fold, group.buffer_epochs = tail.fold, tail.epochs
            group.counts["takeovers_warm"] += 1
            return summary
    group.counts["takeovers_tail_unfit"] += 1
    return None


def _check_commit_log(group: GroupState, replication_factor: int) -> Steps[None]:
    """Create the commit log of a new group, or check that the known one is the same topic.

    Raises:
        CorruptDataError: the commit log was deleted and created again, or ZooKeeper does not know it.
        RollbridgeError: the group was led before, and ZooKeeper was set back.
    """
    name = group.name
    raw = yield from read_node(paths.group(name))
    if raw is None:
        raise StaleStateError(f"group {name} is gone")
    known = Group.from_json(raw)
    if not known.commit_log_topic_id:
        ids = yield from CreateTopics([commit_log_topic_spec(name, replication_factor)])
        ends = yield from EndOffsets([(name.commit_log_topic, 0)])
        if ends[name.commit_log_topic, 0] > 0:
            yield from check_birth(group)
            raise CorruptDataError(
                f"commit log {name.commit_log_topic} holds records, but ZooKeeper has no record of it: ZooKeeper was "
                "wiped, or another zookeeper_root is meant. Ids of transactions would be given out again, so nothing "
                "was written. Restore ZooKeeper from a backup; or, to start without the data of scope "
                f"{name.scope}, delete its topics: kafka-topics.sh --delete --topic '{name.scope}[.].*'"
            )
        fresh = replace(known, commit_log_topic_id=ids[name.commit_log_topic])
        if not (yield from Write([SetNode(paths.group(name), fresh.to_json())])):
            raise StaleStateError(f"group {name} is gone")
        known = fresh
    else:
        topic, identity = name.commit_log_topic, known.commit_log_topic_id
        found = (yield from TopicIds([topic])).get(topic)
        if found != identity:
            journaled = group.journal.nodes.get(paths.group(name))
            if journaled is not None and Group.from_json(journaled).commit_log_topic_id == found:
                yield from refuse(group, [f"commit log {topic} was created again, ZooKeeper knows the one before"])
            is_what = "does not exist" if found is None else f"has id {found}, and {identity} is on record"
            raise CorruptDataError(
                f"commit log {topic} {is_what}: it was deleted, and with it the outcomes of transactions; nothing "
                f"was written; `rollbridge repair --commit-log {name}` creates it again, without the open "
                "transactions"
            )
    yield from load_log(group, known)


def _load_records(group: GroupState) -> Steps[None]:
    buckets = [f"{paths.transactions(group.name)}/{number:02x}" for number in range(paths.BUCKETS)]
    names = yield from ReadChildren(buckets)
    group.records.recorded.update(TransactionId.parse(item).bytes for items in names.values() for item in items)
