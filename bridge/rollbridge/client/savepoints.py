"""Savepoints of a transaction's owner: their contents, and which can be rolled back to.

A savepoint lies in the buffer of the first stream, behind everything that was written there before; it is sent when
:mod:`rollbridge.client.protocol` says. It contains only the changes since the one before, so they are sent in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Deadline, LightFuture, call_back
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import Manifest, PieceKey
from rollbridge.buffer.savepoints import SAVEPOINT_BYTES_MAX, HeldSavepoint, SavepointFrame, notes_bytes, notes_fault
from rollbridge.client.futures import Completion
from rollbridge.client.results import Piece, Savepoint
from rollbridge.errors import (
    IncompleteError,
    InvalidRequestError,
    OutcomeUnknownError,
    TransactionTooLargeError,
)

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Seconds after which the waiter for a savepoint checks whether the transaction has ended."""


def savepoint_of(transaction: TransactionId, streams: Sequence[str], held: HeldSavepoint) -> Savepoint:
    """Return the public form of what a leader holds."""
    pieces = tuple(Piece(*key, records, 0, 0) for key, records in held.pieces.items())
    frame = held.frame
    return Savepoint(
        transaction,
        frame.number,
        dict(frame.notes),
        records_by_stream(streams, pieces),
        pieces,
        held.offsets,
        held.conditions,
    )


def records_by_stream(streams: Sequence[str], pieces: Collection[Piece]) -> dict[str, int]:
    """Return the records of pieces by stream, also of streams that have none."""
    found = dict.fromkeys(streams, 0)
    for piece in pieces:
        if piece.stream < len(streams):
            found[streams[piece.stream]] += piece.records
    return found


@checked()
class SavepointFuture(LightFuture[Savepoint]):
    """Savepoint that is on its way; resolves once the brokers have it, and all that it counts."""

    __slots__ = ("_callbacks", "_completion", "_fault", "_is_done", "_lock", "_savepoint", "_wait_until")

    def __init__(
        self, savepoint: Savepoint, completion: Completion, wait_until: Callable[[Callable[[], bool], float], bool]
    ) -> None:
        self._savepoint = savepoint
        self._completion = completion
        self._wait_until = wait_until
        self._is_done = False
        self._fault: str | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], object]] = []

    def result(self, timeout: float | None = None) -> Savepoint:
        """Wait until the brokers have it.

        Args:
            timeout: Seconds; None waits without end.

        Raises:
            TimeoutError: not acknowledged in time; it is still being sent.
            IncompleteError: something that it counts could not be sent; the transaction can only be aborted.
            OutcomeUnknownError: the connection was closed before it was acknowledged.
        """
        deadline = None if timeout is None else Deadline(timeout)
        completion = self._completion
        while not self._is_done:
            left = _LOOK_S if deadline is None else min(deadline.left(), _LOOK_S)
            if self._wait_until(lambda: self._is_done, left):
                break
            if completion.settled and not self._is_done:
                raise OutcomeUnknownError(
                    f"whether savepoint {self._savepoint.number} of transaction {completion.transaction} was made is "
                    "not known: the transaction has ended, or its connection was closed, before the brokers answered",
                    transaction=str(completion.transaction),
                )
            if deadline is not None and deadline.passed():
                raise TimeoutError(
                    f"savepoint {self._savepoint.number} of transaction {completion.transaction} is not acknowledged "
                    f"after {timeout} s; it is still being sent"
                )
        if self._fault is not None:
            raise IncompleteError(
                f"savepoint {self._savepoint.number} of transaction {completion.transaction} was not made: "
                f"{self._fault}; the transaction can only be aborted",
            )
        return self._savepoint

    def done(self) -> bool:
        """Return True if the brokers have answered."""
        return self._is_done

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with this future once the brokers have answered: now, or on the delivery thread.

        It must not block, and may send nothing; its exceptions are logged.
        """
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        call_back(lambda: callback(self), logger, "a savepoint")

    def settle(self, fault: object | None) -> None:
        """Take the answer of the brokers; called on the delivery thread, or by the thread that finds it unsendable."""
        with self._lock:
            if self._is_done:
                return
            self._fault = None if fault is None else str(fault)
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            call_back(lambda callback=callback: callback(self), logger, "a savepoint")  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<SavepointFuture of number {self._savepoint.number}>"


def check_notes(notes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return notes as they are kept.

    Raises:
        InvalidRequestError: names that are no text, or values that are no bytes; nothing was sent.
    """
    given: Mapping[Any, Any] = notes
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidRequestError(
                f"notes map text to bytes, not {type(name).__name__} to {type(value).__name__}; no savepoint was made"
            )
    return {name: bytes(value) for name, value in notes.items()}


