"""Replicated state machine on the records of one key, as pure functions from the log to a replica's state.

Each record under the key is an *update* or a *snapshot* of the whole state. A snapshot replaces the state, an update
is applied to it. The first record is always a snapshot, of the initial state, so that all replicas begin with the same
one. An update carries the position of the newest snapshot that its writer knew. So a starting replica searches for the
last record of the key, from the end backwards, and reads from the snapshot that it names:

    ... | snapshot A | update, A | update, A | snapshot B | update, B | update, B |
                                               ^ begin here ---------------^ named by the last record

An update that was written without a condition may name a snapshot that is not the newest. That one serves as well; if
it has been deleted, the record before names a newer one, down to that newer snapshot itself.

Source: Pravega, ``StateSynchronizer`` over ``RevisionedStreamClient``. Differs: there the newest snapshot is found by a
mark, an attribute of the segment that is set after it was written; here each record names it, and nothing can be left
unmarked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast

from rollbridge.base.errors import CorruptDataError, InvalidRequestError, NewerFormatError, TruncatedError
from rollbridge.base.sn import DLSN, EMPTY, SN

S = TypeVar("S")
"""State."""
U = TypeVar("U")
"""Update."""
T = TypeVar("T")

MARK_HEADER: Final = "synchronizer"
"""Name of the Kafka header of each record: ``1 snapshot``, or ``1 update DLSN`` with the place of a snapshot."""
_MARK: Final = re.compile(r"1 (?:snapshot|update (\S+))")
_NEWER: Final = re.compile(rb"([2-9]|[1-9][0-9]+) ")


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Encoding of states or updates: ``decode(encode(x))`` must mean the same as ``x``."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]

    @staticmethod
    def json() -> Codec[Any]:
        """Return a codec for values that JSON can hold; keys of objects are sorted."""
        return Codec(_to_json, json.loads)

    @staticmethod
    def raw() -> Codec[bytes]:
        """Return a codec for bytes, left unchanged."""
        return Codec(_only_bytes, bytes)


class KeyRecord(NamedTuple):
    """Record under the key.

    Attributes:
        place: DLSN of the record.
        sn: SN of the record, for conditions.
        since: Place of the snapshot that an update names; None for a snapshot.
        value: The encoded update or state.
    """

    place: DLSN
    sn: SN
    since: DLSN | None
    value: bytes

    @property
    def pointer(self) -> Pointer:
        """Place of the entry, and the snapshot to read from."""
        return Pointer(self.place, self.since or self.place)


class Pointer(NamedTuple):
    """Place of an entry, and of the snapshot from which to read up to it, which may be the entry itself."""

    place: DLSN
    snapshot: DLSN


class KeyLog(Protocol):
    """Committed records of one key, across their segments. Places may be those of any record.

    Raises, from each method:
        CorruptDataError: A record under the key was not written by a synchronizer.
    """

    def end(self) -> DLSN:
        """Return the place behind every record that was acknowledged before this call."""

    def between(self, start: DLSN, end: DLSN) -> Iterator[KeyRecord]:
        """Iterate over entries from ``start`` up to ``end`` (exclusive); raise TruncatedError if some were deleted."""

    def backwards(self, end: DLSN) -> Iterator[Pointer]:
        """Iterate over places of entries before ``end``, newest first; raise TruncatedError at deleted records."""

    def kept_from(self) -> int:
        """Return the highest sequence id known so far below which all records were deleted."""


@dataclass(frozen=True, slots=True)
class Replica(Generic[S]):
    """One process's replica of the state. Immutable.

    Attributes:
        state: The state.
        read_to: Every entry before this place is in it.
        sn: The last entry in it; EMPTY if there is none.
        snapshot: Place of the newest snapshot in it; None if there is none.
        bytes_since: Size of the updates after that snapshot.
    """

    state: S
    read_to: DLSN
    sn: SN = EMPTY
    snapshot: DLSN | None = None
    bytes_since: int = 0

    def with_updates(self, state: S, sn: SN, size: int) -> Replica[S]:
        """Return the replica after updates that follow the last entry; ``sn`` is that of the last update."""
        return replace(self, state=state, read_to=_after(sn), sn=sn, bytes_since=self.bytes_since + size)

    def with_snapshot(self, state: S, sn: SN) -> Replica[S]:
        """Return the replica after a snapshot that follows the last entry."""
        return Replica(state, _after(sn), sn, sn.dlsn)


class Machine(Generic[S, U]):
    """State machine: its initial state, the effect of an update, and the encoding of both."""

    def __init__(
        self,
        initial: S,
        apply: Callable[[S, U], S],
        states: Codec[S] | None = None,
        updates: Codec[U] | None = None,
    ) -> None:
        """Define the machine; without codecs, states and updates are bytes.

        Raises:
            InvalidRequestError: The initial state is not bytes and has no codec, or ``apply`` is no function.
        """
        if not callable(apply):
            raise InvalidRequestError(f"apply must be a function of a state and an update, not {apply!r}")
        self.apply: Final = apply
        self.states: Final = states or cast("Codec[S]", Codec.raw())
        self.updates: Final = updates or cast("Codec[U]", Codec.raw())
        # As every replica will decode it.
        self.initial: Final = self.states.decode(self.states.encode(initial))

    def begin(self, end: DLSN) -> Replica[S]:
        """Return a replica of a log without entries."""
        return Replica(self.initial, end)

    def preview(self, state: S, encoded: Iterable[bytes]) -> S:
        """Return the state after updates that are not written yet, as any replica will see it."""
        for value in encoded:
            state = self.apply(state, self.updates.decode(value))
        return state

    def take(self, replica: Replica[S], entry: KeyRecord) -> Replica[S]:
        """Return the replica after one more entry.

        Raises:
            CorruptDataError: The entry cannot be decoded, or rests on a snapshot that was not met.
            Exception: Any error of ``apply``, with a note on the entry.
        """
        if entry.since is None:
            return replica.with_snapshot(_decode(self.states, entry, "snapshot"), entry.sn)
        if replica.snapshot is None or entry.since > replica.snapshot:
            raise CorruptDataError(
                f"the update at {entry.place} rests on a snapshot at {entry.since}, which was not found there"
            )
        update = _decode(self.updates, entry, "update")
        try:
            state = self.apply(replica.state, update)
        except Exception as fault:
            fault.add_note(f"raised by `apply` for the update at {entry.place}; the state stays as it was before")
            raise
        return replica.with_updates(state, entry.sn, len(entry.value))

    def catch_up(self, replica: Replica[S], log: KeyLog) -> Replica[S]:
        """Return the replica after everything that is in the log now.

        Raises:
            TruncatedError: Entries were deleted, and no snapshot is left that covers them.
            CorruptDataError: See :meth:`take`.
        """
        end = log.end()
        try:
            for entry in log.between(replica.read_to, end):
                replica = self.take(replica, entry)
        except TruncatedError:
            return self.bootstrap(log)
        return replace(replica, read_to=end)

    def bootstrap(self, log: KeyLog) -> Replica[S]:
        """Build a replica from the newest snapshot and what follows; raise as :meth:`catch_up` does."""
        kept_from: int | None = None
        while True:
            end = log.end()
            found: DLSN | None = None
            lost: DLSN | None = None
            try:
                for place, snapshot in log.backwards(end):
                    found = found or place
                    if lost is not None and snapshot <= lost:
                        continue
                    try:
                        return self._replay(log, snapshot, end)
                    except TruncatedError:
                        lost = snapshot
                if found is None:
                    return self.begin(end)
                raise TruncatedError(f"no snapshot is left before {found}")
            except TruncatedError as fault:
                # During this read, a snapshot may have been written, even after the end, and the records before it
                # deleted. But one that covers the records known to be deleted at the last try is before this end.
                known, kept_from = kept_from, log.kept_from()
                if known == kept_from:
                    raise TruncatedError(
                        f"records were deleted, and no snapshot under this key replaces them ({fault}): its state is "
                        "lost; start again under another key"
                    ) from fault

    def _replay(self, log: KeyLog, snapshot: DLSN, end: DLSN) -> Replica[S]:
        entries = log.between(snapshot, end)
        first = next(entries, None)
        if first is None or first.since is not None or first.place != snapshot:
            raise CorruptDataError(f"there is no snapshot at {snapshot}, where a later record says that there is one")
        replica = self.take(self.begin(end), first)
        for entry in entries:
            replica = self.take(replica, entry)
        return replace(replica, read_to=end)


def mark_of_snapshot() -> tuple[str, bytes]:
    """Return the header of a snapshot."""
    return MARK_HEADER, b"1 snapshot"


def mark_of_update(snapshot: DLSN) -> tuple[str, bytes]:
    """Return the header of an update by a writer that knows this snapshot."""
    return MARK_HEADER, f"1 update {snapshot}".encode()


def entry_of(sn: SN, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> KeyRecord:
    """Parse the entry in the record at ``sn``.

    Raises:
        NewerFormatError: It is an entry of a version that is not known here.
        CorruptDataError: The record is not an entry.
    """
    place = sn.dlsn
    marks = [mark for name, mark in headers if name == MARK_HEADER]
    if place is None or value is None or len(marks) != 1:
        raise CorruptDataError(
            f"the record at {place} was not written by a synchronizer, which must be the only writer of its key; "
            "what it means for the state is not known"
        )
    match = _MARK.fullmatch((marks[0] or b"").decode("ascii", "replace"))
    if match is None:
        kind = NewerFormatError if _NEWER.match(marks[0] or b"") else CorruptDataError
        raise kind(f"the record at {place} has the header {MARK_HEADER}: {marks[0]!r}, which is unknown")
    try:
        since = None if match[1] is None else DLSN.parse(match[1])
    except InvalidRequestError as fault:
        raise CorruptDataError(f"the update at {place} names no place of a snapshot: {fault}") from fault
    # The local sequence is that of transactions, of which no entry is part.
    return KeyRecord(replace(place, local_sequence=0), sn, since, value)


def _after(sn: SN) -> DLSN:
    if sn.dlsn is None:
        raise CorruptDataError(f"SN {sn} names no place")
    return DLSN(sn.dlsn.epoch, sn.dlsn.number, sn.dlsn.offset + 1)


def _decode(codec: Codec[T], entry: KeyRecord, what: str) -> T:
    try:
        return codec.decode(entry.value)
    except Exception as fault:
        raise CorruptDataError(f"the {what} at {entry.place} cannot be decoded: {fault!r}") from fault


def _to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _only_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidRequestError(
            f"{value!r} is not bytes: states and updates are, unless a codec is given; nothing was written"
        )
    return value
