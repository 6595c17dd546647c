"""Order of one session's commits: the numbers in their frames, and the commits held until earlier ones are met.

A client's transactions go to several buffers of several partitions, which a leader folds in any order relative to each
other. A connection therefore numbers its commits in a group 1, 2, 3, ..., and each COMMIT frame carries its number and
the count of earlier numbers that may be in flight: the connection has learned the outcome of all before those. A commit
is decided once all earlier numbers have been *met*, that is, their frames were folded, with any outcome. Until then it
is *held*, without effect on other connections.

If a frame could not be delivered, the connection gives up its number with an ABORT frame of the same number, or with
its next frame. If the connection is gone as well, a held commit is refused in the end, so a session always leaves a
prefix of the commits that it asked for.

Source: Kafka's idempotent producer (producer id, sequence numbers); TCP's acknowledged sequence number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
"""Held commit, as its decider represents it."""

NUMBER_BITS: Final = 40
_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1
_LOW_BITS: Final = 31
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
CONNECTION_MAX: Final = (1 << (_LOW_BITS + 64 - NUMBER_BITS)) - 1
BEHIND_MAX: Final = (1 << 32) - 1
LINES_MAX: Final = 20_000
MET_MAX: Final = 200_000
"""Limit on numbers of all lines that were met out of order and are remembered, at 75 bytes each."""

LineKey = tuple[int, int]
"""Key of a line of numbers: the connection, and the epoch of its client's session."""


class CommitOrder(NamedTuple):
    """Position of a commit among those of its connection.

    Attributes:
        connection: Unique number of the connection, see :class:`rollbridge.client.sessions.SessionCommitNumbers`.
        epoch: Epoch of the client's session.
        number: Number of the commit, from 1.
        behind: Count of earlier numbers that may have no outcome yet.
    """

    connection: int
    epoch: int
    number: int
    behind: int

    @property
    def line(self) -> LineKey:
        """Key of the line that the number belongs to."""
        return self.connection, self.epoch

    def fields(self) -> tuple[int, int, int]:
        """Return the values for segment, first count and records of an end's header, otherwise unused."""
        high = self.connection >> _LOW_BITS
        return self.connection & _LOW_MASK, high << NUMBER_BITS | self.number, self.behind


def order_of(segment: int, first_count: int, records: int, client_epoch: int) -> CommitOrder | None:
    """Return the order in the header of an end, the inverse of :meth:`CommitOrder.fields`; None without one."""
    number = first_count & _NUMBER_MASK
    if not number:
        return None
    connection = first_count >> NUMBER_BITS << _LOW_BITS | segment
    return _order((connection, client_epoch, number, records if records < number else number - 1))


_order: Final[Callable[[tuple[int, int, int, int]], CommitOrder]] = partial(tuple.__new__, CommitOrder)
"""``CommitOrder(*fields)`` in half the time: a leader makes one for each commit."""


class CommitLine(Generic[T]):
    """Numbers of one connection that were met.

    Attributes:
        floor: All numbers below it have been met, or have an outcome.
        held: Commits that wait for earlier numbers, by their own.
    """

    __slots__ = ("_met", "floor", "held")

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self._met: set[int] = set()
        self.held: dict[int, T] = {}

    def meet(self, number: int) -> int:
        """Record that the frame of a number was folded; return the change in the count of remembered numbers."""
        before = len(self._met)
        if number == self.floor:
            self.floor += 1
            if before:
                self._rise()
        elif number > self.floor:
            self._met.add(number)
        return len(self._met) - before

    @property
    def waiting(self) -> int:
        """Count of remembered numbers, met out of order."""
        return len(self._met)

    def lose_met(self) -> None:
        """Forget the numbers that were met out of order; what waits for one of them waits in vain."""
        self._met.clear()

    def raise_to(self, floor: int) -> None:
        """Raise the floor: all numbers below it have an outcome, or will never be met."""
        if floor > self.floor:
            self.floor = floor
            if self._met:
                self._met = {number for number in self._met if number >= floor}
                self._rise()

    def due(self) -> Sequence[T]:
        """Remove and return the held commits whose predecessors have all been met, in order."""
        return [self.held.pop(number) for number in sorted(self.held) if number < self.floor]

    def _rise(self) -> None:
        while self.floor in self._met:
            self._met.remove(self.floor)
            self.floor += 1


class CommitLines(Generic[T]):
    """Lines of all connections; the oldest ones are forgotten.

    Forgetting costs only time: the next frame of the line carries its floor, since the connection gives up the numbers
    whose outcome it knows.
    """

    def __init__(self, lines_max: int = LINES_MAX, met_max: int = MET_MAX) -> None:
        self._lines_max = lines_max
        self._met_max = met_max
        self._met = 0
        self._lines: OrderedDict[LineKey, CommitLine[T]] = OrderedDict()
        self._holding: dict[LineKey, CommitLine[T]] = {}

    def of(self, order: CommitOrder) -> CommitLine[T]:
        """Return the line of a number, with its floor raised to the first number that may be in flight."""
        key = order.line
        line = self._lines.get(key)
        low = order.number - order.behind
        if line is None:
            line = self._lines[key] = CommitLine(low)
            if len(self._lines) > self._lines_max:
                self._forget()
        elif low > line.floor:
            line.raise_to(low)
        return line

    def meet(self, order: CommitOrder) -> None:
        """Record that the frame of a number was folded.

        Numbers met out of order have to be remembered, and a client can make up any. When there are too many, the lines
        with the most lose theirs; the commits that they hold are refused in the end.
        """
        line = self.of(order)
        if order.number == line.floor and not line.waiting:
            line.floor += 1
            return
        self._met += line.meet(order.number)
        if self._met <= self._met_max:
            return
        lines = list(self._lines.values())
        self._met = sum(line.waiting for line in lines)  # some were let go of, or forgotten with their lines
        if self._met > self._met_max:
            share = self._met // len(lines)
            for line in lines:
                if line.waiting >= share:
                    line.lose_met()
            self._met = sum(line.waiting for line in lines)

    def hold(self, order: CommitOrder, transaction: T) -> None:
        """Have a commit wait until all numbers before it have been met."""
        line = self._lines[order.line]
        line.held[order.number] = transaction
        self._holding[order.line] = line

    def release(self, order: CommitOrder, transaction: T) -> None:
        """Drop a held commit that was decided otherwise."""
        line = self._holding.get(order.line)
        if line is not None and line.held.get(order.number) is transaction:
            del line.held[order.number]
            if not line.held:
                del self._holding[order.line]

    def due(self, key: LineKey) -> Sequence[T]:
        """Remove and return the commits of a line that wait no longer, in order."""
        line = self._holding.get(key)
        if line is None:
            return ()
        found = line.due()
        if not line.held:
            del self._holding[key]
        return found

    def held(self) -> Iterator[T]:
        """Iterate over all held commits."""
        for line in self._holding.values():
            yield from line.held.values()

    def __bool__(self) -> bool:
        return bool(self._holding)

    def conclude(self, key: LineKey, number: int) -> None:
        """Record that a commit was carried out, and everything before it was, or never will be."""
        line = self._lines.get(key)
        if line is not None:
            line.raise_to(number + 1)

    def _forget(self) -> None:
        """Forget the oldest line in which nothing waits."""
        for key in self._lines:
            if key not in self._holding:
                del self._lines[key]
                return
