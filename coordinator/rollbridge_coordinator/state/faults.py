"""Faults that must not stop a group: streams in an error state, and rounds with an unknown outcome. Pure.

**Streams in an error state.** A broker may refuse a topic for good: a permission is missing, or the topic was removed
or reconfigured. The stream's transactions wait while those of all others go on, and are tried again at growing
intervals, so the stream leaves this state by itself.

Of some streams a leader cannot even read what they are, or what is in their buffer (:data:`UNLED`). These are not led:
see :mod:`rollbridge_coordinator.procedures.unled`.

**Rounds with an unknown outcome.** A lost connection or a time-out in the middle of a round ends a leader's term. The
next one takes the transactional ids over, which ends what was open, reads the outcome in the commit log, and does the
round again if it was not committed. If the content of one transaction provokes this each time, no term would get past
it. So:

1. The transactions of such a round are merged one by one.
2. Before each, something harmless is appended to the same topics and aborted, which shows that the brokers work.
3. A transaction whose own rounds had no known outcome several times in a row is refused, by a leader that has read in
   the commit log that it was not committed.

This memory outlives the terms of one process, and ends with it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Final

from rollbridge.model.changes import TOPIC_DELETED, TOPIC_RECREATED, UNLED, WATCHED, StreamFault
from rollbridge.model.pieces import BufferedTransaction
from rollbridge_coordinator.state.upkeep import Rest

LEADERLESS: Final = "LEADER_NOT_AVAILABLE"
"""Kafka's name of what is wrong with a topic none of whose brokers is there."""
LEADERLESS_S: Final = 3.0
"""How long a segment may have no leader before its stream waits, and all others go on."""
SEAL_TIMEOUT: Final = "seal-timeout"
"""Our name of a seal that took too long; it may work the next time."""


class Faults:
    """The streams of a group that are in an error state, by ``scope/stream``."""

    def __init__(self) -> None:
        self._present: dict[str, StreamFault] = {}
        self._rests: dict[str, Rest] = {}
        self._suspended: set[str] = set()
        self.news: list[str] = []
        """What is worth a line in the log and has not got one yet."""

    def __len__(self) -> int:
        return len(self._present)

    def items(self) -> list[tuple[str, StreamFault]]:
        """Return all of them, by name."""
        return sorted(self._present.items())

    def get(self, stream: str) -> StreamFault | None:
        """Return the fault of a stream, or None."""
        return self._present.get(stream)

    def first_of(self, streams: Collection[str]) -> str | None:
        """Return one of these streams that is in an error state."""
        if not self._present:
            return None
        return next((name for name in streams if name in self._present), None)

    def is_lost(self, stream: str) -> bool:
        """Return True if the topic that a stream has adopted is gone, or another one has its name."""
        fault = self._present.get(stream)
        return fault is not None and fault.code in (TOPIC_DELETED, TOPIC_RECREATED)

    def note(self, stream: str, fault: StreamFault, now_ms: int) -> bool:
        """Note that a stream was refused, and return True if that is new; the next try is twice as far away.

        Unless all that it waits for is a broker: this passes by itself, and to look for it costs next to nothing.
        """
        if stream in self._suspended:
            return False
        last = self._rests.get(stream)
        self._rests[stream] = Rest.after(None if fault.code in (LEADERLESS, SEAL_TIMEOUT) else last, now_ms)
        if stream in self._present:
            return False
        self._present[stream] = fault
        if last is None:
            self.news.append(f"stream {stream} is in an error state, its transactions wait: {fault.reason}")
        return True

    def restore(self, stream: str, fault: StreamFault) -> None:
        """Take over a fault that an earlier leader has noted; the stream is tried again at once."""
        self._present[stream] = fault

    def exclude(self, stream: str, fault: StreamFault) -> None:
        """Note why a stream is not led."""
        known = self._present.get(stream)
        if known is None or (known.code, known.reason) != (fault.code, fault.reason):
            self.news.append(f"stream {stream} is not led, its group goes on without it ({fault.code}): {fault.reason}")
        self._present[stream] = fault

    def suspend(self, stream: str, fault: StreamFault) -> None:
        """Note that a stream waits in the middle of a change; it is not tried meanwhile."""
        if stream not in self._suspended:
            self.news.append(f"stream {stream} is suspended, its transactions wait: {fault.reason}")
        self._suspended.add(stream)
        self._rests.pop(stream, None)
        self._present[stream] = fault

    def resume(self, stream: str) -> None:
        """Note that the change is done, or given up."""
        if stream in self._suspended:
            self.news.append(f"stream {stream} is not suspended any more")
        self._suspended.discard(stream)
        self._present.pop(stream, None)

    def due(self, now_ms: int) -> list[str]:
        """Return the streams to try again."""
        return [
            name
            for name in self._present
            if name not in self._suspended
            and self._present[name].code not in WATCHED
            and (name not in self._rests or self._rests[name].is_over(now_ms))
        ]

    def is_tried(self, stream: str) -> bool:
        """Return True if it was refused, or looked at, in this term, whether or not its rest is over."""
        return stream in self._rests or self._present[stream].code in WATCHED | UNLED

    def lift(self, stream: str) -> None:
        """Try what waits for a stream, which seems to be well again."""
        self._present.pop(stream, None)

    def worked(self, streams: Iterable[str]) -> None:
        """Note that transactions of these streams have been merged."""
        if self._rests:
            for name in streams:
                if self._rests.pop(name, None) is not None:
                    self.news.append(f"stream {name} has left its error state")

    def forget(self, stream: str) -> None:
        """Forget a stream that was deleted."""
        self._suspended.discard(stream)
        self._present.pop(stream, None)
        self._rests.pop(stream, None)


