"""Histories of conditional writes, and whether they are linearizable; no input or output.

A history says of each operation when it was asked for, when it was answered, and what the answer was. Together with the
log as a plain ``read_committed`` reader finds it in the end, the order of the writes is known, so the question is only
whether each operation fits in at some instant between its question and its answer. Taking what fits as soon as it fits
never spoils anything, because reads and refusals change nothing; so one pass decides, without a search.

The model is independent of the code under test: a log is a list of records, a condition is what the documentation says.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FOREVER: Final = 1 << 62
EMPTY: Final = -1
"""Position of the record that stands before the first."""
ANY: Final = -2
"""No expectation."""


class Answer(StrEnum):
    """How an operation ended."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    """Nothing was written, for another reason than the condition."""
    UNKNOWN = "unknown"
    """No answer, or one that says that it may have been written."""


@dataclass(frozen=True, slots=True)
class Write:
    """A conditional write.

    Attributes:
        value: Unlike that of any other write.
        expected: Position that was expected: a sequence id, EMPTY or ANY.
        asked, answered: Nanoseconds of one clock; ``answered`` is FOREVER without an answer.
        position: Where it stands, if it is OK.
        actual: What a refusal said is there.
    """

    value: str
    key: str
    by_key: bool
    expected: int
    asked: int
    answered: int
    answer: Answer
    position: int | None = None
    actual: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """A tail: ``key`` is None for that of the segment, ``seen`` the position that was answered."""

    key: str | None
    seen: int
    asked: int
    answered: int


Operation = Write | Look


@dataclass(frozen=True, slots=True)
class Stored:
    """A record of the final log."""

    position: int
    key: str
    value: str


class _Log:
    """The part of the log that has been taken so far."""

    def __init__(self) -> None:
        self.last = EMPTY
        self.by_key: dict[str, int] = {}

    def take(self, record: Stored) -> None:
        self.last = record.position
        self.by_key[record.key] = record.position

    def latest(self, key: str | None) -> int:
        return self.last if key is None else self.by_key.get(key, EMPTY)

    def allows(self, write: Write) -> bool:
        """Whether the condition holds now."""
        if write.expected == ANY:
            return True
        if not write.by_key:
            return self.last == write.expected
        latest = self.latest(write.key)
        # An expected place that is further than the log does not hold either, which only a refusal can come from.
        return latest == EMPTY if write.expected == EMPTY else latest <= write.expected <= self.last

    def fits(self, operation: Operation) -> bool:
        """Whether an operation that changes nothing can have its answer now."""
        if isinstance(operation, Look):
            return self.latest(operation.key) == operation.seen
        latest = self.latest(operation.key if operation.by_key else None)
        return not self.allows(operation) and latest == operation.actual


def find_fault(operations: Sequence[Operation], log: Sequence[Stored]) -> str | None:
    """What shows that a history is not linearizable, in a sentence; None if it is.

    Args:
        operations: In any order.
        log: All committed records, in order of their positions.
    """
    writes = {operation.value: operation for operation in operations if isinstance(operation, Write)}
    fault = _stored_wrongly(writes, log)
    if fault is not None:
        return fault
    stored = {record.value for record in log}
    quiet = [item for item in operations if isinstance(item, Look) or item.answer is Answer.REFUSED]
    # Whoever has an answer must be taken before anything that was asked for after it.
    ends = [(item.answered, number) for number, item in enumerate(operations) if _must_be_taken(item, stored)]
    heapq.heapify(ends)
    numbers = {id(item): number for number, item in enumerate(operations)}
    taken: set[int] = set()
    state = _Log()
    waiting = sorted(quiet, key=lambda item: item.asked)
    for record in [*log, None]:
        horizon, waiting = _take_quiet(state, waiting, ends, taken, numbers)
        if record is None:
            break
        write = writes[record.value]
        if write.asked > horizon:
            late = operations[ends[0][1]]
            return f"{write} came into effect before {late}, which had its answer before it was asked for"
        if not state.allows(write):
            return f"{write} was accepted, but the last record was {state.last}, of its key {state.latest(write.key)}"
        state.take(record)
        taken.add(numbers[id(write)])
    if waiting:
        return f"{waiting[0]} does not fit in at any instant"
    return None


def _take_quiet(
    state: _Log, waiting: list[Operation], ends: list[tuple[int, int]], taken: set[int], numbers: Mapping[int, int]
) -> tuple[int, list[Operation]]:
    """Take all that change nothing and fit now; returns the earliest answer of what is left, and what waits."""
    while True:
        while ends and ends[0][1] in taken:
            heapq.heappop(ends)
        horizon = ends[0][0] if ends else FOREVER
        left = []
        for item in waiting:
            if item.asked <= horizon and state.fits(item):
                taken.add(numbers[id(item)])
            else:
                left.append(item)
        if len(left) == len(waiting):
            return horizon, left
        waiting = left


def _must_be_taken(operation: Operation, stored: set[str]) -> bool:
    return isinstance(operation, Look) or operation.answer is Answer.REFUSED or operation.value in stored


def _stored_wrongly(writes: Mapping[str, Write], log: Sequence[Stored]) -> str | None:
    """What is in the log and must not be, or is not and must be."""
    seen: set[str] = set()
    for record in log:
        write = writes.get(record.value)
        if write is None:
            return f"{record} was never written"
        if record.value in seen:
            return f"{record} stands in the log twice"
        seen.add(record.value)
        if write.answer in (Answer.REFUSED, Answer.FAILED):
            return f"{write} left {record}"
        if write.key != record.key or write.position not in (None, record.position):
            return f"{write} stands as {record}"
    for write in writes.values():
        if write.answer is Answer.OK and write.value not in seen:
            return f"{write} is not in the log"
    return None
