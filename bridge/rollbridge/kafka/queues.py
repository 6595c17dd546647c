"""Queues of batches, one per partition and producer: what may be sent, what came back, and its numbers. Pure, no I/O.

The batches of a queue wait, are in flight, and are answered in order::

    inherited ─┐
               ├─ take ──► in_flight ── acknowledge ──► written
    pending ───┘              │
        ▲                     └─ give_back ──► back in front, once nothing is in flight
        └─ open (being filled)

A batch whose answer was lost is *doubtful*, that is possibly persisted. It is sent again with the same sequence number,
by which the broker recognises it. One that is given up leaves a gap: the log may have it, or get it later from a broker
that stood still, and whatever had its number then would be taken for it. So if the broker misses it, its number is not
given to another batch: the next one has the epoch after this, which also keeps what comes late out.

A queue comes and goes with its stream, its numbers do not: they are in a :class:`Lane`, which is the producer id's.

Source: KIP-98 for sequence numbers; KIP-360 and Kafka's ``TransactionManager.maybeResolveSequences`` for gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

from rollbridge.kafka.records import RawBatch
from rollbridge.stream.names import Partition

SEQUENCE_MAX: Final = (1 << 31) - 1
UNNUMBERED: Final = -1


class QueuedBatch:
    """Batch, as far as queues and their sender look at it.

    Attributes:
        count: Number of its records, and so of the sequence numbers that it takes.
        data: The batch in Kafka's format, once it is closed.
        opened_s: Time of its first record (monotonic seconds).
        sequence: Its first sequence number in its queue; negative before it was sent.
        doubtful: True if it may have been written although no answer says so (possibly persisted).
        is_sent: True once it was sent, so that to send it is to send it again.
    """

    __slots__ = ("count", "data", "doubtful", "is_sent", "opened_s", "sequence")

    def __init__(self, opened_s: float = 0.0) -> None:
        self.count = 0
        self.data: RawBatch = b""
        self.opened_s = opened_s
        self.sequence = UNNUMBERED
        self.doubtful = self.is_sent = False


P = TypeVar("P", bound=QueuedBatch)


class Lane(Generic[P]):
    """Sequence numbers of one producer id, in its present epoch, in one partition.

    They live as long as the producer id, even if the stream is deleted: a broker identifies a batch by producer id,
    epoch, partition name and number. Restarting at 0 in a topic that still exists would be acknowledged with an old
    offset, and nothing would be written. So all queues that a partition has had share a lane, and one sends only when
    all batches of the others have an outcome.

    Attributes:
        next: Number of the next batch.
        acked: Number after the last batch that is written, or was given up as possibly persisted.
        has_gap: True if a possibly persisted batch was given up, and no later one has been acknowledged.
        holder: Queue whose batches have the latest numbers; None once all have an outcome, so that queues of deleted
            streams are not kept.
    """

    __slots__ = ("acked", "has_gap", "holder", "next")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start over with a new producer id or epoch, whose sequence numbers begin at 0."""
        self.next = self.acked = 0
        self.has_gap = False
        self.holder: PartitionQueue[P] | None = None

    def is_free_for(self, queue: PartitionQueue[P]) -> bool:
        """Return True if everything that other queues have sent has an outcome."""
        return self.holder is None or self.holder is queue or not any(self.holder.held())


