"""Positions of readers as values with a text form, start positions, and the numbers kept of deleted streams.

===========================================  ======================================================
text of a start                              begins with
===========================================  ======================================================
``earliest``                                 the first record that is still there
``latest``                                   what becomes readable from now on
``2026-01-31T12:00:00Z``, ``1769860800000``  records of that time (ms since 1970) or later, by segment
``4-0:17:3``, ``dlsn=4-0:17:3,seq=1017``     the record at that DLSN, or SN
``sales/orders@4-0:17,4-1:0``                where a reader that was asked for its position stood
===========================================  ======================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import EPOCH_MAX, SegmentId
from rollbridge.base.sn import DLSN, LONG_MAX, SN
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import GroupName, StreamName

_OFFSET_MAX: Final = (1 << 63) - 1
_PLACE: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10}):([0-9]{1,19})")
_LOG: Final = re.compile(r"([^@]+)@([0-9]{1,19})")
_MS: Final = re.compile(r"[0-9]{12,14}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?")


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """Reading position in a stream: the next offset in each segment at the front.

    Predecessors of these segments have been read to their ends; what neither they nor their predecessors cover is
    unread.
    Printed as ``sales/orders@EPOCH-NUMBER:OFFSET,...`` and parsed back by :meth:`parse`.
    """

    stream: StreamName
    offsets: Mapping[SegmentId, int]

    def __post_init__(self) -> None:
        if not self.offsets:
            raise InvalidRequestError(f"a position in {self.stream} names at least one segment")
        for segment, offset in self.offsets.items():
            if not 0 <= offset <= _OFFSET_MAX:
                raise InvalidRequestError(f"offset {offset} of segment {segment} is not in 0..{_OFFSET_MAX}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints.

        Raises:
            InvalidRequestError: not such a text.
        """
        name, _, places = text.partition("@")
        offsets: dict[SegmentId, int] = {}
        for place in places.split(","):
            match = _PLACE.fullmatch(place)
            segment = None if match is None else SegmentId.of(int(match[2]), int(match[1]))
            if match is None or segment is None or segment in offsets:
                raise InvalidRequestError(
                    f"{text!r} is not a position: SCOPE/STREAM@EPOCH-NUMBER:OFFSET,... is expected, each segment once, "
                    "such as sales/orders@4-0:17,4-1:0"
                )
            offsets[segment] = int(match[3])
        return cls(StreamName.parse(name), offsets)

    def __str__(self) -> str:
        places = (f"{segment.epoch}-{segment.number}:{offset}" for segment, offset in sorted(self.offsets.items()))
        return f"{self.stream}@{','.join(places)}"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Reading position in a commit log: the next offset. Printed as ``sales/default@1234``."""

    group: GroupName
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= _OFFSET_MAX:
            raise InvalidRequestError(f"offset {self.offset} of a commit log is not in 0..{_OFFSET_MAX}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what ``str()`` prints.

        Raises:
            InvalidRequestError: not such a text.
        """
        match = _LOG.fullmatch(text)
        if match is None:
            raise InvalidRequestError(
                f"{text!r} is not a position in a commit log: SCOPE/GROUP@OFFSET is expected, such as "
                "sales/default@1234"
            )
        return cls(GroupName.parse(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.group}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Earliest:
    """Begin with the first record that is still there."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Begin with what becomes readable from now on."""


@dataclass(frozen=True, slots=True)
class Since:
    """Begin, in each segment, with the first record of a time or later; ms since 1970."""

    ms: int


@dataclass(frozen=True, slots=True)
class At:
    """Begin at offsets; what their segments continue counts as read, all else is read from its beginning."""

    offsets: Mapping[SegmentId, int]


Start = Earliest | Latest | Since | At
StartLike = str | int | datetime | DLSN | SN | ReadPosition | Iterable[DLSN | SN]
"""Start position as callers may give it; an int is a time in ms since 1970."""


def parse_log_start(text: str) -> Earliest | Latest | Since | LogPosition:
    """Parse a start position for a commit log: ``earliest``, ``latest``, a time, or a position.

    Raises:
        InvalidRequestError: it means nothing.
    """
    if text == "earliest":
        return Earliest()
    if text == "latest":
        return Latest()
    return _parse_time(text) or LogPosition.parse(text)


def parse_start(stream: StreamName, start: StartLike) -> Start:
    """Interpret a caller's start position for a stream.

    Raises:
        InvalidRequestError: it means nothing, belongs to another stream, or says two things of one segment.
    """
    match start:
        case str():
            return _parse_text(stream, start)
        case bool():
            raise InvalidRequestError(f"{start!r} is not a place to begin at")
        case int():
            return _since(start)
        case datetime():
            # A time without a zone is the machine's own, as everywhere in Python.
            return _since(int(start.timestamp() * 1000))
        case ReadPosition():
            if start.stream != stream:
                raise InvalidRequestError(f"the position {start} belongs to {start.stream}, not to {stream}")
            return At(start.offsets)
        case DLSN() | SN():
            return _at(stream, [start])
        case Iterable():
            return _at(stream, list(start))
        case _:
            raise InvalidRequestError(f"{start!r} is not a place to begin at")


def _parse_text(stream: StreamName, text: str) -> Start:
    if text == "earliest":
        return Earliest()
    if text == "latest":
        return Latest()
    if "@" in text:
        return parse_start(stream, ReadPosition.parse(text))
    if (since := _parse_time(text)) is not None:
        return since
    if text.startswith(("dlsn=", "seq=", "txid=")) or text.count(":") == 2:
        return _at(stream, [SN.parse(text)])
    raise InvalidRequestError(
        f"{text!r} is not a place to begin at: earliest, latest, a time such as 2026-01-31T12:00:00Z, a DLSN or SN, or "
        "a position such as sales/orders@4-0:17 is expected"
    )


def _parse_time(text: str) -> Since | None:
    """Return the time that a text names, UTC if without a zone; None if it does not look like one."""
    if _MS.fullmatch(text):
        return _since(int(text))
    if not _TIME.fullmatch(text):
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError as fault:
        raise InvalidRequestError(f"{text!r} is not a time: {fault}") from None
    return _since(int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000))


