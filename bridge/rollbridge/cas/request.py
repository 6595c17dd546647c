"""A conditional write on its way: what is to be written, what it expects, and the future that gets the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollbridge.cas.answer import Answer
from rollbridge.errors import CasWriteError, OutcomeUnknown, UnavailableError
from rollbridge.model.cas import Condition, Entry, Scope
from rollbridge.model.course import Course
from rollbridge.model.sn import SN
from rollbridge.model.token import Token

RecordHeaders = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to write; ``headers`` include ours."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    transaction_id: int | None
    size: int


@dataclass(eq=False, slots=True)
class Request:
    """One write of one or more records: all or none.

    Attributes:
        owner: The writer; its writes keep their order.
        records: They stand side by side in one segment.
        expected: What it expects, or the write whose last record it expects to be the last.
        operation: Its identity, in the headers of its records.
        rising_ids: Whether its transaction ids must not be lower than the last one before.
        repeatable: Whether the same token may have been tried before, so that a refusal has to look for it.
        position: Of its first key in the key space.
        course: Its segments, as of when it was routed last.
        deadline: By ``time.monotonic()``; nothing is begun after it.
        attended: Whether a thread waits for it that can carry it out.
        last_try: Why the last try came to nothing.
        size: Upper bound of its bytes.
        done: Gets the SNs of its records.
    """

    owner: object
    records: Sequence[NewRecord]
    expected: SN | Request
    scope: Scope
    operation: bytes
    position: float
    course: Course
    deadline: float
    timestamp_ms: int
    rising_ids: bool = False
    repeatable: bool = False
    attended: bool = False
    last_try: str = ""
    size: int = 0
    done: Answer = field(default_factory=Answer)

    def __post_init__(self) -> None:
        self.size = sum([record.size for record in self.records])

    @property
    def token(self) -> Token:
        """Names it, for whoever asks what became of it."""
        expected = self.expected
        return Token(self.operation, self.records[0].key, SN() if isinstance(expected, Request) else expected)

    def condition(self) -> Condition:
        """What it expects of what is committed; that of a write which still waits for another is of no use yet."""
        expected = self.expected
        if isinstance(expected, Request):
            expected = expected.done.result()[-1] if _succeeded(expected) else SN()
        return Condition(expected, self.scope, self.records[0].key)

    def entry(self, places: Mapping[Request, int]) -> Entry:
        """As one write of a round, in which the writes of ``places`` stand before it."""
        after = places.get(self.expected) if isinstance(self.expected, Request) else None
        return Entry(
            self.condition(),
            self.course,
            tuple([record.key for record in self.records]),
            tuple([record.transaction_id for record in self.records]),
            after,
            self.rising_ids,
        )

    def broken_chain(self) -> BaseException | None:
        """Why this can not be tried: the write that it expects has failed."""
        before = self.expected
        if not isinstance(before, Request) or not before.done.done():
            return None
        fault = before.done.exception()
        if isinstance(fault, CasWriteError):
            return CasWriteError(
                f"525: the write that this one expects was refused: {fault}",
                expected=fault.expected,
                actual=fault.actual,
            )
        if isinstance(fault, OutcomeUnknown):
            return UnavailableError(
                f"the outcome of the write that this one expects is unknown; nothing was written: {fault}"
            )
        return fault

    def awaited(self, places: Mapping[Request, int]) -> Request | None:
        """The write that this one expects, while it is neither done nor in the same round."""
        before = self.expected
        return None if not isinstance(before, Request) or before.done.done() or before in places else before


def _succeeded(request: Request) -> bool:
    return request.done.done() and request.done.exception() is None
