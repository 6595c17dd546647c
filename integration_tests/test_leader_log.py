"""Each transaction can be followed through its leader's log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.model.names import StreamName
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator, until


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_each_change_of_state_has_a_line(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, level: str
) -> None:
    scope = unique_name("told")
    stream = str(StreamName(scope, "orders"))
    with (
        coordinator(cluster, f"/{scope}", "one", tmp_path, arguments=(f"--log-level={level}",)),
        Site(cluster, f"/{scope}", tmp_path).connect("teller") as b,
    ):
        b.admin.create_stream(stream)
        with b.transaction(stream) as committed:
            committed.write(stream, key=b"k", value=b"v")
        aborted = b.begin(stream)
        aborted.write(stream, key=b"k", value=b"v")
        aborted.flush()
        until(lambda: any(record.id == aborted.id for record in b.admin.transactions()))
        b.admin.abort_transaction(aborted.id, reason="it was in the way")
        log = tmp_path / "one.log"
        refused = f"transaction {aborted.id} open -> aborting (abort: it was in the way), round "
        until(lambda: refused in log.read_text())
        ordinary = f"transaction {committed.id} open -> committing (commit: a frame of {stream}), round "
        if level == "DEBUG":
            ended = f"transaction {committed.id} committing -> committed (merged), round 1, controller epoch 1"
            until(lambda: ended in log.read_text())
            assert f"transaction {committed.id} unknown -> open (begin: client teller, " in log.read_text()
            assert ordinary in log.read_text()
        else:
            assert ordinary not in log.read_text()
            assert "committing -> committed (merged)" not in log.read_text()
