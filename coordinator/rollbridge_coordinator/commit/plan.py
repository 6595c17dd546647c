"""Planning: which of the decided transactions go into the next round, and to which segments. Pure.

Transactions leave in the order of their decisions. One that cannot leave yet delays only later ones of its line, which
are the commits of its connection. Those whose segments are active, or have an active duplicate, merge directly; the
first that does not starts a rolling commit, which gathers all waiting transactions of its epochs, or goes into the
duplicates of the one before, if these are open. Large ones are first merged in the background
(:mod:`rollbridge_coordinator.commit.large`), and are then rolled alone.

Source: PDP-24, "CommitTransaction" and the collection of sibling transactions.

Tour of a commit, stop 5 of 8: see docs/tour.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollbridge.base.ids import SegmentId
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.metadata.changes import (
    ID_BYTES,
    NARROWED_BYTES,
    NODE_BYTES,
    NUMBER_BYTES,
    CommittingTransactions,
    Merging,
    Roll,
)
from rollbridge.metadata.records import bytes_of_epoch
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.config import RecordTimes, StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition, StreamName
from rollbridge.stream.segment_graph import Segment
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import SEGMENTS_MAX, Lingering

# Large transactions: which are merged in the background, and into which segments. Pure.
#
# A merge takes time in proportion to its bytes. While it is a part of a round, other commits wait, and so do plain
# readers of its segments, since Kafka shows them nothing behind the first record of an open native transaction. So a
# large transaction is merged by a native transaction of its own, into segments that are not read yet, while rounds of
# others continue. After that, a rolling commit puts these segments into the history, which takes as long for 16 GiB as
# for a record.
#
# There are few ids for such merges, each with an open native transaction. An id is for appending, not for waiting: a
# merge begins when nothing keeps its roll from being carried out. If its transaction has to wait later, for native
# transactions of others or for a stream in an error state, it gives its id to one that need not, and begins again
# afterwards. That is counted, logged and bounded, as is every other failed merge.
#
# The epoch in which such a segment will begin is not known when its topic is created: others may scale or roll its
# stream meanwhile. So its id has a number of its own, counted up forever for each stream, with the epoch that is active
# at that time. That name is never used again, not even for another try of the same transaction.
#
# Source: PDP-24, "mergeSegments"; there a merge is metadata only, as segments of transactions are stored apart.


SEGMENTS_PREPARED_MAX: Final = 256
"""Segments of a transaction up to which it is merged in the background. Beyond it, creating each topic would take
longer than appending its records.
"""


def is_large(group: GroupState, transaction: BufferedTransaction) -> bool:
    """Return True if a transaction to be committed is merged in the background.

    That takes a rolling commit, so none that writes to an adopted topic is: the stream would have to leave the topic.
    Nor is one that writes to a stream which was deleted, or is not led.
    """
    bound = group.settings.merge_beside_bytes
    if not bound or transaction.bytes < bound or transaction.state is not State.COMMITTING:
        return False
    # All of its bytes may be of parts that its commit does not name: then it writes to no segment at all.
    written = transaction.written_segments()
    streams = [group.streams.get(name) for name in written]
    return 0 < sum(map(len, written.values())) <= SEGMENTS_PREPARED_MAX and not any(
        stream is None or stream.is_on_topic for stream in streams
    )


def prepared_rolls(group: GroupState, transaction: BufferedTransaction, record: Merging) -> tuple[Roll, ...]:
    """Return the rolls that put prepared segments into the present histories of their streams."""
    rolls = []
    for item in record.streams:
        history = group.streams[item.stream].history
        fresh = history.next_epoch
        epoch = transaction.begin.streams[item.stream]
        rolls.append(Roll(item.stream, epoch, history.active.epoch, fresh, fresh + 1, prepared=item.segments))
    return tuple(rolls)


def is_ready(group: GroupState, transaction: BufferedTransaction, rolls: tuple[Roll, ...]) -> bool:
    """Return True if the segments that a rolling commit of a large transaction names hold its records."""
    found = group.large.preparations.get(transaction.id)
    if found is None or found.offsets is None:
        return False
    prepared = {item.stream: dict(item.segments) for item in found.record.streams}
    return prepared == {roll.stream: dict(roll.prepared) for roll in rolls}


def prepared_topics(group: GroupState, stream: StreamName) -> dict[str, list[str]]:
    """Return the prepared topics of a stream that were not removed yet, by the node that names them."""
    return {
        node: [stream.segment_topic(segment) for segment in item.segments.values()]
        for node, record in group.large.leftovers.items()
        for item in record.streams
        if item.stream == str(stream)
    }


def segments_in_use(group: GroupState) -> set[tuple[str, SegmentId]]:
    """Return the prepared segments that changes in progress will put into the histories of their streams."""
    works = (item.work for item in group.waits.pending_changes.values())
    rolls = [roll for work in works for roll in getattr(work, "rolls", ())]
    return {(roll.stream, segment) for roll in rolls for segment in roll.prepared.values()}


ROLL_BYTES_MAX: Final = 1_000_000
"""Limit of the two epochs that a rolling commit publishes of a stream at once; ZooKeeper takes 1 MiB."""


class Targets:
    """Targets of the pieces of transactions.

    Attributes:
        places: (stream, number of a segment of the transaction's epoch) → partition.
        segments: Partition → stream and segment.
        rooms: Adopted topic → largest batch that it takes, in bytes.
        stamped: Topics whose records get the time of the commit.
    """

    __slots__ = ("places", "rooms", "segments", "stamped")

    def __init__(self) -> None:
        self.places: dict[tuple[str, int], Partition] = {}
        self.segments: dict[Partition, tuple[str, SegmentId]] = {}
        self.rooms: dict[str, int] = {}
        self.stamped: set[str] = set()

    def add(self, config: StreamConfig, number: int, segment: SegmentId) -> None:
        """Map a segment of transactions, given by its number, to another segment's partition."""
        place = config.place(segment)
        self.places[str(config.name), number] = place
        self.segments[place] = str(config.name), segment
        if config.timestamps is RecordTimes.COMMIT:
            self.stamped.add(place[0])


OrderKey = LineKey | str


@dataclass(frozen=True, slots=True)
class DirectRound:
    """Merge into active segments, or log as aborted."""

    transactions: tuple[BufferedTransaction, ...]


@dataclass(frozen=True, slots=True)
class RollingRound:
    """Merge into duplicates of the transactions' epochs."""

    transactions: tuple[BufferedTransaction, ...]
    rolls: tuple[Roll, ...]


@dataclass(frozen=True, slots=True)
class LateRound:
    """Merge into duplicates that were made for other transactions, and are not sealed yet."""

    transactions: tuple[BufferedTransaction, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The commit requires something that can never be merged; it must end as aborted."""

    transaction: BufferedTransaction
    reason: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Nothing can be done except for transactions that name frames not folded yet."""

    transactions: tuple[BufferedTransaction, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """The transaction is large: its background merge is to begin.

    Attributes:
        instead_of: Preparation that gives its id to this one, as it waits for something else; None if one is free.
    """

    transaction: BufferedTransaction
    instead_of: bytes | None = None


Round = DirectRound | RollingRound | LateRound | Beside | Refusal | Incomplete | None


def plan_round(group: GroupState) -> Round:
    """Plan the next step for the transactions whose end is decided; None if there are none."""
    settings = group.settings
    large = settings.merge_beside_bytes
    shapes = _Shapes(group)
    ready: list[BufferedTransaction] = []
    incomplete: list[BufferedTransaction] = []
    held: set[OrderKey] = set()
    waiting_for_place: BufferedTransaction | None = None
    at_work: set[bytes] = set()
    size = 0
    # Rare facts, and a member of an enum, are read once and not for each transaction.
    committing, has_faults, has_doubts = State.COMMITTING, bool(group.waits.faults), bool(group.waits.unknown_outcomes)
    may_be_alone = has_doubts or bool(group.waits.failed_rounds)
    for transaction in group.fold.decided.values():
        if transaction.state is committing:
            if held and line_of(transaction) in held:
                continue
            if has_faults and group.waits_for(transaction) is not None:
                held.add(line_of(transaction))
                continue
            if not transaction.is_complete():
                incomplete.append(transaction)
                held.add(line_of(transaction))
                continue
            fault, rolls = shapes.look_up(transaction)
            if fault is None and has_doubts:
                fault = group.waits.unknown_outcomes.fault_of(transaction)
            if fault is None and rolls:
                fault = _roll_fault(group, rolls)
            if fault is not None:
                return DirectRound(tuple(ready)) if ready else Refusal(transaction, fault)
            if large and transaction.bytes >= large and is_large(group, transaction):
                held.add(line_of(transaction))
                retry = group.large.retries.get(transaction.id)
                if group.holds_roll(transaction.written_streams()) or (retry is not None and not retry.is_due):
                    continue
                preparation = group.large.preparations.get(transaction.id)
                if preparation is None:
                    if len(group.large.preparations) < settings.merges_beside_max:
                        return DirectRound(tuple(ready)) if ready else Beside(transaction)
                    waiting_for_place = waiting_for_place or transaction
                    continue
                if preparation.offsets is None:
                    at_work.add(transaction.id)
                    continue
                prepared = RollingRound((transaction,), prepared_rolls(group, transaction, preparation.record))
                return DirectRound(tuple(ready)) if ready else prepared
            if rolls and group.waits.held_rolls and group.holds_roll(rolls):
                held.add(line_of(transaction))
                continue
            if rolls:
                return DirectRound(tuple(ready)) if ready else _late(group) or _gather(group, transaction, rolls)
            if conditions_of(transaction) or (may_be_alone and is_alone(group, transaction)):
                return DirectRound(tuple(ready) or (transaction,))
        if ready and (
            size + transaction.bytes > settings.round_bytes_max or len(ready) >= settings.round_transactions_max
        ):
            break
        ready.append(transaction)
        size += transaction.bytes
    if ready:
        return DirectRound(tuple(ready))
    if waiting_for_place is not None:
        idle = [item for item in group.large.preparations if item not in at_work]
        if idle:
            return Beside(waiting_for_place, idle[-1])  # the one that was begun last has least to lose
    return Incomplete(tuple(incomplete)) if incomplete else None


def is_alone(group: GroupState, transaction: BufferedTransaction) -> bool:
    """Return True if a transaction is merged alone because of an earlier round with it."""
    return transaction.id in group.waits.failed_rounds or group.waits.unknown_outcomes.is_suspect(transaction.id)


def line_of(transaction: BufferedTransaction) -> OrderKey:
    """Return the line whose commits keep their order: the connection, or the client name if they are not numbered."""
    return transaction.begin.client_name if transaction.order is None else transaction.order.line


def conditions_of(transaction: BufferedTransaction) -> tuple[StreamCondition, ...]:
    """Return the conditions of a transaction to be committed; with any, it has a round of its own.

    One refused after its commit was requested is only logged, with any others.
    """
    if transaction.state is not State.COMMITTING or transaction.manifest is None:
        return ()
    return transaction.manifest.conditions


def _roll_fault(group: GroupState, rolls: Mapping[str, int]) -> str | None:
    """Return why ZooKeeper cannot take the epochs of a rolling commit, before anything is sealed; None if it can.

    It always can unless a stream has more segments than can be made now: from a time without a limit. The segments of a
    roll of the whole stream are counted, which has the most.
    """
    for name, epoch in rolls.items():
        history = group.streams[name].history
        old, active = len(history.grown_from(epoch).segments), len(history.active.segments)
        if bytes_of_epoch(old, active) + bytes_of_epoch(active, 0) > ROLL_BYTES_MAX:
            return (
                f"too many segments: stream {name} was scaled since the transaction began, and epochs of {old} and "
                f"{active} segments do not fit into one write to ZooKeeper; begin it again"
            )
    return None


class _Shapes:
    """Cache of facts about transactions with the same begin and manifest, for the length of one plan.

    Frames with the same bytes are decoded to the same object, so most small transactions of a round share both, and
    what follows from these two is computed once.
    """

    def __init__(self, group: GroupState) -> None:
        self._group = group
        self._known: dict[tuple[int, int], tuple[str | None, dict[str, int]]] = {}

    def look_up(self, transaction: BufferedTransaction) -> tuple[str | None, dict[str, int]]:
        """Return why a complete transaction can never be merged, or None and the rolls that it needs."""
        fault = transaction.frames_fault()
        if fault is not None:
            return fault, {}
        # Both are kept alive by the transaction, which stays where it is until the plan is made.
        shape = (id(transaction.begin), id(transaction.manifest))
        known = self._known.get(shape)
        if known is None:
            fault = transaction.names_fault() or _shape_fault(self._group, transaction)
            known = (fault, {} if fault is not None else rolls_of(self._group, transaction))
            self._known[shape] = known
        return known


def merge_fault(group: GroupState, transaction: BufferedTransaction) -> str | None:
    """Return why a complete transaction can never be merged; None if it can."""
    return transaction.manifest_fault() or _shape_fault(group, transaction)


def _shape_fault(group: GroupState, transaction: BufferedTransaction) -> str | None:
    """Return the same, as far as begin and manifest alone decide it."""
    if transaction.manifest is None:
        return None
    names = list(transaction.begin.streams)
    for piece in transaction.manifest.pieces:
        name = names[piece.stream]
        stream = group.streams.get(name)
        if stream is None:
            return f"stream {name} does not exist in group {group.name}"
        epoch = transaction.begin.streams[name]
        history = stream.history
        if 0 <= epoch < history.born:
            return f"stream {name} was deleted and created again after the transaction began"
        if 0 <= epoch < history.first:
            return f"epoch {epoch} of stream {name} was dropped before the transaction began in its buffer"
        if not 0 <= epoch < history.next_epoch or history.record(epoch).reference_epoch != epoch:
            return f"epoch {epoch} is not a reference epoch of stream {name}"
        if piece.segment not in history.grown_from(epoch).numbers:
            return f"epoch {epoch} of stream {name} has no segment {piece.segment}"
    return None


def rolls_of(group: GroupState, transaction: BufferedTransaction) -> dict[str, int]:
    """Return the streams for which a transaction needs a rolling commit, with its reference epoch of each.

    A stream needs none if all segments to which the transaction wrote are active, or duplicates of active ones: a
    number names one key range for good.
    """
    return {name: transaction.begin.streams[name] for name in _replaced(group, transaction)}


def _replaced(group: GroupState, transaction: BufferedTransaction) -> dict[str, set[int]]:
    """Return the numbers of segments that a transaction wrote to and that are no longer active, by stream."""
    written = transaction.written_segments()
    left = {name: numbers - group.streams[name].history.active.numbers for name, numbers in written.items()}
    return {name: numbers for name, numbers in left.items() if numbers}


def _late(group: GroupState) -> LateRound | None:
    """Return the round of all waiting transactions that lingering duplicates take, in decision order; None without any.

    Left out are those that would also merge into what continues the duplicates, those with conditions, and later ones
    of a connection of which one was left out.
    """
    lingering = group.waits.lingering
    if lingering is None:
        return None
    chosen: list[BufferedTransaction] = []
    passed: set[OrderKey] = set()
    room = group.settings.round_bytes_max
    for transaction in group.fold.decided.values():
        if transaction.state is not State.COMMITTING:
            continue
        fits = (
            transaction.is_complete()
            and merge_fault(group, transaction) is None
            and lingering.takes(_replaced(group, transaction))
            and not lingering.is_before(transaction.written_segments())
            and not _is_alone(group, transaction)
            and group.waits_for(transaction) is None
            and line_of(transaction) not in passed
            and transaction.bytes <= room
            and len(chosen) < group.settings.round_transactions_max
        )
        if fits:
            chosen.append(transaction)
            room -= transaction.bytes
        else:
            passed.add(line_of(transaction))
    return LateRound(tuple(chosen)) if chosen else None


def ends_linger(group: GroupState, transactions: Sequence[BufferedTransaction]) -> bool:
    """Return True if lingering duplicates must be sealed before these transactions are merged into active segments.

    They are written to what continues the duplicates, or have conditions, which ask for ends of segments.
    """
    lingering = group.waits.lingering
    return lingering is not None and any(
        conditions_of(item) or lingering.is_before(item.written_segments())
        for item in transactions
        if item.state is State.COMMITTING
    )


def _gather(group: GroupState, first: BufferedTransaction, rolls: dict[str, int]) -> RollingRound:
    """Return all waiting transactions that the same rolls serve, in decision order; one with conditions alone.

    Their number is bounded by the ids that one ZooKeeper node takes.

    Left out are those that would merge into the active epoch of a stream that is being rolled, those with conditions,
    and, to keep the order of the commits of a connection, later ones of a connection of which one was left out.
    """
    served: list[BufferedTransaction] = []
    passed: set[OrderKey] = set()
    most = group.settings.rolling_transactions_max
    for transaction in [first] if _is_alone(group, first) else group.fold.decided.values():
        if len(served) >= most:
            break
        alone = transaction is not first and _is_alone(group, transaction)
        line = line_of(transaction)
        waits = group.waits_for(transaction) is not None
        if not alone and not waits and line not in passed and _is_served(group, transaction, rolls):
            served.append(transaction)
        elif transaction.state is State.COMMITTING:
            passed.add(line)
    return _fitting(group, served, rolls)


def _fitting(group: GroupState, served: Sequence[BufferedTransaction], rolls: dict[str, int]) -> RollingRound:
    """Return the round of as many transactions as fit into the node of a rolling commit, at least one.

    If the segments of one alone do not fit into it, whole streams are rolled.
    """
    numbers: dict[str, set[int]] = {name: set() for name in rolls}
    chosen: list[BufferedTransaction] = []
    room = group.settings.write_bytes_max - NODE_BYTES - sum(roll.node_bytes for roll in _planned(group, rolls, {}))
    for transaction in served:
        more = {name: own - numbers[name] for name, own in _replaced(group, transaction).items()}
        room -= ID_BYTES
        for name, own in more.items():
            room -= NUMBER_BYTES * len(own) + (0 if numbers[name] else NARROWED_BYTES + len(name))
        if chosen and room < 0:
            break
        chosen.append(transaction)
        for name, own in more.items():
            numbers[name] |= own
    planned = _planned(group, rolls, numbers)
    if NODE_BYTES + ID_BYTES + sum(roll.node_bytes for roll in planned) > group.settings.write_bytes_max:
        planned = _planned(group, rolls, {})
    return RollingRound(tuple(chosen), planned)


def _planned(group: GroupState, rolls: Mapping[str, int], numbers: Mapping[str, Collection[int]]) -> tuple[Roll, ...]:
    planned = []
    for name, epoch in sorted(rolls.items()):
        history = group.streams[name].history
        fresh = history.next_epoch
        touched = tuple(sorted(numbers.get(name, ())))
        planned.append(Roll(name, epoch, history.active.epoch, fresh, fresh + 1, touched))
    return tuple(planned)


def still_fitting(
    group: GroupState, transactions: Sequence[BufferedTransaction], rolls: Sequence[Roll]
) -> list[BufferedTransaction]:
    """Return those of a rolling commit that it still serves after a wait; in its order, within that of lines.

    Another stream of a transaction may have been scaled or deleted meanwhile, or be in an error state. A record from
    before ZooKeeper was set back may name fewer segments than a transaction needs now.
    """
    epochs = {roll.stream: roll.transaction_epoch for roll in rolls}
    taken = {roll.stream: _taken(group.streams[roll.stream].history, roll) for roll in rolls}
    fitting: list[BufferedTransaction] = []
    passed: set[OrderKey] = set()
    for transaction in transactions:
        keys = line_of(transaction), transaction.begin.client_name
        concerned = transaction.written_streams() | transaction.expected_streams()
        fits = (
            group.unled_of(transaction) is None
            and not any(group.waits.faults.get(name) is not None for name in concerned - epochs.keys())
            and _is_served(group, transaction, epochs)
            and all(own <= taken[name] for name, own in _replaced(group, transaction).items())
        )
        if fits and passed.isdisjoint(keys):
            fitting.append(transaction)
        elif transaction.state is not State.ABORTING:  # of one that is open, the line is in a COMMIT frame not read yet
            passed.add(keys[0])
    return fitting


def _taken(history: EpochHistory, roll: Roll) -> set[int]:
    return {*(item.id.number for item in duplicates_of(history, roll)), *roll.prepared}


def _is_alone(group: GroupState, transaction: BufferedTransaction) -> bool:
    return bool(conditions_of(transaction)) or is_alone(group, transaction) or is_large(group, transaction)


def _is_served(group: GroupState, transaction: BufferedTransaction, rolls: dict[str, int]) -> bool:
    if (
        transaction.state is not State.COMMITTING
        or not transaction.is_complete()
        or merge_fault(group, transaction) is not None
    ):
        return False
    own = rolls_of(group, transaction)
    if not own or any(rolls.get(name) != epoch for name, epoch in own.items()):
        return False
    return not (transaction.written_streams() - own.keys()) & rolls.keys()


def targets(group: GroupState, rolls: tuple[Roll, ...] = ()) -> Targets:
    """Return the partitions of transactions' pieces: active segments, and the duplicates that ``rolls`` name.

    In a stream that is rolled, the duplicates take their own pieces, and active segments the rest.
    """
    found = Targets()
    rolled = {roll.stream: roll for roll in rolls}
    for name, stream in group.streams.items():
        if stream.is_on_topic and stream.config.limits is not None:
            found.rooms[stream.config.topic] = stream.config.limits.batch_room
        history = stream.history
        for item in history.active.segments:
            found.add(stream.config, item.id.number, item.id)
        roll = rolled.get(name)
        if roll is None:
            continue
        sources = {item: number for number, item in roll.prepared.items()}
        for item in duplicates_of(history, roll):
            found.add(stream.config, sources.get(item.id, item.id.number), item.id)
    return found


def duplicates_of(history: EpochHistory, roll: Roll) -> tuple[Segment, ...]:
    """Return the segments that a rolling commit makes for the transactions, published or not."""
    if history.active.epoch >= roll.duplicate_epoch:
        return history.began_with(roll.duplicate_epoch)
    planned, _ = history.plan_rolling(roll.transaction_epoch, 0, roll.numbers, roll.prepared)
    return tuple(item for item in planned.segments if item.id not in history.active.segment_ids)


def replaced_by(history: EpochHistory, roll: Roll) -> tuple[Segment, ...]:
    """Return the active segments that end with a rolling commit; none if it is published."""
    if history.active.epoch >= roll.duplicate_epoch:
        return ()
    planned, _ = history.plan_rolling(roll.transaction_epoch, 0, roll.numbers, roll.prepared)
    return history.ending_with(planned)


def lingering_of(
    group: GroupState, committing: CommittingTransactions, since_ms: int, until_ms: int
) -> Lingering | None:
    """Return the lingering part of a published rolling commit; None if too many segments continue it."""
    duplicates: dict[str, frozenset[int]] = {}
    behind: dict[str, frozenset[int]] = {}
    places: list[Partition] = []
    for roll in committing.rolls:
        stream = group.streams[roll.stream]
        duplicates[roll.stream] = frozenset(item.id.number for item in duplicates_of(stream.history, roll))
        fresh = stream.history.began_with(roll.new_active_epoch)
        behind[roll.stream] = frozenset(item.id.number for item in fresh)
        places += stream.places_of(fresh).values()
    if len(places) > SEGMENTS_MAX:
        return None
    return Lingering(committing, duplicates, behind, tuple(places), since_ms, until_ms)
