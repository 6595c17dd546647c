"""Clients whose connections have been idle for too long when a broker is away go on once it is back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest

from integration_tests.backends import faults
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from rollbridge.kafka import connection
from rollbridge_devcluster.state import KAFKA

IDLE_S = 0.5
"""In place of nine minutes."""

Fault = Callable[[AnyCluster, str], AbstractContextManager[None]]


def failed(records: Sequence[logging.LogRecord]) -> set[str | None]:
    """The threads that did not get a connection."""
    return {record.threadName for record in records if "broker.unreachable" in record.getMessage()}


@pytest.mark.parametrize("fault", [faults.killed, faults.stopped], ids=["restarts", "hangs"])
def test_a_client_outlives_a_broker_that_is_away_after_a_quiet_time(
    own_site: Site,
    scope: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connection, "_IDLE_MAX_S", IDLE_S)
    caplog.set_level(logging.INFO, "rollbridge.kafka.dispatch")
    stream = f"{scope}/orders"
    with own_site.connect() as client:
        client.admin.create_stream(stream)
        writer = client.writer(stream)
        transaction = client.begin(stream)
        transaction.write(stream, key=b"k", value=b"1")
        transaction.savepoint()
        writer.write(b"k", b"2").result(60)
        quiet_since = time.monotonic()
        until(lambda: time.monotonic() - quiet_since > 2 * IDLE_S)
        with fault(own_site.cluster, KAFKA):
            future = writer.write(b"k", b"3")
            transaction.write(stream, key=b"k", value=b"4")
            until(lambda: {"rollbridge-delivery-reach", "rollbridge-writer-reach"} <= failed(caplog.records))
        future.result(60)
        transaction.commit()
    assert {message.value() for message in own_site.committed(stream)} == {b"1", b"2", b"3", b"4"}
