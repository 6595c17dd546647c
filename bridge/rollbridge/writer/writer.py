"""Writer of plain records to one stream, the public object of the user."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rollbridge.base.arguments import (
    NOT_BYTES,
    as_bytes,
    as_headers,
    as_timestamp,
    as_transaction_id,
    checked,
    from_fault_on,
)
from rollbridge.base.attribution import RECORD_HEADER
from rollbridge.base.deadlines import Deadline, Timeout, as_seconds, in_chunks, wall_ms
from rollbridge.base.forks import hold, is_gone
from rollbridge.base.sn import TRANSACTION_ID_HEADER, pack_transaction_id
from rollbridge.errors import InvalidRequestError, TransactionIdOutOfOrderError, UnavailableError
from rollbridge.stream.keyspace import HASH_SEED
from rollbridge.writer.accumulator import Account, Headers, PlainFuture, StreamAccumulator

if TYPE_CHECKING:
    from rollbridge.writer.sender import PlainSender


_NO_HEADERS: Final[list[tuple[str, bytes | None]]] = []
_NO_ID: Final = -1


@checked(but=("write",))
class StreamWriter:
    """Writer of records to the active segments of a stream, and to their successors when they are sealed.

    Made by :meth:`rollbridge.Bridge.writer`. Thread-safe. Records with the same key keep the order in which they were
    written; each is written once, or its future and :meth:`flush` report that it was not.
    """

    def __init__(
        self, engine: PlainSender, channel: StreamAccumulator, *, monotonic_ids: bool = False, owner: object = None
    ) -> None:
        self._owner = owner  # closed once it is dropped
        self._engine = engine
        self._channel = channel
        self._lock = engine.lock
        self._monotonic_ids = monotonic_ids
        self._last_id = _NO_ID
        self._closed = False
        self._account = Account()
        hold(self, "_lock", "_engine", "_channel")

    @property
    def stream(self) -> str:
        """Name of the stream, ``scope/stream``."""
        return self._channel.stream

    def write(
        self,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp: int | None = None,
        transaction_id: int | None = None,
    ) -> PlainFuture:
        """Write a record; the future gives its SN once the brokers have it.

        Args:
            key: Decides the segment; records with the same key stay in order. None: any segment.
            value: None is a tombstone.
            headers: Kept in their order; rollbridge's own header names are refused.
            timestamp: Milliseconds since 1970; None is now.
            transaction_id: A number of the user's own, 0 to 2^63 - 1, stored with the record as part of its SN. In a
                writer opened with ``monotonic_ids`` it must not be lower than the highest one before.

        Raises:
            RecordTooLargeError, BackpressureError, InvalidRequestError: The record was
                not written, and the writer stays usable.
            StreamNotFoundError: The stream was deleted.
        """
        if key.__class__ is not bytes and key is not None:
            key = as_bytes("key", key)
        if value.__class__ is not bytes and value is not None:
            value = as_bytes("value", value)
        if timestamp is not None:
            timestamp = as_timestamp(timestamp)
        if transaction_id is not None:
            transaction_id = as_transaction_id(transaction_id)
        headers = _NO_HEADERS if not headers and transaction_id is None else _all_headers(headers, transaction_id)
        channel = self._channel
        self._lock.acquire()  # written out: a `with` here takes a tenth of the time of writing a record
        try:
            if self._closed or channel.failure is not None:
                raise self._refusal()
            if timestamp is not None:
                channel.limits.check_time(timestamp)
            if transaction_id is not None and self._monotonic_ids and transaction_id < self._last_id:
                raise self._falling(transaction_id)
            if key is not None and channel.bounds:
                batch = channel.queues[bisect_right(channel.bounds, channel.hash_of(key, HASH_SEED))].open
            else:
                batch = channel.queue_of(key).open
            if batch is not None and batch.append(batch.count, timestamp, key, value, headers) is not None:
                batch.count += 1
            else:
                batch = channel.append(key, value, headers, timestamp)
            if batch.author is not self._account:
                batch.begin_run(self._account)
            future = PlainFuture()
            future.batch = batch
            future.index = batch.count - 1
            if transaction_id is not None:
                self._last_id = max(self._last_id, transaction_id)
                if batch.ids is None:
                    batch.ids = {}
                batch.ids[future.index] = transaction_id
            return future
        finally:
            self._lock.release()

    def write_all(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> int:
        """Write many records, given as key and value, and return their number; faster than one by one.

        :meth:`flush` reports their outcome. Takes some hundreds of records at a time, with one timestamp, from the
        iterator, which runs without the lock: it may take its time, and use this connection.

        Raises:
            As :meth:`write`; the records before the faulty one were written. Errors of the iterator; the records that
                it gave
                before were written.
        """
        return in_chunks(records, self._write_locked)

    def _write_locked(self, records: list[tuple[bytes | None, bytes | None]]) -> None:
        with self._lock:
            if self._closed or self._channel.failure is not None:
                raise self._refusal()
            left = iter(records)
            try:
                self._write_some(left)
            except NOT_BYTES as fault:
                self._write_some(from_fault_on(records[len(records) - length_hint(left) - 1 :], fault))

    def _write_some(self, records: Iterator[tuple[bytes | None, bytes | None]]) -> None:
        channel, locate, seed = self._channel, bisect_right, HASH_SEED
        headers, account = _NO_HEADERS, self._account
        now_ms = wall_ms()
        for key, value in records:
            # Look the queue up for each record: waiting for room releases the lock, and queues may change meanwhile.
            if key is None:
                batch = channel.queue_of(None).open
            else:
                bounds = channel.bounds
                batch = channel.queues[locate(bounds, channel.hash_of(key, seed)) if bounds else 0].open
            if batch is not None and batch.append(batch.count, now_ms, key, value, headers) is not None:
                batch.count += 1
            else:
                batch = channel.append(key, value, headers, now_ms)
            if batch.author is not account:
                batch.begin_run(account)

    def flush(self, timeout: Timeout = None) -> None:
        """Return once the brokers have everything written to the stream so far through this connection.

        Waits for records of other writers as well, but their failures are reported to those writers.

        Raises:
            UnavailableError: Records were not acknowledged in time; they are still being sent.
            RollbridgeError: Records of this writer failed since its last flush; this is the error of the first of them.
        """
        deadline = Deadline(self._seconds(timeout))
        with self._lock:
            self._channel.cut_older(float("inf"))
            self._engine.pump()
            waiting = list(self._channel.unsettled)
        while waiting:
            batch = waiting.pop()
            while not batch.is_decided():
                if deadline.passed():
                    raise UnavailableError(
                        f"the brokers have not acknowledged everything of {self.stream} within "
                        f"{deadline.timeout_s:g} s; it is still being sent"
                    )
                batch.wait(deadline.left())
            if batch.where is not None:
                waiting.extend({id(piece): piece for piece, _ in batch.where}.values())
        with self._lock:
            fault, self._account.refused = self._account.refused, None
        if fault is not None:
            raise fault()

    def close(self, timeout: Timeout = None) -> None:
        """Flush, and take no more records through this object. Raises as :meth:`flush` does."""
        if not self._closed and not is_gone(self._engine):
            self._closed = True
            self.flush(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True  # records are still sent; waiting for them could hide the exception

    def __repr__(self) -> str:
        return f"<StreamWriter of {self.stream}>"

    def _seconds(self, timeout: Timeout) -> float:
        return as_seconds(timeout, self._engine.options.delivery_timeout_s)

    def _refusal(self) -> Exception:
        if self._channel.failure is not None:
            return self._channel.failure()
        return InvalidRequestError(f"this writer of {self.stream} is closed; the record was not written")

    def _falling(self, transaction_id: int) -> InvalidRequestError:
        return TransactionIdOutOfOrderError(
            f"transaction id {transaction_id} is lower than {self._last_id}, which this writer of {self.stream} has "
            "given before; the record was not written",
            transaction_id=transaction_id,
            last=self._last_id,
        )


def _all_headers(headers: Headers, transaction_id: int | None) -> list[tuple[str, bytes | None]]:
    whole = as_headers(headers)
    for name, _ in whole:
        if name in (RECORD_HEADER, TRANSACTION_ID_HEADER):
            raise InvalidRequestError(
                f"the header {name!r} is rollbridge's own; the record was not written: name it otherwise"
            )
    if transaction_id is not None:
        whole.append((TRANSACTION_ID_HEADER, pack_transaction_id(transaction_id)))
    return whole
