"""The order of one session's commits: numbers that their frames carry, and who has to wait for whom.

A client's transactions go to several buffers, and each buffer has several partitions; nothing orders two partitions,
and whoever folds them reads them in any order. So a connection numbers the commits that it asks for in a group, 1, 2,
3, ..., and each COMMIT frame carries its number and how many numbers before it may be under way: all below those have
an outcome that the connection has learned. A commit is decided once all numbers before it have been *met*: their frames
have been folded, whatever became of them. Until then it is *held*, and only it: other connections do not notice.

A number that never comes, because its frame could not be delivered, is let go of by the connection, with an ABORT frame
of the same number, or with whatever it sends next. If the connection is gone as well, a held commit is refused in the
end, so what a session leaves behind is always what it asked for up to some commit.

Source: Kafka's idempotent producer (producer id, sequence numbers); TCP's acknowledged sequence number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
"""What is held: a commit as whoever decides it knows it."""

NUMBER_BITS: Final = 40
_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1
_LOW_BITS: Final = 31
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
CONNECTION_MAX: Final = (1 << (_LOW_BITS + 64 - NUMBER_BITS)) - 1
BEHIND_MAX: Final = (1 << 32) - 1
LINES_MAX: Final = 20_000
MET_MAX: Final = 200_000
"""Numbers of all lines that are kept in mind because earlier ones have not been met, at 75 bytes each."""

LineKey = tuple[int, int]
"""Names whose numbers they are: the connection, and the epoch of its client's session."""


class CommitOrder(NamedTuple):
    """Where a commit stands among those of its connection.

    Attributes:
        connection: A number that no other connection has, see :class:`rollbridge.client.identity.CommitLine`.
        epoch: Of the session of the client.
        number: Counts from 1.
        behind: How many numbers before it may have no outcome yet.
    """

    connection: int
    epoch: int
    number: int
    behind: int

    @property
    def line(self) -> LineKey:
        """Whose number it is."""
        return self.connection, self.epoch

    def fields(self) -> tuple[int, int, int]:
        """As the fields segment, local sequence count and records of a frame's header, which an end has no use for."""
        high = self.connection >> _LOW_BITS
        return self.connection & _LOW_MASK, high << NUMBER_BITS | self.number, self.behind


def order_of(segment: int, first_count: int, records: int, client_epoch: int) -> CommitOrder | None:
    """The order in the header of an end, the inverse of :meth:`CommitOrder.fields`; None if it has none."""
    number = first_count & _NUMBER_MASK
    if not number:
        return None
    connection = first_count >> NUMBER_BITS << _LOW_BITS | segment
    return CommitOrder(connection, client_epoch, number, min(records, number - 1))


class CommitLine(Generic[T]):
    """What was met of one connection's numbers.

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
        """The frame of a number has been folded; gives by how many there are more, or fewer, to keep in mind."""
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
        """How many numbers are kept in mind."""
        return len(self._met)

    def lose_met(self) -> None:
        """Forget the numbers that were met out of order; what waits for one of them waits in vain."""
        self._met.clear()

    def raise_to(self, floor: int) -> None:
        """All numbers below ``floor`` have an outcome, or will never be met."""
        if floor > self.floor:
            self.floor = floor
            if self._met:
                self._met = {number for number in self._met if number >= floor}
                self._rise()

    def due(self) -> Sequence[T]:
        """Take those out that have waited for nothing but what has been met by now, in their order."""
        return [self.held.pop(number) for number in sorted(self.held) if number < self.floor]

    def _rise(self) -> None:
        while self.floor in self._met:
            self._met.remove(self.floor)
            self.floor += 1


class CommitLines(Generic[T]):
    """The lines of all connections, of which the ones that were quiet for longest are forgotten.

    What is forgotten costs nothing but time: the next frame of the line says from where on numbers count, and the
    connection lets go of what it knows the outcome of.
    """

    def __init__(self, lines_max: int = LINES_MAX, met_max: int = MET_MAX) -> None:
        self._lines_max = lines_max
        self._met_max = met_max
        self._met = 0
        self._lines: OrderedDict[LineKey, CommitLine[T]] = OrderedDict()
        self._holding: dict[LineKey, CommitLine[T]] = {}

    def of(self, order: CommitOrder) -> CommitLine[T]:
        """The line of a number, which knows now from where on its connection counts."""
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
        """The frame of a number has been folded.

        Numbers that are met out of order have to be kept in mind, and any client can make up any. When there are too
        many, the lines with the most lose theirs; what they hold is forsaken in the end.
        """
        self._met += self.of(order).meet(order.number)
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
        """Let go of a commit that waits no longer, because it has been decided otherwise."""
        line = self._holding.get(order.line)
        if line is not None and line.held.get(order.number) is transaction:
            del line.held[order.number]
            if not line.held:
                del self._holding[order.line]

    def due(self, key: LineKey) -> Sequence[T]:
        """Take those of a line out that wait no longer, in their order."""
        line = self._holding.get(key)
        if line is None:
            return ()
        found = line.due()
        if not line.held:
            del self._holding[key]
        return found

    def held(self) -> Iterator[T]:
        """All commits that wait."""
        for line in self._holding.values():
            yield from line.held.values()

    def __bool__(self) -> bool:
        """Whether any commit waits."""
        return bool(self._holding)

    def conclude(self, key: LineKey, number: int) -> None:
        """A commit of a line was carried out, and so was, or never will be, everything before it."""
        line = self._lines.get(key)
        if line is not None:
            line.raise_to(number + 1)

    def _forget(self) -> None:
        """Forget the oldest line in which nothing waits."""
        for key in self._lines:
            if key not in self._holding:
                del self._lines[key]
                return
