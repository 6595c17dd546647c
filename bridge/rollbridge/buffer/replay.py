"""Records of ongoing transactions: the open transactions of a buffer's frames up to a position.

Without them a new leader would read a buffer from the first frame of its oldest open transaction on, and the commit log
from as long ago; and a transaction may be open for days. They are in the topic of indexes, under two alternating keys.

Source: PIP-196 (a snapshot ends at the max read position, which the oldest ongoing transaction holds back); PDP-24
(transactions that live for days).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Annotated, Final

from rollbridge.base.ids import COUNT_MAX, OWNER_PART
from rollbridge.base.mapper import Mapper, StoredAs, seal, unseal
from rollbridge.buffer import joins
from rollbridge.buffer.frames import BeginFrame, PieceKey
from rollbridge.buffer.savepoints import HeldSavepoint, StoredSavepoint
from rollbridge.buffer.snapshots import (
    AbortedTransactions,
    Age,
    Choice,
    SegmentIndex,
    Snapshot,
    age_of,
    decode_all,
    partition_name,
)
from rollbridge.buffer.state import BufferedTransaction, FrameRef, HeldFrames
from rollbridge.stream.names import Partition, StreamName
from rollbridge_schemas import Datum

FRAME_BYTES: Final = 16
"""About what a frame takes in a record, at most."""
TRANSACTION_BYTES: Final = 2_000
"""The same for a transaction without its frames, unless it has very many streams."""
_SUFFIX: Final = "-ongoing"
_LOW_MASK: Final = (1 << 64) - 1
_LOW_HALF: Final = 1 << 63


def _id_parts(transaction: OngoingTransaction) -> Datum:
    number = int.from_bytes(transaction.id, "big")
    low = (number + _LOW_HALF & _LOW_MASK) - _LOW_HALF  # as a signed number
    return {"epoch": number >> 112, "counter_high": number >> 64 & 0xFFFF_FFFF, "counter_low": low}


def _id_of(datum: Datum) -> bytes:
    number: int = datum["epoch"] << 112 | datum["counter_high"] << 64 | datum["counter_low"] & _LOW_MASK
    return number.to_bytes(16, "big")


def _columns(transaction: OngoingTransaction) -> Datum:
    frames = transaction.frames
    return {
        "frame_offsets": _differences(transaction.first_position, [frame.offset for frame in frames]),
        "frame_parts": [frame.piece.part for frame in frames],
        "frame_segments": [frame.piece.segment for frame in frames],
        "frame_counts": _differences(0, [frame.first_count for frame in frames]),
        "frame_records": [frame.records for frame in frames],
        "frame_bytes": [frame.size for frame in frames],
        "frame_starts": [frame.start for frame in frames],
    }


def _frames_of(datum: Datum) -> HeldFrames:
    """Return the frames in the columns of a transaction, to which :func:`_transactions_of` has added the partition."""
    partition = datum["partition"]
    streams = [StreamName.parse(item["stream"]) for item in datum["streams"]]
    [place] = [place for place, stream in enumerate(streams) if stream.owns_buffer(partition[0])]
    counts = list(accumulate(datum["frame_counts"], initial=0))[1:]
    if max(counts, default=0) > COUNT_MAX:
        raise ValueError(f"a frame begins at record {max(counts)} of its part")
    columns = zip(
        list(accumulate(datum["frame_offsets"], initial=datum["first_position"]))[1:],
        datum["frame_parts"],
        datum["frame_segments"],
        counts,
        datum["frame_records"],
        datum["frame_bytes"],
        datum["frame_starts"],
        strict=True,
    )
    return HeldFrames(
        FrameRef(partition, offset, PieceKey(part, place, segment), count, records, size, None, start)
        for offset, part, segment, count, records, size, start in columns
    )


def _differences(first: int, values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise([first, *values])]


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingTransaction:
    """Open transaction as one partition knows it; see ``schemas/rollbridge_schemas/ongoing_transactions.avsc``.

    The last three fields are stored among the additions.
    """

    id: Annotated[bytes, StoredAs(write=_id_parts, read=_id_of)]
    begin: BeginFrame
    begun_ms: int
    is_begun: bool
    first_position: int
    log_position: int
    owners: tuple[int, ...] = ()
    owner: Annotated[tuple[str, int], StoredAs(fields=("owner_name", "owner_epoch"))] = ("", 0)
    frames: Annotated[Sequence[FrameRef], StoredAs(write=_columns, read=_frames_of)] = ()
    lister: int = OWNER_PART
    joins: tuple[int, ...] = ()
    savepoint: HeldSavepoint | None = None

    @property
    def has_more(self) -> bool:
        """Return whether the additions have an entry for it."""
        return self.lister != OWNER_PART or bool(self.joins) or self.savepoint is not None

    @classmethod
    def of(cls, transaction: BufferedTransaction, stream: str, partition: Partition) -> OngoingTransaction:
        """Return what is known of a transaction by a stream's buffer, one of whose partitions holds its frames."""
        return cls(
            id=transaction.id,
            begin=transaction.begin,
            begun_ms=transaction.begun_ms,
            is_begun=stream in transaction.begun_in,
            first_position=transaction.first_offsets[partition],
            log_position=transaction.log_position,
            owners=transaction.owners.of(stream),
            owner=transaction.owners.session,
            frames=HeldFrames(replace(item, batch=None) for item in transaction.frames if item.partition == partition),
            lister=transaction.lister,
            joins=() if transaction.lists is None else transaction.lists.joins.get(stream, ()),
            savepoint=transaction.savepoint if stream == transaction.begin.home else None,
        )

    def restore(self, transaction: BufferedTransaction, stream: str, partition: Partition) -> None:
        """Put it back into a transaction that nothing of this partition has been folded into."""
        deadline_ms = max(self.begun_ms + self.begin.lease_ms, transaction.deadline_ms)
        # A later begin, of before the home stream's buffer was read, makes the lease no longer.
        is_extended = self.begin.lease_ms != transaction.begin.lease_ms
        # What another buffer's record said may be older: of fewer streams, or of those of another owner.
        joins.learn(transaction, self.lister, self.begin)
        transaction.begun_ms = min(transaction.begun_ms, self.begun_ms)
        if is_extended and deadline_ms > transaction.deadline_ms:
            # It was extended, and the record of another buffer is older.
            transaction.begin = replace(transaction.begin, lease_ms=deadline_ms - transaction.begun_ms)
        transaction.owners.restore(stream, self.owners, self.owner)
        place = transaction.place_of(stream)
        assert place is not None  # it is on the list of this record, so at least a stray
        if self.is_begun:
            transaction.begun_in.add(stream)
        for part in self.joins:
            joins.note_join(transaction, part, stream)
        transaction.first_offsets[partition] = self.first_position
        if self.savepoint is not None:
            transaction.savepoint = self.savepoint
        for item in self.frames:
            if item.piece.stream != place:
                item.piece = item.piece._replace(stream=place)
            transaction.frames.append(item)
            transaction.bytes += item.size
            if place:
                transaction.note_beside(place, item.size)
            transaction.last_count[item.piece] = item.first_count
        if stream == transaction.begin.home and transaction.owners.part > transaction.lister:
            joins.hand_over(transaction, transaction.owners.part, self.begin)


