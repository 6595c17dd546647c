"""Planning: which of the decided transactions go into the next round, and to which segments. Pure.

Transactions leave in the order of their decisions. One that cannot leave yet holds up later ones of its line, which
are the commits of its connection, and nobody else's. Those whose segments are active, or have an active duplicate,
merge directly; the first that does not starts a rolling commit, which gathers all waiting transactions of its epochs,
or goes into the duplicates of the one before, if these are open. Large ones are merged beside the line first
(:mod:`rollbridge_coordinator.state.preparing`), and are then rolled alone.

Source: PDP-24, "CommitTransaction" and the collection of sibling transactions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollbridge.model.changes import (
    ID_BYTES,
    NARROWED_BYTES,
    NODE_BYTES,
    NUMBER_BYTES,
    CommittingTransactions,
    Roll,
)
from rollbridge.model.commit_order import LineKey
from rollbridge.model.conditions import StreamCondition, name_some
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import RecordTimes, StreamConfig, bytes_of_epoch
from rollbridge.model.segment_graph import Segment
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.linger import SEGMENTS_MAX, Lingering
from rollbridge_coordinator.state.preparing import is_large, prepared_rolls

ROLL_BYTES_MAX: Final = 1_000_000
"""Of the two epochs that a rolling commit publishes of a stream at once; ZooKeeper takes 1 MiB."""


class Targets:
    """Where the pieces of transactions go, and what stands where.

    Attributes:
        places: (stream, number of a segment of the transaction's epoch) → partition.
        segments: Partition → stream and segment.
        rooms: Adopted topic → largest batch that it takes, in bytes.
        stamped: Topics whose records get the time of the commit.
    """

    __slots__ = ("places", "rooms", "segments", "stamped")

    def __init__(self) -> None:
        """Start without any."""
        self.places: dict[tuple[str, int], Partition] = {}
        self.segments: dict[Partition, tuple[str, SegmentId]] = {}
        self.rooms: dict[str, int] = {}
        self.stamped: set[str] = set()

    def add(self, config: StreamConfig, number: int, segment: SegmentId) -> None:
        """Send what transactions have written to a segment, given by its number, to another one's partition."""
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
    """The commit asks for something that can never be merged; it must end as aborted."""

    transaction: BufferedTransaction
    reason: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Nothing can be done but for transactions that name frames which have not been folded yet."""

    transactions: tuple[BufferedTransaction, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """The transaction is large: its merge is to be begun beside the line.

    Attributes:
        transaction: The transaction.
        instead_of: Preparation that gives its place to this one, as it waits for something else; None if one is free.
    """

    transaction: BufferedTransaction
    instead_of: bytes | None = None


Round = DirectRound | RollingRound | LateRound | Beside | Refusal | Incomplete | None


def plan_round(group: GroupState) -> Round:
    """Plan what to do next for the transactions whose end is decided; None if there are none."""
    settings = group.settings
    large = settings.merge_beside_bytes
    shapes = _Shapes(group)
    ready: list[BufferedTransaction] = []
    incomplete: list[BufferedTransaction] = []
    held: set[OrderKey] = set()
    waiting_for_place: BufferedTransaction | None = None
    at_work: set[bytes] = set()
    size = 0
    # What hardly ever is, and a member of an enum, is looked up once and not for each transaction.
    committing, has_faults, has_doubts = State.COMMITTING, bool(group.faults), bool(group.doubts)
    may_be_alone = has_doubts or bool(group.failed_rounds)
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
                fault = group.doubts.fault_of(transaction)
            if fault is None and rolls:
                fault = _roll_fault(group, rolls)
            if fault is not None:
                return DirectRound(tuple(ready)) if ready else Refusal(transaction, fault)
            if large and transaction.bytes >= large and is_large(group, transaction):
                held.add(line_of(transaction))
                retry = group.merge_retries.get(transaction.id)
                if group.holds_roll(transaction.written_streams()) or (retry is not None and not retry.is_due):
                    continue
                preparation = group.preparations.get(transaction.id)
                if preparation is None:
                    if len(group.preparations) < settings.merges_beside_max:
                        return DirectRound(tuple(ready)) if ready else Beside(transaction)
                    waiting_for_place = waiting_for_place or transaction
                    continue
                if preparation.offsets is None:
                    at_work.add(transaction.id)
                    continue
                prepared = RollingRound((transaction,), prepared_rolls(group, transaction, preparation.record))
                return DirectRound(tuple(ready)) if ready else prepared
            if rolls and group.held_rolls and group.holds_roll(rolls):
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
        idle = [item for item in group.preparations if item not in at_work]
        if idle:
            return Beside(waiting_for_place, idle[-1])  # the one that was begun last has least to lose
    return Incomplete(tuple(incomplete)) if incomplete else None


def is_alone(group: GroupState, transaction: BufferedTransaction) -> bool:
    """Return True if a transaction is merged by itself because of a round that held it."""
    return transaction.id in group.failed_rounds or group.doubts.is_suspect(transaction.id)


def line_of(transaction: BufferedTransaction) -> OrderKey:
    """Return the line whose commits keep their order: the connection, or the client name if they are not numbered."""
    return transaction.begin.client_name if transaction.order is None else transaction.order.line


def conditions_of(transaction: BufferedTransaction) -> tuple[StreamCondition, ...]:
    """Return the conditions of a transaction to be committed; with any, it has a round of its own.

    One that was refused after its commit was asked for is only logged, whatever it expected, beside any others.
    """
    if transaction.state is not State.COMMITTING or transaction.manifest is None:
        return ()
    return transaction.manifest.conditions


def _roll_fault(group: GroupState, rolls: Mapping[str, int]) -> str | None:
    """Return why ZooKeeper cannot take the epochs of a rolling commit, before anything is sealed; None if it can.

    It always can unless a stream has more segments than can be made now: from a time when there was no limit. Counted
    are those of a roll of the whole stream, which has the most.
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
    """What is known of transactions that begin and end alike, for the length of one plan.

    Frames with the same bytes are decoded to the same object, so most small transactions of a round share both their
    begin and their manifest, and what follows from these two is worked out once.
    """

    def __init__(self, group: GroupState) -> None:
        self._group = group
        self._known: dict[tuple[int, int], tuple[str | None, dict[str, int]]] = {}

    def look_up(self, transaction: BufferedTransaction) -> tuple[str | None, dict[str, int]]:
        """Return why a complete transaction can never be merged, and if it can, which rolls it needs."""
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
    """Return the same, as far as it follows from its begin and its manifest alone."""
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

    A stream needs none if all segments to which the transaction wrote are active, or duplicates of them: a number names
    one key range for good.
    """
    return {name: transaction.begin.streams[name] for name in _replaced(group, transaction)}


def _replaced(group: GroupState, transaction: BufferedTransaction) -> dict[str, set[int]]:
    """Return the numbers of segments that a transaction wrote to and that are not active any more, by stream."""
    written = transaction.written_segments()
    left = {name: numbers - group.streams[name].history.active.numbers for name, numbers in written.items()}
    return {name: numbers for name, numbers in left.items() if numbers}


def _late(group: GroupState) -> LateRound | None:
    """Return the round of all waiting transactions that lingering duplicates take, in decision order; None without any.

    Left out are those that would also merge into what continues the duplicates, those with conditions, and those of
    which an earlier one of the connection was left out.
    """
    lingering = group.lingering
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
    lingering = group.lingering
    return lingering is not None and any(
        conditions_of(item) or lingering.is_before(item.written_segments())
        for item in transactions
        if item.state is State.COMMITTING
    )


def _gather(group: GroupState, first: BufferedTransaction, rolls: dict[str, int]) -> RollingRound:
    """Return all waiting transactions that the same rolls serve, in decision order; one with conditions alone.

    They are as many as ZooKeeper takes the ids of, in one node.

    Left out are those that would merge into the active epoch of a stream that is being rolled, those with conditions,
    and, so that the commits of a connection keep their order, those of which an earlier one was left out.
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
    """Return the round of as many transactions as fit into the node of a rolling commit, one at least.

    Where the segments of one alone do not fit into it, whole streams are rolled.
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
    before ZooKeeper was set back may name fewer segments than a transaction needs by now.
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
            and not any(group.faults.get(name) is not None for name in concerned - epochs.keys())
            and _is_served(group, transaction, epochs)
            and all(own <= taken[name] for name, own in _replaced(group, transaction).items())
        )
        if fits and passed.isdisjoint(keys):
            fitting.append(transaction)
        elif transaction.state is not State.ABORTING:  # of one that is open, the line is in a COMMIT frame not read yet
            passed.add(keys[0])
    return fitting


def _taken(history: EpochHistory, roll: Roll) -> set[int]:
    """Return the numbers of the transactions' segments for which a rolling commit has duplicates."""
    return {*(item.id.number for item in duplicates_of(history, roll)), *roll.prepared}


def waiting(group: GroupState) -> Iterator[tuple[BufferedTransaction, str]]:
    """Yield the transactions whose commits wait for what may take long, with the reason, in their order.

    Nothing of them has been appended for good, and nothing will be before that is over, so they may still be aborted.
    """
    held: dict[OrderKey, BufferedTransaction] = {}
    for transaction in list(group.fold.decided.values()):
        if transaction.state is not State.COMMITTING:
            continue
        line = line_of(transaction)
        why = _own_wait(group, transaction) if transaction.is_complete() else UNREAD
        if why is None and line in held:
            why = f"transaction {held[line].transaction_id} of its connection"
        if why is not None:
            held.setdefault(line, transaction)
            yield transaction, why
    for transaction in group.fold.lines.held():
        yield transaction, EARLIER


EARLIER: Final = "earlier commits of its connection"
UNREAD: Final = "frames that its commit names had not been read from the buffers"


def why_waits(group: GroupState, wanted: BufferedTransaction) -> str | None:
    """Return what a transaction waits for, to follow that verb; None if it is not one of those."""
    return next((why for transaction, why in waiting(group) if transaction is wanted), None)


def _own_wait(group: GroupState, transaction: BufferedTransaction) -> str | None:
    name = group.waits_for(transaction)
    if name is not None:
        return f"stream {name}, which is {'suspended' if group.is_suspended(name) else 'in an error state'}"
    if merge_fault(group, transaction) is not None:
        return None
    large = is_large(group, transaction)
    if group.held_rolls:
        rolls = transaction.written_streams() if large else rolls_of(group, transaction).keys()
        held = group.held_rolls.get(tuple(sorted(rolls))) if rolls else None
        if held is not None:
            why = name_some(held.wait.seen) or "further late commits"
            return f"{why}, before a rolling commit of {', '.join(sorted(rolls))}"
    if not large:
        return None
    retry = group.merge_retries.get(transaction.id)
    again = "" if retry is None else f", which begins again (time {retry.rest.times + 1}): {retry.why}"
    preparation = group.preparations.get(transaction.id)
    if preparation is not None:
        if preparation.offsets is not None:
            return None
        return f"the merge of its records beside those of others, which takes a while for so many{again}"
    if retry is not None and not retry.is_due:
        return f"the merge of its records{again}"
    if len(group.preparations) >= group.settings.merges_beside_max:
        others = ", ".join(str(item.record.transaction) for item in group.preparations.values())
        return f"one of the places for merges of large transactions, which are taken by {others}"
    return None


def _is_alone(group: GroupState, transaction: BufferedTransaction) -> bool:
    """Return True if it has a round of its own."""
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

    Of a stream that is rolled, the duplicates take what belongs to them, and active segments the rest.
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
    """Return the segments that a rolling commit makes for the transactions, whether they are published or not."""
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
    """Return what lingers of a rolling commit whose epochs are published; None if too much continues it."""
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
