"""What a leader shows of its group on the live page: values that do not change, made of its state in its thread. Pure.

The thread of a leader has better things to do, so what is made here is bounded, and made only while somebody looks:
histories and settings of streams are immutable and handed over as they are, and of the open transactions those are
picked that an operator looks for, the oldest and the largest (:class:`Listing`).
:mod:`rollbridge_coordinator.state.documents` makes JSON of it, in another thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from rollbridge.model.buffer import Stranger
from rollbridge.model.changes import EpochTransition, StreamFault
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.names import Partition
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import StreamConfig
from rollbridge.model.transaction import Drop
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import SURVEYED_PER_S, LeaderView, PastRound, lag_of

LISTED_MAX: Final = 100
"""Transactions in each of the two lists."""
LIVE_STREAMS_MAX: Final = 100
"""Streams of a group that are shown: those in an error state, and then those with most to do."""
NAMED_MAX: Final = 10
"""Streams of a transaction, and what a change waits for, that are named."""


@dataclass(frozen=True, slots=True)
class LiveTransaction:
    """An open transaction.

    Attributes:
        id: Its id, as it is shown.
        state: Its state.
        client, label: What its client says of itself: anybody's text.
        begun_ms, deadline_ms: When it began, and when its lease ends.
        bytes, frames: What has arrived of it; None where that is not known.
        streams: The first of its streams.
        streams_count: How many it has.
    """

    id: str
    state: str
    client: str
    label: str
    begun_ms: int
    deadline_ms: int
    bytes: int | None
    frames: int | None
    streams: tuple[str, ...]
    streams_count: int

    @classmethod
    def of(cls, item: BufferedTransaction) -> LiveTransaction:
        """Copy what is shown."""
        streams = tuple(item.begin.streams)
        return cls(
            id=str(item.transaction_id),
            state=item.state.value,
            client=item.begin.client_name,
            label=item.begin.label or "",
            begun_ms=item.begun_ms,
            deadline_ms=item.deadline_ms,
            bytes=item.bytes,
            frames=len(item.frames),
            streams=streams[:NAMED_MAX],
            streams_count=len(streams),
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """Open transactions of which two lists are shown.

    Attributes:
        at_ms: When they were looked at.
        count: How many there were.
        oldest: Those that began first.
        largest: Those of which most bytes have come.
    """

    at_ms: int
    count: int
    oldest: tuple[LiveTransaction, ...]
    largest: tuple[LiveTransaction, ...]

    @property
    def due_ms(self) -> int:
        """When to look again: rarely where there are very many, as for a survey."""
        return self.at_ms + 2 * self.count * 1000 // SURVEYED_PER_S


def list_open(transactions: Collection[BufferedTransaction], now_ms: int) -> Listing:
    """Pick the oldest and the largest of the transactions whose outcome is not in the commit log yet."""
    oldest = heapq.nsmallest(LISTED_MAX, transactions, key=attrgetter("begun_ms"))
    largest = heapq.nlargest(LISTED_MAX, transactions, key=attrgetter("bytes"))
    known = {item.id: LiveTransaction.of(item) for item in (*oldest, *largest)}
    first, most = (tuple(known[item.id] for item in found) for found in (oldest, largest))
    return Listing(now_ms, len(transactions), first, most)


@dataclass(frozen=True, slots=True)
class LiveStream:
    """A stream of the group.

    Attributes:
        config, history: As its leader knows it.
        fault: Why its transactions wait, if it is in an error state.
        open: Open transactions that write to it, or could.
        open_bytes: Bytes of their frames for it.
        records, bytes: What was committed by transactions in this term.
        lag: Messages of its buffer that are not folded yet.
        lag_ms: For how long the leader has been behind it: :func:`lag_of`.
        held_bytes: About how many bytes of its buffer cannot be truncated.
    """

    config: StreamConfig
    history: EpochHistory
    fault: StreamFault | None
    open: int
    open_bytes: int
    records: int
    bytes: int
    lag: int
    lag_ms: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class LiveWait:
    """A scale or rolling commit that waits for native transactions of others, or for leaders that are away.

    Attributes:
        kind: ``scale`` or ``rolling-commit``.
        streams: Its streams; none of a request to scale that has not begun.
        since_ms: Since when.
        is_half_done: Whether its streams take no transactions meanwhile.
        waits_for: What it waits for, as far as it is known.
    """

    kind: str
    streams: tuple[str, ...]
    since_ms: int
    is_half_done: bool
    waits_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group as its leader sees it.

    Attributes:
        name: ``scope/group``.
        controller_epoch: The leader's term.
        serves_since_ms: When it had taken over.
        at_ms: When this was put together, by its clock.
        states: Open transactions by state.
        open_bytes: Bytes of their frames.
        oldest_ms: When the first of them began; None without one.
        deadline_ms: When the first lease ends; None if none is open.
        listing: The transactions that are listed.
        streams: Its streams, or those to look at.
        streams_count: How many it has.
        faults_count: How many are in an error state.
        rounds: The last rounds, oldest first.
        waits: What has to wait.
        lag: Messages of all buffers that are not folded yet.
        lag_ms: For how long the leader has been behind one of them, at most.
        foreign: Messages of buffers that were no frames, in this term.
        stranger: The last of them.
    """

    name: str
    controller_epoch: int
    serves_since_ms: int
    at_ms: int
    states: Mapping[str, int]
    open_bytes: int
    oldest_ms: int | None
    deadline_ms: int | None
    listing: Listing
    streams: tuple[LiveStream, ...]
    streams_count: int
    faults_count: int
    rounds: tuple[PastRound, ...]
    waits: tuple[LiveWait, ...]
    lag: int
    lag_ms: int = 0
    foreign: int = 0
    stranger: Stranger | None = None