class SavepointLog:
    """Contents of one transaction's savepoints. Its owner holds a lock.

    Attributes:
        number: Number of the last one.
        notes: Notes in force.
        undone: Numbers that cannot be gone back to any more, as the transaction was rolled back to an earlier one.
    """

    __slots__ = ("_notes_bytes", "_said", "notes", "number", "undone")

    def __init__(self, number: int = 0, notes: Mapping[str, bytes] | None = None) -> None:
        self.number = number
        self.notes = dict(notes or {})
        self._notes_bytes = notes_bytes(self.notes)
        self.undone: list[range] = []
        self._said: Manifest | None = None  # by the present part; None before its first one

    def begin_anew(self, notes: Mapping[str, bytes]) -> None:
        """Continue with notes of before, and make the next savepoint a full one."""
        self.notes = dict(notes)
        self._notes_bytes = notes_bytes(self.notes)
        self._said = None

    def make(self, manifest: Manifest, notes: Mapping[str, bytes], transaction: object) -> SavepointFrame:
        """Return the frame of the next savepoint, which changes nothing here; :meth:`made` does.

        Raises:
            InvalidRequestError, TransactionTooLargeError: no savepoint was made; the transaction is as it was.
        """
        size_of_notes, count = self._with(notes)
        fault = notes_fault(notes, count, size_of_notes)
        if fault:
            raise InvalidRequestError(f"{fault}; no savepoint was made")
        said, number = self._said, self.number + 1
        if said is None:
            frame = SavepointFrame(number, True, manifest, {**self.notes, **notes})
        else:
            groups = {item.group_id: item for item in said.offsets}
            changed = Manifest(
                {key: records for key, records in manifest.pieces.items() if said.pieces.get(key) != records},
                tuple(item for item in manifest.offsets if groups.get(item.group_id) != item),
                manifest.conditions[len(said.conditions) :],
            )
            fresh = {name: value for name, value in notes.items() if self.notes.get(name) != value}
            frame = SavepointFrame(number, False, changed, fresh)
        # About what all of it takes in a frame, with notes in hexadecimal; an upper bound of the manifest's.
        size = 2 * size_of_notes + _PIECE_BYTES * len(manifest.pieces)
        if manifest.offsets or manifest.conditions:
            size = 2 * size_of_notes + len(manifest.encode())
        if size > SAVEPOINT_BYTES_MAX:
            raise TransactionTooLargeError(
                f"a savepoint of transaction {transaction} would take {size} bytes, and {SAVEPOINT_BYTES_MAX} are "
                "possible: it names each segment that was written to, each offset, condition and note; no savepoint "
                "was made, the transaction is as it was",
                limit_bytes=SAVEPOINT_BYTES_MAX,
            )
        return frame

    def made(self, manifest: Manifest, frame: SavepointFrame, notes: Mapping[str, bytes]) -> None:
        """Note that a savepoint was sent, or waits for that."""
        self.number = frame.number
        self._notes_bytes, _ = self._with(notes)
        self.notes |= notes
        self._said = manifest

    def _with(self, notes: Mapping[str, bytes]) -> tuple[int, int]:
        """Return bytes and number of the notes in force with some more, or others in their place."""
        size, count = self._notes_bytes, len(self.notes)
        for name, value in notes.items():
            former = self.notes.get(name)
            if former is None:
                size += len(name.encode()) + len(value)
                count += 1
            else:
                size += len(value) - len(former)
        return size, count

    def check(self, savepoint: Savepoint, transaction: TransactionId) -> None:
        """Raise InvalidRequestError if a transaction cannot go back to a savepoint; nothing was changed."""
        if savepoint.transaction != transaction:
            raise InvalidRequestError(
                f"savepoint {savepoint.number} is one of transaction {savepoint.transaction}, not of {transaction}; "
                "nothing was changed"
            )
        if not 1 <= savepoint.number <= self.number:
            raise InvalidRequestError(
                f"transaction {transaction} has {self.number} savepoints as far as is known here, and none of number "
                f"{savepoint.number}; nothing was changed"
            )
        if any(savepoint.number in numbers for numbers in self.undone):
            raise InvalidRequestError(
                f"transaction {transaction} was rolled back to a savepoint before number {savepoint.number}, which is "
                "gone with that; nothing was changed"
            )


_PIECE_BYTES: Final = 20
"""About what a piece takes in a frame, at most."""


def pieces_of(pieces: Sequence[Piece]) -> dict[PieceKey, int]:
    """Return how many records of each piece count."""
    return {piece.key: piece.records for piece in pieces}