def _since(ms: int) -> Since:
    if ms < 0:
        raise InvalidRequestError(f"a time to begin at is not negative: {ms}")
    return Since(ms)


def _at(stream: StreamName, places: list[DLSN | SN]) -> At:
    offsets: dict[SegmentId, int] = {}
    for place in places:
        dlsn = place.dlsn if isinstance(place, SN) else place
        if not isinstance(dlsn, DLSN):
            raise InvalidRequestError(f"{place} cannot be begun at: an SN needs its dlsn for that")
        if not 0 <= dlsn.offset <= _OFFSET_MAX:
            raise InvalidRequestError(f"offset {dlsn.offset} of {dlsn} is not in 0..{_OFFSET_MAX}")
        if dlsn.segment in offsets:
            raise InvalidRequestError(f"two places to begin at are in segment {dlsn.segment} of {stream}")
        offsets[dlsn.segment] = dlsn.offset
    if not offsets:
        raise InvalidRequestError(f"no place to begin at was given for {stream}")
    return At(offsets)


# Lives of a stream. A stream created under the name of a deleted one continues with epochs, sequence ids and partition
# numbers above all that were used there. Topics of segments and of the buffer, DLSNs, SNs, saved positions, placements
# in COMMIT records, offsets by partition and the reference epochs of BEGIN frames then differ between the two, and a
# paused process that acts on a name from before finds nothing.
# A deleted stream leaves an empty node below its scope, ``former/STREAM#EPOCH.SEQUENCE.PARTITION``: the first numbers
# that it has not used. The name holds everything, so that two leaders of a scope's groups never overwrite each other's
# knowledge. When there are many, some are folded into a *floor*, ``former/#EPOCH.SEQUENCE.PARTITION``, above which
# every name begins. Of several nodes of a name, or floors, the highest number counts in each field.