def live_group(group: GroupState, view: LeaderView, known: LiveGroup | None) -> LiveGroup:
    """Return what is shown of a group now.

    Args:
        group: The leader's state.
        view: What its shell knows besides.
        known: What was shown before in this term; its listing is used again where looking takes long.
    """
    survey = view.survey
    listing = None if known is None else known.listing
    if listing is None or not listing.at_ms <= view.now_ms < listing.due_ms:
        listing = list_open(group.fold.open.values(), view.now_ms)
    # Of its streams only: the tail may still know the end of a buffer that is gone.
    lags = {
        partition: lag_of(view, partition, group.fold.positions.get(partition, 0), group.metrics.since_ms)
        for partition in group.partitions()
    }
    streams = [_live_stream(group, view, name, lags) for name in _chosen(group, view)]
    return LiveGroup(
        name=str(group.name),
        controller_epoch=group.controller_epoch,
        serves_since_ms=group.serves_since_ms,
        at_ms=view.now_ms,
        states={state.value: count for state, count in survey.states.items()},
        open_bytes=survey.size,
        oldest_ms=None if survey.oldest is None else survey.oldest.begun_ms,
        deadline_ms=survey.deadline_ms,
        listing=listing,
        streams=tuple(streams),
        streams_count=len(group.streams),
        faults_count=len(group.faults),
        rounds=tuple(group.metrics.rounds),
        waits=tuple(_waits(group)),
        lag=sum(messages for messages, _ in lags.values()),
        lag_ms=max((late_ms for _, late_ms in lags.values()), default=0),
        foreign=group.fold.dropped[Drop.FOREIGN],
        stranger=group.fold.stranger,
    )


def _chosen(group: GroupState, view: LeaderView) -> Collection[str]:
    """Return the streams to show: all, or those in an error state, and then those with most to do."""
    if len(group.streams) <= LIVE_STREAMS_MAX:
        return group.streams.keys()
    written, open_of = group.metrics.bytes, view.survey.of_streams
    return heapq.nlargest(
        LIVE_STREAMS_MAX,
        group.streams,
        key=lambda name: (group.faults.get(name) is not None, open_of.get(name, 0), written[name]),
    )


def _live_stream(
    group: GroupState, view: LeaderView, name: str, lags: Mapping[Partition, tuple[int, int]]
) -> LiveStream:
    led = group.streams[name]
    partitions = list(led.partitions())
    behind = [lags.get(partition, (0, 0)) for partition in partitions]
    return LiveStream(
        config=led.config,
        history=led.history,
        fault=group.faults.get(name),
        open=view.survey.of_streams.get(name, 0),
        open_bytes=view.survey.bytes_of_streams.get(name, 0),
        records=group.metrics.records[name],
        bytes=group.metrics.bytes[name],
        lag=sum(messages for messages, _ in behind),
        lag_ms=max((late_ms for _, late_ms in behind), default=0),
        held_bytes=sum(view.held_bytes.get(partition, 0) for partition in partitions),
    )


def _waits(group: GroupState) -> list[LiveWait]:
    found = []
    for wait in group.held.values():
        found.append(LiveWait("scale", (), wait.since_ms, False, _named(wait.lasting)))
    for streams, roll in group.held_rolls.items():
        if roll.wait.seen:  # the others gather, for a moment
            wait = roll.wait
            found.append(LiveWait("rolling-commit", streams[:NAMED_MAX], wait.since_ms, False, _named(wait.lasting)))
    for suspended in group.suspended.values():
        kind = "scale" if isinstance(suspended.work, EpochTransition) else "rolling-commit"
        streams = tuple(suspended.work.streams)[:NAMED_MAX]
        reasons = (suspended.refused,) if suspended.refused else _named(suspended.wait.lasting)
        found.append(LiveWait(kind, streams, suspended.wait.since_ms, True, reasons))
    return sorted(found, key=lambda wait: wait.since_ms)[:LISTED_MAX]


def _named(obstacles: Collection[object]) -> tuple[str, ...]:
    return tuple(sorted(map(str, obstacles))[:NAMED_MAX])