_TRANSACTION: Final = Mapper(OngoingTransaction, "ongoing_transactions.transactions")


def _additions(transactions: Sequence[OngoingTransaction]) -> list[Datum]:
    return [
        {
            "transaction": number,
            "lister": item.lister,
            "joins": list(item.joins),
            "savepoint": None if item.savepoint is None else asdict(StoredSavepoint.of(item.savepoint)),
        }
        for number, item in enumerate(transactions)
        if item.has_more
    ]


def _transactions_of(datum: Datum) -> tuple[OngoingTransaction, ...]:
    place = {"partition": (datum["topic"], datum["partition"])}
    found = [_TRANSACTION.of_datum(item | place) for item in datum["transactions"]]
    for more in datum["additions"]:
        number, stored = more["transaction"], more["savepoint"]
        if not 0 <= number < len(found):
            raise ValueError(f"there is no transaction {number} in a record of {len(found)}")
        found[number] = replace(
            found[number],
            lister=more["lister"],
            joins=tuple(more["joins"]),
            savepoint=None if stored is None else StoredSavepoint(**stored).held(),
        )
    return tuple(found)


_TRANSACTIONS: Final = StoredAs(
    write=lambda record: {
        "transactions": list(map(_TRANSACTION.to_datum, record.transactions)),
        "additions": _additions(record.transactions),
    },
    read=_transactions_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingTransactions:
    """A record about one partition; see ``schemas/rollbridge_schemas/ongoing_transactions.avsc``."""

    partition: Annotated[Partition, StoredAs(fields=("topic", "partition"))]
    topic_id: str
    generation: int
    controller_epoch: int
    position: int
    replay_position: int
    commit_log_position: int
    transactions: Annotated[tuple[OngoingTransaction, ...], _TRANSACTIONS]

    @property
    def age(self) -> Age:
        """Return a sort key, comparable with the ages of snapshots; newest first."""
        return age_of(self.controller_epoch, self.generation)

    def encode(self) -> bytes:
        """Return its Kafka value."""
        return seal(_RECORD, self)


_RECORD: Final = Mapper(OngoingTransactions, "ongoing_transactions")


def ongoing_keys(partition: Partition) -> tuple[bytes, bytes]:
    """Return the two Kafka keys of a partition's records, which take turns."""
    name = ongoing_name(partition)
    return f"0-{name}".encode(), f"1-{name}".encode()


def ongoing_name(partition: Partition) -> str:
    """Return the part of a key after the turn."""
    return f"{partition_name(partition)}{_SUFFIX}"


def is_ongoing(key: bytes) -> bool:
    """Return whether a key is that of such a record, of whatever partition; no name of a partition ends like it."""
    return key.endswith(_SUFFIX.encode())


def decode_ongoing(value: bytes | None) -> OngoingTransactions:
    """Return the ongoing transactions in a record.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, or it is damaged.
    """
    return unseal(_RECORD, value)


def choose_ongoing(found: Iterable[bytes | None], snapshot: Snapshot) -> Choice[OngoingTransactions]:
    """Return the record of a snapshot's partition that spares most reading; None if none spares any.

    One that was written after the snapshot is not used: the snapshot does not list what was aborted in between, and
    the frames from which that would be learned would not be read.

    Args:
        found: Values of the records with the partition's keys; None where there is none.
        snapshot: What is known of the aborted transactions.
    """
    best: OngoingTransactions | None = None
    used = -1
    records, faults = decode_all(found, decode_ongoing)
    for place, record in records.items():
        if record.partition != snapshot.partition or record.topic_id != snapshot.topic_id:
            faults[place] = f"it is of another topic, with id {record.topic_id}"
        elif (
            record.age >= snapshot.age
            and record.replay_position > snapshot.max_read_position
            and (best is None or record.replay_position > best.replay_position)
        ):
            best, used = record, place
    return Choice(best, used, faults)


# Start of the reading of a transaction buffer: the part that snapshots spare, and the look-ups in them.
#
# A new leader, a standby and a preview compute this the same way. A buffer is folded from the max read position of its
# snapshot on, or from the replay position of its record of ongoing transactions; the commit log is read from the first
# possible outcome of the folded frames. Transactions that seem open then may have been aborted long before: the aborted
# transactions of the snapshot tell.
#
# Source: PIP-196 (recovery reads from the max read position of the snapshot on; "check whether a transaction message is
# sent by an aborted transaction").


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A buffer partition as it is found: what a takeover would begin with.

    Attributes:
        topic_id: Kafka's id of the buffer.
        stream: ``scope/stream`` whose buffer it is.
        snapshot: The snapshot that would be used.
        ongoing: The record of open transactions that would be used with it.
        start, end: Its first offset, and the one after its last message.
    """

    topic_id: str
    stream: str
    snapshot: Snapshot | None
    ongoing: OngoingTransactions | None
    start: int
    end: int

    @property
    def floor(self) -> int:
        """Offset at which reading begins."""
        if self.ongoing is not None:
            return max(self.ongoing.replay_position, self.start)
        return self.start if self.snapshot is None else max(self.snapshot.max_read_position, self.start)

    def log_floor(self, log_end: int) -> int:
        """Return the offset, in a log with this end, from which on the outcomes of later frames are.

        The end must have been asked for before that of the buffer.
        """
        if self.snapshot is not None and self.ongoing is not None:
            return min(self.ongoing.commit_log_position, self.snapshot.commit_log_end, log_end)
        if self.end <= self.floor:
            return log_end
        return 0 if self.snapshot is None else min(self.snapshot.commit_log_position, log_end)


BufferPlaces = Mapping[Partition, BufferPlace]


def log_start(places: BufferPlaces, log_end: int, again: int) -> int:
    """Return the offset from which on the commit log has to be read."""
    return max(min((place.log_floor(log_end) for place in places.values()), default=log_end) - again, 0)


# Look-up of aborted transactions


@dataclass(slots=True)
class LookUp:
    """Answers known at once of transactions that seem open, and the segments to load for the others.

    Attributes:
        aborted: Ids of those that the unsealed snapshots list.
        segments: For each buffer partition, the sealed segments to load, and the transactions that each may list.
    """

    aborted: set[bytes] = field(default_factory=set)
    segments: dict[Partition, dict[SegmentIndex, list[bytes]]] = field(default_factory=dict)


def look_up(aborted: Mapping[Partition, AbortedTransactions], transactions: Iterable[BufferedTransaction]) -> LookUp:
    """Return where to search for open transactions that may have been aborted before they were folded.

    A BEGIN frame in another stream's buffer can come that late, and the commit log is not read so far back.
    """
    found = LookUp()
    for transaction in transactions:
        asked: list[tuple[Partition, SegmentIndex]] = []
        for partition, offset in transaction.first_offsets.items():
            known = aborted.get(partition)
            if known is None:
                continue
            if transaction.id in known.unsealed:
                found.aborted.add(transaction.id)
                break
            asked += [(partition, index) for index in known.candidates(transaction.id, offset)]
        else:
            for partition, index in asked:
                found.segments.setdefault(partition, {}).setdefault(index, []).append(transaction.id)
    return found