# Rounds with an unknown outcome


UNKNOWN_MAX: Final = 3
"""How often in a row a transaction may have no known outcome in a round of its own."""


class Doubts:
    """What is known of rounds without a known outcome. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._round: tuple[bytes, ...] = ()
        self._suspect: bytes | None = None

    def begin(self, transactions: Sequence[BufferedTransaction], *, together: bool = False) -> None:
        """Begin a round.

        Args:
            transactions: Those of the round.
            together: Whether they cannot be merged one by one; the largest is suspected then.
        """
        self._round = tuple(item.id for item in transactions)
        self._suspect = None
        if len(transactions) == 1:
            self._suspect = transactions[0].id
        elif transactions and together:
            self._suspect = max(transactions, key=lambda item: item.bytes).id

    def end(self) -> None:
        """End the round, whose outcome is known: committed, refused, or never begun."""
        self._round, self._suspect = (), None

    def note_unknown(self) -> None:
        """Note that the term has ended and the outcome of its round, if one was under way, is unknown."""
        for transaction in self._round:
            self._counts.setdefault(transaction, 0)
        if self._suspect is not None:
            self._counts[self._suspect] += 1
        self.end()

    def keep(self, known: Container[bytes]) -> None:
        """Forget all others: they have an outcome by now."""
        self._counts = {item: count for item, count in self._counts.items() if item in known}

    def forget(self, transaction: bytes) -> None:
        """Forget a transaction that has an outcome."""
        self._counts.pop(transaction, None)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def is_suspect(self, transaction: bytes) -> bool:
        """Return True if it was in a round with an unknown outcome, so it is merged alone."""
        return transaction in self._counts

    def fault_of(self, transaction: BufferedTransaction) -> str | None:
        """Return why it is refused now; None if it is not."""
        count = self._counts.get(transaction.id, 0)
        if count < UNKNOWN_MAX:
            return None
        return (
            f"its merge had no known outcome {count} times in a row, while the brokers took other records, and it was "
            "not committed"
        )


# Takeovers


LEFT_OUT_S: Final = 600.0


class Suspects:
    """Buffers that takeovers of a process could not read, though they seem to be there.

    If that is so twice in a row, the stream is left out by the process's takeovers of the next ten minutes.
    """

    def __init__(self) -> None:
        self._once: set[str] = set()
        self._left_out: dict[str, tuple[float, str]] = {}

    def note(self, topic: str, reason: str, now_s: float) -> None:
        """Note that a takeover could not read a buffer, and why."""
        if topic in self._once:
            self._left_out[topic] = now_s + LEFT_OUT_S, reason
        self._once.add(topic)

    def all_read(self) -> None:
        """Note that a takeover has read all buffers that it did not leave out."""
        self._once.clear()

    def left_out(self, now_s: float) -> dict[str, str]:
        """Return the buffers to leave out now, with the reasons."""
        return {topic: reason for topic, (until_s, reason) in self._left_out.items() if now_s < until_s}


# Errors of the coordinator that never reach a client


class StaleStateError(Exception):
    """ZooKeeper or Kafka do not hold what this leader last wrote: it must forget its state and take over anew."""


class DeposedError(Exception):
    """A newer leader exists: this term is over."""