class PartitionQueue(Generic[P]):
    """Queue of one partition and one producer.

    Attributes:
        target: Topic and partition.
        lane: Its sequence numbers.
        open: Batch that is being filled; in no queue yet.
        inherited: Batches that were written to another queue first; sent before the others.
        pending: Batches written to this queue.
        in_flight: Batches sent and not answered, in order.
        last_offset: Offset of the last record acknowledged, or at the end of the log before the first batch was sent:
            possibly persisted batches can only follow it. -1 if unknown.
        epoch: Leader epoch at which the log had that end; -1 if unknown.
        placed: True once the log end was asked for under the present producer id, which precedes any batch; or if
            not needed.
    """

    __slots__ = (
        "_known",
        "_renumber",
        "_returned",
        "epoch",
        "in_flight",
        "inherited",
        "lane",
        "last_offset",
        "open",
        "pending",
        "placed",
        "target",
    )

    def __init__(self, target: Partition, lane: Lane[P], *, placed: bool = False) -> None:
        self.target = target
        self.lane = lane
        self.open: P | None = None
        self.inherited: deque[P] = deque()
        self.pending: deque[P] = deque()
        self.in_flight: deque[P] = deque()
        self.last_offset = self.epoch = -1
        self.placed = placed
        self._returned: list[P] = []
        self._renumber = False
        self._known = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target}, {len(self.in_flight)} in flight>"

    @property
    def topic(self) -> str:
        """Topic that receives the batches."""
        return self.target[0]

    @property
    def waiting(self) -> bool:
        """True if a batch waits to be sent."""
        return bool(self.inherited or self.pending)

    def held(self) -> Iterator[P]:
        """Yield all batches that are neither written nor given up, in order, except the open one."""
        yield from self._returned
        yield from self.in_flight
        yield from self.inherited
        yield from self.pending

    def may_send(self) -> bool:
        """Return True if :meth:`take` may be called.

        A broker that has no state of a producer accepts any sequence number, so the first batch goes alone: were it
        rejected temporarily, the second would be written before it. Doubtful batches go alone as well: a broker
        recognises the last five batches only, so nothing may be written behind one without an answer.
        """
        if self._returned or self._renumber or not self.waiting or not self.lane.is_free_for(self):
            return False
        if self.in_flight:
            fresh = self.inherited[0] if self.inherited else self.pending[0]
            if not self._known or fresh.doubtful or self.in_flight[-1].doubtful:
                return False
        return True

    def take(self) -> P:
        """Return the next batch to send, numbered and now in flight. Requires :meth:`may_send`."""
        batch, lane = self.inherited.popleft() if self.inherited else self.pending.popleft(), self.lane
        lane.holder = self
        if batch.sequence < 0:
            batch.sequence = lane.next
        lane.next = _later(lane.next, following(batch.sequence, batch.count))
        self.in_flight.append(batch)
        return batch

    def place(self, end: int, epoch: int) -> None:
        """Record the end of the log before the first batch of this producer.

        Args:
            end: Offset of that end; 0 if it is unknown.
            epoch: Leader epoch at that time; -1 if it is unknown.
        """
        self.last_offset, self.epoch, self.placed = end - 1, epoch, True

    def acknowledge(self, batch: P, last_offset: int) -> None:
        """Remove a batch in flight that was written; ``last_offset`` is that of its last record.

        That offset may be lower than the last one known: then the log has lost its end, and later batches follow this
        one.
        """
        self.in_flight.remove(batch)
        batch.doubtful = False
        self.last_offset = last_offset
        self.lane.acked = _later(self.lane.acked, following(batch.sequence, batch.count))
        self.lane.has_gap = False
        self._known = True
        self._gather()

    def give_back(self, batch: P, *, doubtful: bool) -> None:
        """Take back a batch in flight, to be sent again; ``doubtful`` if this attempt may have written it."""
        self.in_flight.remove(batch)
        batch.doubtful |= doubtful
        self._returned.append(batch)
        self._gather()

    def misplace(self, batch: P) -> bool:
        """Take back a batch in flight that was out of order: one before it is not in the log.

        Such a batch is not written, and gets another sequence number. Behind one that was given up, what was sent of it
        before may yet be taken after that one: it stays doubtful.

        Returns:
            True if it needs the next epoch: all before it were acknowledged, so the log has lost its end; or it, or one
            that was given up before it, may still be on its way, and would be taken for what has its number then.
        """
        needs_epoch = batch.doubtful or self.lane.has_gap or batch.sequence == self.lane.acked
        batch.doubtful &= self.lane.has_gap
        self._renumber = True
        self.give_back(batch, doubtful=False)
        return needs_epoch

    def exchange(self, batch: P, others: Iterable[P]) -> None:
        """Replace a batch in flight that was refused, and so is not written, by others."""
        self.in_flight.remove(batch)
        self._returned.extend(others)
        self._renumber = True
        self._gather()

    def drop(self, batch: P) -> None:
        """Give up a batch, in flight or not.

        Later batches must not leave a gap in the sequence numbers, so they are numbered again. The numbers of a
        doubtful batch are not reused: it may have been written, or be written yet, and a batch with the same numbers
        would be taken for it.
        """
        for place in (self.in_flight, self._returned, self.inherited, self.pending):
            if batch in place:
                place.remove(batch)
        if batch.doubtful:
            self.lane.acked = _later(self.lane.acked, following(batch.sequence, batch.count))
            self.lane.has_gap = True
        elif batch.sequence >= 0:
            self._renumber = True
        self._gather()

    def restart(self) -> None:
        """Start over with a new producer id or epoch, whose sequence numbers begin at 0.

        Requires that no batch is in flight. Of a doubtful batch a second copy will be written, if there is a first.
        """
        self.lane.restart()
        self._known = False
        self.last_offset = self.epoch = -1
        self.placed = False  # the log may have lost its end, the reason for the new id
        for batch in self.held():
            batch.sequence = UNNUMBERED
            batch.doubtful = False

    def _gather(self) -> None:
        """Once nothing is in flight, put what came back in front of the queue."""
        if self.in_flight:
            return
        self.inherited.extendleft(reversed(self._returned))
        self._returned.clear()
        if self.lane.holder is self and not self.waiting:
            self.lane.holder = None
        if self._renumber:
            self._renumber = False
            self.lane.next = self.lane.acked
            for batch in self.held():
                if not batch.doubtful:
                    batch.sequence = UNNUMBERED


def following(sequence: int, count: int) -> int:
    """Return the sequence number after ``count`` records from ``sequence`` on: 2^31-1 is followed by 0."""
    return (sequence + count) & SEQUENCE_MAX


def _later(one: int, other: int) -> int:
    return other if (other - one) & SEQUENCE_MAX < SEQUENCE_MAX >> 1 else one
