"""What a refusal says of what was written: no more than that, and nothing else beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollbridge.cas import machine
from rollbridge.cas.dispatch import StreamAppender
from rollbridge.cas.machine import AppendQueue
from rollbridge.errors import RecordTooLargeError
from rollbridge.kafka.appender import Operation, TransactionalAppender
from rollbridge.kafka.errors import KafkaUnavailableError
from rollbridge.kafka.record_limits import RecordLimits


def test_a_refused_record_says_no_more_than_that_it_was_not_written() -> None:
    """What becomes of its transaction is up to who has written it: a program goes on, ``produce`` aborts."""
    limits = RecordLimits("sales/orders", None, None, record_bytes_max=64, batch_bytes=64)
    with pytest.raises(RecordTooLargeError, match=r"; it was not written$") as caught:
        limits.check(None, b"x" * 99, [])
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
