"""What a refusal says of what was written: no more than that, and nothing else beside it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollbridge.cas import machine
from rollbridge.cas.dispatch import StreamAppender
from rollbridge.cas.machine import AppendQueue
from rollbridge.cli import produce
from rollbridge.errors import RecordTooLargeError
from rollbridge.kafka.appender import Operation, TransactionalAppender
from rollbridge.kafka.errors import KafkaUnavailableError
from rollbridge.kafka.record_limits import TRANSACTION_AUTHOR, RecordLimits

LIMITS = RecordLimits("sales/orders", None, None, record_bytes_max=64, batch_bytes=64, author=TRANSACTION_AUTHOR)


class Checking:
    """Transaction that takes small records."""

    def write_all(self, _: str, records: Iterable[tuple[bytes | None, bytes]]) -> None:
        for key, value in records:
            LIMITS.check(key, value, [])

    def write(self, _: str, *, key: bytes | None, value: bytes, headers: object) -> None:
        LIMITS.check(key, value, [])


@pytest.mark.parametrize("headers", [[], [("h", b"")]])
def test_a_line_that_is_too_large_ends_all_lines(headers: list[tuple[str, bytes]]) -> None:
    with pytest.raises(RecordTooLargeError, match=r"; it was not written, and no line was committed$") as caught:
        produce._write(cast(Any, Checking()), "sales/orders", iter([(None, b""), (None, b"x" * 99)]), headers)
    assert caught.value.limit_bytes == 64


def test_what_took_too_long_is_not_called_unknown_as_well() -> None:
    appender: Any = SimpleNamespace(transactional_id="x", append=lambda _: None)
    lost = TransactionalAppender._unknown(appender, Operation.APPEND, KafkaUnavailableError("no answer in 5 s"))
    assert "is unknown: no answer in 5 s; init, then read the log" in str(lost)

    class Session:
        """Session of a broker that goes in the middle."""

        class appender:
            @staticmethod
            def commit() -> None:
                raise lost

    event = StreamAppender._perform(
        cast(Any, None), machine.End(commits=True), cast(Any, None), cast(Any, Session), cast(Any, None)
    )
    assert isinstance(event, machine.Lost)
    request: Any = SimpleNamespace(deadline=SimpleNamespace(passed=lambda: True), last_try=event.why)
    told = str(AppendQueue.overdue(cast(Any, SimpleNamespace(_stream="sales/orders")), request))
    assert told == (
        "the conditional write to sales/orders took too long: append: no answer in 5 s; nothing was written"
    )