PARTITION_MAX: Final = (1 << 31) - 1 - (1 << 24)
"""Highest partition number from which a stream may begin to count its segments, of Kafka's 31 bits."""
FORMER_MAX: Final = 1_000
"""Nodes of a scope's deleted streams; their names stay far below ZooKeeper's limit of 1 MiB for a list."""
FOLDED_AT_ONCE: Final = 500
"""Number of nodes folded in one ZooKeeper multi."""
SEQUENCE_SLACK: Final = 1 << 32
"""More records than are still written plainly between the look at the ends of a stream and the end of its topics."""
UNSEEN_RECORDS: Final = 1 << 40
"""More records than there are in a segment whose end cannot be told, because its topic is gone."""


@dataclass(frozen=True, slots=True)
class DeletedStream:
    """The first numbers that the former lives of a stream have not used.

    Attributes:
        epoch: Above every epoch that there was.
        sequence: Above every sequence id that was given out.
        partition: Above every partition number of a segment.
    """

    epoch: int = 0
    sequence: int = 0
    partition: int = 0

    def __or__(self, other: DeletedStream) -> DeletedStream:
        """Return the first numbers that neither has used."""
        return DeletedStream(
            max(self.epoch, other.epoch), max(self.sequence, other.sequence), max(self.partition, other.partition)
        )

    def node(self, stream: str = "") -> str:
        """Return the name of the node that keeps the numbers of a stream of the scope, or of a floor without one."""
        return f"{stream}#{self.epoch}.{self.sequence}.{self.partition}"


def parse_former(node: str) -> tuple[str, DeletedStream]:
    """Parse the name of :meth:`Former.node`; an unknown name yields no numbers."""
    stream, _, numbers = node.partition("#")
    parts = numbers.split(".")[:3]  # a node of a version before has two, one of a later version may have more
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return node, DeletedStream()
    return stream, DeletedStream(*map(int, parts))


def former_among(nodes: Iterable[str], name: StreamName) -> DeletedStream:
    """Return the first unused numbers for a stream, from the nodes kept in its scope."""
    found = DeletedStream()
    for node in nodes:
        stream, known = parse_former(node)
        if stream in ("", name.stream):
            found |= known
    return found


def former_of(history: EpochHistory, ends: Mapping[SegmentId, int]) -> DeletedStream:
    """Return the numbers to keep of a stream that is deleted.

    Args:
        history: Its epochs.
        ends: Where those of its segments end that were not sealed, as far as that is known.

    Raises:
        InvalidRequestError: no numbers are left for another stream of this name.
    """
    bases = history.graph.sequence_bases
    last = 0 if history.foundation is None else max(history.foundation.ends)
    for segment in history.segments():
        end = history.sealed_end(segment)
        last = max(last, bases.get(segment, 0) + (ends.get(segment, UNSEEN_RECORDS) if end is None else end))
    found = DeletedStream(history.next_epoch, last + SEQUENCE_SLACK, 1 + max(history.graph.by_partition))
    if found.epoch > EPOCH_MAX or found.sequence > LONG_MAX - UNSEEN_RECORDS or found.partition > PARTITION_MAX:
        raise InvalidRequestError(
            "all numbers of epochs, records or segments of this name are used up; choose another name"
        )
    return found


def fold(nodes: Iterable[str]) -> tuple[DeletedStream, list[str]]:
    """Return a floor for the deleted streams that used the least, and the nodes it replaces; none if few are kept.

    Floors that were there before are among them, so that one remains.
    """
    known = sorted(((*parse_former(node), node) for node in nodes), key=lambda row: (row[0] != "", row[1].epoch))
    if len(known) < FORMER_MAX:
        return DeletedStream(), []
    floor = DeletedStream()
    for _, former, _ in known[:FOLDED_AT_ONCE]:
        floor |= former
    return floor, [node for _, _, node in known[:FOLDED_AT_ONCE] if node != floor.node()]
