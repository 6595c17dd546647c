"""Takeover: a new leader makes sure that the old one can not act any more, and finishes what it left.

The order matters: the controller epoch has been raised before (every later ZooKeeper write checks it); then the Kafka
transactional ids are taken, which fences the old leader in Kafka and aborts what it left open; only then the logs are
read, because they can not change any more behind our back.

Source: PDP-24 (the temporary node), PIP-196 (recovery); Kafka's controller epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.errors import CorruptDataError
from rollbridge.model import paths
from rollbridge.model.buffer import BufferFold
from rollbridge.model.buffered import Partition
from rollbridge.model.faults import StreamFault
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.nodes import SetNode
from rollbridge.model.records import Group, StreamConfig
from rollbridge.model.records import StreamState as Lifecycle
from rollbridge.model.under_way import Committing, Scaling
from rollbridge_coordinator.procedures.counters import open_counter
from rollbridge_coordinator.procedures.journal import check_birth, check_journal, check_mark, open_journal
from rollbridge_coordinator.procedures.outcomes import open_preserver
from rollbridge_coordinator.procedures.restore import finish_restore, restore_ongoing, restore_snapshots
from rollbridge_coordinator.procedures.retention import load_stream
from rollbridge_coordinator.procedures.rolling import resume_roll
from rollbridge_coordinator.procedures.scale import finish_scale
from rollbridge_coordinator.procedures.sealing import unsealed_fault
from rollbridge_coordinator.procedures.sessions import load_sessions
from rollbridge_coordinator.procedures.suspended import load_suspended
from rollbridge_coordinator.state.effects import LogSummary
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState, LeaderSettings
from rollbridge_coordinator.state.steps import (
    Steps,
    confirm_leadership,
    create_topics,
    end_offsets,
    ensure_nodes,
    read_all_children,
    read_children,
    read_commit_log,
    read_node,
    read_nodes,
    read_orders,
    take_identity,
    topic_ids,
    write,
)
from rollbridge_coordinator.state.streams import Doomed
from rollbridge_coordinator.state.tail import WarmTail
from rollbridge_coordinator.state.topics import commit_log_topic_spec

ORDERS_READ: Final = 100_000
"""How many outcomes at the end of the commit log are looked at for numbers of commits, if any commit waits for some."""

MakeFold = Callable[[Collection[bytes]], BufferFold]
"""Makes an empty fold that drops the frames of the transactions in a collection, which may grow until it folds."""


def take_over(
    name: GroupName,
    controller_epoch: int,
    make_fold: MakeFold,
    settings: LeaderSettings,
    *,
    replication_factor: int = -1,
    tail: WarmTail | None = None,
) -> Steps[tuple[GroupState, dict[Partition, int]]]:
    """Become the leader: gives the group's state, and the buffer offsets to fold before :func:`finish_pending`.

    What a standby has followed, the ``tail``, is gone on with if it fits; it must not be used elsewhere afterwards.

    Raises:
        CorruptDataError: an internal topic was deleted and made again behind our back.
        ZooKeeperOutdated: ZooKeeper was set back.
    """
    yield from take_identity(name)
    yield from ensure_nodes(paths.group_skeleton(name))
    preserver, journal = yield from open_preserver(name, settings, replication_factor)
    terminated: dict[bytes, int] = {}
    group = GroupState(name, controller_epoch, make_fold(terminated), settings)
    group.preserver = preserver
    group.journal.nodes = journal
    yield from _check_commit_log(group, replication_factor)
    yield from check_mark(group)
    yield from check_journal(group)
    yield from open_counter(group)
    yield from _load_streams(group)
    yield from load_suspended(group)
    raw = yield from read_node(paths.scaling(name))
    yield from _load_records(group)
    yield from load_sessions(group)
    yield from confirm_leadership()
    yield from _check_buffers(group)
    yield from _read_logs(group, terminated, replication_factor, tail)
    if raw is not None:
        yield from finish_scale(group, Scaling.from_json(raw), paths.scaling(name))
    ends = yield from end_offsets(sorted(group.partitions()))
    return group, dict(ends)


def finish_pending(group: GroupState) -> Steps[None]:
    """Finish a rolling commit that was under way; the buffers have been folded up to the offsets of the takeover."""
    group.fold.fresh = list(group.fold.open)  # looked at with the first work, once what was under way is finished
    yield from finish_restore(group)
    if group.fold.lines:
        # They wait for earlier commits of their connections, some of which may have an outcome and not be read again.
        group.fold.learn_order((yield from read_orders(group.commit_log, ORDERS_READ)))
    raw = yield from read_node(paths.committing(group.name))
    yield from confirm_leadership()
    if raw is not None:
        yield from resume_roll(group, paths.committing(group.name), Committing.from_json(raw))
    for name, stream in group.streams.items():
        if stream.history.unsealed() and group.faults.get(name) is None:
            group.faults.restore(name, unsealed_fault(0))
    group.fold.fences.caught_up()
    gone = [item for item in group.recorded if item not in group.fold.open]
    group.finished.extend(gone)
    group.recorded.difference_update(gone)
    group.begun &= group.fold.open.keys()
    yield from open_journal(group)


def _read_logs(
    group: GroupState, terminated: dict[bytes, int], replication_factor: int, tail: WarmTail | None
) -> Steps[None]:
    """Load the snapshots of the buffers, and the part of the commit log that says more than they do, or than the tail.

    Its outcomes are put into ``terminated``, which is what the fold goes by.
    """
    group.snapshots.replication_factor = replication_factor
    start = yield from restore_snapshots(group)
    summary = yield from _go_on(group, start, tail)
    followed = tail.partitions if tail is not None and summary is not None else ()
    if summary is None:
        summary = yield from read_commit_log(group.commit_log, max(start - group.settings.outcomes_again, 0))
        terminated.update(summary.terminated)
        group.fold.late, group.fold.late_streams = {}, group.streams.keys()
    group.fold.log_position = start
    group.begun = set(summary.begun)
    restore_ongoing(group, summary.terminated, followed)
    group.snapshots.summary = summary


def _go_on(group: GroupState, start: int, tail: WarmTail | None) -> Steps[LogSummary | None]:
    """Go on from a tail, if there is one that fits; gives what the commit log has said, to its end."""
    if tail is None:
        return None
    topic_ids = {
        partition: item.config.buffer_topic_id for item in group.streams.values() for partition in item.partitions()
    }
    if tail.fits(topic_ids, group.fold.positions, start):
        tail.follow((yield from read_commit_log(group.commit_log, tail.log_end)))
        if len(tail.fold.open) <= group.fold.limits.open_transactions_max and not tail.contradicts(group.fold.fences):
            known = group.snapshots.partitions.values()
            # From where the open ones that were written down began, which is before the start.
            since = min([start, *(item.needed.log_position for item in known if item.spared is not None)])
            summary = tail.hand_over(group.fold, since)
            group.fold = tail.fold
            group.counts["takeovers_warm"] += 1
            return summary
    group.counts["takeovers_tail_unfit"] += 1
    return None


def _check_commit_log(group: GroupState, replication_factor: int) -> Steps[None]:
    """Create the commit log of a new group; refuse one that was deleted and made again."""
    name = group.name
    raw = yield from read_node(paths.group(name))
    if raw is None:
        raise StaleStateError(f"group {name} is gone")
    known = Group.from_json(raw)
    if not known.commit_log_topic_id:
        ids = yield from create_topics([commit_log_topic_spec(name, replication_factor)])
        ends = yield from end_offsets([(name.commit_log_topic, 0)])
        if ends[name.commit_log_topic, 0] > 0:
            yield from check_birth(group)
            raise CorruptDataError(
                f"commit log {name.commit_log_topic} holds records, but ZooKeeper has no record of it: ZooKeeper was "
                "wiped, or another zookeeper_root is meant. Ids of transactions would be given out again, so nothing "
                "was written. Restore ZooKeeper from a backup; or, to begin anew without the data of scope "
                f"{name.scope}, delete its topics: kafka-topics.sh --delete --topic '{name.scope}[.].*'"
            )
        fresh = replace(known, commit_log_topic_id=ids[name.commit_log_topic])
        if not (yield from write(SetNode(paths.group(name), fresh.to_json()))):
            raise StaleStateError(f"group {name} is gone")
    else:
        yield from _check_ids({name.commit_log_topic: known.commit_log_topic_id})


def _check_buffers(group: GroupState) -> Steps[None]:
    expected = {item.config.buffer_topic: item.config.buffer_topic_id for item in group.streams.values()}
    yield from _check_ids(expected)


def _check_ids(expected: Mapping[str, str]) -> Steps[None]:
    ids = yield from topic_ids(sorted(expected))
    for topic, identity in expected.items():
        if ids.get(topic) != identity:
            raise CorruptDataError(
                f"topic {topic} has id {ids.get(topic, 'none: it does not exist')} but {identity} is on record: it was "
                "deleted or made again behind our back, so outcomes may be lost; nothing was written, restore the topic"
            )


def _load_streams(group: GroupState) -> Steps[None]:
    scope = group.name.scope
    names = [StreamName(scope, item) for item in (yield from read_children(paths.streams(scope)))]
    values = yield from read_nodes([path for name in names for path in (paths.stream(name), paths.stream_fault(name))])
    slots: list[str] = []
    for name in names:
        raw = values[paths.stream(name)]
        config = None if raw is None else StreamConfig.from_json(raw)
        if config is None or config.group != group.name:
            continue
        if config.state is Lifecycle.DELETING:
            group.doomed[str(name)] = Doomed(config)
        else:
            group.streams[str(name)] = yield from load_stream(config)
            slots.append(paths.cas_slots(name))
            fault = values[paths.stream_fault(name)]
            if fault is not None:
                with suppress(CorruptDataError):  # it is found out again, or written anew
                    group.faults.restore(str(name), StreamFault.from_json(fault))
    # A stream that was restored lacks it, and where ACLs are in force conditional writers may not make it.
    present = yield from read_nodes(slots)
    yield from ensure_nodes([path for path, value in present.items() if value is None])


def _load_records(group: GroupState) -> Steps[None]:
    buckets = [f"{paths.transactions(group.name)}/{number:02x}" for number in range(paths.BUCKETS)]
    names = yield from read_all_children(buckets)
    group.recorded.update(TransactionId.parse(item).bytes for items in names.values() for item in items)
